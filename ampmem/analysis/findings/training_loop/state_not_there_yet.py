"""Optimizer state that has not been made yet."""

from __future__ import annotations

from ampmem.analysis.findings.base import Case, Finding
from ampmem.analysis.static_model.verdict import judge
from ampmem.analysis.timeline.categories import Category
from ampmem.units import format_bytes


def check(case: Case) -> Finding | None:
    """The loss scaler left out every update, and there is no state: what it will take is still to come.

    An optimizer that was never called is not known, and then neither is what it will keep.
    """
    steps = case.recording.steps
    if not steps or not all(step.skipped_update for step in steps):
        return None
    if case.live(Category.OPTIMIZER_STATE, case.analysis.timeline.position(steps[-1].end_ns)):
        return None
    told = _told(case)
    if case.recording.optimizers and told == 0:
        return None
    come = f"{format_bytes(told)} of it" if told else "what it keeps (Adam: 8 bytes per parameter)"
    return Finding(
        code="state-not-there-yet",
        severity="info",
        message=f"the loss scaler has skipped every update so far, so there is no optimizer state yet: {come} will "
        "come with the first update that is done.",
        bytes=told or None,
        change="record more steps: ampmem profile --steps N, until an update is done",
        evidence=(f"skipped updates: {len(steps)} of {len(steps)} steps",),
    )


def _told(case: Case) -> int:
    """Bytes of state that the static model tells of the parameters that are trained."""
    verdict = judge(case.analysis)
    parts = () if verdict is None else verdict.components
    per_element = [part.model_bytes_per_param for part in parts if part.component == str(Category.OPTIMIZER_STATE)]
    own = [record for record in case.recording.parameters if record.trainable and record.shares is None]
    return round(per_element[-1] * sum(record.elements for record in own)) if per_element else 0
