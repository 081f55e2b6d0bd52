"""What a recording is in numbers for a logger."""

from dataclasses import replace

import pytest
from support.build import AMP, FP32, Story, gpu_run, small_run

from ampmem.analysis.summary import Summary, summarize
from ampmem.events import Phase
from ampmem.integrations.loggers import PEAK, REQUESTED, LoggedRow, largest_row, rows


def steps_of(*sizes: int) -> Summary:
    """A run whose steps have so many bytes of temporaries at their peaks, and a parameter of 40 bytes."""
    story = Story(weight=10)
    for step, size in enumerate(sizes):
        story.begin(step, Phase.BACKWARD)
        story.scratch(0x2000, size)
        story.end()
    return summarize(story.recording(precision=FP32))


def test_a_row_has_the_peak_and_each_category_that_is_there() -> None:
    first, second = rows(steps_of(100, 300), {0: 7, 1: 8})
    assert (first.step, second.step) == (7, 8)
    assert first.values == {PEAK: 140, "ampmem/peak/parameters": 40, "ampmem/peak/temporaries": 100}
    assert second.values[PEAK] == 340
    assert "ampmem/most/temporaries" not in first.values
    assert second.values["ampmem/most/temporaries"] == 300


def test_the_largest_speaks_for_recorded_steps_that_are_one_of_the_trainings() -> None:
    (row,) = rows(steps_of(100, 300, 200), {0: 7, 1: 7, 2: 7})
    assert (row.step, row.values[PEAK]) == (7, 340)


def test_steps_without_a_number_have_no_row() -> None:
    assert [row.step for row in rows(steps_of(100, 300), {1: 4})] == [4]


@pytest.mark.parametrize("holds", [True, False])
def test_the_last_row_has_the_static_model_where_all_of_it_holds(holds: bool) -> None:
    summary = summarize(small_run().recording(precision=AMP))
    parts = tuple(replace(part, holds=holds or part.component != "gradients") for part in summary.static_model)
    (row,) = rows(replace(summary, static_model=parts), {summary.steps[-1].index: 5})
    (total,) = [part for part in parts if part.component == "total" and part.mark == "after_backward"]
    assert row.values.get("ampmem/static/total") == (total.measured_bytes if holds else None)
    assert row.values.get("ampmem/static/rule_bytes_per_parameter") == (16.0 if holds else None)


def test_reserved_is_there_where_it_is_known() -> None:
    summary = summarize(gpu_run().recording(precision=AMP))
    (row, *_) = rows(summary, {step.index: step.index for step in summary.steps})
    assert row.values["ampmem/reserved"] == summary.steps[0].peak_reserved
    peak = summary.steps[0].peak
    assert (row.values[PEAK], row.values[REQUESTED]) == (peak.allocated, peak.bytes)
    assert peak.allocated is not None and peak.allocated > peak.bytes
    assert REQUESTED not in rows(steps_of(1), {0: 0})[0].values
    assert not any("reserved" in name for row in rows(steps_of(1), {0: 0}) for name in row.values)


def test_sums_that_are_wrong_are_told_nobody() -> None:
    summary = steps_of(100)
    wrong = replace(summary, conservation=replace(summary.conservation, residual_bytes=8))
    assert rows(wrong, {0: 0}) == ()


def test_one_row_for_all_is_that_of_the_largest_peak() -> None:
    given = [LoggedRow(step=1, values={PEAK: 9, "a": 1}), LoggedRow(step=2, values={PEAK: 5, "a": 2, "static": 16.0})]
    assert largest_row(given) == LoggedRow(step=1, values={PEAK: 9, "a": 1, "static": 16.0})
