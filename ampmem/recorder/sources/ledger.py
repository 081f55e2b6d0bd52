"""One stream of allocator events out of what the profiler saw, the process's total, and the deaths of storages.

The profiler sees one thread; its running total counts all. What the total has beyond the blocks that are known is
held by other threads, and stands in the events as one block of their own, at :data:`~ampmem.events.OTHER_THREADS`.
Where the total has less, blocks that are known died on another thread: those of which that can be told are freed;
what cannot be told stays a difference between the events and the total.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from time import time_ns
from typing import NamedTuple

import numpy as np

from ampmem.events import OTHER_THREADS, UNKNOWN, Action, Column
from ampmem.recorder.facts.addresses import AliveBlocks
from ampmem.recorder.sources.base import RawEvents
from ampmem.recorder.sources.storages import Died, SeenStorage, Storages


def fates(events: Iterable[tuple[int, int]], blocks: Mapping[int, int]) -> tuple[list[int], set[int]]:
    """What the ``events`` to come (address, signed bytes) say of ``blocks``.

    Those at whose addresses memory is handed out again were dead before; those that they free are alive until then.
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
    """Those of the ``blocks`` at the addresses ``dead`` that fit into ``missing`` bytes of frees."""
    found: list[int] = []
    for address in dead:
        if blocks[address] <= missing:
            found.append(address)
            missing -= blocks[address]
    return found


def told_by_size(missing: int, blocks: Mapping[int, int]) -> list[int]:
    """Those of the ``blocks`` (address to bytes, oldest first) that make up ``missing`` bytes; none where none do.

    That is one block, or several of one size, or several that were allocated in a row.
    """
    return (_of_one_size(missing, blocks) or _in_a_row(missing, blocks)) if missing else []


def _of_one_size(missing: int, blocks: Mapping[int, int]) -> list[int]:
    by_size: dict[int, list[int]] = {}
    for address, size in blocks.items():
        by_size.setdefault(size, []).append(address)
    for size in sorted(by_size, reverse=True):  # the largest: the fewest blocks
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
    """Mapped memory, the storages in it (address and bytes of each), and in the same way what lies around them."""

    address: int
    bytes: int
    storages: tuple[tuple[int, int], ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """All of it."""
        return self.rest + self.storages


class Mappings:
    """Divides each mapping into the storages that were seen in it; what lies around them is one more part."""

    def __init__(self) -> None:
        self._mappings: dict[int, MappedMemory] = {}
        self._seen: dict[int, int] = {}
        """Address of each storage that was seen to its bytes; those that no block is known for."""
        self._sorted: list[int] = []
        self.parts: set[int] = set()
        """The addresses of all parts."""

    def __contains__(self, address: int) -> bool:
        return address in self._mappings

    def expect(self, seen: Iterable[SeenStorage]) -> None:
        """These storages were seen since the last call: some may lie in mappings that are still to be added."""
        inside = [storage for mapping in self._mappings.values() for storage in mapping.storages]
        self._seen = dict(inside) | {each.address: each.bytes for each in seen}
        self._sorted = sorted(self._seen)

    def add(self, address: int, size: int) -> tuple[tuple[int, int], ...]:
        """``size`` bytes are mapped at ``address``; their parts."""
        mapping = self._mappings[address] = self._divide(address, size)
        self.parts.update(start for start, _ in mapping.parts)
        return mapping.parts

    def remove(self, address: int) -> list[int]:
        """The mapping at ``address`` is no more; the addresses of its parts. None where there is no such mapping."""
        mapping = self._mappings.pop(address, None)
        starts = [] if mapping is None else [start for start, _ in mapping.parts]
        self.parts.difference_update(starts)
        return starts

    def around(self, address: int) -> MappedMemory | None:
        """The mapping in which ``address`` lies."""
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
            if start < reached or start + self._seen[start] > end:  # a view of what is a part already
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
"""The op of what no event of the recorded thread accounts for."""
MAPPED = "mapped memory"
"""The op of what lies in a mapping: a file, or memory that processes share."""


class Profiled(NamedTuple):
    """Allocations and frees as the profiler has them, in order."""

    time_ns: Column
    address: Column
    bytes: Column
    """Below 0 of a free."""
    total: Column
    """The process's, after the event. Of mapped memory none is kept, and it is 0."""
    op: Column
    """Index of the node's name."""
    sequence: Column
    """Its sequence number, or -1."""


_EMPTY = np.zeros(0, dtype=np.int64)
NOTHING = Profiled(_EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY)
_NEVER = 1 << 63


class Ledger:
    """Which blocks are alive, and what their sum has to be."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._blocks: dict[int, int] = {}
        """Those that are in torch's total, oldest first."""
        self._counted = 0
        """Their sum."""
        self._foreign: dict[int, int] = {}
        """Those that are not: the baseline, parts of mapped files, memory that torch did not allocate."""
        self._uncounted = 0
        self._mappings = Mappings()
        self._stale: int | None = None
        """What the total has of earlier profiles in the process; ``None`` before the first event."""
        self._balance = 0
        """What the total had beyond the blocks at the last event; below 0 where frees are missing."""
        self._others = 0
        """Size of the block of the other threads."""
        self._dead: set[int] = set()
        """Addresses of blocks whose storages are dead."""
        self._pending: list[tuple[int, int, int]] = []
        """What of the baseline is still to be written: (time, address, bytes)."""
        self._elsewhere = self._mapping = 0
        """Indices of the two among the ops."""
        self._rows = _Rows()
        self.told_by_size = 0
        """Bytes of blocks that other threads have freed, as only their sizes tell."""

    def add_baseline(self, blocks: Mapping[int, int]) -> None:
        """These blocks (address to bytes) are alive."""
        now = time_ns()
        self._pending = [(now, address, size) for address, size in blocks.items()]

    def blocks(self) -> AliveBlocks:
        """What is alive."""
        alive = self._blocks | self._foreign
        unseen = {address: size for address, size in alive.items() if not self._storages.alive(address)}
        return AliveBlocks(unseen, sum(alive.values()))

    def settle(self, events: Profiled, ops: dict[str, int]) -> RawEvents:
        """The ``events``, which came since the last call, and what happened beside them, in order.

        ``ops`` are the names of the nodes; the one for other threads is added.
        """
        rows = self._rows = _Rows()
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
        """Go through the ``events``, and through those ``beside`` them up to the last of them.

        Most events change the total by their own bytes, at an address that says the same: :meth:`_Rows.events` makes
        rows of these. The loop is the hottest of a recording.
        """
        rows, blocks, foreign, dead = self._rows, self._blocks, self._foreign, self._dead
        counted, expected = self._counted, self._expected()
        next_beside = beside[-1].time_ns if beside else _NEVER
        rows.shift(self._uncounted - (self._stale or 0))
        columns = (events.time_ns.tolist(), events.address.tolist(), events.bytes.tolist(), events.total.tolist())
        for place, (time, address, size, total) in enumerate(zip(*columns, strict=True)):
            if time < next_beside and total == expected + size and total:
                if size > 0 and address not in blocks and address not in foreign:
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
            while beside and beside[-1].time_ns <= time:
                self._beside(beside.pop())
            next_beside = beside[-1].time_ns if beside else _NEVER
            if total == 0 and (size > 0 or address in self._mappings):
                self._mapped(time, address, size)
            else:
                self._counted_event(time, address, size, total, events, place)
            rows.leave_out(place, self._uncounted - (self._stale or 0))
            counted, expected = self._counted, self._expected()
        self._counted, rows.place = counted, len(events.time_ns)

    def _expected(self) -> int:
        """The total while nothing happens; there is none before the first event."""
        return _NEVER if self._stale is None else self._stale + self._counted + self._balance

    def _counted_event(self, time: int, address: int, size: int, total: int, events: Profiled, place: int) -> None:
        if self._stale is None:
            self._stale = total - size - self._counted
        own = size < 0 and address in self._blocks
        if size > 0:
            self._make_way(time, address)
            self._counted += size
        elif own:
            self._counted += size
            del self._blocks[address]  # whatever others have freed, it is not this one
        elif self._is_whole(address):  # counted by an earlier profile
            self._stale += size
            self._free_foreign(time, address)
        elif total - self._stale < self._counted:  # unknown to us, and of an earlier profile
            self._stale += size
        balance = total - self._stale - self._counted
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
        """Memory is handed out at ``address``: what was there has died, unseen."""
        self._dead.discard(address)
        if address in self._blocks:
            self._free(time, address)
        elif self._is_whole(address):
            self._free_foreign(time, address)

    def _settle_others(self, time: int, balance: int, events: Profiled, place: int) -> None:
        """The total has ``balance`` bytes beyond the blocks."""
        if balance < 0:
            for address in self._freed_elsewhere(-balance - max(-self._balance, 0), events, place):
                balance += self._blocks[address]
                self._free(time, address)
        self._balance = balance
        self._hold_elsewhere(time, max(balance, 0))

    def _freed_elsewhere(self, missing: int, events: Profiled, place: int) -> list[int]:
        """Addresses of the blocks that make up ``missing`` bytes of frees, as far as that can be told."""
        if missing <= 0:
            return []
        later = zip(events.address[place:].tolist(), events.bytes[place:].tolist(), strict=True)
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

    def _mapped(self, time: int, address: int, size: int) -> None:
        """A file or shared memory was mapped, or unmapped: of that the profiler keeps no total."""
        if size > 0:
            self._map(time, address, size)
        else:
            self._unmap(time, address)

    def _unmap(self, time: int, address: int) -> None:
        for part in self._mappings.remove(address):
            self._free_foreign(time, part)

    def _map(self, time: int, address: int, size: int) -> None:
        """Divide what is mapped at ``address``, anew if it was there before."""
        self._unmap(time, address)
        for part, part_size in self._mappings.add(address, size):
            self._add_foreign(time, part, part_size, Action.ALLOC, self._mapping)

    def _beside(self, what: SeenStorage | Died) -> None:
        """A storage was seen, or died."""
        if isinstance(what, SeenStorage):
            self._saw(what)
            return
        time, address = what
        if address in self._blocks:
            self._dead.add(address)
        elif self._is_whole(address):
            self._free_foreign(time, address)

    def _saw(self, seen: SeenStorage) -> None:
        """A hook has seen a storage: if its block is not known, it is now."""
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
        """Whether a block lies there that torch does not count, and that is no part of a mapping."""
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
        """A block of torch's died where no event shows it."""
        size = self._blocks.pop(address)
        self._counted -= size
        self._dead.discard(address)
        self._rows.add((time, Action.FREE, address, size, UNKNOWN, 0, -1))


class _Rows:
    """Collects rows of :class:`RawEvents` beside those that events come to by themselves."""

    def __init__(self) -> None:
        self.place = 0
        """Position of the event before which rows are added now."""
        self._rows: list[tuple[int, ...]] = []
        self._left_out: list[int] = []
        self._shifts: list[tuple[int, int]] = []

    def add(self, row: tuple[int, ...]) -> None:
        """A row of its own."""
        self._rows.append((self.place, *row))

    def shift(self, bytes_beside: int) -> None:
        """From here on so much more is alive than the total says."""
        self._shifts.append((self.place, bytes_beside))

    def leave_out(self, place: int, bytes_beside: int) -> None:
        """The event at ``place`` is not a row by itself: what it comes to was added."""
        self._left_out.append(place)
        self.shift(bytes_beside)

    def events(self, events: Profiled, ops: tuple[str, ...]) -> RawEvents:
        """All rows, in order."""
        by_itself = np.ones(len(events.time_ns), dtype=bool)
        by_itself[self._left_out] = False
        places = np.flatnonzero(by_itself)
        given = Profiled(*(column[places] for column in events))
        born = given.bytes > 0
        since, shifts = np.array(self._shifts, dtype=np.int64).reshape(-1, 2).T
        allocated = given.total + shifts[np.searchsorted(since, places, side="right") - 1]
        action = np.where(born, int(Action.ALLOC), int(Action.FREE))
        op, sequence = np.where(born, given.op, 0), np.where(born, given.sequence, -1)
        plain = (places, given.time_ns, action, given.address, np.abs(given.bytes), allocated, op, sequence)
        flat = np.fromiter(chain.from_iterable(self._rows), dtype=np.int64, count=len(plain) * len(self._rows))
        added = flat.reshape(-1, len(plain)).T
        # What was added before an event comes first: it stands first here, and the sort is stable.
        order = np.argsort(np.concatenate([added[0], places]), kind="stable")
        columns = [np.concatenate(parts)[order] for parts in zip(added[1:], plain[1:], strict=True)]
        time, action, address, size, allocated, op, sequence = columns
        return RawEvents(
            time_ns=time,
            action=action,
            address=address,
            bytes=size,
            block_bytes=size,
            stream=np.zeros_like(size),
            allocated=allocated,
            op=op,
            sequence=sequence,
            ops=ops,
        )
