"""Cast copies that nobody but autocast's cache keeps."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.findings.copies.weight_cache import per_allocation
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.events import Column, Phase
from ampmem.units import format_bytes


def check(run: TrainingRun) -> Finding | None:
    """At the peak of the cast copies the cache holds some that no backward needs, as under ``no_grad``.

    Without the cache each of them would live for its one use only, so the peak would lack all but the largest.
    The copies that autograd saved more than once would become more, which is set off against it.
    """
    ledger = run.analysis.ledger
    if not run.autocast or not run.recording.arm.cache or len(ledger.bytes) == 0:
        return None
    series = run.analysis.timeline.series(Category.CAST_COPIES)
    position = int(np.argmax(series))
    # Checkpointing hides from the hooks what a recomputation saves: who holds those copies is not known.
    idle = ledger.cached & (ledger.saves == 0) & (ledger.phase != Phase.BACKWARD)
    alive = ledger.alive_at(run.analysis, position)
    held = ledger.bytes * (idle & alive)
    reused = int((np.maximum(ledger.saves - 1, 0) * ledger.bytes * (ledger.cached & alive)).sum())
    without = int(series[position]) - int(held.sum()) + int(held.max()) + reused
    saved = int(series[position]) - max(without, _most_needed(run, ledger.bytes * ~idle))
    if not run.notable(saved):
        return None
    return Finding(
        code="cache-off-saves",
        severity="advice",
        section=Section.CASTS,
        message=f"{format_bytes(int(held.sum()))} of cast copies stay only because autocast's cache holds them until "
        f"the region ends: without the cache cast copies would take about {format_bytes(saved)} less at most.",
        bytes=saved,
        change="torch.autocast(..., cache_enabled=False) for the forward that keeps nothing for backward "
        "(evaluation, checkpointed blocks)",
        evidence=run.copied_parameters(held),
        off_peak=_off_peak(run, idle),
    )


def _off_peak(run: TrainingRun, idle: Mask) -> int | None:
    """Without the cache ``idle`` copies live one at a time, and each use that autograd saved has a copy of its own.

    So at each event the idle copies are gone, all but the largest of the run, and the further copies are there.
    """
    ledger = run.analysis.ledger
    gone, further = ledger.bytes * idle, np.maximum(ledger.saves - 1, 0) * ledger.bytes * ledger.cached
    return run.off_peak(per_allocation(run, gone - further), but=int(gone.max(initial=0)))


def _most_needed(run: TrainingRun, sizes: Column) -> int:
    """The most of ``sizes`` (one per cast copy) that ever lives at once."""
    every = np.zeros(len(run.analysis.lifetimes), dtype=np.int64)
    every[run.analysis.ledger.allocation] = sizes
    return int(every[run.analysis.lifetimes.alive_at(run.most_alive(every))].sum())
