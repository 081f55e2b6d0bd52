"""Autocast that reaches nothing."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.events import Fact


def check(run: TrainingRun) -> Finding | None:
    """No parameter was cast and no op that was seen gave or kept anything in low precision."""
    facts = run.recording.facts
    seen = np.isin(facts.fact, (Fact.OUTPUT, Fact.SAVED, Fact.OTHER_CAST)) & (facts.dtype != 0)
    if not run.autocast or not seen.any() or (facts.fact == Fact.CAST_COPY).any():
        return None
    if run.low_precision[facts.dtype[seen]].any():
        return None
    device = run.recording.run.device_type
    parameters = run.analysis.parameters
    if parameters and all(record.dtype == "float64" for record in parameters):
        where = "make the model and its inputs float32 (model.float()): autocast does not cast float64"
    else:
        where = (
            f'with torch.autocast("{device}", dtype=torch.bfloat16): around the forward itself, with '
            "the device that the model is on"
        )
    entered = run.recording.arm.dtype is not None
    said = "autocast was on, but" if entered else "the run was to be under autocast, but no forward was seen under it:"
    return Finding(
        code="no-autocast-effect",
        severity="warning",
        section=Section.ACTIVATIONS,
        message=f"{said} no parameter was cast and nothing ran in low precision.",
        bytes=None,
        change=where,
        evidence=(f"device: {device}", f"ops' results seen, all in other types: {int(seen.sum())}"),
    )
