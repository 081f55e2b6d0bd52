"""Expandable segments in small exact examples."""

import pytest

from ampmem.allocator.blocks import UNMAPPED, Block, CallKind
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.oom import OutOfMemory
from ampmem.allocator.settings import GIB, MIB, Settings, parse_settings


def expandable(total: int = GIB) -> DeviceCachingAllocator:
    return DeviceCachingAllocator(Settings(expandable_segments=True), total_memory=total)


def layout(block: Block) -> list[tuple[int, int]]:
    """(state, size in MiB) of every block of its segment."""
    return [(each.state, each.size // MIB) for each in block.segment.blocks()]


@pytest.mark.parametrize(("size", "page"), [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB)])
def test_memory_is_mapped_in_pages(size: int, page: int) -> None:
    allocator = expandable()
    block = allocator.malloc(size)
    assert allocator.counters.reserved == page
    assert block.segment.page_size == page
    assert [(call.call, call.size) for call in allocator.driver.calls] == [(CallKind.SEGMENT_MAP, page)]


def test_the_page_of_the_large_pool_is_a_large_segment() -> None:
    settings = parse_settings("expandable_segments:True,large_segment_size_mb:32")
    assert DeviceCachingAllocator(settings, total_memory=GIB).malloc(2 * MIB).segment.page_size == 32 * MIB


def test_address_space_is_an_eighth_more_than_the_device() -> None:
    assert expandable(160 * MIB).malloc(2 * MIB).segment.size == 180 * MIB
    assert expandable(100 * MIB).malloc(2 * MIB).segment.size == 120 * MIB


def test_a_segment_grows_behind_its_free_tail() -> None:
    allocator = expandable()
    first = allocator.malloc(4 * MIB)
    second = allocator.malloc(30 * MIB)
    assert second.address == first.address + 4 * MIB
    counters = allocator.counters
    assert counters.reserved == 40 * MIB
    assert counters.segments_peak == counters.inactive_split_peak == 0
    assert counters.num_device_alloc == 2


def test_a_large_block_is_split_down_to_512_bytes() -> None:
    allocator = expandable()
    block = allocator.malloc(20 * MIB - 512)
    assert block.size == 20 * MIB - 512
    assert block.next is not None and block.next.size == 512


def test_the_best_fit_counts_the_unmapped_part_behind_a_block() -> None:
    allocator = expandable()
    free, _, tail = (allocator.malloc(size * MIB) for size in (24, 10, 16))
    allocator.free(free)
    allocator.free(tail)
    # The tail is 26 MiB and could grow to the end of the address space: the hole of 24 MiB fits better.
    assert allocator.malloc(18 * MIB).address == free.address
    assert allocator.malloc(18 * MIB).address == tail.address


def test_a_larger_hole_is_a_better_fit_than_a_smaller_tail_that_can_grow() -> None:
    allocator = expandable()
    hole, _, tail = (allocator.malloc(size * MIB) for size in (28, 10, 16))
    allocator.free(hole)
    allocator.free(tail)
    # The tail is 22 MiB, and behind it is the rest of the address space.
    assert allocator.malloc(18 * MIB).address == hole.address


def test_of_equal_holes_the_lowest_serves() -> None:
    allocator = expandable()
    first, _, second, _ = (allocator.malloc(12 * MIB) for _ in range(4))
    for block in (second, first):
        allocator.free(block)
    assert allocator.malloc(12 * MIB).address == first.address


def test_every_stream_and_pool_has_a_segment() -> None:
    allocator = expandable()
    blocks = [allocator.malloc(size, stream) for size in (1, 2 * MIB) for stream in (0, 1)]
    assert len({block.segment.address for block in blocks}) == 4


def test_whole_pages_are_unmapped_and_mapped_again_from_the_lowest_address() -> None:
    allocator = expandable()
    first, middle, last = (allocator.malloc(size * MIB) for size in (10, 50, 20))
    allocator.free(middle)
    allocator.empty_cache()
    # 10 to 60 MiB were free: the pages from 20 to 60 go.
    assert layout(first) == [(1, 10), (0, 10), (UNMAPPED, 40), (1, 20), (UNMAPPED, GIB // MIB + 128 + 8 - 80)]
    assert allocator.counters.reserved == 40 * MIB
    again = allocator.malloc(25 * MIB)
    assert again.address == middle.address
    assert layout(first)[1:4] == [(1, 25), (0, 5), (UNMAPPED, 20)]
    assert last.address - first.address == 60 * MIB


def test_a_snapshot_shows_the_ranges_with_memory() -> None:
    allocator = expandable()
    blocks = [allocator.malloc(size * MIB) for size in (10, 50, 20)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    found = allocator.snapshot()
    assert [segment.address for segment in found] == [blocks[0].address, blocks[2].address]
    assert [[block.size // MIB for block in segment.blocks] for segment in found] == [[10, 10], [20]]
    assert all(segment.expandable and segment.size == 20 * MIB for segment in found)


def test_a_segment_without_memory_is_forgotten() -> None:
    allocator = expandable()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.empty_cache()
    assert not allocator.segments
    assert allocator.counters.reserved == 0
    assert not any(allocator.large.unmapped.values())


def test_pages_are_unmapped_when_another_pool_needs_the_memory() -> None:
    allocator = expandable(60 * MIB)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.malloc(40 * MIB, stream=1)
    assert allocator.counters.num_alloc_retries == 1
    assert allocator.counters.reserved_peak == 60 * MIB


def test_what_was_mapped_before_memory_ran_out_stays() -> None:
    allocator = expandable(60 * MIB)
    kept = allocator.malloc(30 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(40 * MIB)
    assert allocator.counters.reserved == 40 * MIB
    assert layout(kept)[:2] == [(1, 30), (0, 10)]


def test_fragmentation_that_ordinary_segments_have_disappears() -> None:
    sizes = [11 * MIB + step * MIB // 4 for step in range(40)]
    peaks = []
    for settings in (Settings(), Settings(expandable_segments=True)):
        allocator = DeviceCachingAllocator(settings, total_memory=GIB)
        for size in sizes:
            pair = [allocator.malloc(size), allocator.malloc(size)]
            for block in pair:
                allocator.free(block)
        peaks.append(allocator.counters.reserved_peak)
    assert peaks[1] < peaks[0]
