"""``ampmem show --check``, and what a recording whose sums are wrong says of itself."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from build import ARM, Story, write
from command_line import ampmem_here

from ampmem.analysis.comparison import compare, entry_of
from ampmem.analysis.summary import summarize
from ampmem.events import Fact, OptimizerRecord, Phase, Recording
from ampmem.reporters.base import EVERYTHING
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.table import render

FP32 = replace(ARM, name="fp32", dtype=None, cache=None)


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
    recording = story.recording(arm=FP32)
    parameters = tuple(replace(record, optimizer=0) for record in recording.parameters)
    sgd = OptimizerRecord(class_name="SGD", implementation="for-loop")
    return replace(recording, parameters=parameters, optimizers=(sgd,))


def leaking(recording: Recording, size: int = 716_800) -> Recording:
    """The allocator says from the middle on that more is allocated than the events tell."""
    allocated = recording.events.allocated.copy()
    allocated[len(allocated) // 2 :] += size
    return replace(recording, events=replace(recording.events, allocated=allocated))


def test_a_recording_that_adds_up(tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", trained())
    code, output, _ = ampmem_here(tmp_path, "show", "--check", str(path), str(path))
    assert code == 0
    assert output.splitlines() == [f"{path}: ok, 13 events, residual 0 B, the static model holds"] * 2


def test_a_residual_fails_the_check_and_is_said_first(tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", leaking(trained()))
    code, output, _ = ampmem_here(tmp_path, "show", "--check", str(path))
    assert code == 1
    assert output.startswith(f"{path}: the categories are up to 700.0 KiB (716,800 bytes) off the allocator's")
    code, shown, _ = ampmem_here(tmp_path, "show", str(path))
    assert code == 0
    verdict, warning, *_ = shown.split("\n\n")
    assert verdict.startswith("No verdict: ")
    assert warning.startswith("WARNING  the categories are up to 700.0 KiB (716,800 bytes) off")
    assert "nothing left over" not in shown
    assert "the model does not hold: the categories are up to" in " ".join(shown.split())


def test_with_a_residual_nothing_holds_and_a_finding_says_so() -> None:
    summary = summarize(leaking(trained(kept=4096)))
    assert {row.holds for row in summary.static_model} == {False}
    assert {row.explained for row in summary.static_model} == {True}
    assert summary.static_problem is not None
    found = {finding.code: finding for finding in summary.findings}
    assert (found["residual"].severity, found["residual"].bytes) == ("warning", 716_800)
    # What seems to be left behind may be dead.
    assert not {"steady-growth", "outputs-kept"} & found.keys()


def test_a_comparison_says_first_which_of_its_recordings_is_wrong() -> None:
    entries = [entry_of(trained()), entry_of(leaking(trained()), label="other")]
    text = render_comparison(compare(entries), details=EVERYTHING)
    verdict, warning, *_ = text.split("\n\n")
    assert verdict.startswith("No verdict: the sums of other differ from the allocator's")
    assert warning.startswith("WARNING  other: the categories are up to 700.0 KiB")
    assert "the model does not hold: other: the categories" in " ".join(text.split())


def test_a_model_that_is_nowhere_is_no_term_but_an_error(tmp_path: Path) -> None:
    recording = trained(found=False)
    summary = summarize(recording)
    assert summary.static_model == ()
    assert summary.static_problem is not None
    assert "none of the model's parameters (4,000 bytes) was found" in summary.static_problem
    _, warning, *others = (" ".join(part.split()) for part in render(summary, ()).split("\n\n"))
    assert warning.startswith("WARNING none of the model's parameters (4,000 bytes) was found")
    assert "no verdict: none of the model's parameters" in " ".join(others)
    code, output, _ = ampmem_here(tmp_path, "show", "--check", str(write(tmp_path / "run.ampmem", recording)))
    assert code == 1
    assert "no verdict on the static model" in output


def test_a_rule_of_thumb_that_does_not_fit_is_said_and_is_not_an_error(tmp_path: Path) -> None:
    recording = trained()
    adam = replace(recording.optimizers[0], class_name="Adam")  # of which no state is there
    path = write(tmp_path / "run.ampmem", replace(recording, optimizers=(adam,)))
    code, output, _ = ampmem_here(tmp_path, "show", "--check", str(path))
    assert "residual 0 B, the static model does not explain optimizer_state" in output
    assert code == 0


def test_a_file_that_cannot_be_read_fails_the_check_with_its_line(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good.ampmem", trained()), tmp_path / "none.ampmem"
    code, output, _ = ampmem_here(tmp_path, "show", "--check", str(bad), str(good))
    assert code == 1
    assert output.splitlines()[0] == f"{bad} does not exist"
    assert "ok" in output.splitlines()[1]


@pytest.mark.parametrize(("op", "severity"), [("aten::clone", "warning"), ("", "info")])
def test_growth_that_nothing_names_is_no_leak(op: str, severity: str) -> None:
    (found,) = [each for each in summarize(trained(kept=4096, op=op)).findings if each.code == "steady-growth"]
    assert (found.severity, found.bytes) == (severity, 4096)
    assert ("append numbers" in found.change) == (severity == "warning")
    assert ("need not be a leak" in found.message) == (severity == "info")


def test_a_recording_that_was_not_ended_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "run.ampmem", trained())
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE meta SET value = '{\"ended\": false}' WHERE key = 'ended'")
    code, output, _ = ampmem_here(tmp_path, "show", "--check", str(path))
    assert code == 0 and output.endswith(", not ended\n")
    assert (
        "WARNING  this recording was not ended: its process was killed" in ampmem_here(tmp_path, "show", str(path))[1]
    )
