"""The lifetime and block size of each allocation: the trace is walked back from the final state, then forwards."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from ampmem.allocator.blocks import SnapshotSegment
from ampmem.allocator.settings import SMALL_BUFFER, SMALL_SIZE, Settings, round_size
from ampmem.allocator.snapshot import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    DeviceSnapshot,
    NotReplayable,
    SnapshotEvent,
    rebuild,
)
from ampmem.errors import RecordingError


class BlockSizes(NamedTuple):
    """Block sizes in bytes: of blocks from before the trace by address, and of allocs in order."""

    before: Mapping[int, int]
    allocs: Sequence[int]


def block_sizes(snapshot: DeviceSnapshot, settings: Settings) -> BlockSizes | None:
    """The size that each alloc took of the free block at its address, from the segments and its neighbours.

    ``None`` if the state at the start cannot be rebuilt, as with expandable segments, which split off the whole
    remainder, or if the trace contradicts it.
    """
    try:
        segments = _Segments(rebuild(snapshot, settings), settings)
        allocs = [size for event in snapshot.events if (size := segments.follow(event)) is not None]
    except (NotReplayable, _Contradiction):
        return None
    return BlockSizes(segments.before, allocs)


class _Contradiction(Exception):
    """An event that does not fit the segments."""


class _Segments:
    """The blocks in use and the segments, by address, with their ends."""

    def __init__(self, initial: Sequence[SnapshotSegment], settings: Settings) -> None:
        self._settings = settings
        self._ends = {segment.address: segment.address + segment.size for segment in initial}
        self._small = {segment.address for segment in initial if segment.is_small}
        self._starts = sorted(self._ends)
        blocks = [block for segment in initial for block in segment.blocks]
        self._used = sorted(block.address for block in blocks)
        self.before = {block.address: block.size for block in blocks}

    def follow(self, event: SnapshotEvent) -> int | None:
        """Apply ``event``; returns the size of the block if it is an alloc."""
        if event.action == ALLOC:
            return self._allocate(event.address, event.size)
        if event.action == FREE_COMPLETED:
            at = bisect_left(self._used, event.address)
            if at == len(self._used) or self._used[at] != event.address:
                raise _Contradiction
            del self._used[at]
        elif event.action == "segment_alloc":
            insort(self._starts, event.address)
            self._ends[event.address] = event.address + event.size
            if event.size == SMALL_BUFFER:
                self._small.add(event.address)
        elif event.action == "segment_free":
            if self._ends.pop(event.address, None) is None:
                raise _Contradiction
            self._starts.remove(event.address)
            self._small.discard(event.address)
        return None

    def _allocate(self, address: int, requested: int) -> int:
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            raise _Contradiction
        segment = self._starts[at]
        end = self._ends[segment]
        place = bisect_left(self._used, address)
        if place < len(self._used):
            end = min(end, self._used[place])
        rounded = round_size(requested, self._settings)
        left = end - address - rounded
        if left < 0:
            raise _Contradiction
        self._used.insert(place, address)
        return rounded if segment in self._small or left > SMALL_SIZE else rounded + left


ALIVE = -1
"""Value of :attr:`Allocation.died` for a block alive at the snapshot."""

BEFORE = -1
"""Value of :attr:`Allocation.born` for a block that was alive before the trace."""


_MOST_BYTES: Final = 2**62

_Blocks: TypeAlias = dict[int, tuple[int, int]]
"""Requested bytes and stream, by address."""


class Allocation(NamedTuple):
    """One life of a block. ``born`` and ``died`` are indices into :attr:`TracedBlocks.events`.

    A tuple, because there are hundreds of thousands.
    """

    address: int
    bytes: int
    block_bytes: int
    stream: int
    born: int
    died: int

    @property
    def throughout(self) -> bool:
        """Whether the block was alive before the trace and still is after it."""
        return self.born == BEFORE and self.died == ALIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBlocks:
    """Allocs and frees in order, and the allocations in order of birth, those from before the trace first.

    ``allocation`` is the index of each event's allocation. ``checked`` says that the running total of the trace ends at
    the bytes in the segments; ``strangers`` counts the blocks in which the two differ.
    """

    events: tuple[SnapshotEvent, ...]
    allocation: tuple[int, ...]
    allocations: tuple[Allocation, ...]
    baseline_bytes: int
    checked: bool
    strangers: int


def replay(snapshot: DeviceSnapshot) -> TracedBlocks:
    """The allocations of ``snapshot``. Raises :class:`RecordingError` if the trace contradicts itself."""
    # Allocs and, for each free, the event at which its memory stops counting as allocated. If the ring buffer lost a
    # free's request, the block of the completion was no longer allocated.
    free = FREE_REQUESTED if any(event.action == FREE_REQUESTED for event in snapshot.events) else FREE_COMPLETED
    events = [event for event in snapshot.events if event.action in (ALLOC, free)]
    foreign = 0
    if snapshot.has_strangers:
        events, foreign = _taking_turns(events)
    there = [(segment, block) for segment in snapshot.segments for block in segment.blocks if block.allocated]
    final = {block.address: (block.requested, segment.stream) for segment, block in there}
    block_bytes = {block.address: block.size for _, block in there}
    before, strangers = _rewind(events, final)
    strangers += foreign
    settings = snapshot.settings or Settings()
    handed_out = None if strangers else block_sizes(snapshot, settings)
    allocations, owner = _forward(events, before, _Sizes(block_bytes, handed_out, settings))
    if sum(max(allocation.bytes, allocation.block_bytes) for allocation in allocations) > _MOST_BYTES:
        raise RecordingError("the snapshot is damaged: the sizes of its allocations are too large to add up")
    born_bytes = sum(allocation.bytes for allocation in allocations if allocation.born == BEFORE)
    total = born_bytes + sum(event.size if event.action == ALLOC else -event.size for event in events)
    return TracedBlocks(
        events=tuple(events),
        allocation=tuple(owner),
        allocations=tuple(allocations),
        baseline_bytes=born_bytes,
        checked=strangers == 0 and total == sum(size for size, _ in final.values()),
        strangers=strangers,
    )


def _taking_turns(events: list[SnapshotEvent]) -> tuple[list[SnapshotEvent], int]:
    """``events`` without a second alloc or a second free in a row at one address, and the number of such addresses.

    With event kinds unknown to ampmem, a block may be allocated or freed by one of those.
    """
    kept: list[SnapshotEvent] = []
    allocated: dict[int, bool] = {}
    odd: set[int] = set()
    for event in events:
        if allocated.get(event.address) == (event.action == ALLOC):
            odd.add(event.address)
            continue
        allocated[event.address] = event.action == ALLOC
        kept.append(event)
    return kept, len(odd)


def _rewind(events: list[SnapshotEvent], final: _Blocks) -> tuple[_Blocks, int]:
    """The blocks alive before the first event, by address, and the number in which trace and final state differ.

    They differ if recording stopped before the snapshot was taken: then the last events are missing.
    """
    alive = dict(final)
    settled: set[int] = set()
    """Addresses of events seen so far: a difference at one of them is a contradiction."""
    strangers = 0
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        there = event.address in alive
        if there != (event.action == ALLOC):
            if event.address in settled:
                what = "allocated twice" if event.action == ALLOC else "freed twice"
                raise RecordingError(
                    f"the snapshot is damaged: the event {index} of its trace says that {event.address:#x} was {what}"
                )
            strangers += 1
        if event.action == ALLOC:
            alive.pop(event.address, None)
        else:
            alive[event.address] = event.size, event.stream
        settled.add(event.address)
    return alive, strangers


class _Sizes:
    """Block sizes: from the segments, else from the trace, else the rounded request."""

    def __init__(self, final: dict[int, int], handed_out: BlockSizes | None, settings: Settings) -> None:
        self._final = final
        self._before, self._allocs = BlockSizes({}, ()) if handed_out is None else handed_out
        self._settings = settings
        self._rounded: dict[int, int] = {}

    def block_size(self, address: int, size: int, number: int, died: int) -> int:
        """The block size of the trace's alloc ``number``; a negative number means a block from before the trace."""
        block = self._final.get(address) if died == ALIVE else None
        if block is None and number < 0:
            block = self._before.get(address)
        elif block is None and number < len(self._allocs):
            block = self._allocs[number]
        if block is None:
            block = self._rounded.get(size)
        if block is None:
            block = self._rounded[size] = round_size(size, self._settings)
        return block


def _forward(events: list[SnapshotEvent], before: _Blocks, sizes: _Sizes) -> tuple[list[Allocation], list[int]]:
    births: list[tuple[int, int, int, int]] = []
    died: dict[int, int] = {}
    alive: dict[int, int] = {}
    for address in sorted(before):
        alive[address] = len(births)
        births.append((address, *before[address], BEFORE))
    owner: list[int] = []
    for index, (action, address, size, stream, _, _) in enumerate(events):
        if action == ALLOC:
            alive[address] = number = len(births)
            births.append((address, size, stream, index))
        else:
            number = alive.pop(address)
            died[number] = index
        owner.append(number)
    allocations = []
    for number, (address, size, stream, born) in enumerate(births):
        death = died.get(number, ALIVE)
        block = sizes.block_size(address, size, number - len(before), death)
        allocations.append(Allocation(address, size, block, stream, born, death))
    return allocations, owner
