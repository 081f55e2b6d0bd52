"""The evidence for the static model's verdict: the parameters' memory, gradients, states and casts at one instant."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ampmem.analysis.casts import CastLedger
from ampmem.analysis.static_model.recipes import COMPONENTS
from ampmem.analysis.timeline.categories import CODES, Breakdown, Category
from ampmem.analysis.timeline.lifetimes import ALIVE, FOREVER, Mask, dtype_bytes
from ampmem.analysis.timeline.timeline import MemoryHistory
from ampmem.events import Fact, ParameterRecord, Phase
from ampmem.names import FUNCTIONAL, StateName, casts_compiled, casts_open
from ampmem.vocabulary import SourceKind

ITEMSIZES = (1, 2, 4, 8)
"""The possible bytes per element."""

_LINKS = {
    Category.PARAMETERS: Fact.PARAMETER,
    Category.GRADIENTS: Fact.GRADIENT,
    Category.MASTER_COPIES: Fact.MASTER_COPY,
}
"""For each category the facts that name a parameter's tensor in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMemory:
    """A live allocation with the names of its tensors from facts, in the order in which they were seen.

    Each name has the dtype of its tensor, empty if no hook knew it. ``further`` are names of tensors of which this is
    not the first part: a tensor that wraps several, or the values of a sparse one.
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
    """A live cast copy: ``cached`` and ``saved`` say who holds or held it, ``view`` that it is a copy of a view.

    ``earlier`` says that an earlier step made it.
    """

    bytes: int
    cached: bool
    saved: bool
    view: bool
    earlier: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The copies of one parameter that a step has made by some instant.

    ``saved`` says that autograd saved one of them, ``again`` that the step's backward makes another, as recomputation
    does.
    """

    saved: bool
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """Names that lost their memory before an instant (``gone``), and names that get memory only after it (``later``).

    Both are known from facts about allocations: nothing is known about a name that is in neither.
    """

    gone: frozenset[str]
    later: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The state of the parameters at one instant of one step.

    ``copied`` are parameters of modules that did not run. ``cast`` are the parameters that the step has cast by then;
    ``casts_seen`` says that the recording has all casts of parameters; ``named`` that each cast's parameter is known,
    which a snapshot does not tell. ``fates`` and ``states_fate`` say what became of the parameters' tensors and of
    optimizer states. ``had_gradient`` names the parameters with a gradient before the instant, ``sparse`` those with a
    sparse one, ``have_gradients`` those that ever have one, ``at_update`` those with one during an update before the
    instant. ``updated`` says that an optimizer update was done by then, ``skipped`` that a loss scaler skipped one.
    ``compiled`` says that compiled code may have made unseen casts, ``functional`` that torch.func computed gradients.
    ``rounding`` is the allocator's rounding of the static categories in bytes. ``untrained`` names the parameters of
    models that nothing trains, which are not in ``parameters``. ``kept`` has, by parameter, the name of the optimizer
    state that has its memory.
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
    at_update: frozenset[str] = frozenset()
    kept: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credits:
    """The bytes of each parameter's tensors, oldest first, and the bytes of their memory beyond the tensors."""

    of: Mapping[str, Sequence[int]]
    beyond: int


def itemsize(record: ParameterRecord) -> int:
    """Bytes per element of a parameter; if it has no elements, the size of its type, or 4."""
    return record.bytes // record.elements if record.elements else dtype_bytes(record.dtype) or 4


def evidence_at(history: MemoryHistory, ledger: CastLedger, instant_ns: int, index: int) -> Evidence:
    """The evidence at ``instant_ns``, in the step at ``index``; ``ledger`` has the cast copies."""
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
    # The integer tensors of a gradient are the indices of a sparse one.
    indices = recording.naming("int32", "int64")[facts.dtype]
    alive_parameters = alive & history.classes.of(Category.PARAMETERS)
    # The memory of some optimizer states is, or becomes, a parameter's.
    of_parameters = _memories(history, alive_parameters, Fact.OPTIMIZER_STATE)
    states_in_parameters = (StateName.read(text) for memory in of_parameters for text in memory.names)
    return Evidence(
        parameters=history.parameters,
        live=history.timeline.breakdown(position),
        memories={name: _memories(history, alive & history.classes.of(name), fact) for name, fact in _LINKS.items()},
        copied=tuple(memory for memory in _memories(history, alive_parameters, Fact.PARAMETER_COPY) if memory.names),
        fates={name: _fates(history, fact, position) for name, fact in _LINKS.items()},
        states=tuple(
            StateMemory(bytes=memory.bytes, names=tuple(map(StateName.read, memory.names)))
            for memory in _memories(history, alive & history.classes.of(Category.OPTIMIZER_STATE), Fact.OPTIMIZER_STATE)
        ),
        states_fate=_fates(history, Fact.OPTIMIZER_STATE, position),
        copies=_copies(history, ledger, alive, instant_ns, step),
        cast=_cast(history, ledger, step, position),
        casts_seen=bool((facts.fact == Fact.CAST_COPY).any()) and not casts_open(recording.notes),
        had_gradient=_names_of_rows(history, gradients & (facts.time_ns < instant_ns)),
        have_gradients=_names_of_rows(history, gradients),
        at_update=with_a_gradient_at_update(history, instant_ns),
        sparse=_names_of_rows(history, gradients & (facts.time_ns < instant_ns) & indices),
        autocast=recording.precision.dtype is not None,
        updated=not all(ended),
        skipped=any(ended),
        rounding=int((lifetimes.block_bytes - lifetimes.bytes)[static].sum()),
        named=recording.run.source != SourceKind.SNAPSHOT,
        compiled=casts_compiled(recording.notes),
        functional=FUNCTIONAL in recording.notes,
        untrained=history.untrained,
        kept={state.parameter: state.state for state in states_in_parameters},
    )


def with_a_gradient_at_update(history: MemoryHistory, until_ns: int) -> frozenset[str]:
    """The parameters of which a gradient was alive during an update that began before ``until_ns``."""
    facts, lifetimes, phases = history.facts, history.lifetimes, history.recording.phases
    updates = np.flatnonzero((phases.phase == Phase.OPTIMIZER) & (phases.time_ns < until_ns))
    starts = np.append(phases.time_ns[updates], FOREVER)
    ends = np.append(phases.time_ns, FOREVER)[updates + 1]
    rows = facts.fact == Fact.GRADIENT
    allocation = facts.allocation[rows]
    # The first update that ends after the gradient was born is the one that could read it.
    first = starts[np.searchsorted(ends, lifetimes.born_ns[allocation], side="right")]
    names = np.unique(facts.name[rows][first < lifetimes.died_ns[allocation]])
    return frozenset(history.recording.texts[name] for name in names)


def credit(
    memories: Sequence[NamedMemory], parameters: Sequence[ParameterRecord], sparse: Collection[str] = ()
) -> Credits:
    """Divide ``memories`` among the parameters that their names belong to.

    Each parameter gets the bytes of its tensor, or the whole memory if its tensor is ``sparse``; the rest of the memory
    is beyond. Memory of no known parameter is not credited, nor are bytes that do not fit into a memory.
    """
    records = {record.name: record for record in parameters}
    of: dict[str, list[int]] = {}
    beyond = 0
    for memory in memories:
        owners = {records[name]: dtype for name, dtype in memory.names.items() if name in records}
        alone, shares = len(owners) == 1, {}
        for owner, dtype in owners.items():
            size = dtype_bytes(dtype)
            fitting = memory.bytes if alone and fits(memory.bytes, owner) else owner.bytes
            share = fitting if size is None else size * owner.elements
            shares[owner.name] = memory.bytes if alone and owner.name in sparse else share
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
    """Whether a tensor of ``size`` bytes can have the elements of ``owner``."""
    return any(size == itemsize * owner.elements for itemsize in ITEMSIZES)


def _memories(history: MemoryHistory, mine: Mask, fact: Fact) -> tuple[NamedMemory, ...]:
    """The allocations in ``mine`` with the names that facts of the kind ``fact`` give them."""
    facts, texts = history.facts, history.recording.texts
    names: dict[int, dict[str, str]] = {int(allocation): {} for allocation in np.flatnonzero(mine)}
    further: dict[int, set[str]] = {allocation: set() for allocation in names}
    rows = np.flatnonzero((facts.fact == fact) & mine[facts.allocation])
    # Every step repeats the same facts: one of each is enough.
    _, first = np.unique(facts.allocation[rows] * len(texts) + facts.name[rows], return_index=True)
    # The facts about the parts of one tensor follow each other and have the same time.
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


def _copies(
    history: MemoryHistory, ledger: CastLedger, alive: Mask, instant_ns: int, step: int
) -> dict[str, list[Copy]]:
    """The cast copies that are alive at ``instant_ns``, by parameter."""
    cached = ledger.in_cache(history, instant_ns)
    found: dict[str, list[Copy]] = {}
    for place in np.flatnonzero(alive[ledger.allocation] & ~ledger.overwritten).tolist():
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
    """The names in facts of the kind ``fact`` whose memory was freed before ``position``, or born after it."""
    facts, lifetimes, texts = history.facts, history.lifetimes, history.recording.texts
    rows = facts.fact == fact
    name, allocation = facts.name[rows], facts.allocation[rows]
    died, later = lifetimes.died[allocation], lifetimes.born[allocation] >= position
    gone = (died != ALIVE) & (died < position)
    return Fates(
        gone=frozenset(texts[index] for index in np.unique(name[gone])),
        later=frozenset(texts[index] for index in np.unique(name[later])),
    )


def _names_of_rows(history: MemoryHistory, rows: Mask) -> frozenset[str]:
    """The names in these ``rows`` of the recording's facts, including tensors without memory of their own."""
    recording = history.recording
    return frozenset(recording.texts[name] for name in np.unique(recording.facts.name[rows]))
