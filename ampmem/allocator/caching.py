"""The caching allocator: ``malloc`` and ``free``, streams, expandable segments, and returning memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from ampmem.allocator.blocks import (
    ALLOCATED,
    AWAITING,
    FREE,
    GONE,
    UNMAPPED,
    AddressSource,
    Block,
    BlockPool,
    CallKind,
    Driver,
    Segment,
    SnapshotSegment,
    State,
    snapshot_segments,
)
from ampmem.allocator.oom import Candidates, OutOfMemory, OutOfMemoryReport, allowed_memory, largest_size
from ampmem.allocator.settings import (
    MIN_BLOCK_SIZE,
    SMALL_BUFFER,
    SMALL_SIZE,
    Settings,
    get_allocation_size,
    round_size,
    round_up,
)
from ampmem.errors import UsageError


class StreamUses:
    """The streams that use each block, and the events to wait for (``stream_uses``, ``cuda_events``).

    The model has no clock: ``complete`` says that the device has completed the events of a stream. As in PyTorch, a
    block is freed only when the allocator next checks (``process_events``). ``uses`` has the other streams of each
    block, ``recorded`` the number of events recorded on each stream so far: one for each freed block used there.
    """

    __slots__ = ("_event_count", "_finished", "_queues", "recorded", "uses")

    def __init__(self) -> None:
        self.uses: dict[Block, set[int]] = {}
        self.recorded: dict[int, int] = {}
        self._event_count: dict[Block, int] = {}
        self._queues: dict[int, deque[Block]] = {}
        self._finished: dict[int, int] = {}

    def record_stream(self, block: Block, stream: int) -> None:
        """Note a use of ``block`` on ``stream`` (``recordStream``); on the block's own stream it needs no event."""
        if stream != block.segment.stream:
            self.uses.setdefault(block, set()).add(stream)

    def delay_free(self, state: State, block: Block) -> bool:
        """Make a freed block wait for its other streams; ``False`` if it has none."""
        if block not in self.uses:
            return False
        self.await_events(state, block)
        self._insert_events(block)
        return True

    @staticmethod
    def await_events(state: State, block: Block) -> None:
        """Move ``block``, which its owner has freed, to the blocks that await events: they count as active."""
        block.state = AWAITING
        counters = state.counters
        counters.awaiting += 1
        counters.awaiting_bytes += block.size
        counters.awaiting_requested += block.requested
        counters.awaiting_bytes_peak = max(counters.awaiting_bytes_peak, counters.awaiting_bytes)

    def complete(self, stream: int | None) -> None:
        """Complete all work queued so far on ``stream``, or on every stream."""
        for each in list(self._queues) if stream is None else [stream]:
            self.complete_until(each, self.recorded.get(each, 0))

    def complete_until(self, stream: int, events: int) -> None:
        """Complete the first ``events`` events recorded on ``stream``."""
        waiting = len(self._queues.get(stream, ()))
        done = waiting - (self.recorded.get(stream, 0) - events)
        if done > self._finished.get(stream, 0):
            self._finished[stream] = done

    def process_events(self, state: State) -> None:
        """Free the blocks whose events are all completed (``process_events``)."""
        for stream in [stream for stream, finished in self._finished.items() if finished]:
            queue = self._queues[stream]
            for _ in range(self._finished.pop(stream)):
                self._event_done(state, queue.popleft())

    def synchronize_and_free_events(self, state: State) -> None:
        """Wait for all events and free their blocks (``synchronize_and_free_events``)."""
        state.counters.num_sync_all_streams += 1
        for queue in self._queues.values():
            while queue:
                self._event_done(state, queue.popleft())
        self._queues.clear()
        self._finished.clear()

    def _insert_events(self, block: Block) -> None:
        streams = self.uses.pop(block)
        self._event_count[block] = len(streams)
        for stream in sorted(streams):
            self._queues.setdefault(stream, deque()).append(block)
            self.recorded[stream] = self.recorded.get(stream, 0) + 1

    def _event_done(self, state: State, block: Block) -> None:
        """Note that an event of ``block`` has occurred, and free the block after its last one."""
        self._event_count[block] -= 1
        if self._event_count[block] == 0:
            del self._event_count[block]
            state.counters.awaiting -= 1
            state.counters.awaiting_bytes -= block.size
            state.counters.awaiting_requested -= block.requested
            state.free_block(block)


# Expandable segments: address space for the whole device, with memory mapped in page by page.


def try_allocate_expandable_block(state: State, pool: BlockPool, stream: int, size: int) -> Block | None:
    """A free mapped block of at least ``size`` bytes, removed from its pool, or ``None`` without memory.

    Memory mapped before it ran out stays in the pool (``try_allocate_expandable_block``).
    """
    block = find_expandable_block(state, pool, stream, size)
    if block.state == UNMAPPED:
        mapped = map_block(state, block, min(block.size, size))
        if mapped is None:
            return None
        block = mapped
    while block.size < size:
        # The next block is unmapped: find_expandable_block ensured enough room, and free blocks merge.
        unmapped = block.next
        assert unmapped is not None
        mapped = map_block(state, unmapped, min(size - block.size, unmapped.size))
        if mapped is None:
            return None
        block = mapped
    pool.erase(block)
    return block


def find_expandable_block(state: State, pool: BlockPool, stream: int, size: int) -> Block:
    """The start of the lowest run of free and unmapped blocks with room for ``size`` (``find_expandable_block``)."""
    for _, unmapped in pool.unmapped.get(stream, ()):
        before = unmapped.prev
        start = before if before is not None and before.state == FREE else unmapped
        if _has_available_address_space(start, size):
            return start
    return _new_segment(state, pool, stream)


def page_size(state: State, pool: BlockPool) -> int:
    """Bytes mapped at a time: the size of a segment of the small or the large pool."""
    return SMALL_BUFFER if pool.is_small else state.settings.large_segment_size


def _has_available_address_space(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and block.state in (FREE, UNMAPPED):
        room += block.size
        block = block.next
    return room >= size


def _new_segment(state: State, pool: BlockPool, stream: int) -> Block:
    """Address space of 1 1/8 of the device's memory, nothing mapped (``struct ExpandableSegment``)."""
    page = page_size(state, pool)
    size = round_up(state.driver.total + state.driver.total // 8, page)
    segment = Segment(state.driver.reserve_addresses(size), size, pool, stream, page)
    state.segments[segment.address] = segment
    pool.insert_unmapped(segment.first)
    return segment.first


def map_block(state: State, block: Block, size: int) -> Block | None:
    """Map the pages of an unmapped block that cover its first ``size`` bytes (``map_block``).

    Returns the free block that contains them, which is in its pool, or ``None`` without memory.
    """
    segment = block.segment
    pool = segment.pool
    mapped = round_up(size, segment.page_size)
    if not state.driver.map(block.address, mapped, segment.stream):
        return None
    pool.erase_unmapped(block)
    if mapped < block.size:
        pool.insert_unmapped(block.splice_after(mapped))
    merged = _merge(block, FREE, pool.erase)
    pool.insert(merged)
    state.counters.add_reserved(mapped)
    return merged


def _merge(block: Block, state: int, erase: Callable[[Block], None]) -> Block:
    """Merge a block that is in no pool with its neighbours in ``state``, which ``erase`` takes out of their pool."""
    before = block.prev
    if before is not None and before.state == state:
        erase(before)
        before.absorb_next()
        before.exchange_places(block)
        block = before
    if block.next is not None and block.next.state == state:
        erase(block.next)
        block.absorb_next()
    return block


def unmap_block(state: State, block: Block) -> None:
    """Return the pages that are wholly inside a free block (``unmap_block``)."""
    segment = block.segment
    pool = segment.pool
    begin = segment.address + round_up(block.offset, segment.page_size)
    end = block.address + block.size
    end -= (end - segment.address) % segment.page_size
    if begin >= end:
        return
    pool.erase(block)
    if begin > block.address:
        rest = block.splice_after(begin - block.address)
        rest.exchange_places(block)
        pool.insert(block)
        block = rest
    if end < block.address + block.size:
        pool.insert(block.splice_after(end - begin))
    pool.insert_unmapped(_merge(block, UNMAPPED, pool.erase_unmapped))
    state.counters.remove_reserved(end - begin)
    state.driver.give_back(CallKind.SEGMENT_UNMAP, begin, end - begin, segment.stream)
    if not segment.has_memory():  # (``release_expandable_segment``)
        pool.erase_unmapped(segment.first)
        del state.segments[segment.address]


# Returning memory to the device: all free memory, just enough, or what has been free for long.


def release_block(state: State, block: Block) -> None:
    """Return a segment that consists of one free block (``release_block``)."""
    segment = block.segment
    segment.pool.erase(block)
    block.state = GONE
    del state.segments[segment.address]
    state.counters.segments -= 1
    state.counters.remove_reserved(block.size)
    limit = state.settings.max_split_size
    if limit is not None and block.size >= limit:
        state.counters.oversize_segments -= 1
    state.driver.give_back(CallKind.SEGMENT_FREE, block.address, block.size, segment.stream)


def release_blocks(state: State, pool: BlockPool) -> None:
    """Return every free segment of a pool, and the free pages of its expandable ones (``release_blocks``)."""
    to_unmap = []
    for block in pool.blocks():
        if block.segment.page_size:
            to_unmap.append(block)
        elif not block.is_split():
            release_block(state, block)
    for block in to_unmap:
        unmap_block(state, block)


def release_cached_blocks(state: State, streams: StreamUses) -> None:
    """Return all free memory (``release_cached_blocks``), as ``torch.cuda.empty_cache`` does."""
    streams.synchronize_and_free_events(state)
    release_blocks(state, state.large)
    release_blocks(state, state.small)


def release_available_cached_blocks(state: State, pool: BlockPool, stream: int, rounded: int) -> bool:
    """Return oversize blocks until ``rounded`` bytes may fit (``release_available_cached_blocks``).

    Only with ``max_split_size``; returns whether another request to the device may succeed.
    """
    limit = state.settings.max_split_size
    if limit is None:
        return False
    wanted = max(rounded, limit)
    free = pool.of_stream(stream)
    at = bisect_left(free, (wanted,))
    if at < len(free) and not free[at][2].segment.page_size:
        release_block(state, free[at][2])
        return True
    released = 0
    for size, _, block in reversed(free[:at]):
        if released >= wanted or size < limit:
            break
        if not block.segment.page_size:
            released += size
            release_block(state, block)
    return released >= wanted


def garbage_collect_cached_blocks(state: State) -> None:
    """Return segments of the large pool that have been free for long (``garbage_collect_cached_blocks``).

    It starts above the threshold, a share of the process's limit; ages are numbers of searches of the pool, and each
    round returns segments at least as old as the average.
    """
    allowed = allowed_memory(state.settings, state.driver.total)
    if allowed is None:
        return
    target = state.counters.reserved - int(state.settings.garbage_collection_threshold * allowed)
    pool = state.large
    freeable = [block for block in pool.blocks() if not block.is_split()]
    total_age = sum(pool.gc_count(block) for block in freeable)
    reclaimed = 0
    while reclaimed < target and freeable:
        threshold = total_age / len(freeable)
        old = [block for block in freeable if pool.gc_count(block) >= threshold and not block.segment.page_size]
        if not old:
            return
        for block in old:
            reclaimed += block.size
            total_age -= pool.gc_count(block)
            freeable.remove(block)
            release_block(state, block)


# The allocator itself: ``malloc``, ``free`` and what they need from the device.

NO_LIMIT = 1 << 63
"""``max_split_size`` if none is set: larger than any size."""

Plan: TypeAlias = tuple[int, int, bool]
"""Block size, segment size, and whether it is in the small pool."""


class _AllocParams(NamedTuple):
    """A request that no free block could serve (``struct AllocParams``)."""

    pool: BlockPool
    stream: int
    asked: int
    rounded: int
    segment_size: int


class DeviceCachingAllocator(State):
    """One device's caching allocator (``class DeviceCachingAllocator``, ``c10/cuda/CUDACachingAllocator.cpp``).

    ``total_memory`` is the device's in bytes, ``None`` for one that never runs out; ``outside`` are the bytes of
    others. ``addresses`` returns the address of each new segment. ``oldest_first`` is torch 2.12's order
    (:class:`BlockPool`). Blocks are handles: pass each block of ``malloc`` to ``free`` once.
    """

    __slots__ = ("_collects", "_expandable", "_max_split_size", "_plain", "_plans", "streams")

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        total_memory: int | None = None,
        outside: int = 0,
        addresses: AddressSource | None = None,
        oldest_first: bool = False,
    ) -> None:
        driver = Driver(total_memory, outside, addresses)
        super().__init__(settings or Settings(), driver, oldest_first=oldest_first)
        self.streams = StreamUses()
        self.configure(self.settings)

    def configure(self, settings: Settings) -> None:
        """Use ``settings`` from now on (``setAllocatorSettings``)."""
        self.settings = settings
        self._plans: dict[int, Plan] = {}
        self._expandable = settings.expandable_segments
        self._max_split_size = NO_LIMIT if settings.max_split_size is None else settings.max_split_size
        self.set_memory_fraction(settings.memory_fraction)

    def set_memory_fraction(self, fraction: float | None) -> None:
        """Limit the process to this fraction of the device's memory (``setMemoryFraction``)."""
        self.settings = replace(self.settings, memory_fraction=fraction)
        self._collects = fraction is not None and self.settings.garbage_collection_threshold > 0
        # With these settings the best fit is always used.
        self._plain = self.settings.max_split_size is None and not self._expandable and not self._collects

    def malloc(self, size: int, stream: int = 0) -> Block:
        """A block for ``size`` bytes, used on ``stream``. Raises :class:`OutOfMemory`."""
        if self.counters.awaiting:
            self.streams.process_events(self)
        rounded, segment_size, is_small = self._plans.get(size) or self._plan(size)
        pool = self.small if is_small else self.large
        block = self.get_free_block(pool, stream, rounded)
        if block is None:
            block = self._obtain(_AllocParams(pool, stream, size, rounded, segment_size))
        self._alloc_found_block(block, size, rounded)
        return block

    def get_free_block(self, pool: BlockPool, stream: int, rounded: int) -> Block | None:
        """The best fit, removed from the pool, if the settings allow it (``get_free_block``)."""
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
        """Whether the remainder of a block becomes a free block (``should_split``)."""
        if pool.is_small or self._expandable:
            return remaining >= MIN_BLOCK_SIZE
        return remaining > SMALL_SIZE and rounded < self._max_split_size

    def _alloc_found_block(self, block: Block, asked: int, rounded: int) -> None:
        """Allocate a block that was removed from its pool (``alloc_found_block``)."""
        counters = self.counters
        segment = block.segment
        was_split = block.prev is not None or block.next is not None
        size = block.size
        remaining = size - rounded
        if remaining and self.should_split(segment.pool, rounded, remaining):
            rest = block.splice_after(rounded)
            rest.gc_count_base = segment.pool.get_free_blocks_call_count
            if segment.pool.numbers is not None:
                rest.place, block.place = block.place, rest.place
            insort(segment.free, (remaining, rest.place, rest))
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
        if counters.allocated > counters.window_most:
            counters.window_most = counters.allocated
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
        """Free a block (``free``); it stays active while other streams use it."""
        if block.state != ALLOCATED:
            raise ValueError(f"the block at {block.address:#x} is not allocated")
        counters = self.counters
        counters.allocations -= 1
        counters.allocated -= block.size
        if block.size >= self._max_split_size:
            counters.oversize_allocations -= 1
        if not (self.streams.uses and self.streams.delay_free(self, block)):
            self.free_block(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that ``stream`` uses ``block``, too: freeing has to wait for it (``recordStream``)."""
        self.streams.record_stream(block, stream)

    def complete_events(self, stream: int | None = None) -> None:
        """Complete the work queued so far on ``stream``, or on all streams."""
        self.streams.complete(stream)

    def empty_cache(self) -> None:
        """Return all free memory, as ``torch.cuda.empty_cache`` does."""
        release_cached_blocks(self, self.streams)

    def snapshot(self) -> tuple[SnapshotSegment, ...]:
        """The current segments and blocks, by address."""
        return snapshot_segments(self)

    def _plan(self, size: int) -> Plan:
        if size < 1:
            raise UsageError(f"an allocation has at least 1 byte, not {size}")
        rounded = round_size(size, self.settings)
        plan = (rounded, get_allocation_size(rounded, self.settings), rounded <= SMALL_SIZE)
        self._plans[size] = plan
        return plan

    def _obtain(self, params: _AllocParams) -> Block:
        """A block from the device, with the retries of ``malloc`` in their order."""
        if self._collects:
            garbage_collect_cached_blocks(self)
        block = self._alloc_block(params)
        if block is None and release_available_cached_blocks(self, params.pool, params.stream, params.rounded):
            block = self._alloc_block(params)
        if block is None:
            release_cached_blocks(self, self.streams)
            self.counters.num_alloc_retries += 1
            block = self._alloc_block(params)
        if block is None:
            self.counters.num_ooms += 1
            raise OutOfMemory(self._report(params))
        return block

    def _alloc_block(self, params: _AllocParams) -> Block | None:
        """A block of a new segment, or of more of an expandable one (``alloc_block``); ``None`` without memory."""
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

    def _report(self, params: _AllocParams) -> OutOfMemoryReport:
        counters = self.counters
        free = self.driver.free
        limit = allowed_memory(self.settings, self.driver.total)
        allowed = None if limit is None else max(limit - counters.reserved, 0)
        candidates = Candidates.among(self.pools, params.pool, params.stream)
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
            largest_free=largest_size(candidates.usable),
        )


def _expandable_size(block: Block) -> int:
    """The size of a free block together with the unmapped block behind it, into which it can grow."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
