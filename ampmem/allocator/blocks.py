"""The caching allocator's data: blocks in segments and pools, its counters, and its memory from the driver."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ampmem.allocator.settings import SMALL_BUFFER, Settings, round_up

FREE = 0
"""State of a block in its pool, which can be allocated, merged and released."""
ALLOCATED = 1
AWAITING = 2
"""State of a block that its owner freed while other streams may still use it (``record_stream``)."""
UNMAPPED = 3
"""State of address space of an expandable segment without memory behind it."""
GONE = 4
"""State of a block that was merged into another, or whose segment was returned to the device."""


class Segment:
    """Memory from one ``cudaMalloc``, or the address space of an expandable segment.

    ``size`` (bytes) is that of the address space; ``page_size`` is 0 unless the segment is expandable. ``first`` is its
    first block; the others follow through ``next``.
    """

    __slots__ = ("address", "first", "free", "page_size", "pool", "size", "stream")

    def __init__(self, address: int, size: int, pool: BlockPool, stream: int, page_size: int = 0) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.stream = stream
        self.page_size = page_size
        self.free = pool.of_stream(stream)
        self.first = Block(address, size, self, None, None)

    def blocks(self) -> Iterator[Block]:
        """The segment's blocks, by address."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next

    def has_memory(self) -> bool:
        """Whether any part of the segment has memory behind it."""
        return self.first.state != UNMAPPED or self.first.next is not None


class Block:
    """A part of a segment. ``address`` and ``size`` in bytes; ``requested`` is what its owner asked for."""

    __slots__ = ("address", "gc_count_base", "next", "place", "prev", "requested", "segment", "size", "state")

    def __init__(self, address: int, size: int, segment: Segment, prev: Block | None, next: Block | None) -> None:
        self.address = address
        numbers = segment.pool.numbers
        self.place = address if numbers is None else numbers.__next__()
        """The block's position among the free blocks of its size."""
        self.size = size
        self.segment = segment
        self.prev = prev
        self.next = next
        self.state = FREE
        self.requested = 0
        self.gc_count_base = 0

    @property
    def offset(self) -> int:
        """The block's offset in its segment, in bytes."""
        return self.address - self.segment.address

    def is_split(self) -> bool:
        """Whether the block shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    def splice_after(self, size: int) -> Block:
        """Cut off all but the first ``size`` bytes; returns the block of the rest, right behind this one."""
        rest = Block(self.address + size, self.size - size, self.segment, self, self.next)
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Merge the following block into this one; the caller updates the pools."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self
        gone.state = GONE

    def exchange_places(self, other: Block) -> None:
        """Exchange the places of this block and ``other`` in the pool's order, unless the order is by address.

        PyTorch cuts a new block off the front of a block, and a freed block absorbs its neighbours; here the block in
        front stays the same object in both cases.
        """
        if self.segment.pool.numbers is not None:
            self.place, other.place = other.place, self.place


FreeList: TypeAlias = list[tuple[int, int, Block]]
"""Free blocks of one stream as (size, place, block), sorted: the first that is large enough fits best."""


class BlockPool:
    """The free blocks of the small or the large pool (``struct BlockPool``).

    PyTorch orders a pool by (stream, size, address); here each stream has a sorted list of its own. Torch 2.12 orders
    it by (stream, size, number), here ``oldest_first``: blocks are numbered when they are made
    (``BlockComparatorRegistrationCounter``). Later versions number segments, and then order by address: since addresses
    rise here, that is the first order. ``unmapped`` holds the unmapped parts of expandable segments per stream, sorted
    by address.
    """

    __slots__ = ("free", "get_free_blocks_call_count", "is_small", "numbers", "unmapped")

    def __init__(self, *, is_small: bool, oldest_first: bool = False) -> None:
        self.is_small = is_small
        self.numbers = itertools.count() if oldest_first else None
        self.free: dict[int, FreeList] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.get_free_blocks_call_count = 0

    def of_stream(self, stream: int) -> FreeList:
        """The free blocks of ``stream``; the same list every time."""
        return self.free.setdefault(stream, [])

    def blocks(self) -> list[Block]:
        """All free blocks in PyTorch's order; a copy, so the pool may change during iteration."""
        return [block for stream in sorted(self.free) for _, _, block in self.free[stream]]

    def insert(self, block: Block) -> None:
        """Add a free block (``insert_into_blocks``)."""
        block.state = FREE
        block.gc_count_base = self.get_free_blocks_call_count
        insort(block.segment.free, (block.size, block.place, block))

    def erase(self, block: Block) -> None:
        """Remove a free block."""
        free = block.segment.free
        del free[bisect_left(free, (block.size, block.place))]

    def insert_unmapped(self, block: Block) -> None:
        """Add address space without memory."""
        block.state = UNMAPPED
        insort(self.unmapped.setdefault(block.segment.stream, []), (block.address, block))

    def erase_unmapped(self, block: Block) -> None:
        """Remove address space without memory."""
        unmapped = self.unmapped[block.segment.stream]
        del unmapped[bisect_left(unmapped, (block.address,))]

    def gc_count(self, block: Block) -> int:
        """Number of searches of this pool since ``block`` became free."""
        return self.get_free_blocks_call_count - block.gc_count_base


# The allocator's statistics.

_STATISTICS = {
    "allocated_bytes.all": "allocated",
    "requested_bytes.all": "requested",
    "reserved_bytes.all": "reserved",
    "inactive_split_bytes.all": "inactive_split_bytes",
    "allocation.all": "allocations",
    "segment.all": "segments",
    "inactive_split.all": "inactive_split",
    "oversize_allocations": "oversize_allocations",
    "oversize_segments": "oversize_segments",
}
"""The counter of each statistic of torch's that has a peak."""


@dataclass(slots=True, eq=False)
class Counters:
    """The counters behind ``torch.cuda.memory_stats``, all pools together.

    ``allocated`` are bytes of blocks in use, ``requested`` the bytes that their owners requested, ``awaiting`` counts
    blocks that wait for other streams, ``reserved`` is memory from the device, ``inactive_split`` counts the free parts
    of segments in use (``struct DeviceStats``, ``c10/core/CachingDeviceAllocator.h``). ``active`` has no counter: it is
    the sum of allocated and awaiting bytes, and its peak can differ from the peak of allocated bytes only while blocks
    are awaiting.
    """

    allocations: int = 0
    allocations_peak: int = 0
    allocated: int = 0
    allocated_peak: int = 0
    window_most: int = 0
    """Peak of ``allocated`` since it was last reset, by a reader that needs the peak of a part of the run."""
    requested: int = 0
    requested_peak: int = 0
    awaiting: int = 0
    awaiting_bytes: int = 0
    awaiting_bytes_peak: int = 0
    awaiting_requested: int = 0
    active_peak: int = 0
    active_bytes_peak: int = 0
    inactive_split: int = 0
    inactive_split_peak: int = 0
    inactive_split_bytes: int = 0
    inactive_split_bytes_peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0
    segments: int = 0
    segments_peak: int = 0
    oversize_allocations: int = 0
    oversize_allocations_peak: int = 0
    oversize_segments: int = 0
    oversize_segments_peak: int = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_sync_all_streams: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0

    def note_active(self) -> None:
        """Update the peaks of ``active``; only needed after an allocation while blocks are awaiting events."""
        self.active_peak = max(self.active_peak, self.allocations + self.awaiting)
        self.active_bytes_peak = max(self.active_bytes_peak, self.allocated + self.awaiting_bytes)

    def add_reserved(self, size: int) -> None:
        """Count memory from the device."""
        self.num_device_alloc += 1
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def remove_reserved(self, size: int) -> None:
        """Count memory returned to the device."""
        self.num_device_free += 1
        self.reserved -= size

    def add_segment(self, *, oversize: bool) -> None:
        """Count one more segment that is not expandable."""
        self.segments += 1
        self.segments_peak = max(self.segments_peak, self.segments)
        if oversize:
            self.oversize_segments += 1
            self.oversize_segments_peak = max(self.oversize_segments_peak, self.oversize_segments)

    def add_oversize_allocation(self) -> None:
        """Count the allocation of a block of at least ``max_split_size``."""
        self.oversize_allocations += 1
        self.oversize_allocations_peak = max(self.oversize_allocations_peak, self.oversize_allocations)

    def change_inactive_split(self, count: int, size: int) -> None:
        """Add ``count`` blocks and ``size`` bytes, which may be negative."""
        self.inactive_split += count
        if self.inactive_split > self.inactive_split_peak:
            self.inactive_split_peak = self.inactive_split
        self.inactive_split_bytes += size
        if self.inactive_split_bytes > self.inactive_split_bytes_peak:
            self.inactive_split_bytes_peak = self.inactive_split_bytes

    def reset_peaks(self) -> None:
        """``resetPeakStats``: every peak becomes the current value."""
        self.active_peak = self.active_bytes_peak = 0
        for name in self.__slots__:
            if name.endswith("_peak") and not name.startswith("active"):
                setattr(self, name, getattr(self, name.removesuffix("_peak")))
        self.note_active()

    def memory_stats(self) -> dict[str, int]:
        """The statistics under the keys of ``torch.cuda.memory_stats``."""
        found = {
            "active_bytes.all.current": self.allocated + self.awaiting_bytes,
            "active_bytes.all.peak": max(self.active_bytes_peak, self.allocated_peak),
            "active.all.current": self.allocations + self.awaiting,
            "active.all.peak": max(self.active_peak, self.allocations_peak),
        }
        for key, name in _STATISTICS.items():
            found[f"{key}.current"], found[f"{key}.peak"] = getattr(self, name), getattr(self, f"{name}_peak")
        return found | {name: getattr(self, name) for name in self.__slots__ if name.startswith("num_")}


# The CUDA driver as the model needs it: memory, and addresses for it.

AddressSource: TypeAlias = Callable[[int], int]
"""Returns the address of the next ``cudaMalloc`` of this many bytes."""

FIRST_ADDRESS = 0x7F00_0000_0000
UNLIMITED = 1 << 44
"""Stands for the device's memory in bytes if none is given: more than any device has."""


class CallKind(StrEnum):
    """The allocator's calls to the driver, in the words of a torch snapshot's trace."""

    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCall:
    """One successful call to the driver."""

    call: CallKind
    address: int
    size: int
    stream: int


class Driver:
    """A device's memory in bytes. ``in_use`` is the allocator's part; ``outside`` that of others.

    ``calls`` has every successful call, in order; ``observer`` is called with each.

    The driver's addresses cannot be predicted, so they rise from call to call unless an address source is given. They
    matter only between free blocks of equal size.
    """

    __slots__ = ("_next", "_source", "calls", "in_use", "observer", "outside", "total")

    def __init__(self, total: int | None, outside: int = 0, source: AddressSource | None = None) -> None:
        self.total = UNLIMITED if total is None else total
        self.outside = outside
        self.in_use = 0
        self.calls: list[DriverCall] = []
        self.observer: Callable[[DriverCall], None] | None = None
        self._source = source
        self._next = FIRST_ADDRESS

    @property
    def free(self) -> int:
        """Free bytes of the device (``cudaMemGetInfo``)."""
        return self.total - self.outside - self.in_use

    def malloc(self, size: int, stream: int) -> int | None:
        """The address of ``size`` new bytes (``cudaMalloc``), or ``None`` if there are not enough."""
        if size > self.free:
            return None
        address = self.reserve_addresses(size) if self._source is None else self._source(size)
        self._note(CallKind.SEGMENT_ALLOC, address, size, stream)
        return address

    def map(self, address: int, size: int, stream: int) -> bool:
        """Map memory to addresses (``cuMemCreate`` and ``cuMemMap``); ``False`` if there is not enough."""
        if size > self.free:
            return False
        self._note(CallKind.SEGMENT_MAP, address, size, stream)
        return True

    def give_back(self, call: CallKind, address: int, size: int, stream: int) -> None:
        """Return memory to the device (``cudaFree`` or ``cuMemUnmap``)."""
        self._note(call, address, size, stream)

    def reserve_addresses(self, size: int) -> int:
        """Reserve address space without memory (``cuMemAddressReserve``); returns its address."""
        address = self._next
        self._next += round_up(size, SMALL_BUFFER)
        return address

    def _note(self, call: CallKind, address: int, size: int, stream: int) -> None:
        self.in_use += size if call in (CallKind.SEGMENT_ALLOC, CallKind.SEGMENT_MAP) else -size
        made = DriverCall(call=call, address=address, size=size, stream=stream)
        self.calls.append(made)
        if self.observer is not None:
            self.observer(made)


# Shared by the parts of the model: pools, segments, counters, and freeing a block.


class State:
    """The allocator's data, shared by the parts of the model."""

    __slots__ = ("counters", "driver", "large", "segments", "settings", "small")

    def __init__(self, settings: Settings, driver: Driver, *, oldest_first: bool = False) -> None:
        self.settings = settings
        self.driver = driver
        self.counters = Counters()
        self.small = BlockPool(is_small=True, oldest_first=oldest_first)
        self.large = BlockPool(is_small=False, oldest_first=oldest_first)
        self.segments: dict[int, Segment] = {}

    @property
    def pools(self) -> tuple[BlockPool, BlockPool]:
        """The small pool and the large one. Private pools (CUDA graphs, ``torch.cuda.MemPool``) are not modelled."""
        return self.small, self.large

    def free_block(self, block: Block) -> None:
        """Merge a block with its free neighbours and put it into its pool (``free_block``)."""
        segment = block.segment
        free = segment.free
        self.counters.requested -= block.requested
        count = size = 0
        before = block.prev
        if before is not None and before.state == FREE:
            del free[bisect_left(free, (before.size, before.place))]
            count = -1
            size = -before.size
            # Block.absorb_next inlined: the call would cost a tenth of the whole model's time.
            before.size += block.size
            before.next = after = block.next
            if after is not None:
                after.prev = before
            block.state = GONE
            if segment.pool.numbers is not None:
                before.place = block.place
            block = before
        after = block.next
        if after is not None and after.state == FREE:
            del free[bisect_left(free, (after.size, after.place))]
            count -= 1
            size -= after.size
            block.size += after.size
            block.next = beyond = after.next
            if beyond is not None:
                beyond.prev = block
            after.state = GONE
        block.state = FREE
        block.gc_count_base = segment.pool.get_free_blocks_call_count
        insort(free, (block.size, block.place, block))
        if segment.page_size == 0:
            if block.prev is not None or block.next is not None:
                count += 1
                size += block.size
            if count or size:
                self.counters.change_inactive_split(count, size)

    def blocks(self) -> Iterator[Block]:
        """Every block of every segment."""
        for segment in self.segments.values():
            yield from segment.blocks()


# Segments and blocks as frozen values, from a torch snapshot or from the model.

PoolId: TypeAlias = tuple[int, int]

DEFAULT_POOL: PoolId = (0, 0)
"""``segment_pool_id`` of segments outside private pools."""


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """A block: ``allocated``, ``awaiting`` other streams, or else free.

    ``requested`` is the block's size if the snapshot does not have it.
    """

    address: int
    size: int
    requested: int
    allocated: bool
    awaiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSegment:
    """A segment, or a range of an expandable one with memory behind it."""

    address: int
    size: int
    stream: int
    is_small: bool
    expandable: bool
    pool_id: PoolId
    blocks: tuple[SnapshotBlock, ...]


def snapshot_segments(state: State) -> tuple[SnapshotSegment, ...]:
    """The segments with memory, by address (``DeviceCachingAllocator::snapshot``)."""
    found = [
        _snapshot_segment(segment, list(blocks))
        for segment in state.segments.values()
        for mapped, blocks in itertools.groupby(segment.blocks(), key=lambda block: block.state != UNMAPPED)
        if mapped
    ]
    return tuple(sorted(found, key=lambda segment: segment.address))


def _snapshot_segment(segment: Segment, blocks: list[Block]) -> SnapshotSegment:
    return SnapshotSegment(
        address=blocks[0].address,
        size=sum(block.size for block in blocks),
        stream=segment.stream,
        is_small=segment.pool.is_small,
        expandable=segment.page_size > 0,
        pool_id=DEFAULT_POOL,
        blocks=tuple(
            SnapshotBlock(each.address, each.size, each.requested, each.state == ALLOCATED, each.state == AWAITING)
            for each in blocks
        ),
    )
