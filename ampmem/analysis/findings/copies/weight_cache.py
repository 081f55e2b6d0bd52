"""What autocast's weight cache changes at the end of forward: the numbers behind two findings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np

from ampmem.analysis.findings.base import TrainingRun
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.events import Column, Fact, Phase


def cost_of_no_cache(run: TrainingRun) -> Column:
    """For each cast copy what it would cost more without the cache, when all cost most.

    That is the start of a backward of the step of the peak.

    Each use that autograd saved would hold a copy of its own: ``(saves - 1) * bytes``.
    """

    def extra(alive: Mask, saves: Column) -> Column:
        cost: Column = np.maximum(saves - 1, 0) * run.analysis.ledger.bytes * (alive & run.analysis.ledger.cached)
        return cost

    return _largest(run, extra)


def saved_by_cache(run: TrainingRun) -> Column:
    """For each cast copy its bytes where the cache would have served another, when there are most.

    That is the start of a backward of the step of the peak.

    One copy of each parameter stays. The cache takes neither views nor parameters that are not trained.
    """
    ledger = run.analysis.ledger
    trained = {record.name for record in run.recording.parameters if record.trainable}
    cacheable = ~ledger.view & np.array(
        [run.text(name) in trained for name in ledger.parameter.tolist()], dtype=np.bool_
    )

    def further(alive: Mask, saves: Column) -> Column:
        mine = alive & cacheable
        extra = ledger.bytes * mine
        for parameter in np.unique(ledger.parameter[mine]):
            copies = np.flatnonzero(mine & (ledger.parameter == parameter))
            extra[copies[np.argmax(ledger.bytes[copies])]] = 0
        return extra

    return _largest(run, further)


def per_allocation(run: TrainingRun, sizes: Column) -> Column:
    """``sizes`` (bytes, one per cast copy) as one entry per allocation."""
    found = np.zeros(len(run.analysis.lifetimes), dtype=np.int64)
    np.add.at(found, run.analysis.ledger.allocation, sizes)
    return found


def _largest(run: TrainingRun, sizes: Callable[[Mask, Column], Column]) -> Column:
    found = [sizes(alive, saves) for alive, saves in _forwards(run)]
    return max(
        found, key=lambda column: int(column.sum()), default=np.zeros(len(run.analysis.ledger.bytes), dtype=np.int64)
    )


def _forwards(run: TrainingRun) -> Iterator[tuple[Mask, Column]]:
    """At the start of each backward of the step of the peak: which copies live, and how often each was saved since
    the backward before.
    """
    starts = run.starts(Phase.BACKWARD)
    for start in run.peak_starts(Phase.BACKWARD):
        place = bisect_left(starts, start)
        before = starts[place - 1] if place else None
        alive = run.analysis.ledger.alive_at(run.analysis, run.analysis.timeline.position(start))
        yield alive, run.with_fact(Fact.SAVED, before, start)[run.analysis.ledger.allocation]
