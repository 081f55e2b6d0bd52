"""What autocast's weight cache changes at the end of forward: the numbers behind two findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ampmem.analysis.findings.base import Case
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.events import Column, Fact, Phase


def cost_of_no_cache(case: Case) -> Column:
    """For each cast copy what it would cost more without the cache, at the last step's forward where all cost most.

    Each use that autograd saved would hold a copy of its own: ``(saves - 1) * bytes``.
    """

    def extra(alive: Mask, saves: Column) -> Column:
        cost: Column = np.maximum(saves - 1, 0) * case.ledger.bytes * (alive & case.ledger.cached)
        return cost

    return _largest(case, extra)


def saved_by_cache(case: Case) -> Column:
    """For each cast copy its bytes where the cache would have served another, at the last step's forward with most.

    One copy of each parameter stays. The cache takes neither views nor parameters that are not trained.
    """
    book = case.ledger
    trained = {record.name for record in case.recording.parameters if record.trainable}
    cacheable = ~book.view & np.array([case.text(name) in trained for name in book.parameter.tolist()], dtype=np.bool_)

    def further(alive: Mask, saves: Column) -> Column:
        mine = alive & cacheable
        extra = book.bytes * mine
        for parameter in np.unique(book.parameter[mine]):
            copies = np.flatnonzero(mine & (book.parameter == parameter))
            extra[copies[np.argmax(book.bytes[copies])]] = 0
        return extra

    return _largest(case, further)


def _largest(case: Case, sizes: Callable[[Mask, Column], Column]) -> Column:
    found = [sizes(alive, saves) for alive, saves in _forwards(case)]
    return max(found, key=lambda column: int(column.sum()), default=np.zeros(len(case.ledger.bytes), dtype=np.int64))


def _forwards(case: Case) -> Iterator[tuple[Mask, Column]]:
    """At the start of each of the last step's backwards: which copies live, and how often each was saved since
    the backward before.
    """
    starts = case.starts(Phase.BACKWARD)
    for start in case.last_starts(Phase.BACKWARD):
        before = max((earlier for earlier in starts if earlier < start), default=None)
        alive = case.ledger.alive_at(case.analysis, case.analysis.timeline.position(start))
        yield alive, case.with_fact(Fact.SAVED, before, start)[case.ledger.allocation]
