"""What was seen of the parameters at one instant: the evidence for the verdict on the static model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.casts import Ledger
from ampmem.analysis.static_model.static_model import COMPONENTS
from ampmem.analysis.timeline.categories import CODES, Breakdown, Category
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.events import Fact, ParameterRecord

_OF = " of "
ITEMSIZES = (1, 2, 4, 8)
"""Bytes that an element can have."""

_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_LINKS = {
    Category.PARAMETERS: Fact.PARAMETER,
    Category.GRADIENTS: Fact.GRADIENT,
    Category.MASTER_COPIES: Fact.MASTER_COPY,
    Category.OPTIMIZER_STATE: Fact.OPTIMIZER_STATE,
}
"""Which facts name what is in a category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A live allocation with the names that facts give it, in the order in which they were seen.

    Each name comes with the dtype of the tensor that it was given for, empty where no hook knew it.
    """

    bytes: int
    names: Mapping[str, str]


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
    time before; ``sparse`` of those with a gradient that has no storage of its own. ``updated`` says whether
    an optimizer update was done by then, ``skipped`` whether a loss scaler left one out. ``rounding`` is what
    the allocator set aside for the static categories beyond what was requested.
    """

    parameters: tuple[ParameterRecord, ...]
    live: Breakdown
    memories: Mapping[Category, tuple[Memory, ...]]
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


def evidence_at(analysis: Analysis, book: Ledger, instant_ns: int, index: int) -> Evidence:
    """What is there at ``instant_ns``, in the step at ``index``; ``book`` has the cast copies."""
    recording, lifetimes = analysis.recording, analysis.lifetimes
    position = analysis.timeline.position(instant_ns)
    alive = lifetimes.alive_at(position)
    static = np.isin(analysis.classes.category, [CODES[name] for name in COMPONENTS]) & alive
    past = recording.steps[: index + 1]
    ended = [
        step.skipped_update
        for step, marks in zip(past, analysis.marks, strict=False)
        if marks.after_optimizer is not None and marks.after_optimizer <= instant_ns
    ]
    return Evidence(
        parameters=recording.parameters,
        live=analysis.timeline.breakdown(position),
        memories={name: _memories(analysis, alive & analysis.classes.of(name), fact) for name, fact in _LINKS.items()},
        copies=_copies(analysis, book, alive, instant_ns),
        cast=_cast(analysis, book, recording.steps[index].index, position),
        had_gradient=_named(analysis, Fact.GRADIENT, instant_ns),
        sparse=_named(analysis, Fact.GRADIENT, instant_ns, placed=False),
        had_state=frozenset(split_state(name)[1] for name in _named(analysis, Fact.OPTIMIZER_STATE, instant_ns)),
        autocast=recording.arm.dtype is not None,
        updated=not all(ended),
        skipped=any(ended),
        rounding=int((lifetimes.block_bytes - lifetimes.bytes)[static].sum()),
    )


def credit(memories: Sequence[Memory], parameters: Sequence[ParameterRecord]) -> Credits:
    """Share ``memories`` out among the parameters that they are linked to.

    Each gets the bytes of its tensor there; what is left of a memory is beyond. A memory that is linked
    to no known parameter is nobody's, nor is what its parameters lack in one that is too small for them.
    """
    records = {record.name: record for record in parameters}
    of: dict[str, list[int]] = {}
    beyond = 0
    for memory in memories:
        owners = {records[name]: dtype for name, dtype in memory.names.items() if name in records}
        shares = {owner.name: _share(memory, owner, dtype, alone=len(owners) == 1) for owner, dtype in owners.items()}
        for name, share in shares.items():
            of.setdefault(name, []).append(share)
        if shares:
            beyond += max(memory.bytes - sum(shares.values()), 0)
    return Credits(of=of, beyond=beyond)


def split_state(text: str) -> tuple[str, str]:
    """Key and parameter of what the recorder calls ``exp_avg of blocks.0.weight``."""
    key, _, parameter = text.rpartition(_OF)
    return key, parameter


def fits(size: int, owner: ParameterRecord) -> bool:
    """Whether a tensor of that many bytes can have the elements of ``owner``."""
    return any(size == itemsize * owner.elements for itemsize in ITEMSIZES)


def _share(memory: Memory, owner: ParameterRecord, dtype: str, *, alone: bool) -> int:
    """Bytes of ``owner``'s tensor in ``memory``."""
    if dtype in _DTYPES:
        return _DTYPES[dtype] * owner.elements
    return memory.bytes if alone and fits(memory.bytes, owner) else owner.bytes


def _memories(analysis: Analysis, mine: Mask, fact: Fact) -> tuple[Memory, ...]:
    facts, texts = analysis.facts, analysis.recording.texts
    names: dict[int, dict[str, str]] = {int(allocation): {} for allocation in np.flatnonzero(mine)}
    rows = np.flatnonzero((facts.fact == fact) & mine[facts.allocation])
    # The same is seen again in every step: once is enough.
    _, first = np.unique(facts.allocation[rows] * len(texts) + facts.name[rows], return_index=True)
    for row in np.sort(rows[first]).tolist():
        names[int(facts.allocation[row])][texts[facts.name[row]]] = texts[facts.dtype[row]]
    return tuple(
        Memory(bytes=int(analysis.lifetimes.bytes[allocation]), names=found) for allocation, found in names.items()
    )


def _copies(analysis: Analysis, book: Ledger, alive: Mask, instant_ns: int) -> dict[str, list[Copy]]:
    cached = book.in_cache(analysis, instant_ns)
    found: dict[str, list[Copy]] = {}
    for place in np.flatnonzero(alive[book.allocation]).tolist():
        copy = Copy(
            bytes=int(book.bytes[place]),
            cached=bool(cached[place]),
            saved=bool(book.saves[place]),
            view=bool(book.view[place]),
        )
        found.setdefault(analysis.recording.texts[book.parameter[place]], []).append(copy)
    return found


def _cast(analysis: Analysis, book: Ledger, step: int, position: int) -> dict[str, bool]:
    mine = (book.step == step) & (analysis.lifetimes.born[book.allocation] < position)
    saved = np.unique(book.parameter[mine & (book.saves > 0)])
    return {analysis.recording.texts[name]: name in saved for name in np.unique(book.parameter[mine])}


def _named(analysis: Analysis, fact: Fact, before_ns: int, *, placed: bool = True) -> frozenset[str]:
    """What ``fact`` was seen of before then; ``placed`` tells what has memory from what has none of its own."""
    facts = analysis.recording.facts
    ids = np.unique(facts.name[(facts.fact == fact) & (facts.time_ns < before_ns) & ((facts.address != 0) == placed)])
    return frozenset(analysis.recording.texts[name] for name in ids)
