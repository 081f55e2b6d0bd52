"""What the parts of the model share: pools, segments, counters, and the freeing of a block."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ampmem.allocator.model.blocks import FREE, GONE, Block, BlockPool, Segment
from ampmem.allocator.model.driver import Driver
from ampmem.allocator.model.statistics import Counters
from ampmem.allocator.settings import Settings


class PrivatePool:
    """A small and a large pool of their own (``struct PrivatePool``): CUDA graphs, ``torch.cuda.MemPool``.

    ``use_count`` counts who still holds the pool; at 0 its free segments may be released.
    """

    __slots__ = ("large", "small", "use_count")

    def __init__(self, pool_id: int) -> None:
        self.small = BlockPool(is_small=True, private=pool_id)
        self.large = BlockPool(is_small=False, private=pool_id)
        self.use_count = 0


class State:
    """The allocator's data. ``captures`` maps a private pool that is being filled to its stream, or to ``None``."""

    __slots__ = ("captures", "counters", "driver", "large", "private_pools", "segments", "settings", "small")

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self.settings = settings
        self.driver = driver
        self.counters = Counters()
        self.small = BlockPool(is_small=True)
        self.large = BlockPool(is_small=False)
        self.private_pools: dict[int, PrivatePool] = {}
        self.captures: dict[int, int | None] = {}
        self.segments: dict[int, Segment] = {}

    def pools(self) -> Iterator[BlockPool]:
        """All pools: the default ones first."""
        yield self.small
        yield self.large
        for private in self.private_pools.values():
            yield private.small
            yield private.large

    def get_pool(self, is_small: bool, stream: int) -> BlockPool:
        """The pool that serves ``stream``: a private one while that is being filled from it (``get_pool``)."""
        for pool_id, captured in self.captures.items():
            if captured is None or captured == stream:
                private = self.private_pools[pool_id]
                return private.small if is_small else private.large
        return self.small if is_small else self.large

    def free_block(self, block: Block) -> None:
        """Merge a block with its free neighbours and put it into its pool (``free_block``)."""
        segment = block.segment
        free = segment.free
        self.counters.requested -= block.requested
        count = size = 0
        before = block.prev
        if before is not None and before.state == FREE:
            del free[bisect_left(free, (before.size, before.address))]
            count = -1
            size = -before.size
            # Same as Block.absorb_next, which as a call would cost a tenth of the whole model's time.
            before.size += block.size
            before.next = after = block.next
            if after is not None:
                after.prev = before
            block.state = GONE
            block = before
        after = block.next
        if after is not None and after.state == FREE:
            del free[bisect_left(free, (after.size, after.address))]
            count -= 1
            size -= after.size
            block.size += after.size
            block.next = beyond = after.next
            if beyond is not None:
                beyond.prev = block
            after.state = GONE
        block.state = FREE
        block.gc_count_base = segment.pool.get_free_blocks_call_count
        insort(free, (block.size, block.address, block))
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
