"""Cast copies that nobody but autocast's cache keeps."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Case, Finding
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Column, Phase
from ampmem.units import format_bytes


def check(case: Case) -> Finding | None:
    """At the peak of the cast copies the cache holds some that no backward needs, as under ``no_grad``.

    Without the cache each of them would live for its one use only, so the peak would lack all but the largest.
    The copies that autograd saved more than once would become more, which is set off against it.
    """
    book = case.ledger
    if not case.autocast or not case.recording.arm.cache or len(book.bytes) == 0:
        return None
    series = case.analysis.timeline.series(Category.CAST_COPIES)
    position = int(np.argmax(series))
    # Checkpointing hides from the hooks what a recomputation saves: who holds those copies is not known.
    idle = book.cached & (book.saves == 0) & (book.phase != Phase.BACKWARD)
    alive = book.alive_at(case.analysis, position)
    held = book.bytes * (idle & alive)
    reused = int((np.maximum(book.saves - 1, 0) * book.bytes * (book.cached & alive)).sum())
    without = int(series[position]) - int(held.sum()) + int(held.max()) + reused
    saved = int(series[position]) - max(without, _most_needed(case, book.bytes * ~idle))
    if not case.notable(saved):
        return None
    return Finding(
        code="cache-off-saves",
        severity="advice",
        message=f"{format_bytes(int(held.sum()))} of cast copies stay only because autocast's cache holds them until "
        f"the region ends: without the cache their peak would be about {format_bytes(saved)} lower.",
        bytes=saved,
        change="torch.autocast(..., cache_enabled=False) for the forward that keeps nothing for backward "
        "(evaluation, checkpointed blocks)",
        evidence=case.copied_parameters(held),
    )


def _most_needed(case: Case, sizes: Column) -> int:
    """The most of ``sizes`` (one per cast copy) that ever lives at once."""
    every = np.zeros(len(case.analysis.lifetimes), dtype=np.int64)
    every[case.ledger.allocation] = sizes
    return int(every[case.analysis.lifetimes.alive_at(case.most_alive(every))].sum())
