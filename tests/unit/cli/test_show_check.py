"""``ampmem show --check``, and what a recording whose sums are wrong says of itself."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.build import FP32, Story, write
from support.command_line import transcript
from support.golden_sections import Golden

from ampmem.analysis.comparison import compare, entry_of
from ampmem.analysis.summary import summarize
from ampmem.events import Fact, OptimizerRecord, Phase, Recording
from ampmem.reporters.base import EVERYTHING
from ampmem.reporters.text.compare import render as render_comparison


def trained(*, found: bool = True, steps: int = 3, kept: int = 0, op: str = "aten::clone") -> Recording:
    """Plain SGD steps; ``found``: the parameter's memory has its fact; each step leaves ``kept`` bytes behind."""
    story = Story()
    story.parameter(0x1000 if found else 0x999000, "weight", 1000)
    if not found:  # the memory that has the fact is gone, and nothing says where the parameter lies
        story.free(0x999000)
        story.alloc(0x1000, 4000)
    for step in range(steps):
        story.begin(step, Phase.FORWARD)
        story.alloc(0x2000, 5000, op="aten::mm", module="(model)")
        story.fact(Fact.SAVED, 0x2000, "aten::mm", dtype="float32")
        story.enter(Phase.BACKWARD)
        story.tensor(Fact.GRADIENT, 0x3000, 4000, "weight", dtype="float32")
        story.free(0x2000)
        story.enter(Phase.OPTIMIZER)
        story.enter(Phase.BETWEEN)
        if kept:
            story.alloc(0x100000 + 0x10000 * step, kept, op=op)
        story.end()
        story.free(0x3000)
    recording = story.recording(precision=FP32)
    parameters = tuple(replace(record, optimizer=0) for record in recording.parameters)
    sgd = OptimizerRecord(class_name="SGD", implementation="for-loop")
    return replace(recording, parameters=parameters, optimizers=(sgd,))


def leaking(recording: Recording, size: int = 716_800) -> Recording:
    """The allocator says from the middle on that more is allocated than the events tell."""
    allocated = recording.events.allocated.copy()
    allocated[len(allocated) // 2 :] += size
    return replace(recording, events=replace(recording.events, allocated=allocated))


def without_its_end(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE meta SET value = '{\"ended\": false}' WHERE key = 'ended'")
    return path


def of_adam(recording: Recording) -> Recording:
    """As if the optimizer were one of whose state nothing is there."""
    return replace(recording, optimizers=(replace(recording.optimizers[0], class_name="Adam"),))


def test_what_a_check_of_the_sums_says(tmp_path: Path, golden: Golden) -> None:
    write(tmp_path / "good.ampmem", trained())
    write(tmp_path / "residual.ampmem", leaking(trained()))
    write(tmp_path / "without-model.ampmem", trained(found=False))
    write(tmp_path / "no-rule.ampmem", of_adam(trained()))
    without_its_end(write(tmp_path / "killed.ampmem", trained()))
    files = ("good", "residual", "without-model", "no-rule", "killed", "none")
    golden(transcript(tmp_path, *(["show", "--check", f"{file}.ampmem", "good.ampmem"] for file in files)))
    for file in ("residual", "without-model", "killed"):
        golden(transcript(tmp_path, ["show", f"{file}.ampmem"]), file)


def test_with_a_residual_nothing_holds_and_a_finding_says_so() -> None:
    summary = summarize(leaking(trained(kept=4096)))
    assert {row.holds for row in summary.static_model} == {False}
    assert {row.explained for row in summary.static_model} == {True}
    assert summary.static_problem is not None
    found = {finding.code: finding for finding in summary.findings}
    assert (found["residual"].severity, found["residual"].bytes) == ("warning", 716_800)
    # What seems to be left behind may be dead.
    assert not {"steady-growth", "outputs-kept"} & found.keys()


def test_a_comparison_says_first_which_of_its_recordings_is_wrong(golden: Golden) -> None:
    entries = [entry_of(trained()), entry_of(leaking(trained()), label="other")]
    golden(render_comparison(compare(entries), details=EVERYTHING))


def test_a_model_that_is_nowhere_is_no_term_but_an_error() -> None:
    summary = summarize(trained(found=False))
    assert summary.static_model == ()
    assert summary.static_problem is not None


@pytest.mark.parametrize(("op", "severity"), [("aten::clone", "warning"), ("", "info")])
def test_growth_that_nothing_names_is_no_leak(op: str, severity: str) -> None:
    (found,) = [each for each in summarize(trained(kept=4096, op=op)).findings if each.code == "steady-growth"]
    assert (found.severity, found.bytes) == (severity, 4096)
    assert ("append numbers" in found.change) == (severity == "warning")
    assert ("need not be a leak" in found.message) == (severity == "info")
