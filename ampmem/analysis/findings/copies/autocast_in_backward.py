"""A backward that runs inside the autocast region."""

from __future__ import annotations

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.units import format_bytes

_CHANGE = "with torch.autocast(...): loss = ...  # and outside of it: loss.backward()"
_CHANGE_OF_PIPELINE = "enter torch.autocast(...) in the forward of the stages' modules: a schedule runs backward, too"


def check(run: TrainingRun) -> Finding | None:
    """Autocast was on when a backward started, so the cache's copies live through it."""
    steps = [(step, held) for step, held in zip(run.steps, run.casts, strict=True)]
    found = [(step.index, held.after_forward) for step, held in steps if step.autocast_in_backward]
    if not found:
        return None
    index, holders = found[-1]
    held = 0 if holders is None else holders.cache.bytes
    cost = f" {format_bytes(held)} of cast copies that only its cache holds live through backward." if held else ""
    return Finding(
        code="autocast-in-backward",
        severity="advice",
        section=Section.CASTS,
        message=f"backward runs inside the autocast region.{cost}",
        bytes=held or None,
        change=_CHANGE_OF_PIPELINE if run.pipelined else _CHANGE,
        evidence=(f"steps: {', '.join(str(step) for step, _ in found)}", f"cast copies are those of step {index}")
        if held
        else (f"steps: {', '.join(str(step) for step, _ in found)}",),
    )
