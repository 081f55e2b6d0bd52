"""Optimizer state that has not been made yet."""

from __future__ import annotations

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.parameters import own_elements
from ampmem.analysis.timeline.categories import Category
from ampmem.units import format_bytes


def check(run: TrainingRun) -> Finding | None:
    """The loss scaler left out every update, and there is no state: what it will take is still to come.

    An optimizer that was never called is not known, and then neither is what it will keep.
    """
    steps = run.steps
    if not steps or not all(step.skipped_update for step in steps):
        return None
    if run.live(Category.OPTIMIZER_STATE, run.analysis.timeline.position(steps[-1].end_ns)):
        return None
    to_come = _modelled(run)
    if run.recording.optimizers and to_come == 0:
        return None
    come = f"{format_bytes(to_come)} of it" if to_come else "what it keeps (Adam: 8 bytes per parameter)"
    return Finding(
        code="state-not-there-yet",
        severity="info",
        section=Section.STATIC_MODEL,
        message=f"the loss scaler has skipped every update so far, so there is no optimizer state yet: {come} will "
        "come with the first update that is done.",
        bytes=to_come or None,
        change="record more steps: ampmem profile --steps N, until an update is done",
        evidence=(f"skipped updates: {len(steps)} of {len(steps)} steps",),
    )


def _modelled(run: TrainingRun) -> int:
    """Bytes of state that the static model has of the parameters that are trained."""
    verdict = run.analysis.verdict
    parts = () if verdict is None or verdict.step not in [step.index for step in run.steps] else verdict.components
    per_element = [part.model_bytes_per_param for part in parts if part.component == str(Category.OPTIMIZER_STATE)]
    trained = sum(own_elements(record) for record in run.recording.parameters if record.trainable)
    return round(per_element[-1] * trained) if per_element else 0
