"""A backward that runs inside the autocast region."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.findings.copies.weight_cache import per_allocation
from ampmem.events import Column
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
    held = 0 if holders is None or holders.cache is None else holders.cache.bytes
    cost = f" {format_bytes(held)} of cast copies that only its cache holds live through backward." if held else ""
    return Finding(
        code="autocast-in-backward",
        severity="advice",
        section=Section.CASTS,
        message=f"backward runs inside the autocast region.{cost}",
        bytes=held or None,
        change=_CHANGE_OF_PIPELINE if run.pipelined else _CHANGE,
        off_peak=run.off_peak(*_idle(run)) if held else None,
        evidence=(f"steps: {', '.join(str(step) for step, _ in found)}", f"cast copies are those of step {index}")
        if held
        else (f"steps: {', '.join(str(step) for step, _ in found)}",),
    )


def _idle(run: TrainingRun) -> tuple[Column, Column]:
    """Bytes of the copies that only the cache holds when the last backward starts, and from which position on."""
    start = run.analysis.marks[run.peak_step].after_forward
    nothing = np.zeros(len(run.analysis.lifetimes), dtype=np.int64)
    if start is None:
        return nothing, nothing
    ledger, position = run.analysis.ledger, run.analysis.timeline.position(start)
    mine = ledger.alive_at(run.analysis, position) & ledger.in_cache(run.analysis, start) & (ledger.saves == 0)
    return per_allocation(run, ledger.bytes * mine), nothing + position + 1  # at the end of forward they are there
