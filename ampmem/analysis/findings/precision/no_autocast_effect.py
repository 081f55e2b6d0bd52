"""Autocast that reaches nothing."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Case, Finding
from ampmem.events import Fact


def check(case: Case) -> Finding | None:
    """No parameter was cast and no op that was seen gave or kept anything in low precision."""
    facts = case.recording.facts
    seen = np.isin(facts.fact, (Fact.OUTPUT, Fact.SAVED, Fact.OTHER_CAST)) & (facts.dtype != 0)
    if not case.autocast or not seen.any() or (facts.fact == Fact.CAST_COPY).any():
        return None
    if case.low_precision[facts.dtype[seen]].any():
        return None
    run = case.recording.run
    return Finding(
        code="no-autocast-effect",
        severity="warning",
        message="autocast was on, but no parameter was cast and nothing ran in low precision.",
        bytes=None,
        change=f'with torch.autocast("{run.device_type}", dtype=torch.bfloat16): around the forward itself, with '
        "the device that the model is on",
        evidence=(f"device: {run.device_type}", f"ops' results seen, all in other types: {int(seen.sum())}"),
    )
