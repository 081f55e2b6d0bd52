"""``ampmem fit``: the boundary is where two runs of their own say that it is; failures and Ctrl-C leave nothing."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ampmem

from ampmem.events import Action
from ampmem.recording import read

pytestmark = pytest.mark.slow

GPU = "592MiB"
"""512 MiB are taken as used outside of the allocator."""

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


def test_two_runs_of_their_own_confirm_the_boundary(tmp_path: Path) -> None:
    script = ("-m", "ampmem.workloads.gpt", "--preset", "tiny", "--device", "cuda")
    options = ("--gpu", GPU, "--arms", "fp32", "--points", "0", "--json", "--html", "page.html")
    done = ampmem(tmp_path, "fit", *options, *script, "--vary", "--batch-size=48:64")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    found = json.loads(done.stdout)
    (arm,) = found["arms"]
    assert arm["smallest_not_fitting"] == arm["largest_fitting"] + 1
    assert 48 < arm["largest_fitting"] < 63
    assert done.stderr.count(": fp32 --batch-size=") == found["runs"] == len(arm["points"])
    points = {point["value"]: point for point in arm["points"]}
    profile = ("profile", "--device", "sim", "--gpu", GPU, "--arm", "fp32", "--seed", "0", "--steps", "2", "--quiet")
    for value, fits in ((arm["largest_fitting"], True), (arm["smallest_not_fitting"], False)):
        alone = ampmem(tmp_path, *profile, "-o", f"{value}.ampmem", *script, f"--batch-size={value}")
        assert (alone.returncode == 0) == fits, alone.stderr
        assert ("does not fit" in alone.stderr) != fits
        recording = read(tmp_path / f"{value}.ampmem")
        assert bool(recording.ooms) != fits
        assert points[value]["fits"] == fits
        if fits:
            sizes = recording.events.block_bytes
            live = np.cumsum(np.where(recording.events.action == Action.FREE, -sizes, sizes))
            assert points[value]["allocated_bytes"] == live.max()
            assert live.max() <= points[value]["reserved_bytes"] <= (592 - 512) << 20


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
    done = ampmem(tmp_path, "fit", "--arms", "as-is", "train.py", "--vary", "--size 2:9")
    assert done.returncode == 1
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert said[0].startswith("run 1: as-is --size 2: fits, peak ")
    assert said[1].startswith(f"run 2: as-is --size 9: failed: {failure}")
    assert shown in done.stderr
    assert said[-1].startswith("ampmem: as-is --size 9 failed, and not for want of memory")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_survives_running_out_of_memory_does_not_fit(tmp_path: Path) -> None:
    in_step = "try: size > 2 and torch.empty(1 << 40, device='cuda')\n    except torch.OutOfMemoryError: sys.exit(7)"
    (tmp_path / "train.py").write_text(TRAINING.format(in_step=in_step))
    done = ampmem(tmp_path, "fit", "--arms", "as-is", "--points", "0", "train.py", "--vary", "--size 2:3")
    assert done.returncode == 0, done.stderr
    assert "as-is: --size 2 fits" in done.stdout and ", 3 does not" in done.stdout


def test_ctrl_c_ends_the_runs_and_leaves_nothing(tmp_path: Path) -> None:
    home, reached = tmp_path / "home", tmp_path / "reached"
    home.mkdir()
    os.mkfifo(reached)
    descriptor = os.open(reached, os.O_RDONLY | os.O_NONBLOCK)
    stubborn = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    in_step = f"{stubborn}; print(os.getpid(), file=open({str(reached)!r}, 'w'), flush=True); signal.pause()"
    (home / "train.py").write_text(TRAINING.format(in_step=in_step))
    process = subprocess.Popen(
        [sys.executable, "-m", "ampmem", "fit", "--arms", "as-is", "train.py", "--vary", "--size 2:9"],
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
    assert stdout == ""
    assert stderr == "ampmem: interrupted\n"
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not list(tmp_path.glob("ampmem-fit-*"))
    assert [path.name for path in home.iterdir()] == ["train.py"]
