"""What a recording comes to as numbers for an experiment logger: a row of named values for each step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ampmem.analysis.static_model.verdict import TOTAL
from ampmem.analysis.summary import Step, Summary
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.vocabulary import Mark

PEAK = f"ampmem/peak/{TOTAL}"
REQUESTED = "ampmem/peak/requested"
"""What of the peak was asked for, which the categories add up to; where the peak has the rounding of blocks, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The values of one of the training's steps, which its loggers count as ``step``.

    Sizes are whole bytes; those whose name says so are bytes per parameter.
    """

    step: int
    values: Mapping[str, float]


def rows(summary: Summary, numbers: Mapping[int, int]) -> tuple[Row, ...]:
    """A row for each step of the training; ``numbers`` has that step's number by the index of a recorded one.

    Where several recorded steps are one of the training's, the one with the largest peak speaks for it. The last row
    has what is known of the whole run besides. A recording whose sums are wrong gives no rows.
    """
    if summary.conservation.breach is not None:
        return ()
    largest: dict[int, Step] = {}
    for step in summary.steps:
        number = numbers.get(step.index)
        if step.finished and number is not None:
            largest[number] = max(step, largest.get(number, step), key=lambda each: each.peak.said)
    found = [Row(step=number, values=_of_step(step, largest.values())) for number, step in sorted(largest.items())]
    if found:
        found[-1] = replace(found[-1], values={**found[-1].values, **_of_run(summary)})
    return tuple(found)


def largest_row(found: Sequence[Row]) -> Row:
    """One row for all, of which there is one at least: that with the largest peak, and what is known of the run."""
    top = max(found, key=lambda row: row.values[PEAK])
    return replace(top, values={**found[-1].values, **top.values})


def _of_step(step: Step, steps: Collection[Step]) -> dict[str, float]:
    """Each category that any of ``steps`` has at its peak is in each row: a logger draws no lines through gaps."""
    there = [category for category in CATEGORIES if any(each.peak.categories[category] for each in steps)]
    values: dict[str, float] = {PEAK: step.peak.said}
    if step.peak.allocated is not None:
        values[REQUESTED] = step.peak.bytes
    values |= {f"ampmem/peak/{category}": step.peak.categories[category] for category in there}
    if step.peak_reserved is not None:
        values["ampmem/reserved"] = step.peak_reserved
    return values


def _of_run(summary: Summary) -> dict[str, float]:
    most = {f"ampmem/most/{category}": size for category, size in summary.most.items() if size}
    return {**most, **_static_model(summary)}


def _static_model(summary: Summary) -> dict[str, float]:
    """What there is after backward, where all of the model holds."""
    parts = [part for part in summary.static_model if part.mark == Mark.AFTER_BACKWARD]
    total = next((part for part in parts if part.component == TOTAL), None)
    recipe = summary.static_recipe
    if recipe is None or total is None or summary.static_problem or not all(part.holds for part in parts):
        return {}
    return {
        "ampmem/static/total": total.measured_bytes,
        "ampmem/static/bytes_per_parameter": total.measured_bytes_per_param,
        "ampmem/static/rule_bytes_per_parameter": recipe.bytes_per_param,
    }
