"""Snapshots of real runs come out of the model exactly, and so do traces that the model made itself."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.replayed import Replay, replay
from support.snapshots import real

from ampmem.allocator.blocks import AWAITING, DEFAULT_POOL, Block, DriverCall, SnapshotBlock, SnapshotSegment
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.oom import OutOfMemory
from ampmem.allocator.settings import MIB, Settings, parse_settings
from ampmem.allocator.snapshot import DeviceSnapshot, NotReplayable, SnapshotEvent, read_snapshot, rebuild
from ampmem.allocator.trace import CallTrace, Operation, make_calls, trace_of_events, what_if
from ampmem.events import Action, EventColumns, SegmentAction, SegmentColumns
from ampmem.importer.recording import recording_of
from ampmem.importer.unpickle import load_plain

REAL = {
    # Segments that the driver was asked for within the trace, and the peak reserved bytes.
    "course_no_time": (152, 6_471_811_072),
    "lm2700m_ctx128_bf16_forward": (461, 24_245_174_272),
    "lm2700m_ctx128_fp32_forward": (289, 19_667_091_456),
    "lm2700m_ctx128_fp32_step": (783, 61_111_009_280),
    "lm_medium_ctx128_fp32_step": (0, 7_235_174_400),
    "lm_medium_ctx512_bf16_inference": (0, 1_981_808_640),
}
"""The recorded runs: the state at the start of every one of them can be rebuilt without ambiguity."""

SYNTHETIC = "old_no_free_requested"
"""Made up by its authors: its blocks do not fill its segments, and its trace is about other addresses."""


def agree(result: Replay) -> bool:
    """Whether model and recording agree in everything that can be compared."""
    return (
        (result.moved, result.resized) == (0, 0)
        and result.recorded_calls == result.modelled_calls
        and result.recorded_peak_reserved == result.modelled_peak_reserved
    )


def snapshot_of(name: str) -> DeviceSnapshot:
    return read_snapshot(load_plain(real(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_recorded_run_comes_out_exactly(name: str) -> None:
    segments, peak_reserved = REAL[name]
    result = replay(snapshot_of(name))
    assert result.modelled_calls == result.recorded_calls
    assert len(result.recorded_calls) == segments
    assert result.modelled_peak_reserved == result.recorded_peak_reserved == peak_reserved
    assert (result.moved, result.first_moved, result.resized) == (0, None, 0)
    assert agree(result)


def test_wrong_settings_do_not_come_out_exactly() -> None:
    snapshot = snapshot_of("lm2700m_ctx128_fp32_forward")
    result = replay(snapshot, parse_settings("large_segment_size_mb:32"))
    assert not agree(result)
    assert result.first_moved is not None
    assert result.recorded_calls != result.modelled_calls


def test_a_synthetic_snapshot_is_refused() -> None:
    with pytest.raises(NotReplayable, match="expandable segments"):
        replay(snapshot_of(SYNTHETIC))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REAL, SYNTHETIC])
def test_every_snapshot_can_be_run_under_other_settings(name: str) -> None:
    trace = trace_of_events(recording_of(snapshot_of(name), name).events)
    result = what_if(trace, parse_settings("expandable_segments:True"))
    assert result.before.events == result.after.events == len(trace)
    before, after = result.before.counters, result.after.counters
    assert after.reserved_peak < before.reserved_peak
    assert (before.requested, before.requested_peak) == (after.requested, after.requested_peak)


class Recorder:
    """An allocator that is recorded as torch records one: a trace, and the segments at the end."""

    def __init__(self, configuration: Settings, total: int) -> None:
        self.allocator = DeviceCachingAllocator(configuration, total_memory=total)
        self.events: list[SnapshotEvent] = []
        self.live: list[Block] = []
        self.states: list[tuple[int, dict[int, tuple[int, int, bool]]]] = [(0, {})]
        self._waiting: list[tuple[Block, int, int]] = []

    def malloc(self, size: int, stream: int) -> None:
        made = len(self.allocator.driver.calls)
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemory as error:
            self._after(made)
            self._note("oom", error.report.device_free, size, stream)
            return
        self._after(made)
        self._note("alloc", block.address, size, stream)
        self.live.append(block)

    def free(self, number: int) -> None:
        if not self.live:
            return
        block = self.live.pop(number % len(self.live))
        row = (block.address, block.requested, block.segment.stream)
        self.allocator.free(block)
        self._note("free_requested", *row)
        if block.state == AWAITING:
            self._waiting.append((block, row[0], row[1]))
        else:
            self._note("free_completed", *row)

    def empty_cache(self) -> None:
        made = len(self.allocator.driver.calls)
        self.allocator.empty_cache()
        self._after(made)

    def record_stream(self, number: int, stream: int) -> None:
        if self.live:
            self.allocator.record_stream(self.live[number % len(self.live)], stream)

    def remember(self) -> None:
        """Keep what is in use now, by address."""
        in_use = {block.address: block for block in (*self.live, *(row[0] for row in self._waiting))}
        now = {address: (b.size, b.requested, b.state == AWAITING) for address, b in in_use.items()}
        self.states.append((len(self.events), now))

    def snapshot(self, start: int) -> DeviceSnapshot:
        """What torch would write if the trace had been switched on at event ``start``."""
        return DeviceSnapshot(
            segments=self.allocator.snapshot(),
            events=tuple(self.events[start:]),
            settings=self.allocator.settings,
        )

    def _after(self, made: int) -> None:
        """Note what a call did by the way: frees whose wait was over, and calls to the driver."""
        for row in [row for row in self._waiting if row[0].state != AWAITING]:
            self._waiting.remove(row)
            self._note("free_completed", row[1], row[2], row[0].segment.stream)
        for call in self.allocator.driver.calls[made:]:
            self._note(call.call.value, call.address, call.size, call.stream)

    def _note(self, action: str, address: int, size: int, stream: int) -> None:
        self.events.append(SnapshotEvent(action=action, address=address, size=size, stream=stream))


SIZES = st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 40 * MIB), st.sampled_from([11 * MIB, 19 * MIB + 512]))
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("record_stream"), st.integers(0, 100), st.integers(0, 1)),
        st.tuples(st.just("complete_events"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def record(calls: list[tuple[str, int, int]], configuration: Settings) -> Recorder:
    recorder = Recorder(configuration, total=200 * MIB)
    for what, number, stream in calls:
        match what:
            case "malloc":
                recorder.malloc(number, stream)
            case "free":
                recorder.free(number)
            case "record_stream":
                recorder.record_stream(number, stream)
            case "complete_events":
                recorder.allocator.complete_events(number)
            case "empty_cache":
                recorder.empty_cache()
        recorder.remember()
    return recorder


@pytest.mark.parametrize("configuration", ["", "roundup_power2_divisions:4", "large_segment_size_mb:32"])
@settings(max_examples=60)
@given(calls=CALLS, cut=st.floats(0, 1))
@example(calls=[("malloc", 1, 0), ("free", 0, 0), ("empty_cache", 0, 0)], cut=0.5)
def test_a_trace_of_the_model_comes_out_of_it_again(
    configuration: str, calls: list[tuple[str, int, int]], cut: float
) -> None:
    recorder = record(calls, parse_settings(configuration))
    start, truth = recorder.states[round(cut * (len(recorder.states) - 1))]
    snapshot = recorder.snapshot(start)
    initial = rebuild(snapshot, recorder.allocator.settings)
    rebuilt = {block.address: block for segment in initial for block in segment.blocks}
    assert rebuilt.keys() == truth.keys()
    for address, (size, requested, awaiting) in truth.items():
        block = rebuilt[address]
        assert (block.requested, block.awaiting) == (requested, awaiting)
        assert 0 <= size - block.size <= MIB
    result = replay(snapshot)
    assert result.allocations == sum(event.action == "alloc" for event in snapshot.events)
    if all(rebuilt[address].size == size for address, (size, _, _) in truth.items()):
        assert agree(result)


def event(action: str, address: int, size: int) -> SnapshotEvent:
    return SnapshotEvent(action=action, address=address, size=size, stream=0)


def empty_segment(address: int, size: int) -> SnapshotSegment:
    block = SnapshotBlock(address=address, size=size, requested=0, allocated=False, awaiting=False)
    return SnapshotSegment(
        address=address,
        size=size,
        stream=0,
        is_small=False,
        expandable=False,
        pool_id=DEFAULT_POOL,
        blocks=(block,),
    )


def freed(address: int, size: int) -> list[SnapshotEvent]:
    return [event("free_requested", address, size), event("free_completed", address, size)]


def rebuilt_blocks(*events: SnapshotEvent) -> list[tuple[int, int]]:
    """(offset, size) of the blocks at the start, in a segment of 20 MiB that ends empty."""
    snapshot = DeviceSnapshot(segments=(empty_segment(0, 20 * MIB),), events=events, settings=None)
    initial = rebuild(snapshot, Settings())
    return [(block.address, block.size) for block in initial[0].blocks]


def test_a_trace_without_free_requested_is_replayed() -> None:
    recorder = Recorder(Settings(), total=200 * MIB)
    for size in (4 * MIB, 4 * MIB, 600):
        recorder.malloc(size, 0)
    for _ in range(3):
        recorder.free(0)
    recorder.empty_cache()
    recorder.events = [each for each in recorder.events if each.action != "free_requested"]
    for start in (0, 1):
        result = replay(recorder.snapshot(start))
        assert agree(result)
        assert result.counters.memory_stats()["active_bytes.all.peak"] == result.counters.allocated_peak


def test_a_block_with_much_room_behind_it_is_as_large_as_its_request() -> None:
    assert rebuilt_blocks(*freed(0, 4 * MIB)) == [(0, 4 * MIB)]


def test_a_block_with_less_room_behind_it_than_a_block_needs_had_that_room() -> None:
    assert rebuilt_blocks(*freed(0, 19 * MIB)) == [(0, 20 * MIB)]


def test_a_later_neighbour_tells_where_a_block_ended() -> None:
    ends = freed(4 * MIB, 2 * MIB) + freed(0, 3 * MIB + 1)
    assert rebuilt_blocks(*ends) == [(0, 4 * MIB), (4 * MIB, 2 * MIB)]


def test_a_remainder_of_exactly_1_mib_belongs_to_the_block() -> None:
    ends = freed(4 * MIB, 16 * MIB) + freed(0, 3 * MIB)
    assert rebuilt_blocks(*ends) == [(0, 4 * MIB), (4 * MIB, 16 * MIB)]


def test_a_neighbour_that_comes_and_goes_tells_too() -> None:
    events = [event("alloc", 4 * MIB, 16 * MIB), *freed(4 * MIB, 16 * MIB), *freed(0, 4 * MIB)]
    assert rebuilt_blocks(*events) == [(0, 4 * MIB)]


def test_a_far_neighbour_does_not_tell() -> None:
    ends = freed(10 * MIB, 10 * MIB) + freed(0, 4 * MIB)
    assert rebuilt_blocks(*ends) == [(0, 4 * MIB), (10 * MIB, 10 * MIB)]


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([event("alloc", 0, 4 * MIB)], "where there is no block afterwards"),
        (freed(40 * MIB, 4 * MIB), "in no segment"),
        (freed(0, 21 * MIB), "overlaps"),
        (freed(2 * MIB, 2 * MIB) + freed(0, 4 * MIB), "overlaps"),
        (freed(0, 4 * MIB) + freed(2 * MIB, 2 * MIB), "overlaps"),
        ([event("segment_alloc", 64 * MIB, 20 * MIB)], "does not exist, or is not free"),
        ([event("segment_map", 0, 20 * MIB)], "expandable"),
    ],
)
def test_a_trace_that_contradicts_its_segments_is_refused(events: list[SnapshotEvent], complaint: str) -> None:
    with pytest.raises(NotReplayable, match=complaint):
        rebuilt_blocks(*events)


def test_settings_that_hide_block_sizes_are_refused() -> None:
    snapshot = DeviceSnapshot(segments=(), events=(), settings=parse_settings("max_split_size_mb:20"))
    with pytest.raises(NotReplayable, match="max_split_size"):
        replay(snapshot)


RAW: dict[str, Any] = {
    "segments": [
        {
            "device": 0,
            "address": 4096,
            "total_size": 2 * MIB,
            "stream": 0,
            "segment_type": "small",
            "blocks": [{"size": 512, "state": "active_allocated"}, {"size": 2 * MIB - 512, "state": "inactive"}],
        },
        {"device": 1},
    ],
    "device_traces": [[{"action": "oom", "device_free": 7, "size": 1, "stream": 0}]],
}


def test_an_old_snapshot_lacks_addresses_and_requested_sizes() -> None:
    snapshot = read_snapshot(RAW)
    assert [(block.address, block.requested) for block in snapshot.segments[0].blocks] == [
        (4096, 512),
        (4608, 2 * MIB - 512),
    ]
    assert snapshot.segments[0].pool_id == DEFAULT_POOL
    assert (snapshot.events, [(failed.asked, failed.free) for failed in snapshot.failed]) == ((), [(1, 7)])
    assert snapshot.settings is None


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"action": "snapshot", "user_metadata": "a run"}], "a run"),
        ([{"action": "snapshot", "user_metadata": 7}], ""),
        ([{"action": "snapshot"}], ""),
        ([{"action": "oom", "device_free": 7, "size": 1, "user_metadata": "a run"}], ""),
        ([{"action": "oom", "device_free": 7, "size": 1}, {"action": "snapshot", "user_metadata": "a run"}], ""),
    ],
)
def test_a_snapshot_says_what_its_first_marker_has(rows: list[dict[str, Any]], text: str) -> None:
    event = {"action": "alloc", "addr": 4096, "size": 512, "stream": 0}
    assert read_snapshot(RAW | {"device_traces": [[*rows, event]]}).text == text


def test_stacks_are_told_once() -> None:
    inner, outer, other = ({"name": name, "filename": "train.py", "line": 3} for name in ("inner", "outer", "other"))
    traces = [[inner, outer], [other], [inner, outer], None, []]
    event = {"action": "alloc", "addr": 4096, "size": 512, "stream": 0}
    found = read_snapshot(RAW | {"device_traces": [[event | {"frames": frames} for frames in traces]]})
    assert [[frame.name for frame in found.stacks[each.stack]] for each in found.events] == [
        ["inner", "outer"],
        ["other"],
        ["inner", "outer"],
        [],
        [],
    ]
    assert len(found.stacks) == 3


def test_the_settings_of_a_snapshot() -> None:
    divisions = {str(1 << power): 4 if power > 2 else 0 for power in range(16)}
    raw = {
        "max_split_size": 20 * MIB,
        "garbage_collection_threshold": 0.5,
        "expandable_segments": False,
        "roundup_power2_divisions": divisions,
    }
    assert read_snapshot(RAW | {"allocator_settings": raw}).settings == Settings(
        max_split_size=20 * MIB,
        garbage_collection_threshold=0.5,
        roundup_power2_divisions=(0, 0, 0, *[4] * 13),
    )


def test_a_trace_of_a_recording() -> None:
    rows = [
        (Action.BASELINE, 1000, 4 * MIB),
        (Action.ALLOC, 2000, 0),
        (Action.ALLOC, 3000, 512),
        (Action.FREE, 2000, 0),
        (Action.FREE, 3000, 512),
        (Action.ALLOC, 3000, 600),
    ]
    columns = dict.fromkeys(EventColumns.names(), CallTrace.of_rows([(0, 0, 0, 0)] * len(rows)).bytes)
    trace = CallTrace.of_rows([(action, address, size, 0) for action, address, size in rows])
    columns |= {"action": trace.operation, "address": trace.allocation, "bytes": trace.bytes}
    found = trace_of_events(EventColumns(**columns))
    assert found.operation.tolist() == [Operation.MALLOC, Operation.MALLOC, Operation.FREE, Operation.MALLOC]
    assert found.allocation.tolist() == [0, 1, 1, 2]
    assert found.bytes.tolist() == [4 * MIB, 512, 0, 600]
    released = dict.fromkeys(SegmentColumns.names(), np.array([0, 0, 0], dtype=np.int64))
    released |= {
        "action": np.array([SegmentAction.BASELINE, SegmentAction.RELEASE, SegmentAction.RELEASE]),
        "position": np.array([0, 5, 5]),
    }
    emptied = trace_of_events(EventColumns(**columns), SegmentColumns(**released))
    assert emptied.operation.tolist() == [*found.operation[:3].tolist(), Operation.EMPTY_CACHE, Operation.MALLOC]


def test_a_run_says_where_memory_ran_out() -> None:
    trace = CallTrace.of_rows([(Operation.MALLOC, index, 12 * MIB, 0) for index in range(5)])
    result = make_calls(trace, DeviceCachingAllocator(total_memory=40 * MIB))
    assert result.events == 3
    assert result.out_of_memory is not None and result.out_of_memory.asked == 12 * MIB
    assert result.counters.reserved_peak == 36 * MIB


def test_a_run_makes_every_kind_of_call() -> None:
    trace = CallTrace.of_rows(
        [
            (Operation.MALLOC, 0, 12 * MIB, 0),
            (Operation.RECORD_STREAM, 0, 0, 1),
            (Operation.FREE, 0, 0, 0),
            (Operation.COMPLETE_EVENTS, 0, 0, -1),
            (Operation.MALLOC, 1, 12 * MIB, 0),
            (Operation.FREE, 1, 0, 0),
            (Operation.EMPTY_CACHE, 0, 0, 0),
        ]
    )
    allocator = DeviceCachingAllocator()
    result = make_calls(trace, allocator)
    assert (result.events, result.out_of_memory) == (len(trace), None)
    assert result.counters.reserved_peak == 12 * MIB
    assert [isinstance(call, DriverCall) for call in allocator.driver.calls] == [True, True]
