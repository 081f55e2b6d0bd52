"""Makes one stream of allocator events from the profiler's events, the process's total, and freed storages.

The profiler sees one thread, but its running total counts all. Bytes in the total beyond the known blocks belong to
other threads, and are one block in the events, at :data:`~ampmem.events.OTHER_THREADS`. If the total has fewer bytes
than the known blocks, another thread has freed some of them: those that can be identified are freed, and the rest stays
a difference between the events and the total.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import time_ns
from typing import NamedTuple

import numpy as np

from ampmem.events import OTHER_THREADS, UNKNOWN, Action, Column
from ampmem.names import MAPPED
from ampmem.recorder.facts.addresses import AliveBlocks
from ampmem.recorder.sources.base import RawEvents
from ampmem.recorder.sources.storages import Died, SeenStorage, Storages


def fates(events: Iterable[tuple[int, int]], blocks: Mapping[int, int]) -> tuple[list[int], set[int]]:
    """Addresses of ``blocks`` that later ``events`` (address, signed bytes) reuse, and of those that they free.

    A block whose address is allocated again was freed before; one that is freed is alive until then.
    """
    undecided, reused, freed = set(blocks), [], set()
    for address, size in events:
        if address in undecided:
            undecided.discard(address)
            if size > 0:
                reused.append(address)
            else:
                freed.add(address)
    return reused, freed


def proven_dead(missing: int, blocks: Mapping[int, int], dead: Iterable[int]) -> list[int]:
    """The ``blocks`` at the addresses ``dead`` that fit into ``missing`` bytes of frees."""
    found: list[int] = []
    for address in dead:
        if blocks[address] <= missing:
            found.append(address)
            missing -= blocks[address]
    return found


def told_by_size(missing: int, blocks: Mapping[int, int]) -> list[int]:
    """The ``blocks`` (address to bytes, oldest first) that add up to ``missing`` bytes; empty if none do.

    They are one block, several of one size, or several that were allocated in a row.
    """
    return (_of_one_size(missing, blocks) or _in_a_row(missing, blocks)) if missing else []


def _of_one_size(missing: int, blocks: Mapping[int, int]) -> list[int]:
    by_size: dict[int, list[int]] = {}
    for address, size in blocks.items():
        by_size.setdefault(size, []).append(address)
    for size in sorted(by_size, reverse=True):  # largest first: the fewest blocks
        count, left = divmod(missing, size)
        if not left and 0 < count <= len(by_size[size]):
            return by_size[size][:count]
    return []


def _in_a_row(missing: int, blocks: Mapping[int, int]) -> list[int]:
    row = list(blocks.items())
    first, total = 0, 0
    for last, (_, size) in enumerate(row):
        total += size
        while total > missing:
            total -= row[first][1]
            first += 1
        if total == missing:
            return [address for address, _ in row[first : last + 1]]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedMemory:
    """A memory mapping: its storages (address and bytes of each), and the ``rest`` around them."""

    address: int
    bytes: int
    storages: tuple[tuple[int, int], ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The rest and the storages."""
        return self.rest + self.storages


class Mappings:
    """Divides each memory mapping into the storages seen in it and the rest, which is one part."""

    def __init__(self) -> None:
        self._mappings: dict[int, MappedMemory] = {}
        self._seen: dict[int, int] = {}
        """Address to bytes of each storage that was seen without a known block."""
        self._sorted: list[int] = []
        self.parts: set[int] = set()
        """The addresses of all parts."""

    def __contains__(self, address: int) -> bool:
        return address in self._mappings

    def expect(self, seen: Iterable[SeenStorage]) -> None:
        """Take the storages seen since the last call: some may lie in mappings that are still to be added."""
        inside = [storage for mapping in self._mappings.values() for storage in mapping.storages]
        self._seen = dict(inside) | {each.address: each.bytes for each in seen}
        self._sorted = sorted(self._seen)

    def add(self, address: int, size: int) -> tuple[tuple[int, int], ...]:
        """Add a mapping of ``size`` bytes at ``address``; returns its parts."""
        mapping = self._mappings[address] = self._divide(address, size)
        self.parts.update(start for start, _ in mapping.parts)
        return mapping.parts

    def remove(self, address: int) -> list[int]:
        """Remove the mapping at ``address``; returns the addresses of its parts, none if there is no such mapping."""
        mapping = self._mappings.pop(address, None)
        starts = [] if mapping is None else [start for start, _ in mapping.parts]
        self.parts.difference_update(starts)
        return starts

    def around(self, address: int) -> MappedMemory | None:
        """The mapping that contains ``address``, if any."""
        for mapping in self._mappings.values():
            if mapping.address <= address < mapping.address + mapping.bytes:
                return mapping
        return None

    def _divide(self, address: int, size: int) -> MappedMemory:
        end, reached, rest_at = address + size, address, None
        storages: list[tuple[int, int]] = []
        for start in self._sorted[bisect_left(self._sorted, address) :]:
            if start >= end:
                break
            if start < reached or start + self._seen[start] > end:  # overlaps a storage that is a part already
                continue
            if start > reached and rest_at is None:
                rest_at = reached
            storages.append((start, self._seen[start]))
            reached = start + self._seen[start]
        if reached < end and rest_at is None:
            rest_at = reached
        left = size - sum(each for _, each in storages)
        rest = () if rest_at is None else ((rest_at, left),)
        return MappedMemory(address=address, bytes=size, storages=tuple(storages), rest=rest)


ELSEWHERE = "other threads"
"""The op of memory that other threads allocated or freed."""


class Profiled(NamedTuple):
    """Allocations and frees from the profiler, in order."""

    time_ns: Column
    address: Column
    bytes: Column
    """Bytes of the block; negative for a free."""
    total: Column
    """The process's allocated bytes after the event; 0 for mapped memory, which is not counted."""
    op: Column
    """Index of the name of the node."""
    sequence: Column
    """Sequence number of the node, or -1."""


# Larger than every time and every total, which fit into a signed integer of 64 bits.
_NEVER = 1 << 63


class Ledger:
    """Follows the live blocks, and compares their sum with the process's total to find what other threads did."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._blocks: dict[int, int] = {}
        """Live blocks that torch's total counts (address to bytes), oldest first."""
        self._counted = 0
        """Sum of ``_blocks`` in bytes."""
        self._foreign: dict[int, int] = {}
        """Live blocks that torch's total does not count: the baseline, parts of mapped files, others' memory."""
        self._uncounted = 0
        self._mappings = Mappings()
        self._stale: int | None = None
        """Bytes in the total from earlier profiles of the process; ``None`` before the first event."""
        self._balance = 0
        """Bytes in the total beyond the blocks at the last event; negative if frees are missing."""
        self._others = 0
        """Bytes of the block that stands for other threads."""
        self._dead: set[int] = set()
        """Addresses of blocks whose storages were freed."""
        self._pending: list[tuple[int, int, int]] = []
        """Blocks of the baseline that are still to be written: (time, address, bytes)."""
        self._elsewhere = self._mapping = 0
        """Indices of :data:`ELSEWHERE` and :data:`MAPPED` among the ops."""
        self._rows = _RawRows()
        self.told_by_size = 0
        """Bytes of blocks freed by other threads that only their sizes identify."""

    def add_baseline(self, blocks: Mapping[int, int]) -> None:
        """Add blocks (address to bytes) that are alive at the start."""
        now = time_ns()
        self._pending = [(now, address, size) for address, size in blocks.items()]

    def blocks(self) -> AliveBlocks:
        """The live blocks; those that torch's total does not count, as the baseline, are unseen."""
        alive = self._blocks | self._foreign
        unseen = {
            address: size
            for address, size in alive.items()
            if address in self._foreign or not self._storages.alive(address)
        }
        return AliveBlocks(unseen, sum(alive.values()), frozenset(alive.keys() - unseen.keys()))

    def settle(self, events: Profiled, ops: dict[str, int]) -> RawEvents:
        """The ``events`` since the last call together with those inferred between them, in order.

        ``ops`` are the names of the nodes; the names for other threads and mapped memory are added.
        """
        rows = self._rows = _RawRows()
        self._elsewhere = ops.setdefault(ELSEWHERE, len(ops))
        self._mapping = ops.setdefault(MAPPED, len(ops))
        for time, address, size in self._pending:
            self._add_foreign(time, address, size, Action.BASELINE)
        self._pending = []
        self._mappings.expect(seen := self._storages.take_seen())
        beside: list[SeenStorage | Died] = sorted([*seen, *self._storages.take_died()], reverse=True)
        self._settle_events(events, beside)
        while beside:
            self._beside(beside.pop())
        return rows.events(events, tuple(ops))

    def _settle_events(self, events: Profiled, beside: list[SeenStorage | Died]) -> None:
        """Process the ``events``, and those of ``beside`` up to the last event.

        Most events change the total by their own bytes at an address in the expected state: :meth:`_RawRows.events`
        makes the rows of these. This loop is the hottest of a recording.
        """
        rows, blocks, foreign, dead = self._rows, self._blocks, self._foreign, self._dead
        counted, expected = self._counted, self._expected()
        next_beside = beside[-1].time_ns if beside else _NEVER
        rows.shift(self._uncounted - (self._stale or 0))
        columns = (events.time_ns.tolist(), events.address.tolist(), events.bytes.tolist(), events.total.tolist())
        for place, (time, address, size, total) in enumerate(zip(*columns, strict=True)):
            if time >= next_beside:
                self._counted, rows.place = counted, place
                while beside and beside[-1].time_ns <= time:
                    self._beside(beside.pop())
                next_beside = beside[-1].time_ns if beside else _NEVER
                rows.shift(self._uncounted - (self._stale or 0))
                counted, expected = self._counted, self._expected()
            # The usual event: the total moves by its own bytes, so no other thread was at work.
            if total == expected + size and total:
                if size > 0 and address not in blocks and address not in foreign:
                    if address in dead:
                        dead.discard(address)
                    blocks[address] = size
                    counted += size
                    expected = total
                    continue
                if size < 0 and address in blocks:
                    del blocks[address]
                    counted += size
                    expected = total
                    continue
            self._counted, rows.place = counted, place
            if total == 0 and size > 0:  # the profiler has no total for mapped files and shared memory
                self._map(time, address, size)
            elif total == 0 and address in self._mappings:
                self._unmap(time, address)
            else:
                self._counted_event(time, address, size, total, events, place)
            rows.leave_out(place, self._uncounted - (self._stale or 0))
            counted, expected = self._counted, self._expected()
        self._counted, rows.place = counted, len(events.time_ns)

    def _expected(self) -> int:
        """The total if nothing happens; there is none before the first event."""
        return _NEVER if self._stale is None else self._stale + self._counted + self._balance

    def _counted_event(self, time: int, address: int, size: int, total: int, events: Profiled, place: int) -> None:
        if self._stale is None:
            # Torch's counter is the process's, and is not reset when a profile starts.
            self._stale = total - size - self._counted
        own = size < 0 and address in self._blocks
        if size > 0:
            self._make_way(time, address)
            self._counted += size
        elif own:
            self._counted += size
            del self._blocks[address]  # freed here, so not by another thread
        elif self._is_whole(address):  # an earlier profile counted it
            self._stale += size
            self._free_foreign(time, address)
        elif total - self._stale < self._counted:  # unknown here, so of an earlier profile
            self._stale += size
        balance = total - self._stale - self._counted
        # The total has moved by other bytes than this event's: another thread allocated or freed.
        if balance != self._balance:
            self._settle_others(time, balance, events, place)
        now = total - self._stale + self._uncounted
        if size > 0:
            self._blocks[address] = size
            op, sequence = events.op[place].item(), events.sequence[place].item()
            self._rows.add((time, Action.ALLOC, address, size, now, op, sequence))
        elif own:
            self._rows.add((time, Action.FREE, address, -size, now, 0, -1))

    def _make_way(self, time: int, address: int) -> None:
        """Free whatever is known at ``address``, which is being allocated: its free was missed."""
        self._dead.discard(address)
        if address in self._blocks:
            self._free(time, address)
        elif self._is_whole(address):
            self._free_foreign(time, address)

    def _settle_others(self, time: int, balance: int, events: Profiled, place: int) -> None:
        """Attribute the ``balance`` bytes that the total has beyond the blocks."""
        if balance < 0:
            for address in self._freed_elsewhere(-balance - max(-self._balance, 0), events, place):
                balance += self._blocks[address]
                self._free(time, address)
        self._balance = balance
        self._hold_elsewhere(time, max(balance, 0))

    def _freed_elsewhere(self, missing: int, events: Profiled, place: int) -> list[int]:
        """Addresses of the blocks that add up to ``missing`` bytes of frees, as far as they can be identified."""
        if missing <= 0:
            return []
        later = zip(events.address[place:].tolist(), events.bytes[place:].tolist(), strict=True)
        # An address that is handed out again was freed before, and what is freed here later is alive now.
        reused, freed_here = fates(later, self._blocks)
        dead = dict.fromkeys([*((self._dead & self._blocks.keys()) - freed_here), *reused])
        proven = proven_dead(missing, self._blocks, dead)
        missing -= sum(map(self._blocks.__getitem__, proven))
        alive = {*proven, *freed_here, *filter(self._storages.alive, self._blocks)}
        told = told_by_size(missing, {block: size for block, size in self._blocks.items() if block not in alive})
        self.told_by_size += sum(map(self._blocks.__getitem__, told))
        return proven + told

    def _hold_elsewhere(self, time: int, size: int) -> None:
        if size != self._others:
            if self._others:
                self._rows.add((time, Action.FREE, OTHER_THREADS, self._others, UNKNOWN, 0, -1))
            if size:
                self._rows.add((time, Action.ALLOC, OTHER_THREADS, size, UNKNOWN, self._elsewhere, -1))
            self._others = size

    def _unmap(self, time: int, address: int) -> None:
        for part in self._mappings.remove(address):
            self._free_foreign(time, part)

    def _map(self, time: int, address: int, size: int) -> None:
        """Divide the memory mapped at ``address`` into parts, again if it was divided before."""
        self._unmap(time, address)
        for part, part_size in self._mappings.add(address, size):
            self._add_foreign(time, part, part_size, Action.ALLOC, self._mapping)

    def _beside(self, what: SeenStorage | Died) -> None:
        """Process a storage that was seen, or freed."""
        if isinstance(what, SeenStorage):
            self._saw(what)
            return
        time, address = what
        if address in self._blocks:
            self._dead.add(address)
        elif self._is_whole(address):
            self._free_foreign(time, address)

    def _saw(self, seen: SeenStorage) -> None:
        """Add the block of a storage that a hook has seen, if it is not known yet."""
        time, address, size, resizable, kept = seen
        if address in self._blocks or address in self._foreign:
            return
        mapping = self._mappings.around(address)
        if mapping is not None:
            self._map(time, mapping.address, mapping.bytes)
        elif resizable and size <= self._others:  # another thread allocated it
            self._blocks[address] = size
            self._counted += size
            self._balance -= size
            self._hold_elsewhere(time, self._others - size)
            self._rows.add((time, Action.ALLOC, address, size, UNKNOWN, self._elsewhere, -1))
        elif kept and not self._inside_block(address):
            self._add_foreign(time, address, size, Action.ALLOC)

    def _is_whole(self, address: int) -> bool:
        """Whether a block at ``address`` is not counted by torch, and is not part of a mapping."""
        return address in self._foreign and address not in self._mappings.parts

    def _inside_block(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self._blocks.items())

    def _add_foreign(self, time: int, address: int, size: int, action: Action, op: int = 0) -> None:
        self._foreign[address] = size
        self._uncounted += size
        self._rows.add((time, action, address, size, UNKNOWN, op, -1))

    def _free_foreign(self, time: int, address: int) -> None:
        size = self._foreign.pop(address)
        self._uncounted -= size
        self._rows.add((time, Action.FREE, address, size, UNKNOWN, 0, -1))

    def _free(self, time: int, address: int) -> None:
        """Free a block of torch's for which there is no event."""
        size = self._blocks.pop(address)
        self._counted -= size
        self._dead.discard(address)
        self._rows.add((time, Action.FREE, address, size, UNKNOWN, 0, -1))


class _RawRows:
    """Collects the rows of :class:`RawEvents` that are not made directly from an event."""

    def __init__(self) -> None:
        self.place = 0
        """Index of the event before which rows are added now."""
        self._rows: list[tuple[int, ...]] = []
        self._left_out: list[int] = []
        self._shifts: list[tuple[int, int]] = []

    def add(self, row: tuple[int, ...]) -> None:
        """Add a row."""
        self._rows.append((self.place, *row))

    def shift(self, bytes_beside: int) -> None:
        """Note that from here on ``bytes_beside`` more bytes are alive than torch's total has."""
        self._shifts.append((self.place, bytes_beside))

    def leave_out(self, place: int, bytes_beside: int) -> None:
        """Make no row from the event at ``place``: its rows were added."""
        self._left_out.append(place)
        self.shift(bytes_beside)

    def events(self, events: Profiled, ops: tuple[str, ...]) -> RawEvents:
        """All rows, in order."""
        places, given = np.arange(len(events.time_ns)), events
        if self._left_out:
            places = np.delete(places, self._left_out)
            given = Profiled(*(column[places] for column in events))
        born = given.bytes > 0
        since, shifts = np.array(self._shifts, dtype=np.int64).reshape(-1, 2).T
        allocated = given.total + shifts[np.searchsorted(since, places, side="right") - 1]
        action = np.where(born, int(Action.ALLOC), int(Action.FREE))
        op, sequence = np.where(born, given.op, 0), np.where(born, given.sequence, -1)
        columns = [given.time_ns, action, given.address, np.abs(given.bytes), allocated, op, sequence]
        if self._rows:
            added = np.array(self._rows, dtype=np.int64).T
            # The sort is stable, so rows added before an event stay before it.
            order = np.argsort(np.concatenate([added[0], places]), kind="stable")
            columns = [np.concatenate(parts)[order] for parts in zip(added[1:], columns, strict=True)]
        time, action, address, size, allocated, op, sequence = columns
        table = [time, action, address, size, size, np.zeros_like(size), allocated]
        return RawEvents.from_table(table, op=op, sequence=sequence, ops=ops)
