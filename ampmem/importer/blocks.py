"""How large the blocks were that a trace handed out: what is left of a free block is not always split off."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass

from ampmem.allocator.settings import SMALL_BUFFER, SMALL_SIZE, Settings, round_size
from ampmem.allocator.snapshot import (
    ALLOC,
    FREE_COMPLETED,
    DeviceSnapshot,
    InitialState,
    NotReplayable,
    SnapshotEvent,
    rebuild,
)


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
