"""Children that the script forks end as without ampmem, and leave the parent's recording whole."""

from pathlib import Path

import pytest
from support.commands import python
from support.guest import NAMES, PROGRAMS, beside

import ampmem
from ampmem.analysis.summary import summarize
from ampmem.units import format_bytes

pytestmark = pytest.mark.slow

FORKS = tuple(name for name in NAMES if name.startswith("fork"))
UNCOUNTED = ("fork_after_the_recording", "fork_to_execute")
"""Programs whose children come too late, or run something else."""


@pytest.mark.parametrize("name", FORKS)
def test_a_child_ends_as_without_ampmem_and_its_parent_is_recorded(tmp_path: Path, name: str) -> None:
    run = beside(tmp_path, name)
    assert run.differences() == []
    size = format_bytes(run.recording.stat().st_size)
    assert run.recorded.said == ("ampmem: recording to run.ampmem", f"ampmem: recorded 2 steps in run.ampmem, {size}")
    recording = ampmem.load(run.recording)
    summary = summarize(recording)
    assert (len(summary.steps), summary.conservation.residual_bytes) == (2, 0)
    said = any("child processes" in note for note in recording.notes)
    assert said == (name not in UNCOUNTED)


IN_PYTHON = """
import os, sys
import ampmem
sys.path.append(sys.argv[1])
from _training import Training, print_end_of

training = Training()
with ampmem.profile() as prof:
    training.step()
    child = os.fork()
    if child == 0:
        training.step("loss of the child")
        prof.step()
        if sys.argv[2] == "exits":
            sys.exit(0)
    else:
        print_end_of(child)
        training.step()
if child:
    print(len(prof.summary().steps), prof.summary().conservation.residual_bytes)
elif sys.argv[2] == "records":
    with ampmem.profile() as own:
        training.step("loss of the child")
    print("steps of the child", len(own.summary().steps))
"""


@pytest.mark.parametrize("what", ["exits", "goes on", "records"])
def test_a_child_of_a_block_leaves_its_parents_recording(tmp_path: Path, what: str) -> None:
    done = python(tmp_path, "-c", IN_PYTHON, str(PROGRAMS), what, to_the_end=True)
    assert done.stderr == ""
    assert "the child ended with 0\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 0"
    assert ("steps of the child 1" in done.stdout) == (what == "records")


SIMULATED = """
import os, sys
import torch
from torch import nn
sys.path.append(sys.argv[1])
from _training import print_end_of

model = nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    if step == 0:
        child = os.fork()
        if child == 0:
            print(torch.ones(3, device="cuda").shape, flush=True)
            sys.exit(3)
        print_end_of(child)
"""


def test_a_child_of_a_simulated_run_ends_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SIMULATED)
    options = ("--device", "sim", "--gpu", "h100", "--run-to-end", "--quiet", "-o", "run.ampmem")
    done = python(tmp_path, "-m", "ampmem", "profile", *options, "train.py", str(PROGRAMS), to_the_end=True)
    assert (done.returncode, done.stdout) == (0, "torch.Size([3])\nthe child ended with 3\n")
    summary = summarize(ampmem.load(tmp_path / "run.ampmem"))
    assert (len(summary.steps), summary.conservation.residual_bytes) == (3, 0)


def test_no_thread_is_left_that_was_not_there(tmp_path: Path) -> None:
    code = "import os, sys, torch\ntorch.ones(64, 64) @ torch.ones(64, 64)\nbefore = len(os.listdir('/proc/self/task'))"
    code += "\nimport ampmem\nwith ampmem.profile():\n    print(len(os.listdir('/proc/self/task')) - before)"
    done = python(tmp_path, "-W", "ignore", "-c", code, fresh=True)
    assert done.stdout == "0\n"
