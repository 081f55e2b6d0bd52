"""Each rule of the caching allocator in a small exact example."""

import pytest

from ampmem.allocator.blocks import CallKind, SnapshotBlock, SnapshotSegment
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.oom import (
    Candidates,
    OutOfMemory,
    Reason,
    candidates,
    largest_size,
    pack_segments,
    unpack_segments,
)
from ampmem.allocator.settings import (
    GIB,
    MIB,
    Settings,
    get_allocation_size,
    parse_settings,
    round_size,
    roundup_power2_next_division,
)
from ampmem.errors import UsageError


def allocator_with(text: str = "", total: int | None = None, outside: int = 0) -> DeviceCachingAllocator:
    return DeviceCachingAllocator(parse_settings(text), total_memory=total, outside=outside)


def device_calls(allocator: DeviceCachingAllocator) -> list[tuple[CallKind, int]]:
    return [(call.call, call.size) for call in allocator.driver.calls]


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_sizes_are_rounded_to_512(size: int, rounded: int) -> None:
    assert round_size(size, Settings()) == rounded


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        (4, 2048, 2048),
        (4, 2049, 2560),
        (4, 5000, 5120),
        (4, 7169, 8192),
        (4, 8192, 8192),
        (2, 3 * MIB + 1, 4 * MIB),
        (8, 3 * MIB + 1, 3 * MIB + 256 * 1024),
        (1, 5000, 5120),
    ],
)
def test_sizes_are_rounded_to_divisions_of_powers_of_two(divisions: int, size: int, rounded: int) -> None:
    assert round_size(size, parse_settings(f"roundup_power2_divisions:{divisions}")) == rounded


def test_no_division_below_one_byte() -> None:
    assert roundup_power2_next_division(1200, 4) == 1280
    assert roundup_power2_next_division(3, 4) == 4


def test_divisions_differ_by_size() -> None:
    settings = parse_settings("roundup_power2_divisions:[4:1,8:2,>:4]")
    assert round_size(5 * MIB + 1, settings) == 5 * MIB + 512
    assert round_size(9 * MIB, settings) == 12 * MIB
    assert round_size(17 * MIB, settings) == 20 * MIB


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
    ],
)
def test_the_size_of_a_segment(rounded: int, segment: int) -> None:
    assert get_allocation_size(rounded, Settings()) == segment
    block = allocator_with().malloc(rounded)
    assert block.segment.size == segment


def test_the_size_of_a_large_segment_is_a_setting() -> None:
    assert allocator_with("large_segment_size_mb:32").malloc(2 * MIB).segment.size == 32 * MIB


def test_small_and_large_allocations_do_not_share_segments() -> None:
    allocator = allocator_with()
    large = allocator.malloc(MIB + 1)
    small = allocator.malloc(MIB)
    assert large.segment is not small.segment
    assert [large.segment.pool.is_small, small.segment.pool.is_small] == [False, True]


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    allocator = allocator_with()
    first = allocator.malloc(MIB)
    second = allocator.malloc(MIB - 512)
    assert second.offset == MIB
    assert second.next is not None and second.next.size == 512
    assert allocator.malloc(3).offset == 2 * MIB - 512
    assert first.segment.size == allocator.counters.allocated


@pytest.mark.parametrize(("size", "block_size"), [(11 * MIB, 12 * MIB), (11 * MIB - 512, 11 * MIB - 512)])
def test_a_large_block_is_split_when_more_than_1_mib_is_left(size: int, block_size: int) -> None:
    allocator = allocator_with()
    assert allocator.malloc(size).size == block_size
    counters = allocator.counters
    assert counters.allocated == block_size
    assert counters.requested == size
    assert counters.inactive_split_bytes == 12 * MIB - block_size


def test_the_best_fit_is_the_smallest_block_and_then_the_lowest_address() -> None:
    allocator = allocator_with()
    sizes = [30, 12, 14, 12]
    blocks = [allocator.malloc(size * MIB) for size in sizes]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.malloc(12 * MIB).address == blocks[1].address
    assert allocator.malloc(12 * MIB).address == blocks[3].address
    assert allocator.malloc(12 * MIB).address == blocks[2].address
    # 14 MiB were handed out for 12: a remainder of 2 MiB stays free.
    assert allocator.counters.inactive_split_bytes == 2 * MIB


def test_a_freed_block_merges_with_both_neighbours() -> None:
    allocator = allocator_with()
    blocks = [allocator.malloc(4 * MIB) for _ in range(3)]
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    assert not blocks[0].segment.first.is_split()
    assert allocator.malloc(20 * MIB).address == blocks[0].address
    assert allocator.counters.inactive_split_peak == 2


def test_blocks_belong_to_a_stream() -> None:
    allocator = allocator_with()
    block = allocator.malloc(4 * MIB, stream=1)
    allocator.free(block)
    assert allocator.malloc(4 * MIB, stream=2).segment is not block.segment
    assert allocator.malloc(4 * MIB, stream=1).segment is block.segment


def test_a_block_is_freed_once() -> None:
    allocator = allocator_with()
    block = allocator.malloc(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(block)
    with pytest.raises(UsageError):
        allocator.malloc(0)


def test_empty_cache_returns_whole_segments_only() -> None:
    allocator = allocator_with()
    kept, freed, gone = (allocator.malloc(size * MIB) for size in (4, 8, 12))
    for block in (freed, gone):
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.counters.reserved == 20 * MIB
    assert allocator.counters.reserved_peak == 32 * MIB
    assert list(allocator.segments.values()) == [kept.segment]


def test_max_split_size_keeps_large_blocks_whole() -> None:
    allocator = allocator_with("max_split_size_mb:32")
    block = allocator.malloc(40 * MIB)
    assert allocator.counters.oversize_segments == 1
    allocator.free(block)
    # Too small a request for a block of at least max_split_size, even though it would fit.
    assert allocator.malloc(20 * MIB).segment is not block.segment
    whole = allocator.malloc(36 * MIB)
    assert (whole.segment, whole.size) == (block.segment, 40 * MIB)
    assert allocator.counters.oversize_allocations == 1


def test_a_request_of_exactly_max_split_size_is_oversize_too() -> None:
    allocator = allocator_with("max_split_size_mb:32")
    block = allocator.malloc(40 * MIB)
    allocator.free(block)
    again = allocator.malloc(32 * MIB)
    assert (again.segment, again.size) == (block.segment, 40 * MIB)


@pytest.mark.parametrize(("rounding", "reused"), [(20, False), (30, True)])
def test_an_oversize_block_serves_only_what_is_nearly_as_large(rounding: int, reused: bool) -> None:
    allocator = allocator_with(f"max_split_size_mb:32,max_non_split_rounding_mb:{rounding}")
    block = allocator.malloc(60 * MIB)
    allocator.free(block)
    assert (allocator.malloc(40 * MIB).segment is block.segment) is reused


def test_oversize_blocks_are_released_before_all_others() -> None:
    allocator = allocator_with("max_split_size_mb:32", total=132 * MIB)
    blocks = [allocator.malloc(size * MIB) for size in (12, 40, 40, 40)]
    for block in blocks[:3]:
        allocator.free(block)
    allocator.malloc(70 * MIB)
    freed = [call.address for call in allocator.driver.calls if call.call == CallKind.SEGMENT_FREE]
    assert freed == [blocks[2].address, blocks[1].address]
    assert allocator.counters.num_alloc_retries == 0


def test_no_more_oversize_blocks_are_released_than_needed() -> None:
    allocator = allocator_with("max_split_size_mb:32", total=150 * MIB)
    for block in [allocator.malloc(size * MIB) for size in (34, 36, 38, 40)]:
        allocator.free(block)
    allocator.malloc(75 * MIB)
    assert device_calls(allocator)[4:] == [
        (CallKind.SEGMENT_FREE, 40 * MIB),
        (CallKind.SEGMENT_FREE, 38 * MIB),
        (CallKind.SEGMENT_ALLOC, 76 * MIB),
    ]


@pytest.mark.parametrize(("size", "released"), [(45, 70), (20, 40)])
def test_one_oversize_block_that_is_large_enough_is_released_alone(size: int, released: int) -> None:
    allocator = allocator_with("max_split_size_mb:32", total=115 * MIB)
    for block in [allocator.malloc(size * MIB) for size in (40, 70)]:
        allocator.free(block)
    allocator.malloc(size * MIB)
    assert device_calls(allocator)[2] == (CallKind.SEGMENT_FREE, released * MIB)
    assert device_calls(allocator)[3][0] == CallKind.SEGMENT_ALLOC


def test_everything_free_is_released_before_memory_runs_out() -> None:
    allocator = allocator_with(total=100 * MIB)
    blocks = [allocator.malloc(size) for size in (1, 30 * MIB, 40 * MIB)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(90 * MIB)
    assert device_calls(allocator)[3:] == [
        (CallKind.SEGMENT_FREE, 30 * MIB),
        (CallKind.SEGMENT_FREE, 40 * MIB),
        (CallKind.SEGMENT_FREE, 2 * MIB),
        (CallKind.SEGMENT_ALLOC, 90 * MIB),
    ]
    counters = allocator.counters
    assert (counters.num_alloc_retries, counters.num_ooms, counters.num_sync_all_streams) == (1, 0, 1)
    assert (counters.num_device_alloc, counters.num_device_free) == (4, 3)


def test_garbage_collection_returns_what_has_been_free_for_longest() -> None:
    allocator = allocator_with("garbage_collection_threshold:0.5,per_process_memory_fraction:1", total=200 * MIB)
    old, young, _ = [allocator.malloc(20 * MIB) for _ in range(3)]
    allocator.free(old)
    allocator.malloc(30 * MIB)
    allocator.free(young)
    allocator.malloc(30 * MIB)
    assert allocator.counters.num_device_free == 0
    # 120 of 200 MiB are above the threshold: 20 have to go. The ages are 3 and 2 searches of the pool.
    allocator.malloc(30 * MIB)
    freed = [call.address for call in allocator.driver.calls if call.call == CallKind.SEGMENT_FREE]
    assert freed == [old.address]


def test_garbage_collection_returns_what_is_as_old_as_the_average() -> None:
    allocator = allocator_with("garbage_collection_threshold:0.1,per_process_memory_fraction:1", total=200 * MIB)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.malloc(60 * MIB)
    assert device_calls(allocator)[1] == (CallKind.SEGMENT_FREE, 50 * MIB)
    assert allocator.counters.num_alloc_retries == 0


def test_garbage_collection_needs_a_memory_fraction() -> None:
    allocator = allocator_with("garbage_collection_threshold:0.1", total=200 * MIB)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.malloc(60 * MIB)
    assert allocator.counters.num_device_free == 0


def test_the_peaks_can_be_reset() -> None:
    allocator = allocator_with()
    allocator.free(allocator.malloc(12 * MIB))
    allocator.counters.reset_peaks()
    counters = allocator.counters
    assert (counters.allocated_peak, counters.reserved_peak) == (0, 12 * MIB)
    assert counters.memory_stats()["active_bytes.all.peak"] == 0


def test_statistics_have_the_keys_of_torch() -> None:
    allocator = allocator_with()
    allocator.malloc(1)
    found = allocator.counters.memory_stats()
    assert found["allocated_bytes.all.current"] == 512
    assert found["requested_bytes.all.peak"] == 1
    assert found["reserved_bytes.all.current"] == 2 * MIB
    assert found["inactive_split.all.current"] == 1
    assert found["oversize_segments.current"] == found["num_ooms"] == 0
    assert len(found) == 11 * 2 + 5


def out_of_memory(allocator: DeviceCachingAllocator, size: int, stream: int = 0) -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(size, stream)
    return caught.value


def test_out_of_memory_when_all_is_in_use() -> None:
    allocator = allocator_with(total=GIB, outside=100 * MIB)
    allocator.malloc(900 * MIB)
    error = out_of_memory(allocator, 30 * MIB + 1)
    report = error.report
    assert report.reason is Reason.EXHAUSTED
    assert (report.asked, report.rounded, report.segment) == (30 * MIB + 1, 30 * MIB + 512, 32 * MIB)
    assert (report.device_total, report.device_free) == (GIB, 24 * MIB)
    assert (report.allocated, report.reserved, report.cached, report.largest_free) == (900 * MIB, 900 * MIB, 0, 0)
    assert str(error) == (
        "out of memory. Tried to allocate 30.0 MiB in a new segment of 32.0 MiB. The device has 1.0 GiB, of which "
        "24.0 MiB is free. This process has reserved 900.0 MiB: 900.0 MiB is allocated and 0 B is cached (largest "
        "usable block: 0 B). 100.0 MiB is assumed to be in use outside of the allocator (CUDA context, libraries). "
        "Reason: all free memory together is not enough"
    )
    assert report.in_short == (
        "out of memory: the script tried to allocate 30.0 MiB in a new segment of 32.0 MiB, and 24.0 MiB of the "
        "device's 1.0 GiB was free"
    )
    assert allocator.counters.num_ooms == 1
    # The allocator goes on working.
    assert allocator.malloc(20 * MIB).size == 20 * MIB


def test_out_of_memory_by_fragmentation() -> None:
    allocator = allocator_with(total=40 * MIB)
    blocks = [allocator.malloc(size * MIB) for size in (8, 2, 10, 10, 10)]
    for index in (0, 2):
        allocator.free(blocks[index])
    report = out_of_memory(allocator, 18 * MIB).report
    assert report.reason is Reason.FRAGMENTED
    assert (report.cached, report.largest_free) == (18 * MIB, 10 * MIB)


def test_out_of_memory_on_the_wrong_stream() -> None:
    allocator = allocator_with(total=20 * MIB)
    allocator.malloc(2 * MIB, stream=1)
    report = out_of_memory(allocator, 4 * MIB).report
    assert report.reason is Reason.WRONG_STREAM
    assert report.largest_free == 0


def test_out_of_memory_in_the_wrong_pool() -> None:
    allocator = allocator_with(total=20 * MIB)
    allocator.malloc(4 * MIB)
    report = out_of_memory(allocator, 1024).report
    assert report.reason is Reason.WRONG_POOL
    assert report.largest_free == 0


def test_out_of_memory_by_the_memory_fraction() -> None:
    allocator = allocator_with("per_process_memory_fraction:0.5", total=200 * MIB)
    allocator.malloc(80 * MIB)
    report = out_of_memory(allocator, 40 * MIB).report
    assert allocator.malloc(20 * MIB).size == 20 * MIB
    assert report.reason is Reason.LIMITED
    assert (report.allowed, report.device_free) == (100 * MIB, 120 * MIB)
    assert "120.0 MiB is free. This process may use 100.0 MiB, of which 20.0 MiB is left. This" in str(report)
    assert report.in_short.endswith("40.0 MiB, and 20.0 MiB was left of the 100.0 MiB that this process may use")


def test_out_of_memory_because_of_max_split_size() -> None:
    allocator = allocator_with("max_split_size_mb:20", total=80 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    # On a GPU a graph that is captured keeps such a block from being released.
    found = Candidates.among(allocator.pools, allocator.large, 0)
    assert found.reason(30 * MIB, 30 * MIB, 0, None) is Reason.OVERSIZE
    assert largest_size(found.usable) == 60 * MIB


def segment(pool: tuple[int, int], *, small: bool, stream: int, free: int) -> SnapshotSegment:
    """A segment with a block that is in use, one that waits for a stream, and one of ``free`` bytes."""
    sizes = (512, True, False), (1024, False, True), (free, False, False)
    address, blocks = 0x100000, []
    for size, allocated, awaiting in sizes:
        blocks.append(SnapshotBlock(address, size, size - 12, allocated, awaiting))
        address += size
    return SnapshotSegment(
        address=0x100000,
        size=sum(size for size, _, _ in sizes),
        stream=stream,
        is_small=small,
        expandable=False,
        pool_id=pool,
        blocks=tuple(blocks),
    )


@pytest.mark.parametrize(
    ("rounded", "usable", "other_stream", "other_pool"),
    [(MIB, [1536], [2048], [2560, 3072, 4096]), (MIB + 512, [2560], [], [1536, 2048, 3072, 4096])],
)
def test_which_free_blocks_of_segments_may_serve(
    rounded: int, usable: list[int], other_stream: list[int], other_pool: list[int]
) -> None:
    """Of stream 3 and the default pool; up to a MiB a block comes from the pool for small ones."""
    segments = (
        segment((0, 0), small=True, stream=3, free=1536),
        segment((0, 0), small=True, stream=0, free=2048),
        segment((0, 0), small=False, stream=3, free=2560),
        segment((1, 0), small=True, stream=3, free=3072),
        segment((1, 0), small=False, stream=0, free=4096),
    )
    found = candidates(segments, rounded, 3, (0, 0))
    groups = (found.usable, found.other_stream, found.other_pool)
    assert [[block.size for block in group] for group in groups] == [usable, other_stream, other_pool]
    assert unpack_segments(pack_segments(segments)) == segments


@pytest.mark.parametrize("oldest_first", [False, True])
def test_of_equal_blocks_the_first_is_taken_and_in_torch_2_12_the_oldest(oldest_first: bool) -> None:
    """A part that was cut off and came back made the first segment's block the younger one."""
    allocator = DeviceCachingAllocator(oldest_first=oldest_first)
    first, second = allocator.malloc(12 * MIB), allocator.malloc(12 * MIB)
    places = [first.address, second.address]
    allocator.free(first)
    allocator.free(second)
    part = allocator.malloc(3 * MIB)
    assert part.address == places[0]
    allocator.free(part)
    assert allocator.malloc(12 * MIB).address == places[oldest_first]
