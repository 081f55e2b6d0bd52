"""The allocator itself: ``malloc``, ``free`` and what they need from the device."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import TypeAlias

from ampmem.allocator.model.blocks import ALLOCATED, UNMAPPED, Block, BlockPool, Segment
from ampmem.allocator.model.driver import AddressSource, Driver
from ampmem.allocator.model.expandable import page_size, try_allocate_expandable_block
from ampmem.allocator.model.layout import SnapshotSegment, snapshot_segments
from ampmem.allocator.model.oom import Candidates, OutOfMemory, OutOfMemoryReport, allowed_memory, largest
from ampmem.allocator.model.release import (
    garbage_collect_cached_blocks,
    release_available_cached_blocks,
    release_cached_blocks,
)
from ampmem.allocator.model.state import PrivatePool, State
from ampmem.allocator.model.statistics import Statistics
from ampmem.allocator.model.streams import StreamUses
from ampmem.allocator.rounding import get_allocation_size, round_size, round_up
from ampmem.allocator.settings import MIN_BLOCK_SIZE, SMALL_SIZE, Settings
from ampmem.errors import UsageError

NO_LIMIT = 1 << 63
"""``max_split_size`` where none is set: larger than any size."""

Plan: TypeAlias = tuple[int, int, bool]
"""Block size, segment size and whether the small pool serves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocParams:
    """A request that no free block could serve so far (``struct AllocParams``)."""

    pool: BlockPool
    stream: int
    asked: int
    rounded: int
    segment_size: int


class DeviceCachingAllocator(State):
    """One device's caching allocator (``class DeviceCachingAllocator``, ``c10/cuda/CUDACachingAllocator.cpp``).

    ``total_memory`` is the device's, ``None`` for one that never runs out; ``outside`` is what others hold of
    it. ``addresses`` says where the driver puts each new segment. Blocks are handles: give back to ``free``
    what ``malloc`` gave out, once.
    """

    __slots__ = ("_collects", "_expandable", "_max_split_size", "_plain", "_plans", "_streams")

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        total_memory: int | None = None,
        outside: int = 0,
        addresses: AddressSource | None = None,
    ) -> None:
        super().__init__(settings or Settings(), Driver(total_memory, outside, addresses))
        self._streams = StreamUses()
        self.configure(self.settings)

    def configure(self, settings: Settings) -> None:
        """Serve requests by ``settings`` from now on (``setAllocatorSettings``)."""
        self.settings = settings
        self._plans: dict[int, Plan] = {}
        self._expandable = settings.expandable_segments
        self._max_split_size = NO_LIMIT if settings.max_split_size is None else settings.max_split_size
        self.set_memory_fraction(settings.memory_fraction)

    def set_memory_fraction(self, fraction: float | None) -> None:
        """Let the process take at most this part of the device (``setMemoryFraction``)."""
        self.settings = replace(self.settings, memory_fraction=fraction)
        self._collects = fraction is not None and self.settings.garbage_collection_threshold > 0
        # With these settings the best fitting block always serves.
        self._plain = self.settings.max_split_size is None and not self._expandable and not self._collects

    def malloc(self, size: int, stream: int = 0) -> Block:
        """A block for ``size`` bytes, used on ``stream``. Raises :class:`OutOfMemory`."""
        if self.counters.awaiting and not self.captures:
            self._streams.process_events(self)
        rounded, segment_size, is_small = self._plans.get(size) or self._plan(size)
        pool = self.small if is_small else self.large
        if self.captures:
            pool = self.get_pool(is_small, stream)
        block = self.get_free_block(pool, stream, rounded)
        if block is None:
            block = self._obtain(
                AllocParams(pool=pool, stream=stream, asked=size, rounded=rounded, segment_size=segment_size)
            )
        self._alloc_found_block(block, size, rounded)
        return block

    def get_free_block(self, pool: BlockPool, stream: int, rounded: int) -> Block | None:
        """Take the best fit out of the pool, where the settings let it serve (``get_free_block``)."""
        free = pool.free.get(stream)
        if self._plain:
            if free:
                at = bisect_left(free, (rounded,))
                if at < len(free):
                    return free.pop(at)[2]
            return None
        if self._collects:
            pool.get_free_blocks_call_count += 1
        if not free:
            return None
        at = bisect_left(free, (rounded,))
        if at == len(free):
            return None
        if self._expandable:
            while at + 1 < len(free) and _expandable_size(free[at + 1][2]) < _expandable_size(free[at][2]):
                at += 1
        limit = self._max_split_size
        if free[at][0] >= (limit if rounded < limit else rounded + self.settings.max_non_split_rounding):
            return None
        return free.pop(at)[2]

    def should_split(self, pool: BlockPool, rounded: int, remaining: int) -> bool:
        """Whether what is left of a block stays free on its own (``should_split``)."""
        if pool.is_small or self._expandable:
            return remaining >= MIN_BLOCK_SIZE
        return remaining > SMALL_SIZE and rounded < self._max_split_size

    def _alloc_found_block(self, block: Block, asked: int, rounded: int) -> None:
        """Hand a block out that is in no pool any more (``alloc_found_block``)."""
        counters = self.counters
        segment = block.segment
        was_split = block.prev is not None or block.next is not None
        size = block.size
        remaining = size - rounded
        if remaining and self.should_split(segment.pool, rounded, remaining):
            rest = block.splice_after(rounded)
            rest.gc_count_base = segment.pool.get_free_blocks_call_count
            insort(segment.free, (remaining, rest.address, rest))
            size = rounded
            if segment.page_size == 0:
                if was_split:
                    counters.inactive_split_bytes -= size
                else:
                    counters.change_inactive_split(1, remaining)
        elif was_split and segment.page_size == 0:
            counters.inactive_split -= 1
            counters.inactive_split_bytes -= size
        block.state = ALLOCATED
        block.requested = asked
        counters.allocations += 1
        if counters.allocations > counters.allocations_peak:
            counters.allocations_peak = counters.allocations
        counters.allocated += size
        if counters.allocated > counters.allocated_peak:
            counters.allocated_peak = counters.allocated
        counters.requested += asked
        if counters.requested > counters.requested_peak:
            counters.requested_peak = counters.requested
        if size >= self._max_split_size:
            counters.add_oversize_allocation()
        if counters.awaiting:
            counters.note_active()

    def free(self, block: Block) -> None:
        """Give a block back (``free``); it stays active while other streams use it."""
        if block.state != ALLOCATED:
            raise ValueError(f"the block at {block.address:#x} is not allocated")
        counters = self.counters
        counters.allocations -= 1
        counters.allocated -= block.size
        if block.size >= self._max_split_size:
            counters.oversize_allocations -= 1
        if not (self._streams.uses and self._streams.delay_free(self, block)):
            self.free_block(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """``block`` is used on ``stream`` too: its free has to wait for that (``recordStream``)."""
        self._streams.record_stream(block, stream)

    def complete_events(self, stream: int | None = None) -> None:
        """The device has finished the work queued so far on ``stream``, or on all."""
        self._streams.complete(stream)

    def complete_events_until(self, stream: int, events: int) -> None:
        """The device has come past the first ``events`` that the allocator recorded on ``stream``."""
        self._streams.complete_until(stream, events)

    def recorded_events(self, stream: int) -> int:
        """How many events the allocator has recorded on ``stream``: one for each freed block that is used there."""
        return self._streams.recorded.get(stream, 0)

    def await_events(self, block: Block) -> None:
        """Free a block whose memory other streams use until :meth:`finish_free`; for replaying a trace."""
        self.counters.allocations -= 1
        self.counters.allocated -= block.size
        self._streams.await_events(self, block)

    def finish_free(self, block: Block) -> None:
        """The wait of one freed block is over; for replaying a trace."""
        self._streams.finish(self, block)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""
        release_cached_blocks(self, self._streams)

    def begin_allocate_to_pool(self, pool_id: int, stream: int | None = None) -> None:
        """From now on a private pool serves ``stream``, or all of them (``beginAllocateToPool``)."""
        if pool_id in self.captures:
            raise UsageError(f"allocations already go to the private pool {pool_id}")
        self.private_pools.setdefault(pool_id, PrivatePool(pool_id)).use_count += 1
        self.captures[pool_id] = stream

    def end_allocate_to_pool(self, pool_id: int) -> None:
        """The default pools serve again (``endAllocateToPool``)."""
        if self.captures.pop(pool_id, -1) == -1:
            raise UsageError(f"no allocations go to the private pool {pool_id}")

    def release_pool(self, pool_id: int) -> None:
        """One holder less; without any, ``empty_cache`` may return the pool's segments (``releasePool``)."""
        private = self.private_pools.get(pool_id)
        if private is None or private.use_count == 0:
            raise UsageError(f"nobody holds the private pool {pool_id}")
        private.use_count -= 1

    def statistics(self) -> Statistics:
        """The statistics now."""
        return self.counters.statistics()

    def snapshot(self) -> tuple[SnapshotSegment, ...]:
        """Its segments and blocks now, by address."""
        return snapshot_segments(self)

    def _plan(self, size: int) -> Plan:
        if size < 1:
            raise UsageError(f"an allocation has at least 1 byte, not {size}")
        rounded = round_size(size, self.settings)
        plan = (rounded, get_allocation_size(rounded, self.settings), rounded <= SMALL_SIZE)
        self._plans[size] = plan
        return plan

    def _obtain(self, params: AllocParams) -> Block:
        """A block from the device, with the retries of ``malloc`` in their order."""
        if self._collects:
            garbage_collect_cached_blocks(self)
        block = self._alloc_block(params)
        if block is None and release_available_cached_blocks(self, params.pool, params.stream, params.rounded):
            block = self._alloc_block(params)
        if block is None and not self.captures:
            release_cached_blocks(self, self._streams)
            self.counters.num_alloc_retries += 1
            block = self._alloc_block(params)
        if block is None:
            self.counters.num_ooms += 1
            raise OutOfMemory(self._report(params))
        return block

    def _alloc_block(self, params: AllocParams) -> Block | None:
        """A new segment, or more of an expandable one (``alloc_block``); ``None`` without memory."""
        size = params.segment_size
        allowed = allowed_memory(self.settings, self.driver.total)
        if allowed is not None and self.counters.reserved + size > allowed:
            return None
        if self._expandable:
            return try_allocate_expandable_block(self, params.pool, params.stream, params.rounded)
        address = self.driver.malloc(size, params.stream)
        if address is None:
            return None
        self.counters.add_reserved(size)
        self.counters.add_segment(oversize=size >= self._max_split_size)
        segment = Segment(address, size, params.pool, params.stream)
        self.segments[address] = segment
        return segment.first

    def _report(self, params: AllocParams) -> OutOfMemoryReport:
        counters = self.counters
        free = self.driver.free
        limit = allowed_memory(self.settings, self.driver.total)
        allowed = None if limit is None else max(limit - counters.reserved, 0)
        candidates = Candidates.among(self.pools(), params.pool, params.stream)
        segment = params.segment_size
        if self._expandable:
            segment = round_up(params.rounded, page_size(self, params.pool))
        return OutOfMemoryReport(
            reason=candidates.reason(params.rounded, segment, free, allowed),
            asked=params.asked,
            rounded=params.rounded,
            segment=segment,
            device_total=self.driver.total,
            device_free=free,
            outside=self.driver.outside,
            allowed=limit,
            allocated=counters.allocated,
            reserved=counters.reserved,
            cached=counters.reserved - counters.allocated - counters.awaiting_bytes,
            largest_free=largest(candidates.usable),
            largest_other_stream=largest(candidates.other_stream),
            largest_other_pool=largest(candidates.other_pool),
        )


def _expandable_size(block: Block) -> int:
    """Up to where a free block can grow: itself and the unmapped block behind it."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
