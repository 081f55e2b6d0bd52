"""Live bytes of each category after every event.

A *position* is a number of events: position 0 is before the first one, position ``n`` after the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampmem.analysis.json.jsonable import EachOf, OneOf
from ampmem.analysis.timeline.categories import CATEGORIES, CODES, Breakdown, Category
from ampmem.analysis.timeline.classify import Classes
from ampmem.analysis.timeline.lifetimes import ALIVE, Lifetimes, clock
from ampmem.events import Column, EventColumns, Phase, StepRecord

PHASES: tuple[str, ...] = tuple(phase.name.lower() for phase in Phase)
"""Names of the phases, in order of their codes."""

PhaseName: TypeAlias = Annotated[str, OneOf(PHASES)]

ByPhase: TypeAlias = Annotated[Mapping[str, int], EachOf(PHASES)]
"""Bytes of each phase, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Bytes alive at each position.

    ``live`` has shape (categories, events + 1), rows in the order of ``CATEGORIES``; ``temporaries``
    splits its temporaries by phase of birth, shape (phases, events + 1); ``total`` and ``time_ns``
    are one-dimensional, of events + 1 and events entries.
    """

    time_ns: Column
    total: Column
    live: NDArray[np.int64]
    temporaries: NDArray[np.int64]

    def position(self, instant_ns: int) -> int:
        """How many events happened before ``instant_ns``."""
        return int(self.time_ns.searchsorted(instant_ns, side="left"))

    def series(self, category: Category) -> Column:
        """Live bytes of ``category`` at every position."""
        series: Column = self.live[CODES[category]]
        return series

    def breakdown(self, position: int) -> Breakdown:
        """Live bytes of every category at ``position``."""
        return dict(zip(CATEGORIES, self.live[:, position].tolist(), strict=True))

    def temporaries_by_phase(self, position: int) -> ByPhase:
        """Live temporaries at ``position``, by the phase in which they were born."""
        return dict(zip(PHASES, self.temporaries[:, position].tolist(), strict=True))

    def peak_between(self, start_ns: int, end_ns: int) -> int:
        """The first position with the most bytes from ``start_ns`` up to ``end_ns``; the state at the start counts."""
        start, end = self.position(start_ns), self.position(end_ns)
        return start + int(np.argmax(self.total[start : end + 1]))


def largest_positions(timeline: Timeline, steps: Sequence[StepRecord]) -> Mapping[Category, int]:
    """For each category the first position, in any of ``steps``, at which it held the most bytes."""
    spans = _apart(range(timeline.position(step.start_ns), timeline.position(step.end_ns) + 1) for step in steps)
    return {category: _largest(timeline.series(category), spans) for category in CATEGORIES}


def most_of(timeline: Timeline, steps: Sequence[StepRecord]) -> Breakdown:
    """The most bytes that each category held in any of ``steps``, each at an instant of its own."""
    found = largest_positions(timeline, steps)
    return {category: int(timeline.series(category)[position]) for category, position in found.items()}


def _apart(spans: Iterable[range]) -> list[range]:
    """``spans`` in order, with those that touch made one: so each position is looked at once, whatever a file says."""
    found: list[range] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return found


def _largest(series: Column, spans: Sequence[range]) -> int:
    found = [span.start + int(np.argmax(series[span.start : span.stop])) for span in spans]
    return max(found, key=lambda position: int(series[position]))


def timeline(events: EventColumns, lifetimes: Lifetimes, classes: Classes) -> Timeline:
    """Add up who lives when."""
    count = len(events)
    owner = np.zeros(count, dtype=np.int64)
    freed = np.flatnonzero(lifetimes.died != ALIVE)
    owner[lifetimes.born] = np.arange(len(lifetimes))
    owner[lifetimes.died[freed]] = freed
    delta = np.zeros(count, dtype=np.int64)
    delta[lifetimes.born] = lifetimes.bytes
    # A free takes back what the birth gave, so that a sum can never drift.
    delta[lifetimes.died[freed]] = -lifetimes.bytes[freed]
    category = classes.category[owner]
    temporary = np.where(category == CODES[Category.TEMPORARIES], lifetimes.phase[owner], 0)
    return Timeline(
        time_ns=clock(events),
        total=_running(delta[np.newaxis])[0],
        live=_running_by(category, range(len(CATEGORIES)), delta),
        temporaries=_running_by(temporary, [int(phase) for phase in Phase], delta),
    )


def _running(delta: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cumulative sums along the rows of ``delta``, starting from 0."""
    sums = np.zeros((delta.shape[0], delta.shape[1] + 1), dtype=np.int64)
    np.cumsum(delta, axis=1, out=sums[:, 1:])
    return sums


def _running_by(group: Column, groups: range | list[int], delta: Column) -> NDArray[np.int64]:
    """One row of cumulative sums per group; row by row, to need the memory of the result only."""
    sums = np.zeros((len(groups), len(delta) + 1), dtype=np.int64)
    for row, code in enumerate(groups):
        mine = group == code
        if mine.any():
            np.cumsum(delta * mine, out=sums[row, 1:])
    return sums
