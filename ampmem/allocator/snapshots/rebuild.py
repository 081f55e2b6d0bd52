"""The allocator's state when a snapshot's trace starts, found by walking the trace backwards."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from ampmem.allocator.model.layout import DEFAULT_POOL, PoolId
from ampmem.allocator.rounding import round_size
from ampmem.allocator.settings import SMALL_BUFFER, SMALL_SIZE, Settings
from ampmem.allocator.snapshots.snapshot import ALLOC, FREE_COMPLETED, FREE_REQUESTED, DeviceSnapshot, SnapshotEvent
from ampmem.errors import AmpmemError


class NotReplayable(AmpmemError):
    """A snapshot from which the state at the start of its trace cannot be rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialBlock:
    """A block in use at the start; ``awaiting`` when its owner had freed it already."""

    address: int
    size: int
    requested: int
    awaiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialSegment:
    """A segment at the start with its blocks in use, by address; the rest of it is free."""

    address: int
    size: int
    stream: int
    is_small: bool
    pool_id: PoolId
    blocks: tuple[InitialBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialState:
    """``ambiguous`` has the addresses of blocks whose size the snapshot does not determine.

    They are taken to be as large as their rounded request; each may be up to 1 MiB larger.
    """

    segments: tuple[InitialSegment, ...]
    ambiguous: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Live:
    size: int
    requested: int
    awaiting: bool
    certain: bool


@dataclass(slots=True, kw_only=True)
class _Range:
    size: int
    stream: int
    is_small: bool
    pool_id: PoolId


def rebuild(snapshot: DeviceSnapshot, settings: Settings) -> InitialState:
    """Undo every event of the trace, newest first, from the final segments.

    Free neighbours always merge, so the blocks in use determine the free ones. Only the size of a block
    that was alive at the start and freed in the trace can be open: the large pool hands a block out whole
    when at most 1 MiB would be left. Since no block of that pool is smaller than that, a smaller gap behind
    such a block belongs to it. Raises :class:`NotReplayable` where trace and segments contradict each other,
    and for settings under which a gap says nothing.
    """
    if settings.expandable_segments or any(segment.expandable for segment in snapshot.segments):
        raise NotReplayable("the snapshot has expandable segments, and does not say where their address space starts")
    if settings.max_split_size is not None:
        raise NotReplayable("with max_split_size_mb a snapshot does not tell how large freed blocks were")
    walk = _Walk(snapshot, settings)
    for number in range(len(snapshot.events) - 1, -1, -1):
        walk.undo(snapshot.events[number], number)
    return walk.state()


def _has_two_events_per_free(events: Iterable[SnapshotEvent]) -> bool:
    """Whether ``free_completed`` follows a ``free_requested``: not so in a trace from before that existed."""
    born = set()
    for event in events:
        if event.action == FREE_REQUESTED:
            return True
        if event.action == ALLOC:
            born.add(event.address)
        elif event.action == FREE_COMPLETED and event.address in born:
            return False
    return True


class _Walk:
    """The blocks in use and the segments, on the way back in time."""

    def __init__(self, snapshot: DeviceSnapshot, settings: Settings) -> None:
        self._settings = settings
        self._two_events = _has_two_events_per_free(snapshot.events)
        self._live: dict[int, _Live] = {}
        self._ranges: dict[int, _Range] = {}
        for segment in snapshot.segments:
            if sum(block.size for block in segment.blocks) != segment.size:
                raise NotReplayable(f"the blocks of the segment at {segment.address:#x} do not fill it")
            self._ranges[segment.address] = _Range(
                size=segment.size, stream=segment.stream, is_small=segment.is_small, pool_id=segment.pool_id
            )
            for block in segment.blocks:
                if block.allocated or block.awaiting:
                    self._live[block.address] = _Live(
                        size=block.size, requested=block.requested, awaiting=block.awaiting, certain=True
                    )
        self._blocks = sorted(self._live)
        self._starts = sorted(self._ranges)

    def undo(self, event: SnapshotEvent, number: int) -> None:
        match event.action:
            case "alloc":
                self._take_block(event, number)
                del self._live[event.address]
                del self._blocks[bisect_left(self._blocks, event.address)]
            case "free_requested":
                self._take_block(event, number).awaiting = False
            case "free_completed":
                self._undo_free(event, number)
            case "segment_alloc":
                if self._ranges.pop(event.address, None) is None or self._live_in(event.address, event.size):
                    raise NotReplayable(f"event {number} makes a segment that is not there, or not free, afterwards")
                del self._starts[bisect_left(self._starts, event.address)]
            case "segment_free":
                self._ranges[event.address] = _Range(
                    size=event.size,
                    stream=event.stream,
                    is_small=event.size == SMALL_BUFFER,
                    pool_id=DEFAULT_POOL,
                )
                insort(self._starts, event.address)
            case "segment_map" | "segment_unmap":
                raise NotReplayable("the trace has expandable segments, which cannot be rebuilt")

    def _take_block(self, event: SnapshotEvent, number: int) -> _Live:
        live = self._live.get(event.address)
        if live is None:
            raise NotReplayable(
                f"event {number} ({event.action}) is about {event.address:#x}, where no block is afterwards"
            )
        return live

    def _live_in(self, address: int, size: int) -> bool:
        at = bisect_left(self._blocks, address)
        return at < len(self._blocks) and self._blocks[at] < address + size

    def _undo_free(self, event: SnapshotEvent, number: int) -> None:
        """The freed block is there again; the gap behind it may tell how large it is, and it ends another gap."""
        at = bisect_left(self._starts, event.address + 1) - 1
        start = self._starts[at] if at >= 0 else -1
        if start < 0 or event.address >= start + self._ranges[start].size:
            raise NotReplayable(f"event {number} frees {event.address:#x}, which is in no segment")
        segment = self._ranges[start]
        rounded = round_size(event.size, self._settings)
        place = bisect_left(self._blocks, event.address)
        end = start + segment.size
        if place < len(self._blocks):
            end = min(end, self._blocks[place])
        gap = end - event.address - rounded
        if place and self._blocks[place - 1] >= start:
            self._bound(self._blocks[place - 1], event.address, number)
        if gap < 0:
            raise NotReplayable(f"event {number} frees {event.address:#x}, which overlaps another block")
        certain = segment.is_small or gap <= SMALL_SIZE
        self._live[event.address] = _Live(
            size=rounded + gap if certain and not segment.is_small else rounded,
            requested=event.size,
            awaiting=self._two_events,
            certain=certain,
        )
        self._blocks.insert(place, event.address)

    def _bound(self, address: int, end: int, number: int) -> None:
        """Something else starts at ``end``: the block before it reaches no further."""
        block = self._live[address]
        gap = end - address - block.size
        if gap < 0:
            raise NotReplayable(f"event {number} frees {end:#x}, which overlaps another block")
        if not block.certain and gap <= SMALL_SIZE:
            block.size += gap
            block.certain = True

    def state(self) -> InitialState:
        segments = []
        for start in self._starts:
            segment = self._ranges[start]
            first = bisect_left(self._blocks, start)
            last = bisect_left(self._blocks, start + segment.size)
            segments.append(
                InitialSegment(
                    address=start,
                    size=segment.size,
                    stream=segment.stream,
                    is_small=segment.is_small,
                    pool_id=segment.pool_id,
                    blocks=tuple(self._initial(address) for address in self._blocks[first:last]),
                )
            )
        return InitialState(
            segments=tuple(segments),
            ambiguous=tuple(address for address in self._blocks if not self._live[address].certain),
        )

    def _initial(self, address: int) -> InitialBlock:
        live = self._live[address]
        return InitialBlock(address=address, size=live.size, requested=live.requested, awaiting=live.awaiting)
