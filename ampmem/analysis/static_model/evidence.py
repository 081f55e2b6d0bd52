"""What was seen of the parameters at one instant: the evidence for the verdict on the static model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.casts import Ledger
from ampmem.analysis.static_model.static_model import COMPONENTS
from ampmem.analysis.timeline.categories import CODES, Breakdown, Category
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.events import Fact, ParameterRecord, Recording
from ampmem.names import StateName

ITEMSIZES = (1, 2, 4, 8)
"""Bytes that an element can have."""

_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_LINKS = {
    Category.PARAMETERS: Fact.PARAMETER,
    Category.GRADIENTS: Fact.GRADIENT,
    Category.MASTER_COPIES: Fact.MASTER_COPY,
}
"""Which facts name what of a parameter's is in a category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMemory:
    """A live allocation with the names that facts give it, in the order in which they were seen.

    Each name comes with the dtype of the tensor that it was given for, empty where no hook knew it.
    """

    bytes: int
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMemory:
    """A live allocation of optimizer state with the names that facts give it, in the order in which they were seen."""

    bytes: int
    names: tuple[StateName, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A live cast copy; ``cached`` and ``saved`` say who holds it or did, ``view`` that it is of a view."""

    bytes: int
    cached: bool
    saved: bool
    view: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything at one instant of one step.

    ``cast`` are the names of the parameters that the step has cast by then, each with whether autograd
    saved a copy; ``had_gradient`` and ``had_state`` of those that had a gradient, or optimizer state, at some
    time before; ``sparse`` of those with a sparse one. ``updated`` says whether
    an optimizer update was done by then, ``skipped`` whether a loss scaler left one out. ``rounding`` is what
    the allocator set aside for the static categories beyond what was requested.
    """

    parameters: tuple[ParameterRecord, ...]
    live: Breakdown
    memories: Mapping[Category, tuple[NamedMemory, ...]]
    states: tuple[StateMemory, ...]
    copies: Mapping[str, Sequence[Copy]]
    cast: Mapping[str, bool]
    had_gradient: frozenset[str]
    had_state: frozenset[str]
    sparse: frozenset[str]
    autocast: bool
    updated: bool
    skipped: bool
    rounding: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Credits:
    """Bytes of each parameter's tensors, oldest first, and what their memory holds beyond all of them."""

    of: Mapping[str, Sequence[int]]
    beyond: int


def itemsize(record: ParameterRecord) -> int:
    """Bytes per element; 4 for a parameter without elements."""
    return record.bytes // record.elements if record.elements else 4


def evidence_at(history: MemoryHistory, ledger: Ledger, instant_ns: int, index: int) -> Evidence:
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
    return Evidence(
        parameters=recording.parameters,
        live=history.timeline.breakdown(position),
        memories={name: _memories(history, alive & history.classes.of(name), fact) for name, fact in _LINKS.items()},
        states=_states(history, alive & history.classes.of(Category.OPTIMIZER_STATE)),
        copies=_copies(history, ledger, alive, instant_ns),
        cast=_cast(history, ledger, recording.steps[index].index, position),
        had_gradient=_named(history, Fact.GRADIENT, instant_ns),
        sparse=_sparse(recording, instant_ns),
        had_state=frozenset(
            StateName.read(name).parameter for name in _named(history, Fact.OPTIMIZER_STATE, instant_ns)
        ),
        autocast=recording.arm.dtype is not None,
        updated=not all(ended),
        skipped=any(ended),
        rounding=int((lifetimes.block_bytes - lifetimes.bytes)[static].sum()),
    )


def _sparse(recording: Recording, before_ns: int) -> frozenset[str]:
    """Parameters with a gradient of which a part is integers: the indices of a sparse one."""
    facts, texts = recording.facts, recording.texts
    integers = [number for number, text in enumerate(texts) if text in ("int32", "int64")]
    mine = (facts.fact == Fact.GRADIENT) & (facts.time_ns < before_ns) & np.isin(facts.dtype, integers)
    return frozenset(texts[name] for name in np.unique(facts.name[mine]))


def credit(
    memories: Sequence[NamedMemory], parameters: Sequence[ParameterRecord], sparse: Collection[str] = ()
) -> Credits:
    """Share ``memories`` out among the parameters that they are linked to.

    Each gets the bytes of its tensor there; what is left of a memory is beyond. A memory that is linked
    to no known parameter is nobody's, nor is what its parameters lack in one that is too small for them.
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
            of.setdefault(name, []).append(share)
        if shares:
            beyond += max(memory.bytes - sum(shares.values()), 0)
    return Credits(of=of, beyond=beyond)


def fits(size: int, owner: ParameterRecord) -> bool:
    """Whether a tensor of that many bytes can have the elements of ``owner``."""
    return any(size == itemsize * owner.elements for itemsize in ITEMSIZES)


def _share(memory: NamedMemory, owner: ParameterRecord, dtype: str, *, alone: bool) -> int:
    """Bytes of ``owner``'s tensor in ``memory``."""
    if dtype in _DTYPES:
        return _DTYPES[dtype] * owner.elements
    return memory.bytes if alone and fits(memory.bytes, owner) else owner.bytes


def _memories(history: MemoryHistory, mine: Mask, fact: Fact) -> tuple[NamedMemory, ...]:
    facts, texts = history.facts, history.recording.texts
    names: dict[int, dict[str, str]] = {int(allocation): {} for allocation in np.flatnonzero(mine)}
    rows = np.flatnonzero((facts.fact == fact) & mine[facts.allocation])
    # The same is seen again in every step: once is enough.
    _, first = np.unique(facts.allocation[rows] * len(texts) + facts.name[rows], return_index=True)
    for row in np.sort(rows[first]).tolist():
        names[int(facts.allocation[row])][texts[facts.name[row]]] = texts[facts.dtype[row]]
    return tuple(
        NamedMemory(bytes=int(history.lifetimes.bytes[allocation]), names=found) for allocation, found in names.items()
    )


def _states(history: MemoryHistory, mine: Mask) -> tuple[StateMemory, ...]:
    return tuple(
        StateMemory(bytes=memory.bytes, names=tuple(map(StateName.read, memory.names)))
        for memory in _memories(history, mine, Fact.OPTIMIZER_STATE)
    )


def _copies(history: MemoryHistory, ledger: Ledger, alive: Mask, instant_ns: int) -> dict[str, list[Copy]]:
    cached = ledger.in_cache(history, instant_ns)
    found: dict[str, list[Copy]] = {}
    for place in np.flatnonzero(alive[ledger.allocation]).tolist():
        copy = Copy(
            bytes=int(ledger.bytes[place]),
            cached=bool(cached[place]),
            saved=bool(ledger.saves[place]),
            view=bool(ledger.view[place]),
        )
        found.setdefault(history.recording.texts[ledger.parameter[place]], []).append(copy)
    return found


def _cast(history: MemoryHistory, ledger: Ledger, step: int, position: int) -> dict[str, bool]:
    mine = (ledger.step == step) & (history.lifetimes.born[ledger.allocation] < position)
    saved = np.unique(ledger.parameter[mine & (ledger.saves > 0)])
    return {history.recording.texts[name]: name in saved for name in np.unique(ledger.parameter[mine])}


def _named(history: MemoryHistory, fact: Fact, before_ns: int, *, placed: bool = True) -> frozenset[str]:
    """What ``fact`` was seen of before then; ``placed`` tells what has memory from what has none of its own."""
    facts = history.recording.facts
    ids = np.unique(facts.name[(facts.fact == fact) & (facts.time_ns < before_ns) & ((facts.address != 0) == placed)])
    return frozenset(history.recording.texts[name] for name in ids)
