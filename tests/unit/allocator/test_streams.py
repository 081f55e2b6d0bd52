"""Blocks used on several streams."""

from ampmem.allocator.blocks import AWAITING
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.settings import MIB


def test_a_block_of_two_streams_stays_active_until_its_event_is_done() -> None:
    allocator = DeviceCachingAllocator()
    block = allocator.malloc(12 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    counters = allocator.counters
    assert counters.allocated == 0
    assert counters.memory_stats()["active_bytes.all.current"] == counters.requested == 12 * MIB
    other = allocator.malloc(12 * MIB)
    assert other.segment is not block.segment
    assert allocator.counters.memory_stats()["active_bytes.all.peak"] == 24 * MIB
    assert allocator.counters.allocated_peak == 12 * MIB
    allocator.complete_events(1)
    assert allocator.counters.memory_stats()["active_bytes.all.current"] == 24 * MIB
    # The allocator looks at events when it is asked for memory.
    assert allocator.malloc(12 * MIB).segment is block.segment
    assert allocator.counters.memory_stats()["active_bytes.all.current"] == 24 * MIB


def test_use_on_the_own_stream_needs_no_event() -> None:
    allocator = DeviceCachingAllocator()
    block = allocator.malloc(1, stream=3)
    allocator.record_stream(block, 3)
    allocator.free(block)
    assert allocator.counters.memory_stats()["active_bytes.all.current"] == 0


def test_every_stream_has_to_come_past_its_event() -> None:
    allocator = DeviceCachingAllocator()
    block = allocator.malloc(12 * MIB)
    for stream in (1, 2, 2):
        allocator.record_stream(block, stream)
    allocator.free(block)
    allocator.complete_events(2)
    allocator.malloc(1)
    assert block.state == AWAITING
    allocator.complete_events(1)
    allocator.malloc(1)
    assert block.state != AWAITING


def test_only_events_recorded_so_far_are_done() -> None:
    allocator = DeviceCachingAllocator()
    first, second = allocator.malloc(12 * MIB), allocator.malloc(12 * MIB)
    for block in (first, second):
        allocator.record_stream(block, 1)
    allocator.free(first)
    allocator.complete_events()
    allocator.free(second)
    allocator.malloc(1)
    assert [first.state == AWAITING, second.state == AWAITING] == [False, True]


def test_a_stream_may_have_come_past_some_of_its_events() -> None:
    allocator = DeviceCachingAllocator()
    blocks = [allocator.malloc(12 * MIB + 1) for _ in range(3)]
    for block in blocks:
        allocator.record_stream(block, 1)
        allocator.free(block)
    counters = allocator.counters
    assert allocator.streams.recorded == {1: 3}
    assert (counters.awaiting_bytes, counters.awaiting_requested) == (3 * (12 * MIB + 512), 3 * (12 * MIB + 1))
    allocator.streams.complete_until(1, 2)
    allocator.streams.complete_until(1, 1)  # what is done stays done
    allocator.malloc(1)
    assert [block.state == AWAITING for block in blocks] == [False, False, True]
    assert (counters.awaiting_bytes, counters.awaiting_requested) == (12 * MIB + 512, 12 * MIB + 1)
    allocator.streams.complete_until(1, 3)
    allocator.malloc(1)
    assert (counters.awaiting, counters.awaiting_requested) == (0, 0)
    assert counters.awaiting_bytes_peak == 3 * (12 * MIB + 512)
    counters.reset_peaks()
    assert counters.awaiting_bytes_peak == 0


def test_a_waiting_block_does_not_merge() -> None:
    allocator = DeviceCachingAllocator()
    first, second = allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)
    allocator.record_stream(first, 1)
    for block in (first, second):
        allocator.free(block)
    assert first.is_split()
    assert allocator.counters.inactive_split_bytes == 16 * MIB
    allocator.empty_cache()
    assert not allocator.segments
    assert allocator.counters.num_sync_all_streams == 1


def test_running_out_of_memory_waits_for_events() -> None:
    allocator = DeviceCachingAllocator(total_memory=20 * MIB)
    block = allocator.malloc(12 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    assert allocator.malloc(14 * MIB).size == 14 * MIB
