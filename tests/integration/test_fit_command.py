"""``ampmem fit``: the boundary is where two runs of their own say that it is; failures and Ctrl-C leave nothing."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from support.commands import ampmem
from support.ready_python import Kind, ready_python

from ampmem.events import Action, Recording
from ampmem.recording import read

pytestmark = pytest.mark.slow

GPU = "976MiB"
"""Of a GPU that is not known, up to 896 MiB are taken as used outside of the allocator."""

TRAINING = """
import os, signal, sys
import torch
size = int(sys.argv[sys.argv.index("--size") + 1])
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    {in_step}
    model(torch.zeros(size, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("the script speaks", flush=True)
"""


SMALL = """
import sys
import torch
from torch import nn
layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten()]
model = nn.Sequential(*layers, nn.LazyLinear(8))
model(torch.ones(2, 3, 64, 64))
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(int(sys.argv[2]), 3, 64, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
GPT = ("-m", "ampmem.workloads.gpt", "--preset", "tiny", "--device", "cuda")
SCRIPTS = {
    "transformer": (GPT, "--batch-size", 38, 47),
    "cnn": (("train.py",), "--size", 32, 41),
}
"""What is run, which argument is varied, and from where to where."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_runs_of_their_own_confirm_the_boundary(tmp_path: Path, name: str) -> None:
    script, argument, first, last = SCRIPTS[name]
    (tmp_path / "train.py").write_text(SMALL)
    options = ("--gpu", GPU, "--precision", "fp32", "--points", "0", "--json", "--html", "page.html")
    done = ampmem(tmp_path, "fit", *options, *script, "--vary", f"{argument} {first}:{last}")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "train.py"]
    found = json.loads(done.stdout)
    (precision,) = found["arms"]
    assert precision["smallest_not_fitting"] == precision["largest_fitting"] + 1
    assert first < precision["largest_fitting"] < last - 1
    assert done.stderr.count(f": fp32 {argument} ") == found["runs"] == len(precision["points"])
    points = {point["value"]: point for point in precision["points"]}
    for value in (precision["largest_fitting"], precision["smallest_not_fitting"]):
        point = points[value]
        alone, recording = run_alone(tmp_path, *script, argument, str(value))
        assert (alone.returncode == 0) == point["may_fit"], alone.stderr
        assert ("it fits" in alone.stderr) == point["fits"] == (value == precision["largest_fitting"])
        assert ("it may not fit: " in alone.stderr) == (point["may_fit"] and not point["fits"])
        assert bool(recording.ooms) != point["may_fit"]
        if point["may_fit"]:
            sizes = recording.events.block_bytes
            live = np.cumsum(np.where(recording.events.action == Action.FREE, -sizes, sizes))
            assert point["allocated_bytes"] == live.max() <= point["reserved_bytes"]
            assert (point["highest_device_used_bytes"] <= 976 << 20) == point["fits"]
    assert points[precision["largest_fitting"]]["reserved_bytes"] <= (976 - 896) << 20
    alone, recording = run_alone(tmp_path, *script, argument, "4096")
    assert alone.returncode == 1
    assert "it does not fit: " in alone.stderr
    assert all(failed.segment > failed.free for failed in recording.ooms) and recording.ooms


def run_alone(folder: Path, *script: str) -> tuple[CompletedProcess[str], Recording]:
    profile = (
        "profile",
        "--device",
        "sim",
        "--gpu",
        GPU,
        "--precision",
        "fp32",
        "--seed",
        "0",
        "--steps",
        "2",
        "--quiet",
    )
    done = ampmem(folder, *profile, "--force", "-o", "alone.ampmem", *script)
    return done, read(folder / "alone.ampmem")


@pytest.mark.parametrize(
    ("in_step", "failure", "shown"),
    [
        ("if size > 2: raise RuntimeError('not so large')", "RuntimeError: not so large", "    RuntimeError: not so"),
        ("if size > 2: os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", ""),
        ("if size > 2 and step == 1: sys.exit()", "it ended after 1 of 2 steps", ""),
    ],
    ids=["raises", "killed", "too short"],
)
def test_a_script_that_fails_for_another_reason_ends_the_search(
    tmp_path: Path, in_step: str, failure: str, shown: str
) -> None:
    (tmp_path / "train.py").write_text(TRAINING.format(in_step=in_step))
    done = ampmem(tmp_path, "fit", "--precision", "as-is", "train.py", "--vary", "--size 2:9")
    assert done.returncode == 1
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert said[0].startswith("run 1: as-is --size 2: fits, peak ")
    assert said[1].startswith(f"run 2: as-is --size 9: failed: {failure}")
    assert shown in done.stderr
    assert said[-1].startswith("ampmem: as-is --size 9 failed, and not because memory ran out")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_survives_running_out_of_memory_does_not_fit(tmp_path: Path) -> None:
    in_step = "try: size > 2 and torch.empty(1 << 40, device='cuda')\n    except torch.OutOfMemoryError: sys.exit(7)"
    (tmp_path / "train.py").write_text(TRAINING.format(in_step=in_step))
    done = ampmem(tmp_path, "fit", "--precision", "as-is", "--points", "0", "train.py", "--vary", "--size 2:3")
    assert done.returncode == 0, done.stderr
    assert "as-is: --size 2 fits" in done.stdout and ", 3 does not" in done.stdout


def interrupted(tmp_path: Path, when: str) -> tuple[str, str]:
    """What ``ampmem fit`` prints when a SIGINT comes as soon as a run has come so far; nothing is left of it."""
    home, reached = tmp_path / "home", tmp_path / "reached"
    home.mkdir()
    os.mkfifo(reached)
    descriptor = os.open(reached, os.O_RDONLY | os.O_NONBLOCK)
    stubborn = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    in_step = f"if {when}: {stubborn}; print(os.getpid(), file=open({str(reached)!r}, 'w'), flush=True); signal.pause()"
    (home / "train.py").write_text(TRAINING.format(in_step=in_step))
    process = subprocess.Popen(
        [
            ready_python(kind=Kind.SIMULATED),
            "-m",
            "ampmem",
            "fit",
            "--jobs",
            "1",
            "--precision",
            "as-is,fp32",
            "--files",
            "write",  # the pipe of a protected run would be its own
            "train.py",
            "--vary",
            "--size 2:9",
        ],
        cwd=home,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert select.select([descriptor], [], [], 300)[0]
    child = int(os.read(descriptor, 100))
    os.close(descriptor)
    process.send_signal(signal.SIGINT)  # not to its group: the runs hear of it from ampmem
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    with contextlib.suppress(ProcessLookupError):  # or it has ended, and whoever is its parent now has not heard of it
        ended = os.pidfd_open(child)
        assert select.select([ended], [], [], 60)[0]
        os.close(ended)
    assert not list(tmp_path.glob("ampmem-fit-*"))
    assert [path.name for path in home.iterdir()] == ["train.py"]
    return stdout, stderr


def test_ctrl_c_ends_the_runs_and_leaves_nothing(tmp_path: Path) -> None:
    assert interrupted(tmp_path, "True") == ("", "ampmem: interrupted\n")


def test_ctrl_c_prints_the_runs_that_have_ended(tmp_path: Path) -> None:
    stdout, stderr = interrupted(tmp_path, "size == 9")
    assert re.sub("[0-9.]+ MiB", "N MiB", stderr) == (
        "run 1: as-is --size 2: fits, peak N MiB allocated, N MiB reserved; still to find: fp32 not run yet\n"
        "run 2: fp32 --size 2: fits, peak N MiB allocated, N MiB reserved; still to find: fp32 above 2\n"
        "ampmem: interrupted\n"
    )
    assert "warning interrupted before the search ended; still to find: fp32 above 2\n" in stdout
    (row,) = [line.split() for line in stdout.splitlines() if re.match(" +2 ", line)]
    assert row[2::2] == ["MiB", "MiB"]
    assert "fp32: --size 2 fits (" in stdout
    assert "as-is: the same as fp32" in stdout
