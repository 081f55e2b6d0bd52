"""The static memory of a run, to hold the published formulas against."""

from __future__ import annotations

from collections.abc import Mapping

from ampmem.analysis.static_model.published import Measured
from ampmem.analysis.static_model.static_model import COMPONENTS
from ampmem.analysis.summary import Step, Summary
from ampmem.analysis.timeline.categories import Breakdown, Category
from ampmem.errors import NothingRecorded
from ampmem.vocabulary import Mark


def measure(summary: Summary) -> Measured:
    """Static memory of the last step whose update was done; :class:`NothingRecorded` when no step has one."""
    for step in reversed(summary.steps):
        if step.finished and not step.skipped_update and step.marks.after_backward is not None:
            return _measured(summary.parameters.count, step, step.marks.after_backward)
    raise NothingRecorded(
        "nothing to compare with: no step with a backward and an optimizer update was recorded; "
        "record more steps (while a loss scaler skips updates there is no optimizer state)"
    )


def _measured(parameters: int, step: Step, after_backward: Breakdown) -> Measured:
    marks = step.marks
    mark, live = Mark.AFTER_BACKWARD, after_backward
    late = marks.after_optimizer
    if late is not None and late[Category.OPTIMIZER_STATE] and not after_backward[Category.OPTIMIZER_STATE]:
        mark, live = Mark.AFTER_OPTIMIZER, late
    return Measured(
        parameters=parameters,
        step=step.index,
        mark=mark,
        static=_parts(live),
        after_forward=None if marks.after_forward is None else _parts(marks.after_forward),
    )


def _parts(live: Breakdown) -> Mapping[str, int]:
    return {component: live[component] for component in COMPONENTS}
