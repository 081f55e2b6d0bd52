"""Children that the script forks end as without ampmem, and leave the parent's recording whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import python
from guest import NAMES, Beside, beside

import ampmem
from ampmem.analysis.summary import summarize

FORKS = tuple(name for name in NAMES if name.startswith("fork"))
UNCOUNTED = ("fork_after_the_recording", "fork_to_execute")
"""Programs whose children come too late, or run something else."""


def whole(path: Path, steps: int) -> bool:
    """Whether the recording at ``path`` has that many steps, and all that happened in them."""
    summary = summarize(ampmem.load(path))
    return len(summary.steps) == steps and summary.conservation.residual_bytes == 0


@pytest.mark.parametrize("name", FORKS)
def test_a_child_ends_as_without_ampmem_and_the_parent_is_recorded(tmp_path: Path, name: str) -> None:
    run = beside(tmp_path, name)
    assert run.differences() == []
    assert whole(run.recording, 2)
    assert says_that_children_are_not_recorded(run) == (name not in UNCOUNTED)
    assert run.said_once("recorded 2 steps")


def says_that_children_are_not_recorded(run: Beside) -> bool:
    return any("child processes" in note for note in ampmem.load(run.recording).notes)


IN_PYTHON = """
import os, sys, tempfile
import ampmem
from _training import Training, print_end_of

training = Training()
with ampmem.profile() as prof:
    training.step()
    child = os.fork()
    if child == 0:
        training.step("loss of the child")
        prof.step()
        {leaves}
    if child:
        print_end_of(child)
        training.step()
if child:
    print(len(prof.summary().steps), prof.summary().conservation.residual_bytes)
else:
    print("the child is out of the block")
"""
PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("leaves", ["sys.exit(0)", "pass"])
def test_a_child_that_leaves_the_block_leaves_its_parents_file(tmp_path: Path, leaves: str) -> None:
    done = python(
        tmp_path,
        "-W",
        "error",
        "-c",
        f"import sys; sys.path.append({str(PROGRAMS)!r}){IN_PYTHON.format(leaves=leaves)}",
        fresh=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-2:] == ["loss 0.04909902811050415", "2 0"]
    assert ("the child is out of the block" in done.stdout) == (leaves == "pass")
    assert "the child ended with 0" in done.stdout
