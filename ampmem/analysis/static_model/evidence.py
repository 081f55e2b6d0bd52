"""What was seen of the parameters at one instant: the evidence for the verdict on the static model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ampmem.analysis.casts import CastLedger
from ampmem.analysis.static_model.recipes import COMPONENTS
from ampmem.analysis.timeline.categories import CODES, Breakdown, Category
from ampmem.analysis.timeline.lifetimes import ALIVE, Mask, dtype_bytes
from ampmem.analysis.timeline.timeline import MemoryHistory
from ampmem.events import Fact, ParameterRecord, Phase, Recording
from ampmem.names import FUNCTIONAL, StateName, casts_compiled, casts_open
from ampmem.vocabulary import SourceKind

ITEMSIZES = (1, 2, 4, 8)
"""Bytes that an element can have."""

_LINKS = {
    Category.PARAMETERS: Fact.PARAMETER,
    Category.GRADIENTS: Fact.GRADIENT,
    Category.MASTER_COPIES: Fact.MASTER_COPY,
}
"""Which facts name what of a parameter's is in a category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMemory:
    """A live allocation with the names that facts give it, in the order in which they were seen.

    Each name comes with the dtype of the tensor that it was given for, empty where no hook knew it. ``further`` are
    those names of which this is one more part: of a tensor that wraps several, or of a sparse one.
    """

    bytes: int
    names: Mapping[str, str]
    further: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMemory:
    """A live allocation of optimizer state with the names that facts give it, in the order in which they were seen."""

    bytes: int
    names: tuple[StateName, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A live cast copy; ``cached`` and ``saved`` say who holds it or did, ``view`` that it is of a view.

    ``earlier`` says that a step before made it.
    """

    bytes: int
    cached: bool
    saved: bool
    view: bool
    earlier: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """What became of the copies of one parameter that a step has made by some instant.

    ``saved`` says that autograd saved one of them, ``again`` that the step's backward makes another, as where
    forward is run again.
    """

    saved: bool
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """Names of what had memory before an instant, ``gone`` when it is no more, and of what has some only ``later``.

    Both are seen, from allocations that the facts are about: a name that is in neither was not seen to be without.
    """

    gone: frozenset[str]
    later: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything at one instant of one step.

    ``copied`` are parameters of modules that did not run. ``cast`` are the parameters that the step has cast by then;
    ``casts_seen`` says whether the recording has any cast of a parameter, and all of them; ``named`` whether which cast
    is whose was seen, as it is not in a snapshot. ``fates`` and ``states_fate`` say of
    parameters' tensors, and of optimizer states, what became of them. ``had_gradient`` are the names of the parameters
    of which a gradient was seen before, ``sparse`` of those with a sparse one, ``have_gradients`` of all that ever have
    one. ``updated`` says whether an optimizer update was done by then, ``skipped`` whether a loss scaler left one out.
    ``compiled`` says that compiled code may have made casts that were not seen, ``functional`` that torch.func took
    gradients. ``rounding`` is what the allocator set aside for the static categories beyond what was requested.
    ``untrained`` are the names of the parameters of models that nothing trains, which are not among ``parameters``.
    ``kept`` has, by parameter, the name of the optimizer's state that has memory of it.
    """

    parameters: tuple[ParameterRecord, ...]
    live: Breakdown
    memories: Mapping[Category, tuple[NamedMemory, ...]]
    copied: tuple[NamedMemory, ...]
    fates: Mapping[Category, Fates]
    states: tuple[StateMemory, ...]
    states_fate: Fates
    copies: Mapping[str, Sequence[Copy]]
    cast: Mapping[str, Cast]
    casts_seen: bool
    had_gradient: frozenset[str]
    have_gradients: frozenset[str]
    sparse: frozenset[str]
    autocast: bool
    updated: bool
    skipped: bool
    rounding: int
    named: bool = True
    compiled: bool = False
    functional: bool = False
    untrained: frozenset[str] = frozenset()
    kept: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credits:
    """Bytes of each parameter's tensors, oldest first, and what their memory holds beyond all of them."""

    of: Mapping[str, Sequence[int]]
    beyond: int


def itemsize(record: ParameterRecord) -> int:
    """Bytes per element; of a parameter without elements those of its type, or 4."""
    return record.bytes // record.elements if record.elements else dtype_bytes(record.dtype) or 4


def evidence_at(history: MemoryHistory, ledger: CastLedger, instant_ns: int, index: int) -> Evidence:
    """What is there at ``instant_ns``, in the step at ``index``; ``ledger`` has the cast copies."""
    recording, lifetimes = history.recording, history.lifetimes
    position = history.timeline.position(instant_ns)
    alive = lifetimes.alive_at(position)
    static = np.isin(history.classes.category, [CODES[name] for name in COMPONENTS]) & alive
    past = recording.steps[: index + 1]
    ended = [
        step.skipped_update
        for step, marks in zip(past, history.marks, strict=False)
        if marks.after_optimizer is not None and marks.after_optimizer <= instant_ns
    ]
    step = recording.steps[index].index
    facts = recording.facts
    gradients = facts.fact == Fact.GRADIENT
    return Evidence(
        parameters=history.parameters,
        live=history.timeline.breakdown(position),
        memories={name: _memories(history, alive & history.classes.of(name), fact) for name, fact in _LINKS.items()},
        copied=_copied(history, alive),
        fates={name: _fates(history, fact, position) for name, fact in _LINKS.items()},
        states=_states(history, alive & history.classes.of(Category.OPTIMIZER_STATE)),
        states_fate=_fates(history, Fact.OPTIMIZER_STATE, position),
        copies=_copies(history, ledger, alive, instant_ns, step),
        cast=_cast(history, ledger, step, position),
        casts_seen=bool((facts.fact == Fact.CAST_COPY).any()) and not casts_open(recording.notes),
        had_gradient=_named(history, gradients & (facts.time_ns < instant_ns)),
        have_gradients=_named(history, gradients),
        sparse=_named(history, gradients & (facts.time_ns < instant_ns) & _of_integers(recording)),
        autocast=recording.arm.dtype is not None,
        updated=not all(ended),
        skipped=any(ended),
        rounding=int((lifetimes.block_bytes - lifetimes.bytes)[static].sum()),
        named=recording.run.source != SourceKind.SNAPSHOT,
        compiled=casts_compiled(recording.notes),
        functional=FUNCTIONAL in recording.notes,
        untrained=history.untrained,
        kept=_kept(history, alive),
    )


def _of_integers(recording: Recording) -> Mask:
    """Which facts are about integers; of a gradient, those are the indices of a sparse one."""
    integers = [number for number, text in enumerate(recording.texts) if text in ("int32", "int64")]
    return np.isin(recording.facts.dtype, integers)


def credit(
    memories: Sequence[NamedMemory], parameters: Sequence[ParameterRecord], sparse: Collection[str] = ()
) -> Credits:
    """Share ``memories`` out among the parameters that they are linked to.

    Each gets the bytes of its tensor there, all of the memory where what it has of those is ``sparse``; what is left
    of a memory is beyond. A memory that is linked to no known parameter is nobody's, nor is what its parameters lack
    in one that is too small for them.
    """
    records = {record.name: record for record in parameters}
    of: dict[str, list[int]] = {}
    beyond = 0
    for memory in memories:
        owners = {records[name]: dtype for name, dtype in memory.names.items() if name in records}
        alone = len(owners) == 1
        shares = {
            owner.name: memory.bytes if alone and owner.name in sparse else _share(memory, owner, dtype, alone=alone)
            for owner, dtype in owners.items()
        }
        for name, share in shares.items():
            sizes = of.setdefault(name, [])
            if sizes and name in memory.further:
                sizes[-1] += share
            else:
                sizes.append(share)
        if shares:
            beyond += max(memory.bytes - sum(shares.values()), 0)
    return Credits(of=of, beyond=beyond)


def fits(size: int, owner: ParameterRecord) -> bool:
    """Whether a tensor of that many bytes can have the elements of ``owner``."""
    return any(size == itemsize * owner.elements for itemsize in ITEMSIZES)


def _share(memory: NamedMemory, owner: ParameterRecord, dtype: str, *, alone: bool) -> int:
    """Bytes of ``owner``'s tensor in ``memory``."""
    if (size := dtype_bytes(dtype)) is not None:
        return size * owner.elements
    return memory.bytes if alone and fits(memory.bytes, owner) else owner.bytes


def _memories(history: MemoryHistory, mine: Mask, fact: Fact) -> tuple[NamedMemory, ...]:
    facts, texts = history.facts, history.recording.texts
    names: dict[int, dict[str, str]] = {int(allocation): {} for allocation in np.flatnonzero(mine)}
    further: dict[int, set[str]] = {allocation: set() for allocation in names}
    rows = np.flatnonzero((facts.fact == fact) & mine[facts.allocation])
    # The same is seen again in every step: once is enough.
    _, first = np.unique(facts.allocation[rows] * len(texts) + facts.name[rows], return_index=True)
    # The parts of one tensor are noted one right after the other, for the same instant.
    again = (facts.fact[1:] == fact) & (facts.fact[:-1] == fact) & (facts.name[1:] == facts.name[:-1])
    again &= facts.time_ns[1:] == facts.time_ns[:-1]
    for row in np.sort(rows[first]).tolist():
        allocation, name = int(facts.allocation[row]), texts[facts.name[row]]
        names[allocation][name] = texts[facts.dtype[row]]
        if row > 0 and again[row - 1] and facts.allocation[row - 1] != allocation:
            further[allocation].add(name)
    return tuple(
        NamedMemory(bytes=int(history.lifetimes.bytes[allocation]), names=found, further=frozenset(further[allocation]))
        for allocation, found in names.items()
    )


def _copied(history: MemoryHistory, alive: Mask) -> tuple[NamedMemory, ...]:
    """What of the parameters' memory belongs to modules that did not run."""
    memories = _memories(history, alive & history.classes.of(Category.PARAMETERS), Fact.PARAMETER_COPY)
    return tuple(memory for memory in memories if memory.names)


def _kept(history: MemoryHistory, alive: Mask) -> dict[str, str]:
    """By parameter, under which name an optimizer's state has memory that is or becomes the parameter's."""
    memories = _memories(history, alive & history.classes.of(Category.PARAMETERS), Fact.OPTIMIZER_STATE)
    states = (StateName.read(text) for memory in memories for text in memory.names)
    return {state.parameter: state.state for state in states}


def _states(history: MemoryHistory, mine: Mask) -> tuple[StateMemory, ...]:
    return tuple(
        StateMemory(bytes=memory.bytes, names=tuple(map(StateName.read, memory.names)))
        for memory in _memories(history, mine, Fact.OPTIMIZER_STATE)
    )


def _copies(
    history: MemoryHistory, ledger: CastLedger, alive: Mask, instant_ns: int, step: int
) -> dict[str, list[Copy]]:
    cached = ledger.in_cache(history, instant_ns)
    found: dict[str, list[Copy]] = {}
    for place in np.flatnonzero(alive[ledger.allocation]).tolist():
        copy = Copy(
            bytes=int(ledger.bytes[place]),
            cached=bool(cached[place]),
            saved=bool(ledger.saves[place]),
            view=bool(ledger.view[place]),
            earlier=bool(ledger.step[place] < step),
        )
        found.setdefault(history.recording.texts[ledger.parameter[place]], []).append(copy)
    return found


def _cast(history: MemoryHistory, ledger: CastLedger, step: int, position: int) -> dict[str, Cast]:
    mine = (ledger.step == step) & (history.lifetimes.born[ledger.allocation] < position)
    saved = np.unique(ledger.parameter[mine & (ledger.saves > 0)])
    again = np.unique(ledger.parameter[(ledger.step == step) & ~mine & (ledger.phase == Phase.BACKWARD)])
    return {
        history.recording.texts[name]: Cast(saved=name in saved, again=name in again)
        for name in np.unique(ledger.parameter[mine])
    }


def _fates(history: MemoryHistory, fact: Fact, position: int) -> Fates:
    facts, lifetimes, texts = history.facts, history.lifetimes, history.recording.texts
    rows = facts.fact == fact
    name, allocation = facts.name[rows], facts.allocation[rows]
    died, later = lifetimes.died[allocation], lifetimes.born[allocation] >= position
    gone = (died != ALIVE) & (died < position)
    return Fates(
        gone=frozenset(texts[index] for index in np.unique(name[gone])),
        later=frozenset(texts[index] for index in np.unique(name[later])),
    )


def _named(history: MemoryHistory, rows: Mask) -> frozenset[str]:
    """The names in those ``rows`` of the recording's facts, of tensors without memory of their own too."""
    recording = history.recording
    return frozenset(recording.texts[name] for name in np.unique(recording.facts.name[rows]))
