"""Live bytes of each category after every event, and the history: a recording with everything derived from it.

A *position* is a number of events: position 0 is before the first one, position ``n`` after the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampmem.analysis.jsonable import EachOf, OneOf
from ampmem.analysis.timeline.categories import CATEGORIES, CODES, Breakdown, Category
from ampmem.analysis.timeline.classify import Classes
from ampmem.analysis.timeline.lifetimes import ALIVE, FOREVER, JoinedFacts, Lifetimes, clock
from ampmem.analysis.timeline.marks import Instants
from ampmem.events import Column, EventColumns, Fact, ParameterRecord, Phase, Recording, StepRecord
from ampmem.output import Shown
from ampmem.vocabulary import Communication

PHASES: tuple[str, ...] = tuple(phase.name.lower() for phase in Phase)
"""The names of the phases, in order of their codes."""

PhaseName: TypeAlias = Annotated[str, OneOf(PHASES)]

ByPhase: TypeAlias = Annotated[Mapping[str, int], EachOf(PHASES)]
"""Bytes by name of phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Bytes alive at each position.

    ``live`` has shape (categories, events + 1), rows in the order of ``CATEGORIES``; ``temporaries`` splits the
    temporaries by phase of birth, shape (phases, events + 1); ``total`` and ``time_ns`` are one-dimensional, of events
    + 1 and events entries.
    """

    time_ns: Column
    total: Column
    live: NDArray[np.int64]
    temporaries: NDArray[np.int64]

    def position(self, instant_ns: int) -> int:
        """The number of events before ``instant_ns``."""
        return int(self.time_ns.searchsorted(instant_ns, side="left"))

    def positions(self, instants_ns: Sequence[int] | Column) -> Column:
        """The :meth:`position` of each instant."""
        return self.time_ns.searchsorted(np.asarray(instants_ns, dtype=np.int64), side="left")

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


def largest_positions(timeline: Timeline, steps: Sequence[StepRecord]) -> Mapping[Category, int]:
    """For each category the first position, in any of ``steps``, at which its bytes were largest."""
    spans = _apart(range(timeline.position(step.start_ns), timeline.position(step.end_ns) + 1) for step in steps)
    return {category: _largest(timeline.series(category), spans) for category in CATEGORIES}


def most_of(timeline: Timeline, steps: Sequence[StepRecord]) -> Breakdown:
    """The most bytes of each category in any of ``steps``, each at an instant of its own."""
    found = largest_positions(timeline, steps)
    return {category: int(timeline.series(category)[position]) for category, position in found.items()}


def _apart(spans: Iterable[range]) -> list[range]:
    """``spans`` in order, with touching ones merged, so that each position is looked at once."""
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
    """The live bytes of each category at every position."""
    owner = lifetimes.owners(len(events))
    # A free subtracts exactly what its birth added, so sums never drift.
    delta = -lifetimes.bytes[owner] if len(events) else np.zeros(0, dtype=np.int64)
    delta[lifetimes.born] = lifetimes.bytes
    category = classes.category[owner]
    temporary = np.where(category == CODES[Category.TEMPORARIES], lifetimes.phase[owner], 0)
    return Timeline(
        time_ns=clock(events),
        total=np.insert(np.cumsum(delta), 0, 0),
        live=_running_by(category, range(len(CATEGORIES)), delta),
        temporaries=_running_by(temporary, [int(phase) for phase in Phase], delta),
    )


def _running_by(group: Column, groups: range | list[int], delta: Column) -> NDArray[np.int64]:
    """One row of cumulative sums per group, row by row, which needs only the memory of the result."""
    sums = np.zeros((len(groups), len(delta) + 1), dtype=np.int64)
    for row, code in enumerate(groups):
        mine = group == code
        if mine.any():
            np.cumsum(delta * mine, out=sums[row, 1:])
    return sums


# A recording with everything known about its allocations, from which the rest of the analysis is derived.


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryHistory(Shown):
    """A recording with its allocations, their categories and sums; ``marks`` has one entry per step."""

    recording: Recording
    lifetimes: Lifetimes
    facts: JoinedFacts
    classes: Classes
    timeline: Timeline
    marks: tuple[Instants, ...]
    untrained: frozenset[str] = frozenset()
    """Names of the parameters that nothing trains, in a run that trains a model."""

    @property
    def parameters(self) -> tuple[ParameterRecord, ...]:
        """The recording's parameters, without those of models that nothing trains."""
        return tuple(record for record in self.recording.parameters if record.name not in self.untrained)

    def _in_short(self) -> str:
        return f"{len(self.lifetimes.born):,} allocations of {self.recording!r}"

    def born_at(self, position: int) -> tuple[str, str]:
        """Op and module of the alloc that was the event before ``position``; empty if unknown."""
        texts = self.recording.texts
        for allocation in np.flatnonzero(self.lifetimes.born == position - 1).tolist():
            return texts[self.lifetimes.op[allocation]], texts[self.lifetimes.module[allocation]]
        return "", ""

    def inferred_at(self, position: int) -> Breakdown:
        """Live bytes at ``position`` whose category was inferred: no hook saw what they are."""
        facts, size = self.facts, self.lifetimes.bytes
        concluded = np.zeros(len(self.lifetimes), dtype=np.bool_)
        concluded[facts.allocation[facts.fact == Fact.INFERRED]] = True
        concluded &= self.lifetimes.alive_at(position)
        return {category: int(size[concluded & self.classes.of(category)].sum()) for category in CATEGORIES}


# The memory of distributed training, by purpose.

PARTS: tuple[Communication, ...] = tuple(Communication)

ByPart: TypeAlias = Mapping[Communication, int]
"""Bytes by purpose of communication."""

_NOTHING: ByPart = dict.fromkeys(PARTS, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationParts:
    """The allocations for communication: ``bytes`` from ``born`` to ``died`` (positions), for the purpose ``part``.

    ``part`` is an index into :data:`PARTS`, or their number if the purpose is unknown.
    """

    born: Column
    died: Column
    bytes: Column
    part: Column

    def at(self, position: int) -> ByPart:
        """Live bytes by purpose at ``position``."""
        if not len(self.born):  # most runs have none, but may have very many steps
            return _NOTHING
        alive = (self.born <= position) & (self.died > position)
        sums = np.zeros(len(PARTS) + 1, dtype=np.int64)
        np.add.at(sums, self.part[alive], self.bytes[alive])
        return dict(zip(PARTS, sums.tolist(), strict=False))


def communication_of(history: MemoryHistory) -> CommunicationParts:
    """The memory of distributed training in ``history``, by purpose."""
    lifetimes, classes = history.lifetimes, history.classes
    mine = np.flatnonzero(classes.of(Category.COMMUNICATION))
    places = {part.value: index for index, part in enumerate(PARTS)}
    texts = history.recording.texts
    names = classes.name[mine].tolist()
    return CommunicationParts(
        born=lifetimes.born[mine] + 1,
        died=np.where(lifetimes.died[mine] == ALIVE, FOREVER, lifetimes.died[mine] + 1),
        bytes=lifetimes.bytes[mine],
        part=np.array([places.get(texts[name], len(PARTS)) for name in names], dtype=np.int64),
    )
