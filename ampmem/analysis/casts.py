"""The cast ledger: what autocast made from the parameters, who used it, who kept it, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.jsonable import Positive
from ampmem.analysis.parameters import own_elements
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.analysis.timeline.lifetimes import ALIVE, JoinedFacts, Mask
from ampmem.analysis.timeline.marks import Instants
from ampmem.analysis.timeline.timeline import PhaseName
from ampmem.events import Column, Fact, Phase, Recording, StepRecord
from ampmem.vocabulary import AUTOCAST_ARMS


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCount:
    """So many copies, of so many bytes together."""

    copies: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCasts:
    """What happened in one phase; ``cache_hits`` are uses of a cached copy that needed no new one."""

    copies: int
    bytes: int
    cache_hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Copies alive at one instant by who keeps them: autocast's cache, autograd, both, or something else."""

    cache: CopyCount
    autograd: CopyCount
    both: CopyCount
    neither: CopyCount


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCasts:
    """The ledger of one step.

    ``phases`` has the phases in which a copy was made or reused. ``recomputed`` are copies made again in
    backward, ``views`` copies of a view of a parameter, ``others`` copies of what is no parameter.
    ``surviving`` are the copies, of this step or before, that are alive when it ends.
    """

    index: int
    phases: Mapping[PhaseName, PhaseCasts]
    after_forward: Holders | None
    peak_bytes: int
    recomputed: CopyCount
    views: CopyCount
    others: CopyCount
    surviving: CopyCount


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCasts:
    """The cast copies of one parameter, over the whole recording; how many of them who kept."""

    name: str
    copies: Positive
    bytes: int
    cache_hits: int
    held_by_cache: int
    held_by_autograd: int
    held_by_both: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """All cast copies of the recording; ``peak_bytes`` is the most that lived at once."""

    copies: int
    bytes: int
    peak_bytes: int
    cache_hits: int
    by_parameter: tuple[ParameterCasts, ...]
    steps: tuple[StepCasts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One entry per cast copy, in order of birth. ``allocation`` indexes the lifetimes, ``parameter`` the texts.

    ``saves`` is how often autograd saved it, ``uses`` how many ops read it. ``cached`` and ``view`` say
    whether autocast's cache held it and whether it is a copy of a view.
    """

    allocation: Column
    parameter: Column
    bytes: Column
    step: Column
    phase: Column
    uses: Column
    saves: Column
    cached: Mask
    view: Mask

    @property
    def hits(self) -> Column:
        """Uses of each copy that the cache served."""
        hits: Column = np.where(self.cached, np.maximum(self.uses - 1, 0), 0)
        return hits

    def count(self, mine: Mask) -> CopyCount:
        """Copies and bytes of ``mine``."""
        return CopyCount(copies=int(mine.sum()), bytes=int(self.bytes[mine].sum()))

    def alive_at(self, history: MemoryHistory, position: int) -> Mask:
        """Which copies live once the first ``position`` events have happened."""
        alive: Mask = history.lifetimes.alive_at(position)[self.allocation]
        return alive

    def in_cache(self, history: MemoryHistory, instant_ns: int) -> Mask:
        """Which copies the cache holds, or has held until they died, and has not let go of by ``instant_ns``."""
        facts = history.facts
        cleared = (facts.fact == Fact.CACHED) & (facts.time_ns < instant_ns)
        kept: Mask = self.cached & ~np.isin(self.allocation, facts.allocation[cleared])
        return kept


def ledger_of(history: MemoryHistory) -> Ledger:
    """Every copy of a parameter in another precision."""
    lifetimes, facts = history.lifetimes, history.facts
    mine = np.flatnonzero(history.classes.of(Category.CAST_COPIES))
    view = _counts(facts, Fact.VIEW_CAST, len(lifetimes))[mine] > 0
    parameter = history.classes.name[mine]
    cleared = _counts(facts, Fact.CACHED, len(lifetimes))[mine] > 0
    return Ledger(
        allocation=mine,
        parameter=parameter,
        bytes=lifetimes.bytes[mine],
        step=lifetimes.step[mine],
        phase=lifetimes.phase[mine],
        uses=_counts(facts, Fact.CAST_USE, len(lifetimes))[mine],
        saves=_counts(facts, Fact.SAVED, len(lifetimes))[mine],
        cached=cleared | _never_cleared(history, mine, parameter, view),
        view=view,
    )


def _never_cleared(history: MemoryHistory, copies: Column, parameter: Column, view: Mask) -> Mask:
    """Which copies are still in the cache at the end: a region that is open then has not cleared it yet.

    Autocast caches copies of whole parameters that need gradients, and clears all of them at once.
    """
    recording, facts, lifetimes = history.recording, history.facts, history.lifetimes
    if not recording.arm.cache:
        return np.zeros(len(copies), dtype=np.bool_)
    frozen = {record.name for record in recording.parameters if not record.trainable}
    frozen_ids = [index for index in np.unique(parameter).tolist() if recording.texts[index] in frozen]
    clears = facts.time_ns[facts.fact == Fact.CACHED]
    after = lifetimes.born_ns[copies] > (clears.max() if len(clears) else -1)
    kept: Mask = after & ~view & ~np.isin(parameter, frozen_ids) & (lifetimes.died[copies] == ALIVE)
    return kept


def casts_of(history: MemoryHistory, ledger: Ledger) -> Casts:
    """The ledger as the summary has it; parameters by bytes, largest first."""
    others = np.flatnonzero(_counts(history.facts, Fact.OTHER_CAST, len(history.lifetimes)) > 0)
    return Casts(
        copies=len(ledger.bytes),
        bytes=int(ledger.bytes.sum()),
        peak_bytes=int(history.timeline.series(Category.CAST_COPIES).max()),
        cache_hits=int(ledger.hits.sum()),
        by_parameter=_by_parameter(history.recording, ledger),
        steps=tuple(
            _step(history, ledger, others, step, marks)
            for step, marks in zip(history.recording.steps, history.marks, strict=True)
        ),
    )


def cast_eligible(recording: Recording) -> int | None:
    """Elements of the parameters that autocast was seen to cast; ``None`` when there was no autocast to see."""
    if recording.arm.name not in AUTOCAST_ARMS:
        return None
    ids = np.unique(recording.facts.name[recording.facts.fact == Fact.CAST_COPY])
    seen = {recording.texts[index] for index in ids}
    return sum(own_elements(record) for record in recording.parameters if record.name in seen)


def _counts(facts: JoinedFacts, fact: Fact, allocations: int) -> Column:
    """How often ``fact`` was seen of each allocation."""
    return np.bincount(facts.allocation[facts.fact == fact], minlength=allocations)


def _by_parameter(recording: Recording, ledger: Ledger) -> tuple[ParameterCasts, ...]:
    names, of = np.unique(ledger.parameter, return_inverse=True)
    saved = ledger.saves > 0

    def sums(values: Column | Mask) -> list[int]:
        found = np.zeros(len(names), dtype=np.int64)
        np.add.at(found, of, values)
        return found.tolist()

    columns = (
        *(sums(np.ones(len(of), dtype=np.int64)), sums(ledger.bytes), sums(ledger.hits)),
        *(sums(ledger.cached & ~saved), sums(~ledger.cached & saved), sums(ledger.cached & saved)),
    )
    found = [
        ParameterCasts(
            name=recording.texts[name],
            copies=copies,
            bytes=size,
            cache_hits=hits,
            held_by_cache=cache,
            held_by_autograd=autograd,
            held_by_both=both,
        )
        for name, copies, size, hits, cache, autograd, both in zip(names.tolist(), *columns, strict=True)
    ]
    return tuple(sorted(found, key=lambda item: (-item.bytes, item.name)))


def _step(history: MemoryHistory, ledger: Ledger, others: Column, step: StepRecord, marks: Instants) -> StepCasts:
    mine = ledger.step == step.index
    start, end = history.timeline.position(step.start_ns), history.timeline.position(step.end_ns)
    other = others[history.lifetimes.step[others] == step.index]
    return StepCasts(
        index=step.index,
        phases=_phases(ledger, mine),
        after_forward=_holders(history, ledger, marks.after_forward),
        peak_bytes=int(history.timeline.series(Category.CAST_COPIES)[start : end + 1].max()),
        recomputed=ledger.count(mine & (ledger.phase == Phase.BACKWARD)),
        views=ledger.count(mine & ledger.view),
        others=CopyCount(copies=len(other), bytes=int(history.lifetimes.bytes[other].sum())),
        surviving=ledger.count(ledger.alive_at(history, end)),
    )


def _phases(ledger: Ledger, mine: Mask) -> dict[str, PhaseCasts]:
    phases = {}
    for phase in Phase:
        made = mine & (ledger.phase == phase)
        if made.any():
            count = ledger.count(made)
            phases[phase.name.lower()] = PhaseCasts(
                copies=count.copies, bytes=count.bytes, cache_hits=int(ledger.hits[made].sum())
            )
    return phases


def _holders(history: MemoryHistory, ledger: Ledger, instant_ns: int | None) -> Holders | None:
    if instant_ns is None:
        return None
    alive = ledger.alive_at(history, history.timeline.position(instant_ns))
    saved = ledger.saves > 0
    cached = ledger.in_cache(history, instant_ns)
    return Holders(
        cache=ledger.count(alive & cached & ~saved),
        autograd=ledger.count(alive & ~cached & saved),
        both=ledger.count(alive & cached & saved),
        neither=ledger.count(alive & ~cached & ~saved),
    )
