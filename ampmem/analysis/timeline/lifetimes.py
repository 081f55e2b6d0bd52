"""From events to allocations: their births and deaths, their facts, and the type and shape of their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ampmem.analysis.jsonable import like
from ampmem.errors import RecordingError
from ampmem.events import Action, Column, Columns, EventColumns, Fact, FactColumns, Recording, StepRecord
from ampmem.names import shape_of


def in_order(recording: Recording) -> Recording:
    """``recording`` with phases that follow each other, and steps that do not overlap.

    Rows that are in order stay as they are. Events have a clock of their own, which never goes back.
    """
    phases = replace(recording.phases, time_ns=np.maximum.accumulate(recording.phases.time_ns))
    return replace(recording, phases=phases, steps=_apart(recording.steps))


def _apart(steps: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
    found: list[StepRecord] = []
    for step in steps:
        start = max(step.start_ns, found[-1].end_ns) if found else step.start_ns
        end = max(start, step.end_ns)
        apart = (start, end) == (step.start_ns, step.end_ns)
        found.append(step if apart else replace(step, start_ns=start, end_ns=end))
    return tuple(found)


# From events to allocations: their births, deaths and facts.

Mask: TypeAlias = NDArray[np.bool_]

ALIVE = -1
"""The value of ``died`` and ``died_step`` for an allocation that was never freed."""

FOREVER = int(np.iinfo(np.int64).max)
"""The value of ``died_ns`` for an allocation that was never freed; later than every instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """One entry per allocation, in order of birth; all columns are ``int64`` of equal length.

    ``born`` and ``died`` are event indices; ``died`` is :data:`ALIVE` for an allocation that was never freed. ``step``,
    ``phase``, ``op``, ``module`` and ``stack`` are those of the birth.
    """

    born: Column
    died: Column
    born_ns: Column
    died_ns: Column
    address: Column
    bytes: Column
    block_bytes: Column
    step: Column
    died_step: Column
    phase: Column
    op: Column
    module: Column
    stack: Column

    def __len__(self) -> int:
        return len(self.born)

    def alive_at(self, position: int) -> Mask:
        """Which allocations are alive once the first ``position`` events have happened."""
        alive: Mask = (self.born < position) & ((self.died == ALIVE) | (self.died >= position))
        return alive

    def owners(self, events: int) -> Column:
        """The allocation that each of ``events`` events made or freed."""
        owner = np.zeros(events, dtype=np.int64)
        freed = np.flatnonzero(self.died != ALIVE)
        owner[self.born] = np.arange(len(self))
        owner[self.died[freed]] = freed
        return owner


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedFacts:
    """Facts, each with its allocation, in the order in which they were seen.

    ``allocation`` indexes :class:`Lifetimes`; facts about memory that no allocation covers are left out.
    """

    time_ns: Column
    allocation: Column
    fact: Column
    name: Column
    module: Column
    dtype: Column
    shape: Column


def clock(events: EventColumns) -> Column:
    """Event times made non-decreasing: the order of events is right even where two clock reads are not."""
    return np.maximum.accumulate(events.time_ns)


def pair(events: EventColumns) -> Lifetimes:
    """The allocations, from births and frees by address. Raises :class:`RecordingError` if these do not alternate."""
    order = np.argsort(events.address, kind="stable")
    address = events.address[order]
    birth = events.action[order] != Action.FREE
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = address[1:] != address[:-1]
    wrong = first & ~birth
    wrong[1:] |= ~first[1:] & (birth[1:] == birth[:-1])
    if wrong.any():
        index = int(order[wrong].min())
        what = "freed before it was allocated" if events.action[index] == Action.FREE else "allocated twice"
        raise RecordingError(
            f"the recording is damaged: event {index} says that address {int(events.address[index]):#x} was {what}; "
            "record the run again"
        )
    at = np.flatnonzero(birth)
    # The event after a birth at the same address is its free.
    freed = np.append(~first[1:], False)[at]
    born = order[at]
    died = np.full(len(at), ALIVE, dtype=np.int64)
    died[freed] = order[at[freed] + 1]
    by_birth = np.argsort(born)
    return _lifetimes(events, born[by_birth], died[by_birth])


def _lifetimes(events: EventColumns, born: Column, died: Column) -> Lifetimes:
    times = clock(events)
    freed = died != ALIVE
    died_ns = np.full(len(died), FOREVER, dtype=np.int64)
    died_ns[freed] = times[died[freed]]
    died_step = np.full(len(died), ALIVE, dtype=np.int64)
    died_step[freed] = events.step[died[freed]]
    births = _rows(events, born)
    return like(Lifetimes, births, born=born, died=died, born_ns=times[born], died_ns=died_ns, died_step=died_step)


_Group = TypeVar("_Group", bound=Columns)


def _rows(columns: _Group, which: Column) -> _Group:
    """The rows ``which`` of ``columns``."""
    return type(columns)(**{name: getattr(columns, name)[which] for name in columns.names()})


def join_facts(events: EventColumns, lifetimes: Lifetimes, facts: FactColumns) -> JoinedFacts:
    """The facts, each with the allocation that is alive at its address at its time.

    An allocation lives from its birth up to, and not including, the instant of its free. Facts about address 0 (tensors
    without memory) are left out too.
    """
    real = np.flatnonzero(facts.address != 0)
    found = _owner(events, lifetimes, facts.time_ns[real], facts.address[real])
    matched = found >= 0
    kept = real[matched]
    return like(JoinedFacts, _rows(facts, kept), allocation=found[matched])


def _owner(events: EventColumns, lifetimes: Lifetimes, time_ns: Column, address: Column) -> Column:
    """The allocation alive at each (time, address), or -1."""
    if len(lifetimes) == 0:
        return np.full(len(time_ns), -1, dtype=np.int64)
    # The number of events so far is exact even where several events share one nanosecond.
    happened = np.searchsorted(clock(events), time_ns, side="right")
    addresses, code = np.unique(lifetimes.address, return_inverse=True)
    wanted = np.searchsorted(addresses, address)
    wanted[wanted == len(addresses)] = 0
    # One sortable number per (address, event index) needs a single search instead of two.
    stride = len(events) + 1
    keys = code * stride + lifetimes.born
    order = np.argsort(keys)
    place = np.searchsorted(keys[order], wanted * stride + happened, side="left") - 1
    owner = order[np.maximum(place, 0)]
    same = (place >= 0) & (lifetimes.address[owner] == address)
    died = lifetimes.died[owner]
    return np.where(same & ((died == ALIVE) | (died >= happened)), owner, -1)


# The type and shape of each allocation's tensor, as far as facts give them and its bytes agree.

_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "bits8", "float4_e2m1fn_x2"), 1),
    **{f"float8_{kind}": 1 for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}

_BEST: tuple[Fact, ...] = (
    Fact.PARAMETER,
    Fact.MASTER_COPY,
    Fact.GRADIENT,
    Fact.OPTIMIZER_STATE,
    Fact.PARAMETER_COPY,
    Fact.BUFFER,
    Fact.CAST_COPY,
    Fact.OUTPUT,
    Fact.INPUT,
    Fact.SAVED,
    Fact.HELD,
)
"""The facts in order of trust: first what a tensor is for, then the op that made it, then uses, which may be of a
transposed view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The type and the shape (text ids) of each allocation's tensor; 0 if unknown.

    A shape counts only if its tensor fills the allocation to the byte, and so is not a slice or one parameter of a flat
    buffer. Without such a tensor, the type is the one that all facts agree on.
    """

    dtype: Column
    shape: Column


def dtype_bytes(dtype: str) -> int | None:
    """Bytes per element of the type ``dtype``; ``None`` if unknown."""
    return _BYTES.get(dtype)


def tensors_of(lifetimes: Lifetimes, facts: JoinedFacts, texts: Sequence[str]) -> Tensors:
    """The type and the shape of each allocation's tensor."""
    dtype, shape = np.zeros((2, len(lifetimes)), dtype=np.int64)
    rows = np.flatnonzero(facts.dtype)
    if not len(rows):
        return Tensors(dtype=dtype, shape=shape)
    about, said = facts.allocation[rows], facts.dtype[rows]
    fills = tensor_sizes(said, facts.shape[rows], texts) == lifetimes.bytes[about]
    trust = np.full(max(Fact) + 1, len(_BEST), dtype=np.int64)  # facts that are not in _BEST come last
    trust[list(_BEST)] = np.arange(len(_BEST))
    order = np.lexsort((np.arange(len(rows)), trust[facts.fact[rows]], ~fills, about))
    mine, start = np.unique(about[order], return_index=True)
    best = order[start]
    agreed = np.minimum.reduceat(said[order], start) == np.maximum.reduceat(said[order], start)
    dtype[mine] = np.where(fills[best] | agreed, said[best], 0)
    shape[mine] = np.where(fills[best], facts.shape[rows][best], 0)
    return Tensors(dtype=dtype, shape=shape)


def tensor_sizes(dtype: Column, shape: Column, texts: Sequence[str]) -> Column:
    """Bytes of a tensor of each type and shape (text ids), -1 if unknown or beyond 64 bits."""
    if not len(dtype):
        return dtype
    pairs, place = np.unique(np.stack([dtype, shape]), axis=1, return_inverse=True)
    sizes = [_size(dtype_bytes(texts[kind]), shape_of(texts[form])) for kind, form in pairs.T.tolist()]
    return np.array(sizes, dtype=np.int64)[place.reshape(-1)]


def _size(itemsize: int | None, shape: tuple[int, ...] | None) -> int:
    if itemsize is None or shape is None:
        return -1
    size = itemsize * math.prod(shape)
    return size if size < 1 << 63 else -1
