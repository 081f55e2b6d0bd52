"""Whatever the calls and the settings: blocks tile their segments, and the statistics are their sums."""

from itertools import pairwise
from typing import TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ampmem.allocator.blocks import ALLOCATED, AWAITING, FREE, UNMAPPED, Block, Segment
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.oom import OutOfMemory, Reason
from ampmem.allocator.settings import MIB, MIN_BLOCK_SIZE, Settings, get_allocation_size, parse_settings, round_size

TOTAL = 160 * MIB
STREAMS = 3

Call: TypeAlias = tuple[str, int, int]

SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 50 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 20 * MIB, 32 * MIB, 40 * MIB]),
)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, STREAMS - 1)),
        st.tuples(st.just("malloc"), SIZES, st.integers(0, STREAMS - 1)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("record_stream"), st.integers(0, 1000), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("complete_events"), st.integers(0, STREAMS - 1), st.just(0)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    max_size=60,
)
CONFIGURATIONS = (
    "",
    "max_split_size_mb:20",
    "max_split_size_mb:32,max_non_split_rounding_mb:25",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,16:8,>:1]",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:20",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9,max_split_size_mb:20",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9,expandable_segments:True",
    "large_segment_size_mb:11",
)


class Driven:
    """An allocator, the blocks that it gave out, and the highest sums that were seen."""

    def __init__(self, configuration: Settings) -> None:
        self.allocator = DeviceCachingAllocator(configuration, total_memory=TOTAL)
        self.live: list[Block] = []
        self.highest = {"allocated": 0, "requested": 0, "active": 0, "reserved": 0}

    def do(self, call: Call) -> None:
        what, number, stream = call
        match what:
            case "malloc":
                self.malloc(number, stream)
            case "free" if self.live:
                self.allocator.free(self.live.pop(number % len(self.live)))
            case "record_stream" if self.live:
                self.allocator.record_stream(self.live[number % len(self.live)], stream)
            case "complete_events":
                self.allocator.complete_events(number)
            case "empty_cache":
                self.allocator.empty_cache()

    def malloc(self, size: int, stream: int) -> None:
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemory as error:
            report = error.report
            assert report.reason is Reason.OVERSIZE or report.largest_free < report.rounded
            assert report.device_free < report.segment or report.allowed is not None
            return
        assert block.size >= block.requested == size
        assert block.address % MIN_BLOCK_SIZE == 0
        assert (block.segment.stream, block.state) == (stream, ALLOCATED)
        self.live.append(block)

    def finish(self) -> None:
        """Free everything, wherever it is."""
        allocator = self.allocator
        for block in self.live:
            allocator.free(block)
        allocator.empty_cache()


def check_segment(segment: Segment) -> None:
    """The blocks follow each other without a gap, and free neighbours have merged."""
    blocks = list(segment.blocks())
    assert blocks[0].address == segment.address and blocks[0].prev is None
    assert sum(block.size for block in blocks) == segment.size
    for before, after in pairwise(blocks):
        assert after.prev is before
        assert after.address == before.address + before.size
        assert not (before.state == after.state and before.state in (FREE, UNMAPPED))
    for block in blocks:
        assert block.size > 0 and block.segment is segment
        assert block.state != UNMAPPED or (block.offset % segment.page_size == block.size % segment.page_size == 0)


def check_pools(allocator: DeviceCachingAllocator) -> None:
    """The pools hold exactly the free and the unmapped blocks, each in its pool, sorted."""
    blocks = list(allocator.blocks())
    for pool in allocator.pools:
        for stream, free in pool.free.items():
            assert free == sorted(free, key=lambda entry: entry[:2])
            mine = [b for b in blocks if b.segment.pool is pool and b.segment.stream == stream and b.state == FREE]
            assert {(b.size, b.address) for b in mine} == {entry[:2] for entry in free}
            assert all(entry[2].size == entry[0] and entry[2].state == FREE for entry in free)
        unmapped = {b.address for b in blocks if b.segment.pool is pool and b.state == UNMAPPED}
        assert unmapped == {address for entries in pool.unmapped.values() for address, _ in entries}


def check(driven: Driven) -> None:
    """Everything that holds after every call."""
    allocator = driven.allocator
    for segment in allocator.segments.values():
        check_segment(segment)
    ranges = sorted((segment.address, segment.address + segment.size) for segment in allocator.segments.values())
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    check_pools(allocator)
    blocks = list(allocator.blocks())
    assert {id(block) for block in blocks if block.state == ALLOCATED} == {id(block) for block in driven.live}
    check_statistics(driven, blocks)


def check_statistics(driven: Driven, blocks: list[Block]) -> None:
    """Every statistic is the sum that it stands for."""
    found, stats = driven.allocator.counters, driven.allocator.counters.memory_stats()
    allocated = [block for block in blocks if block.state == ALLOCATED]
    active = [block for block in blocks if block.state in (ALLOCATED, AWAITING)]
    inactive = [block for block in blocks if block.state == FREE and block.is_split() and not block.segment.page_size]
    ordinary = [segment for segment in driven.allocator.segments.values() if not segment.page_size]
    sums = {
        "allocated": sum(block.size for block in allocated),
        "requested": sum(block.requested for block in active),
        "active": sum(block.size for block in active),
        "reserved": sum(block.size for block in blocks if block.state != UNMAPPED),
    }
    for name, value in sums.items():
        driven.highest[name] = max(driven.highest[name], value)
        assert (name, stats[f"{name}_bytes.all.current"]) == (name, value)
        assert stats[f"{name}_bytes.all.peak"] >= driven.highest[name]
    waiting = [block for block in active if block.state == AWAITING]
    assert driven.allocator.counters.awaiting_bytes == sum(block.size for block in waiting)
    assert driven.allocator.counters.awaiting_requested == sum(block.requested for block in waiting)
    # These rise only at the very end of a call, so nothing higher can have gone unseen.
    assert found.allocated_peak == driven.highest["allocated"]
    assert found.requested_peak == driven.highest["requested"]
    assert found.inactive_split_bytes == sum(block.size for block in inactive)
    assert found.inactive_split == len(inactive)
    assert found.allocations == len(allocated)
    assert stats["active.all.current"] == len(active)
    assert found.segments == len(ordinary)
    assert driven.allocator.driver.in_use == sums["reserved"] <= TOTAL
    limit = driven.allocator.settings.max_split_size
    if limit is not None:
        assert found.oversize_allocations == sum(block.size >= limit for block in allocated)
        assert found.oversize_segments == sum(segment.size >= limit for segment in ordinary)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@settings(max_examples=40)
@given(calls=CALLS)
@example(calls=[("malloc", 40 * MIB, 0), ("free", 0, 0), ("malloc", 30 * MIB, 1), ("malloc", 130 * MIB, 0)])
def test_blocks_tile_segments_and_statistics_are_sums(configuration: str, calls: list[Call]) -> None:
    driven = Driven(parse_settings(configuration))
    for call in calls:
        driven.do(call)
        check(driven)
    driven.finish()
    # Address space for which there was no memory at all may stay.
    assert not any(segment.has_memory() for segment in driven.allocator.segments.values())
    assert driven.allocator.driver.in_use == 0
    stats = driven.allocator.counters.memory_stats()
    assert not any(value for key, value in stats.items() if key.endswith(".current"))


@settings(max_examples=200)
@given(size=st.integers(1, 1 << 40), divisions=st.sampled_from([1, 2, 4, 8, 64]))
def test_rounding_never_takes_away(size: int, divisions: int) -> None:
    configuration = parse_settings(f"roundup_power2_divisions:{divisions}")
    rounded = round_size(size, configuration)
    assert rounded >= size and rounded % MIN_BLOCK_SIZE == 0
    assert round_size(rounded, configuration) == rounded
    assert get_allocation_size(rounded, configuration) >= rounded
    if divisions > 1:
        assert rounded <= max(size * (1 + 1 / divisions), size + MIN_BLOCK_SIZE)
