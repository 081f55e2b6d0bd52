"""Giving memory back to the device: all that is free, just enough, or what has been free for long."""

from __future__ import annotations

from bisect import bisect_left

from ampmem.allocator.model.blocks import GONE, Block, BlockPool
from ampmem.allocator.model.driver import Call
from ampmem.allocator.model.expandable import unmap_block
from ampmem.allocator.model.oom import allowed_memory
from ampmem.allocator.model.state import State
from ampmem.allocator.model.streams import StreamUses


def release_block(state: State, block: Block) -> None:
    """Return a segment that is one free block (``release_block``)."""
    segment = block.segment
    segment.pool.erase(block)
    block.state = GONE
    del state.segments[segment.address]
    state.counters.segments -= 1
    state.counters.remove_reserved(block.size)
    limit = state.settings.max_split_size
    if limit is not None and block.size >= limit:
        state.counters.oversize_segments -= 1
    state.driver.give_back(Call.SEGMENT_FREE, block.address, block.size, segment.stream)


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
    """Return all that is free (``release_cached_blocks``): what ``torch.cuda.empty_cache`` does.

    While a private pool is being filled only private pools that nobody holds any more are touched.
    """
    if not state.captures:
        streams.synchronize_and_free_events(state)
        release_blocks(state, state.large)
        release_blocks(state, state.small)
    for pool_id, private in list(state.private_pools.items()):
        if private.use_count == 0:
            release_blocks(state, private.small)
            release_blocks(state, private.large)
            segments = [segment for segment in state.segments.values() if segment.pool.private == pool_id]
            if not any(segment.has_memory() for segment in segments):
                del state.private_pools[pool_id]
                for segment in segments:
                    del state.segments[segment.address]


def release_available_cached_blocks(state: State, pool: BlockPool, stream: int, rounded: int) -> bool:
    """Return oversize blocks until ``rounded`` bytes may fit (``release_available_cached_blocks``).

    Only with ``max_split_size``; says whether it is worth asking the device again.
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

    Starts above the threshold's share of what the process may take; ages are counted in searches of the
    pool, and each round returns what is at least as old as the average.
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
