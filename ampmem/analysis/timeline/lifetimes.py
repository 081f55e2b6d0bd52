"""From events to allocations: who was born when, who died when, and which facts are whose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampmem.errors import RecordingError
from ampmem.events import Action, Column, EventColumns, FactColumns

Mask: TypeAlias = NDArray[np.bool_]

ALIVE = -1
"""Value of ``died`` and ``died_step`` for an allocation that was never freed."""

FOREVER = int(np.iinfo(np.int64).max)
"""Value of ``died_ns`` for an allocation that was never freed; later than every instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """One entry per allocation, in order of birth; all columns are ``int64`` of equal length.

    ``born`` and ``died`` are event indices, ``died`` is :data:`ALIVE` for what was never freed.
    ``step``, ``phase``, ``op``, ``module`` and ``stack`` are those of the birth.
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
        """Mask of the allocations that live once the first ``position`` events have happened."""
        alive: Mask = (self.born < position) & ((self.died == ALIVE) | (self.died >= position))
        return alive


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedFacts:
    """Facts with the allocation that each is about, in the order in which they were seen.

    ``allocation`` indexes :class:`Lifetimes`; facts about memory that no allocation covers are left
    out.
    """

    time_ns: Column
    allocation: Column
    fact: Column
    name: Column
    module: Column
    dtype: Column
    shape: Column


def clock(events: EventColumns) -> Column:
    """Event times made non-decreasing: events are in order even where two clock reads are not."""
    return np.maximum.accumulate(events.time_ns)


def pair(events: EventColumns) -> Lifetimes:
    """Pair each birth with its free, by address. Raises :class:`RecordingError` when they do not alternate."""
    order = np.argsort(events.address, kind="stable")
    address = events.address[order]
    birth = events.action[order] != Action.FREE
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = address[1:] != address[:-1]
    wrong = first & ~birth
    wrong[1:] |= ~first[1:] & (birth[1:] == birth[:-1])
    if wrong.any():
        _refuse(events, int(order[wrong].min()))
    at = np.flatnonzero(birth)
    # Whatever follows a birth at the same address is its free.
    freed = np.append(~first[1:], False)[at]
    born = order[at]
    died = np.full(len(at), ALIVE, dtype=np.int64)
    died[freed] = order[at[freed] + 1]
    by_birth = np.argsort(born)
    return _lifetimes(events, born[by_birth], died[by_birth])


def _refuse(events: EventColumns, index: int) -> None:
    what = "freed before it was allocated" if events.action[index] == Action.FREE else "allocated twice"
    raise RecordingError(
        f"the recording is damaged: event {index} says that address {int(events.address[index]):#x} was {what}; "
        "record the run again"
    )


def _lifetimes(events: EventColumns, born: Column, died: Column) -> Lifetimes:
    times = clock(events)
    freed = died != ALIVE
    died_ns = np.full(len(died), FOREVER, dtype=np.int64)
    died_ns[freed] = times[died[freed]]
    died_step = np.full(len(died), ALIVE, dtype=np.int64)
    died_step[freed] = events.step[died[freed]]
    return Lifetimes(
        born=born,
        died=died,
        born_ns=times[born],
        died_ns=died_ns,
        address=events.address[born],
        bytes=events.bytes[born],
        block_bytes=events.block_bytes[born],
        step=events.step[born],
        died_step=died_step,
        phase=events.phase[born],
        op=events.op[born],
        module=events.module[born],
        stack=events.stack[born],
    )


def join_facts(events: EventColumns, lifetimes: Lifetimes, facts: FactColumns) -> JoinedFacts:
    """Give every fact to the allocation that lives at its address at its time.

    An allocation lives from its birth up to, and not including, the instant of its free. Facts about
    address 0 (tensors without memory) are left out too.
    """
    real = np.flatnonzero(facts.address != 0)
    found = _owner(events, lifetimes, facts.time_ns[real], facts.address[real])
    matched = found >= 0
    kept = real[matched]
    return JoinedFacts(
        time_ns=facts.time_ns[kept],
        allocation=found[matched],
        fact=facts.fact[kept],
        name=facts.name[kept],
        module=facts.module[kept],
        dtype=facts.dtype[kept],
        shape=facts.shape[kept],
    )


def _owner(events: EventColumns, lifetimes: Lifetimes, time_ns: Column, address: Column) -> Column:
    """The allocation alive at each (time, address), or -1."""
    if len(lifetimes) == 0:
        return np.full(len(time_ns), -1, dtype=np.int64)
    # Events so far: exact where several events share one nanosecond, which times alone are not.
    happened = np.searchsorted(clock(events), time_ns, side="right")
    addresses, code = np.unique(lifetimes.address, return_inverse=True)
    wanted = np.searchsorted(addresses, address)
    wanted[wanted == len(addresses)] = 0
    # One sortable number per (address, event index) makes a single search of the two.
    stride = len(events) + 1
    keys = code * stride + lifetimes.born
    order = np.argsort(keys)
    place = np.searchsorted(keys[order], wanted * stride + happened, side="left") - 1
    owner = order[np.maximum(place, 0)]
    same = (place >= 0) & (lifetimes.address[owner] == address)
    died = lifetimes.died[owner]
    return np.where(same & ((died == ALIVE) | (died >= happened)), owner, -1)
