"""The cast ledger: the copies of parameters that autocast made, with their uses, holders and lifetimes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ampmem.analysis.jsonable import Positive, like
from ampmem.analysis.parameters import own_elements
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import ALIVE, FOREVER, JoinedFacts, Mask, tensor_sizes
from ampmem.analysis.timeline.timeline import MemoryHistory, PhaseName
from ampmem.events import Column, Fact, Phase, Recording
from ampmem.vocabulary import AUTOCAST_PRECISIONS, SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCount:
    """A number of copies and their bytes."""

    copies: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCasts:
    """The copies made and reused in one phase; ``cache_hits`` are uses of a cached copy that needed no new one.

    A snapshot has no uses: ``None``.
    """

    copies: int
    bytes: int
    cache_hits: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The copies alive at one instant by holder: autocast's cache, autograd, both, or something else.

    In a snapshot all but ``cache`` are ``None``; ``cache`` counts the copies that the cache was seen to release,
    whoever else held them, and is ``None`` if it was seen to release none.
    """

    cache: CopyCount | None
    autograd: CopyCount | None
    both: CopyCount | None
    neither: CopyCount | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCasts:
    """The cast copies of one step.

    ``phases`` has the phases in which a copy was made or reused. ``recomputed`` are copies made again in backward,
    ``views`` copies of a view of a parameter (``None`` in a snapshot, which does not distinguish them), ``others``
    copies of tensors that are not parameters. ``surviving`` are all copies alive when the step ends.
    """

    index: int
    phases: Mapping[PhaseName, PhaseCasts]
    after_forward: Holders | None
    peak_bytes: int
    recomputed: CopyCount
    views: CopyCount | None
    others: CopyCount
    surviving: CopyCount


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCasts:
    """The cast copies of one parameter over the whole recording, and how many each holder kept.

    In a snapshot uses and holders are ``None``, except ``held_by_cache``: the copies that the cache was seen to
    release.
    """

    name: str
    copies: Positive
    bytes: int
    cache_hits: int | None
    held_by_cache: int | None
    held_by_autograd: int | None
    held_by_both: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """All cast copies of the recording; ``peak_bytes`` is the most that lived at once.

    ``cache_hits`` is ``None`` in a snapshot, which has no uses.
    """

    copies: int
    bytes: int
    peak_bytes: int
    cache_hits: int | None
    by_parameter: tuple[ParameterCasts, ...]
    steps: tuple[StepCasts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CastLedger:
    """One entry per cast copy, in order of birth. ``allocation`` indexes the lifetimes, ``parameter`` the texts.

    A buffer that holds copies of several parameters has an entry for each of them.

    ``saves`` is how often autograd saved the copy, ``uses`` how many ops read it, ``cached`` whether autocast's cache
    held it, and ``view`` whether it is a copy of a view. ``overwritten`` says that its memory was used again at once,
    in the compiled code that made it: nothing keeps it, and it is alive at no later instant.
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
    overwritten: Mask

    @property
    def hits(self) -> Column:
        """The uses of each copy that the cache served."""
        return np.where(self.cached, np.maximum(self.uses - 1, 0), 0)

    def count(self, mine: Column | Mask) -> CopyCount:
        """The number and bytes of the copies in ``mine``."""
        sizes = self.bytes[mine]
        return CopyCount(copies=len(sizes), bytes=int(sizes.sum()))

    def alive_at(self, history: MemoryHistory, position: int) -> Mask:
        """Which copies are alive once the first ``position`` events have happened."""
        return history.lifetimes.alive_at(position)[self.allocation] & ~self.overwritten

    def in_cache(self, history: MemoryHistory, instant_ns: int) -> Mask:
        """Which copies are in the cache at ``instant_ns``: held until then, or until they died."""
        facts = history.facts
        cleared = (facts.fact == Fact.CACHED) & (facts.time_ns < instant_ns)
        return self.cached & ~np.isin(self.allocation, facts.allocation[cleared])


def ledger_of(history: MemoryHistory) -> CastLedger:
    """The ledger of all copies of parameters in another precision."""
    lifetimes, facts = history.lifetimes, history.facts
    mine, parameter, sizes, shared = _copies(history)
    view = _counts(facts, Fact.VIEW_CAST, len(lifetimes))[mine] > 0
    cleared = _counts(facts, Fact.CACHED, len(lifetimes))[mine] > 0
    # The bytes of the copies in an allocation up to each: the first copy in the memory is the one that it keeps.
    filled, first = np.cumsum(sizes), np.searchsorted(mine, mine, side="left")
    overwritten = filled - (filled[first] - sizes[first]) > lifetimes.bytes[mine]
    return CastLedger(
        allocation=mine,
        parameter=parameter,
        bytes=sizes,
        step=lifetimes.step[mine],
        phase=lifetimes.phase[mine],
        uses=_counts(facts, Fact.CAST_USE, len(lifetimes))[mine],
        saves=np.where(overwritten, 0, _counts(facts, Fact.SAVED, len(lifetimes))[mine]),
        cached=cleared | (_never_cleared(history, mine, parameter, view) & ~shared),
        view=view,
        overwritten=overwritten,
    )


def _copies(history: MemoryHistory) -> tuple[Column, Column, Column, Mask]:
    """The allocation, parameter and bytes of each copy, and whether it shares its allocation with other copies."""
    facts, lifetimes, classes = history.facts, history.lifetimes, history.classes
    rows = np.flatnonzero((facts.fact == Fact.CAST_COPY) & classes.of(Category.CAST_COPIES)[facts.allocation])
    keys = facts.allocation[rows] * len(history.recording.texts) + facts.name[rows]
    rows = rows[np.sort(np.unique(keys, return_index=True)[1])]
    rows = rows[np.argsort(facts.allocation[rows], kind="stable")]
    mine = facts.allocation[rows]
    shared: Mask = np.bincount(mine, minlength=len(lifetimes))[mine] > 1
    pieces = np.maximum(tensor_sizes(facts.dtype[rows], facts.shape[rows], history.recording.texts), 0)
    parameter: Column = np.where(shared, facts.name[rows], classes.name[mine])
    sizes: Column = np.where(shared, pieces, lifetimes.bytes[mine])
    return mine, parameter, sizes, shared


def _never_cleared(history: MemoryHistory, copies: Column, parameter: Column, view: Mask) -> Mask:
    """Which copies are still in the cache at the end, as the autocast region was still open.

    Autocast caches copies of whole parameters that need gradients, and clears all of them at once.
    """
    recording, facts, lifetimes = history.recording, history.facts, history.lifetimes
    if not recording.precision.cache:
        return np.zeros(len(copies), dtype=np.bool_)
    frozen = {record.name for record in recording.parameters if not record.trainable}
    frozen_ids = [index for index in np.unique(parameter).tolist() if recording.texts[index] in frozen]
    clears = facts.time_ns[facts.fact == Fact.CACHED]
    after = lifetimes.born_ns[copies] > (clears.max() if len(clears) else -1)
    kept: Mask = after & ~view & ~np.isin(parameter, frozen_ids) & (lifetimes.died[copies] == ALIVE)
    return kept


def casts_of(history: MemoryHistory, ledger: CastLedger) -> Casts:
    """The ledger summed up; parameters by bytes, largest first."""
    steps, parameters = tuple(_steps(history, ledger)), _by_parameter(history.recording, ledger)
    hits: int | None = int(ledger.hits.sum())
    if history.recording.run.source is SourceKind.SNAPSHOT:  # which has the cache's releases, not uses and holders
        unseen = partial(replace, cache_hits=None, held_by_autograd=None, held_by_both=None)
        parameters = tuple(unseen(each, held_by_cache=each.held_by_cache or None) for each in parameters)
        steps, hits = tuple(map(_as_a_snapshot_knows, steps)), None
    return Casts(
        copies=len(ledger.bytes),
        bytes=int(ledger.bytes.sum()),
        peak_bytes=int(history.timeline.series(Category.CAST_COPIES).max()),
        cache_hits=hits,
        by_parameter=parameters,
        steps=steps,
    )


def _as_a_snapshot_knows(step: StepCasts) -> StepCasts:
    held = step.after_forward
    if held is not None:
        cache = held.cache if held.cache is not None and held.cache.copies else None
        held = Holders(cache=cache, autograd=None, both=None, neither=None)
    phases = {name: replace(phase, cache_hits=None) for name, phase in step.phases.items()}
    return replace(step, phases=phases, after_forward=held, views=None)


def cast_eligible(history: MemoryHistory) -> int | None:
    """The number of parameter elements that autocast was seen to cast; ``None`` without autocast."""
    recording = history.recording
    if recording.precision.name not in AUTOCAST_PRECISIONS:
        return None
    ids = np.unique(recording.facts.name[recording.facts.fact == Fact.CAST_COPY])
    seen = {recording.texts[index] for index in ids}
    return sum(own_elements(record) for record in history.parameters if record.name in seen)


def _counts(facts: JoinedFacts, fact: Fact, allocations: int) -> Column:
    """The number of facts of the kind ``fact`` about each of the ``allocations`` allocations."""
    return np.bincount(facts.allocation[facts.fact == fact], minlength=allocations)


def _by_parameter(recording: Recording, ledger: CastLedger) -> tuple[ParameterCasts, ...]:
    names, of = np.unique(ledger.parameter, return_inverse=True)
    saved = ledger.saves > 0

    def sums(values: Column | Mask) -> list[int]:
        found = np.zeros(len(names), dtype=np.int64)
        np.add.at(found, of, values)
        return found.tolist()

    columns = {
        "name": [recording.texts[name] for name in names.tolist()],
        "copies": sums(np.ones(len(of), dtype=np.int64)),
        "bytes": sums(ledger.bytes),
        "cache_hits": sums(ledger.hits),
        "held_by_cache": sums(ledger.cached & ~saved),
        "held_by_autograd": sums(~ledger.cached & saved),
        "held_by_both": sums(ledger.cached & saved),
    }
    rows = zip(*columns.values(), strict=True)
    found = [ParameterCasts(**dict(zip(columns, row, strict=True))) for row in rows]
    return tuple(sorted(found, key=lambda item: (-item.bytes, item.name)))


def _steps(history: MemoryHistory, ledger: CastLedger) -> Iterator[StepCasts]:
    """The casts of each step, in time proportional to steps plus copies, not to their product."""
    steps, timeline, lifetimes = history.recording.steps, history.timeline, history.lifetimes
    others = np.flatnonzero(_counts(history.facts, Fact.OTHER_CAST, len(lifetimes)) > 0)
    indices = [step.index for step in steps]
    mine_of, others_of = _rows_of(indices, ledger.step), _rows_of(indices, lifetimes.step[others])
    holders, surviving = _holders(history, ledger), _surviving(history, ledger)
    live = timeline.series(Category.CAST_COPIES)
    for place, step in enumerate(steps):
        mine, other = mine_of[place], others[others_of[place]]
        phase, start, end = ledger.phase[mine], timeline.position(step.start_ns), timeline.position(step.end_ns)
        yield StepCasts(
            index=step.index,
            phases=_phases(ledger, mine) if len(mine) else {},
            after_forward=holders[place],
            peak_bytes=int(live[start : end + 1].max()),
            recomputed=ledger.count(mine[phase == Phase.BACKWARD]),
            views=ledger.count(mine[ledger.view[mine]]),
            others=CopyCount(copies=len(other), bytes=int(lifetimes.bytes[other].sum())),
            surviving=surviving[place],
        )


def _rows_of(indices: Sequence[int], step: Column) -> list[Column]:
    """For each step index the rows of that ``step``, in their order."""
    order = np.argsort(step, kind="stable")
    first = np.searchsorted(step[order], indices, side="left").tolist()
    last = np.searchsorted(step[order], indices, side="right").tolist()
    return [order[begin:end] for begin, end in zip(first, last, strict=True)]


def _phases(ledger: CastLedger, mine: Column) -> dict[str, PhaseCasts]:
    phases = {}
    for phase in Phase:
        made = mine[ledger.phase[mine] == phase]
        if len(made):
            hits = int(ledger.hits[made].sum())
            phases[phase.name.lower()] = like(PhaseCasts, ledger.count(made), cache_hits=hits)
    return phases


def _surviving(history: MemoryHistory, ledger: CastLedger) -> list[CopyCount]:
    """For each step the copies that are alive when it ends."""
    ends = history.timeline.positions([step.end_ns for step in history.recording.steps])
    order = np.argsort(ends, kind="stable")
    counts = _between(*_alive_between(history, ledger, ends[order]), ledger.bytes, len(ends))
    return _in_order(order, counts)


def _holders(history: MemoryHistory, ledger: CastLedger) -> list[Holders | None]:
    """For each step the holders of the copies at the end of its forward; ``None`` without a forward."""
    instants = np.array([FOREVER if marks.after_forward is None else marks.after_forward for marks in history.marks])
    order = np.argsort(instants, kind="stable")
    when = instants[order]
    born, died = _alive_between(history, ledger, history.timeline.positions(when))
    # The cache releases everything at once, so until then it still held all that it had taken.
    let_go = np.where(ledger.cached, np.searchsorted(when, _cleared_ns(history)[ledger.allocation], side="right"), 0)
    cached, other = (born, np.minimum(died, let_go)), (np.maximum(born, let_go), died)

    def counts(span: tuple[Column, Column], mine: Mask) -> list[CopyCount]:
        return _in_order(order, _between(span[0][mine], span[1][mine], ledger.bytes[mine], len(when)))

    saved = ledger.saves > 0
    groups = counts(cached, ~saved), counts(other, saved), counts(cached, saved), counts(other, ~saved)
    return [
        None if marks.after_forward is None else Holders(cache=cache, autograd=autograd, both=both, neither=neither)
        for marks, cache, autograd, both, neither in zip(history.marks, *groups, strict=True)
    ]


def _cleared_ns(history: MemoryHistory) -> Column:
    """When autocast's cache was first seen to release each allocation; ``FOREVER`` for never."""
    facts = history.facts
    rows = facts.fact == Fact.CACHED
    cleared = np.full(len(history.lifetimes), FOREVER, dtype=np.int64)
    np.minimum.at(cleared, facts.allocation[rows], facts.time_ns[rows])
    return cleared


def _alive_between(history: MemoryHistory, ledger: CastLedger, positions: Column) -> tuple[Column, Column]:
    """For each copy the first of the ascending ``positions`` at which it is alive, and the first after its death."""
    born, died = history.lifetimes.born[ledger.allocation], history.lifetimes.died[ledger.allocation]
    first = np.searchsorted(positions, born, side="right")
    last = np.where(died == ALIVE, len(positions), np.searchsorted(positions, died, side="right"))
    return first, np.where(ledger.overwritten, first, last)


def _between(first: Column, last: Column, sizes: Column, count: int) -> list[CopyCount]:
    """The copies at each of ``count`` places: a copy counts from its ``first`` place up to, not including, its last."""
    real = first < last
    sums = []
    for weights in (np.ones_like(sizes), sizes):
        change = np.zeros(count + 1, dtype=np.int64)
        np.add.at(change, first[real], weights[real])
        np.subtract.at(change, last[real], weights[real])
        sums.append(np.cumsum(change)[:-1].tolist())
    return [CopyCount(copies=copies, bytes=size) for copies, size in zip(*sums, strict=True)]


def _in_order(order: Column, counts: Sequence[CopyCount]) -> list[CopyCount]:
    """``counts``, which follow the sorting ``order``, back in the original order."""
    return [count for _, count in sorted(zip(order.tolist(), counts, strict=True), key=lambda entry: entry[0])]
