"""Expandable segments: address space for the whole device, with memory mapped in page by page."""

from __future__ import annotations

from ampmem.allocator.model.blocks import FREE, UNMAPPED, Block, BlockPool, Segment
from ampmem.allocator.model.driver import Call
from ampmem.allocator.model.state import State
from ampmem.allocator.rounding import round_up
from ampmem.allocator.settings import SMALL_BUFFER


def try_allocate_expandable_block(state: State, pool: BlockPool, stream: int, size: int) -> Block | None:
    """A free mapped block of at least ``size`` bytes, out of its pool, or ``None`` without memory.

    Memory that was mapped before it ran out stays in the pool (``try_allocate_expandable_block``).
    """
    block = find_expandable_block(state, pool, stream, size)
    if block.state == UNMAPPED:
        mapped = map_block(state, block, min(block.size, size))
        if mapped is None:
            return None
        block = mapped
    while block.size < size:
        # What follows is unmapped: find_expandable_block made sure of enough room, and free blocks merge.
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
    """How much is mapped at a time: as much as a segment of small blocks has otherwise, or of large ones."""
    return SMALL_BUFFER if pool.is_small else state.settings.large_segment_size


def _has_available_address_space(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and block.state in (FREE, UNMAPPED):
        room += block.size
        block = block.next
    return room >= size


def _new_segment(state: State, pool: BlockPool, stream: int) -> Block:
    """Address space for 1 1/8 of the device, nothing mapped (``struct ExpandableSegment``)."""
    page = page_size(state, pool)
    size = round_up(state.driver.total + state.driver.total // 8, page)
    segment = Segment(state.driver.reserve_addresses(size), size, pool, stream, page)
    state.segments[segment.address] = segment
    pool.insert_unmapped(segment.first)
    return segment.first


def map_block(state: State, block: Block, size: int) -> Block | None:
    """Map the pages of an unmapped block that cover its first ``size`` bytes (``map_block``).

    Gives the free block that they end up in, which is in its pool, or ``None`` without memory.
    """
    segment = block.segment
    pool = segment.pool
    mapped = round_up(size, segment.page_size)
    if not state.driver.map(block.address, mapped, segment.stream):
        return None
    pool.erase_unmapped(block)
    if mapped < block.size:
        pool.insert_unmapped(block.splice_after(mapped))
    merged = _merge_into_pool(pool, block)
    state.counters.add_reserved(mapped)
    return merged


def _merge_into_pool(pool: BlockPool, block: Block) -> Block:
    """Merge a block that is in no pool with its free neighbours and insert it."""
    before = block.prev
    if before is not None and before.state == FREE:
        pool.erase(before)
        before.absorb_next()
        block = before
    if block.next is not None and block.next.state == FREE:
        pool.erase(block.next)
        block.absorb_next()
    pool.insert(block)
    return block


def unmap_block(state: State, block: Block) -> None:
    """Return the pages that lie wholly in a free block (``unmap_block``)."""
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
        pool.insert(block)
        block = rest
    if end < block.address + block.size:
        pool.insert(block.splice_after(end - begin))
    _merge_unmapped(pool, block)
    state.counters.remove_reserved(end - begin)
    state.driver.give_back(Call.SEGMENT_UNMAP, begin, end - begin, segment.stream)
    if not segment.has_memory():
        _release_expandable_segment(state, segment)


def _merge_unmapped(pool: BlockPool, block: Block) -> None:
    before = block.prev
    if before is not None and before.state == UNMAPPED:
        pool.erase_unmapped(before)
        before.absorb_next()
        block = before
    if block.next is not None and block.next.state == UNMAPPED:
        pool.erase_unmapped(block.next)
        block.absorb_next()
    pool.insert_unmapped(block)


def _release_expandable_segment(state: State, segment: Segment) -> None:
    """Forget a segment without memory (``release_expandable_segment``)."""
    segment.pool.erase_unmapped(segment.first)
    del state.segments[segment.address]
