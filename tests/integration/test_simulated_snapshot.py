"""The simulated language model against a snapshot of the same model that was taken on a real GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampmem.allocator.replay import replay
from ampmem.allocator.settings import MIB
from ampmem.allocator.snapshot import read_snapshot
from ampmem.events import PEAK_MARK, Action, Recording
from ampmem.importer.recording import import_snapshot
from ampmem.importer.unpickle import load
from ampmem.recording import read

NAME = "lm_medium_ctx128_fp32_step.pickle"


def snapshot() -> Path:
    default = Path(__file__).resolve().parents[2].parent / "shared" / "snapshots"
    path = Path(os.environ.get("AMPMEM_SNAPSHOTS") or default) / NAME
    if not path.exists():
        pytest.skip(f"{NAME} is not in {path.parent}; name its folder in AMPMEM_SNAPSHOTS")
    return path


def simulated(folder: Path, gpu: str) -> Recording:
    """Two steps, of which the second has optimizer state from its start, as the snapshot's has."""
    output = folder / f"{gpu}.ampmem"
    command = [sys.executable, "-m", "ampmem", "profile", "--device", "sim", "--gpu", gpu, "--steps", "2", "--quiet"]
    command += ["--no-stacks", "-o", str(output), "-m", "ampmem.workloads.lm", "--preset", "full", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return read(output)


def births(recording: Recording, step: int) -> list[int]:
    events = recording.events
    return [int(size) for size in events.bytes[(events.action == Action.ALLOC) & (events.step == step)]]


def allocated_peaks(fake: Recording) -> tuple[int, int]:
    """``max_memory_allocated`` on the GPU and in the simulation: the bytes in blocks."""
    on_gpu = replay(read_snapshot(load(snapshot()))).statistics.allocated_bytes.peak
    return on_gpu, max(layers.allocated for layers in fake.layers if layers.mark == PEAK_MARK)


def test_a_training_step_allocates_what_it_did_on_the_gpu(tmp_path: Path) -> None:
    real = import_snapshot(snapshot(), tmp_path / "real.ampmem")
    fake = simulated(tmp_path, "a100-80")  # the snapshot's cuBLAS workspaces are those of GPUs before Hopper
    assert births(fake, 1) == births(real, 0)
    there, here = allocated_peaks(fake)
    assert here == pytest.approx(there, abs=0.1 * MIB)


def test_on_hopper_it_differs_by_the_larger_workspaces(tmp_path: Path) -> None:
    snapshot()
    there, here = allocated_peaks(simulated(tmp_path, "h100"))
    assert here == pytest.approx(there, rel=0.01)
    assert here - there == pytest.approx(2 * (32 * MIB - 8_519_680), abs=0.1 * MIB)
