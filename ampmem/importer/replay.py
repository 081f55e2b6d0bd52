"""What lived when, and in how large a block: the trace walked back from the final state, then forwards."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from ampmem.allocator.settings import SMALL_BUFFER, SMALL_SIZE, Settings, round_size
from ampmem.allocator.snapshot import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    DeviceSnapshot,
    InitialState,
    NotReplayable,
    SnapshotEvent,
    rebuild,
)
from ampmem.errors import RecordingError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Of the blocks from before the trace by address, and of those of its allocs in order; all in bytes."""

    before: Mapping[int, int]
    allocs: tuple[int, ...]


def block_sizes(snapshot: DeviceSnapshot, settings: Settings) -> BlockSizes | None:
    """What each alloc took of the free block at its address, as the segments and its neighbours show.

    ``None`` where the state at the start cannot be rebuilt, as with expandable segments, which split off all that
    is left, or where the trace contradicts it.
    """
    try:
        segments = _Segments(rebuild(snapshot, settings), settings)
        allocs = [size for event in snapshot.events if (size := segments.follow(event)) is not None]
    except (NotReplayable, _Contradiction):
        return None
    return BlockSizes(before=segments.before, allocs=tuple(allocs))


class _Contradiction(Exception):
    """An event that does not fit the segments."""


class _Segments:
    """What is in use in which segment; blocks in use and segments by address, with their ends."""

    def __init__(self, initial: InitialState, settings: Settings) -> None:
        self._settings = settings
        self._ends = {segment.address: segment.address + segment.size for segment in initial.segments}
        self._small = {segment.address for segment in initial.segments if segment.is_small}
        self._starts = sorted(self._ends)
        blocks = [block for segment in initial.segments for block in segment.blocks]
        self._used = sorted(block.address for block in blocks)
        self.before = {block.address: block.size for block in blocks}

    def follow(self, event: SnapshotEvent) -> int | None:
        """The size of the block where one is handed out."""
        if event.action == ALLOC:
            return self._take(event.address, event.size)
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

    def _take(self, address: int, requested: int) -> int:
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
"""Value of :attr:`Allocation.died` for what is alive when the snapshot is taken."""

BEFORE = -1
"""Value of :attr:`Allocation.born` for what was alive before the trace starts."""


_MOST_BYTES: Final = 2**62

_Blocks: TypeAlias = dict[int, tuple[int, int]]
"""Requested bytes and stream, by address."""


class Allocation(NamedTuple):
    """One life of a block. ``born`` and ``died`` are indices into :attr:`TracedBlocks.events`.

    A tuple, since there are hundreds of thousands.
    """

    address: int
    bytes: int
    block_bytes: int
    stream: int
    born: int
    died: int

    @property
    def throughout(self) -> bool:
        """Whether it was there before the trace and is there after it."""
        return self.born == BEFORE and self.died == ALIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBlocks:
    """Allocs and frees in order, and the allocations in order of birth, those from before first.

    ``allocation`` says for each event whose it is. ``checked`` says that the running total of the trace,
    added up by itself, ends at what the segments hold; ``strangers`` counts the blocks in which the two differ.
    """

    events: tuple[SnapshotEvent, ...]
    allocation: tuple[int, ...]
    allocations: tuple[Allocation, ...]
    baseline_bytes: int
    checked: bool
    strangers: int


def replay(snapshot: DeviceSnapshot) -> TracedBlocks:
    """Raises :class:`RecordingError` when the trace contradicts itself."""
    events = _lives_only(snapshot.events)
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
        raise RecordingError("the snapshot is damaged: its allocations have more bytes than can be added up")
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


def _lives_only(events: tuple[SnapshotEvent, ...]) -> list[SnapshotEvent]:
    """Allocs, and the event of each pair of frees at which the memory stops counting as allocated."""
    # A completion whose request the ring has lost is of a block that was no longer allocated.
    free = FREE_REQUESTED if any(event.action == FREE_REQUESTED for event in events) else FREE_COMPLETED
    return [event for event in events if event.action in (ALLOC, free)]


def _taking_turns(events: list[SnapshotEvent]) -> tuple[list[SnapshotEvent], int]:
    """The allocs and frees that take turns at each address, and in how many blocks the others are left out.

    Where there are kinds of events that are not known, a block may have been born or have died by one of them.
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
    """What was alive before the first event, by address, and in how many blocks trace and final state differ.

    They differ when recording was stopped before the snapshot was taken: the last events are missing then.
    """
    alive = dict(final)
    settled: set[int] = set()
    """Addresses that an event seen so far is about: a difference there is a contradiction."""
    strangers = 0
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        there = event.address in alive
        if there != (event.action == ALLOC):
            if event.address in settled:
                raise _contradiction(index, event)
            strangers += 1
        if event.action == ALLOC:
            alive.pop(event.address, None)
        else:
            alive[event.address] = event.size, event.stream
        settled.add(event.address)
    return alive, strangers


def _contradiction(index: int, event: SnapshotEvent) -> RecordingError:
    what = "allocated twice" if event.action == ALLOC else "freed twice"
    return RecordingError(
        f"the snapshot is damaged: the event {index} of its trace says that {event.address:#x} was {what}"
    )


class _Sizes:
    """How large each block was: what the segments say, else the trace, else what its request is rounded to."""

    def __init__(self, final: dict[int, int], handed_out: BlockSizes | None, settings: Settings) -> None:
        self._final = final
        self._before = {} if handed_out is None else handed_out.before
        self._allocs = () if handed_out is None else handed_out.allocs
        self._settings = settings
        self._rounded: dict[int, int] = {}

    def of(self, address: int, size: int, number: int, died: int) -> int:
        """The block of the trace's alloc ``number``, or of one from before it, where that is negative."""
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
        block = sizes.of(address, size, number - len(before), death)
        allocations.append(Allocation(address, size, block, stream, born, death))
    return allocations, owner
