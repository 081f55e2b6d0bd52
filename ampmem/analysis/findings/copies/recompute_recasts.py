"""Weights that activation checkpointing casts a second time."""

from __future__ import annotations

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.events import Phase
from ampmem.units import format_bytes


def check(run: TrainingRun) -> Finding | None:
    """Cast copies made in backward, where forward is run again; those of the last step that has any."""
    found = [step for step in run.casts if step.recomputed.bytes]
    if not found:
        return None
    ledger, last = run.analysis.ledger, found[-1]
    mine = (ledger.step == last.index) & (ledger.phase == Phase.BACKWARD)
    return Finding(
        code="recompute-recasts",
        severity="info",
        section=Section.CASTS,
        message=f"recomputation in backward casts weights again: {last.recomputed.copies} copies, "
        f"{format_bytes(last.recomputed.bytes)} per step.",
        bytes=last.recomputed.bytes,
        change="nothing to mend: autocast's cache is empty by then; fewer checkpointed blocks cast less",
        evidence=run.copied_parameters(ledger.bytes * mine),
    )
