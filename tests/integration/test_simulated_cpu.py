"""A simulated device that stands for the CPU, against what the CPU profiler measures of the same workload."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import arms
import measure
import pytest
from simulated_runs import STEPS

from ampmem.events import Action, Recording
from ampmem.recording import read

WRAPPED = 16
"""Bytes up to which the CPU's allocations are numbers wrapped as tensors, which the simulation does not make."""

pytestmark = pytest.mark.usefixtures("clean_start")
clean_start = measure.clean_start


def simulated(folder: Path, name: str) -> Recording:
    script = Path(__file__).with_name("simulated_runs.py")
    case = f"{name}:fp32:bf16:cpu"
    command = [sys.executable, str(script), str(folder), "80GiB", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {case: []}
    return read(folder / f"{case}.ampmem")


def sizes(recording: Recording, since_step: int = 0) -> list[int]:
    events = recording.events
    born = (events.action == Action.ALLOC) & (events.bytes > WRAPPED) & (events.step >= since_step)
    return [int(size) for size in events.bytes[born]]


def test_gpt_allocates_what_it_allocates_on_the_cpu(tmp_path: Path) -> None:
    """In the same order; the CPU's kernels take scratch of their own beside that, of four sizes."""
    analysis, _ = arms.workload("gpt", "fp32", steps=STEPS)
    real, fake = analysis.recording, simulated(tmp_path, "gpt")
    there, here = sizes(real), sizes(fake)
    assert not Counter(here) - Counter(there)
    matcher = difflib.SequenceMatcher(None, there, here, autojunk=False)
    assert {tag for tag, *_ in matcher.get_opcodes()} == {"equal", "delete"}
    ratio = int(fake.events.allocated.max()) / int(real.events.allocated.max())
    assert ratio == pytest.approx(1, abs=5e-5)


def test_convolutions_differ_by_what_the_cpus_library_keeps(tmp_path: Path) -> None:
    """Known: oneDNN reorders weights and inputs into buffers of its own, which a simulation cannot see."""
    analysis, _ = arms.workload("resnet", "fp32", steps=STEPS)
    real, fake = analysis.recording, simulated(tmp_path, "resnet")
    assert Counter(sizes(real)) - Counter(sizes(fake))
    assert int(fake.events.allocated.max()) < int(real.events.allocated.max())
