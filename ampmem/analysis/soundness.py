"""Whether a summary can be trusted: its sums against the allocator's, and its static memory for the formulas."""

from __future__ import annotations

from collections.abc import Mapping

from ampmem.analysis.static_model.recipes import COMPONENTS, Measured
from ampmem.analysis.static_model.verdict import TOTAL
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import Breakdown, Category
from ampmem.errors import NothingRecorded
from ampmem.units import format_count
from ampmem.vocabulary import Mark


def faults(summary: Summary) -> tuple[str, ...]:
    """Why the recording cannot be trusted, a sentence for each reason; empty if there is none."""
    found = [*wrong_sums(summary)]
    if summary.static_problem not in (None, summary.conservation.breach):
        found.append(f"no verdict on the static model: {summary.static_problem}")
    return tuple(found)


def wrong_sums(summary: Summary) -> tuple[str, ...]:
    """Why the sums of ``summary`` cannot be trusted: they differ from the allocator's totals, or it recorded none."""
    conservation = summary.conservation
    found = []
    if conservation.residual_bytes is None:
        found.append("the recording does not have the allocator's total to check the sums against")
    if conservation.breach is not None:
        found.append(conservation.breach)
    return tuple(found)


def soundness(summary: Summary) -> str:
    """The result of ``--check`` for a recording without :func:`faults`: ``9,120 events, residual 0 B, …``."""
    events = f"{format_count(summary.conservation.events)} events, residual 0 B"
    if not summary.static_model:
        return f"{events}, no static model"
    broken = [row for row in summary.static_model if not row.explained and row.component != TOTAL]
    named = ", ".join(f"{row.component} {str(row.mark).replace('_', ' ')}" for row in broken)
    return f"{events}, the static model does not explain {named}" if broken else f"{events}, the static model holds"


# The static memory of a run, to compare the published formulas with.


def measure(summary: Summary) -> Measured:
    """Static memory of the last step with an update. Raises :class:`NothingRecorded` if no step has one."""
    for step in reversed(summary.steps):
        forward, backward, update = step.marks.after_forward, step.marks.after_backward, step.marks.after_optimizer
        if not step.finished or step.skipped_update or backward is None:
            continue
        mark, live = Mark.AFTER_BACKWARD, backward
        if update is not None and update[Category.OPTIMIZER_STATE] and not backward[Category.OPTIMIZER_STATE]:
            mark, live = Mark.AFTER_OPTIMIZER, update
        return Measured(
            parameters=summary.parameters.count,
            step=step.index,
            mark=mark,
            static=_parts(live),
            after_forward=None if forward is None else _parts(forward),
        )
    raise NothingRecorded(
        "nothing to compare with: no step with a backward and an optimizer update was recorded; "
        "record more steps (while a loss scaler skips updates there is no optimizer state)"
    )


def _parts(live: Breakdown) -> Mapping[str, int]:
    return {component: live[component] for component in COMPONENTS}
