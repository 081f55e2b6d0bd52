from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from time import time_ns
from typing import Any

import numpy as np
import pytest
import torch
from cuda_model import Clock, ModelCuda
from hypothesis import given, settings
from hypothesis import strategies as st

from ampmem.allocator.model.blocks import Block
from ampmem.allocator.model.oom import OutOfMemory
from ampmem.allocator.settings import MIB, Settings
from ampmem.analysis.timeline.lifetimes import pair
from ampmem.errors import UsageError
from ampmem.events import Action, AllocatorRecord, EventColumns, LayersRecord, SegmentAction
from ampmem.recorder.sources.base import DeviceSource, RawEvents
from ampmem.recorder.sources.cuda import source as cuda
from ampmem.recorder.sources.cuda.events import Stamps
from ampmem.recorder.sources.cuda.nodes import NodeRecorder, nodes_of
from ampmem.recorder.sources.cuda.source import CudaSource


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cuda, "time_ns", clock)
    return clock


@pytest.fixture
def gpu(clock: Clock) -> ModelCuda:
    return ModelCuda(clock)


@pytest.fixture
def source(gpu: ModelCuda) -> Iterator[CudaSource]:
    source = CudaSource(api=gpu)
    yield source
    source._nodes.take(go_on=False)


def events_of(windows: list[RawEvents]) -> EventColumns:
    """The windows one after the other, as a recording has them."""
    names = ("time_ns", "action", "address", "bytes", "block_bytes", "stream", "allocated")
    columns = {name: np.concatenate([getattr(window, name) for window in windows]) for name in names}
    zero = np.zeros_like(columns["time_ns"])
    return EventColumns(**columns, step=zero, phase=zero + 3, op=zero, module=zero, stack=zero)


def totals(events: EventColumns) -> Any:
    return np.cumsum(np.where(events.action == Action.FREE, -events.bytes, events.bytes))


def reserved_after(window: RawEvents, before: int, count: int) -> int:
    """What was reserved right after the first ``count`` events of a window that began with ``before``."""
    rows = window.segments
    there = (rows.action == SegmentAction.BASELINE) | (rows.position < count)
    return before + int(np.where(rows.action == SegmentAction.RELEASE, -rows.bytes, rows.bytes)[there].sum())


def held(gpu: ModelCuda) -> int:
    return sum(block.requested for each in gpu.allocator.snapshot() for block in each.blocks if block.allocated)


def test_it_is_a_device_source(source: CudaSource) -> None:
    assert isinstance(source, DeviceSource)


def test_what_was_alive_before_is_the_baseline_with_its_true_sizes(gpu: ModelCuda, source: CudaSource) -> None:
    before = gpu.malloc(1000)
    source.start({})
    after = gpu.malloc(3 * MIB - 100)
    gpu.free(before)
    window = source.drain()
    assert window.action.tolist() == [Action.BASELINE, Action.ALLOC, Action.FREE]
    assert window.address.tolist() == [before.address, after.address, before.address]
    assert window.bytes.tolist() == [1000, 3 * MIB - 100, 1000]
    assert window.block_bytes.tolist() == [1024, 3 * MIB, 1024]
    assert window.allocated.tolist() == [1000, 1000 + 3 * MIB - 100, 3 * MIB - 100]


def test_an_unsplit_block_that_stays_has_its_true_size(gpu: ModelCuda, source: CudaSource) -> None:
    source.start({})
    gpu.malloc(11 * MIB + 512)
    window = source.drain()
    assert window.block_bytes.tolist() == [12 * MIB]


def test_a_step_empties_the_trace_and_the_end_switches_it_off(gpu: ModelCuda, source: CudaSource) -> None:
    source.start({})
    gpu.malloc(512)
    source.drain()
    assert gpu.calls == ["on", "synchronize", "on"]
    assert len(source.drain().time_ns) == 0
    source.stop()
    assert gpu.calls[-2:] == ["synchronize", "off"]
    assert not gpu.recording
    assert gpu._metadata == ""


def test_without_synchronization_nothing_waits_for_the_device(gpu: ModelCuda) -> None:
    source = CudaSource(api=gpu, synchronize=False)
    source.start({})
    gpu.malloc(512)
    source.drain()
    source.stop()
    assert "synchronize" not in gpu.calls


def test_nothing_waits_while_a_graph_is_captured(gpu: ModelCuda, source: CudaSource) -> None:
    source.start({})
    gpu.malloc(512)
    gpu.graph = True
    source.mark(0, "after_forward")
    source.drain()
    assert "synchronize" not in gpu.calls
    assert source.take_layers()[0].device_used is None


def test_a_forked_worker_is_not_recorded(gpu: ModelCuda, source: CudaSource, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.ready = False
    source.start({})
    monkeypatch.setattr(cuda.os, "getpid", lambda: 1)
    gpu.init()
    assert gpu.calls == []


def test_nothing_initializes_cuda_before_the_script_does(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.ready = False
    source.start({})
    assert len(source.drain().time_ns) == 0
    assert gpu.calls == []
    gpu.init()
    gpu.malloc(700)
    assert source.drain().bytes.tolist() == [700]


def test_cuda_that_is_initialized_after_the_recording_stays_untouched(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.ready = False
    source.start({})
    source.stop()
    gpu.init()
    assert gpu.calls == []
    assert source.notes() == []


def test_an_address_that_is_reused_within_a_microsecond_keeps_its_order(
    gpu: ModelCuda, source: CudaSource, clock: Clock
) -> None:
    source.start({})
    clock.now -= clock.now % 1000
    first = gpu.malloc(2048)
    for _ in range(50):
        gpu.free(first)
        again = gpu.malloc(2048)
        assert again.address == first.address
        first = again
    window = source.drain()
    assert len(set(window.time_ns.tolist())) == 1
    assert len(pair(events_of([window]))) == 51


def test_times_never_fall_and_respect_the_stamps(gpu: ModelCuda, source: CudaSource, clock: Clock) -> None:
    source.start({})
    clock.now += 1000 - clock.now % 1000 + 300
    gpu.malloc(512)
    clock.now += 100
    entered = clock()
    assert source.stamp is not None
    source.stamp(entered)
    gpu.malloc(512)
    before, after = source.drain().time_ns.tolist()
    assert before < entered <= after <= clock.now


def test_a_clock_that_runs_ahead_is_held_back_by_the_next_stamp(
    gpu: ModelCuda, source: CudaSource, clock: Clock
) -> None:
    source.start({})
    assert source.stamp is not None
    first = clock()
    source.stamp(first)
    gpu.malloc(512)
    gpu.trace[-1]["time_us"] += 50
    second = clock()
    source.stamp(second)
    gpu.malloc(512)
    times = source.drain().time_ns.tolist()
    assert first <= times[0] < second <= times[1]


def test_a_stamp_of_another_thread_bounds_nothing() -> None:
    stamps = Stamps()
    stamps.add(1, 10)
    stamps.add(2, 15)
    stamps.add(1, 20)
    assert stamps.take() == {10: 20}
    stamps.add(1, 30)
    assert stamps.take() == {20: 30}


def test_a_free_counts_when_it_is_requested_and_the_wait_counts_as_active(
    gpu: ModelCuda, source: CudaSource, clock: Clock
) -> None:
    source.start({})
    block = gpu.malloc(5000)
    kept = gpu.malloc(700)
    gpu.allocator.record_stream(block, 7)
    gpu.free(block)
    clock.now += 5000
    source.mark(0, "after_forward")
    assert source.drain().action.tolist() == [Action.ALLOC, Action.ALLOC, Action.FREE]
    layers = {each.mark: each for each in source.take_layers()}
    assert layers["after_forward"].requested == kept.requested
    assert layers["after_forward"].active == layers["after_forward"].allocated + 5120
    gpu.allocator.complete_events()
    gpu.malloc(512)
    clock.now += 5000
    source.mark(1, "after_forward")
    assert source.drain().action.tolist() == [Action.ALLOC]
    assert source.take_layers()[0].requested == 1212


def test_layers_at_marks_and_at_the_peak(gpu: ModelCuda, source: CudaSource, clock: Clock) -> None:
    source.start({})
    weight = gpu.malloc(100)
    large = gpu.malloc(30 * MIB)
    gpu.free(large)
    clock.now += 2000
    source.mark(3, "after_backward")
    gpu.allocator.empty_cache()
    gpu._catch_up()
    source.drain()
    used = 2 * MIB + 30 * MIB
    assert source.take_layers() == [
        LayersRecord(
            step=3,
            mark="after_backward",
            requested=100,
            allocated=512,
            active=512,
            reserved=used,
            device_used=used + (1 << 28),
        ),
        LayersRecord(
            step=3,
            mark="peak",
            requested=30 * MIB + 100,
            allocated=30 * MIB + 512,
            active=30 * MIB + 512,
            reserved=used,
            device_used=None,
        ),
    ]
    assert source.take_layers() == []
    assert weight.requested == 100


def test_segments_from_before_are_the_baseline_and_a_segment_comes_before_its_alloc(
    gpu: ModelCuda, source: CudaSource, clock: Clock
) -> None:
    gpu.malloc(100)
    gone = gpu.malloc(30 * MIB)
    source.start({})
    clock.now -= clock.now % 1000
    gpu.malloc(11 * MIB)
    gpu.free(gone)
    gpu.allocator.empty_cache()
    gpu._catch_up()
    window = source.drain()
    rows = window.segments
    sizes = [2 * MIB, 30 * MIB, 12 * MIB, 30 * MIB]
    actions = [SegmentAction.BASELINE, SegmentAction.BASELINE, SegmentAction.RESERVE, SegmentAction.RELEASE]
    assert (rows.action.tolist(), rows.bytes.tolist()) == (actions, sizes)
    assert rows.small.tolist() == [1, 0, 0, 0]
    assert rows.expandable.tolist() == [0, 0, 0, 0]
    assert window.action.tolist() == [Action.BASELINE, Action.BASELINE, Action.ALLOC, Action.FREE]
    assert rows.position.tolist() == [0, 0, 2, 4]
    assert rows.time_ns[2] == window.time_ns[2], "in one microsecond"
    assert len(source.drain().segments) == 0


def test_segments_that_the_trace_has_lost_are_made_good(gpu: ModelCuda, source: CudaSource) -> None:
    source.start({})
    gpu.malloc(100)
    gone = gpu.malloc(30 * MIB)
    source.drain()
    gpu.free(gone)
    gpu.allocator.empty_cache()
    gpu.malloc(40 * MIB)
    gpu._catch_up()
    gpu.trace.clear()
    window = source.drain()
    rows = window.segments
    assert [rows.action.tolist(), rows.bytes.tolist()] == [
        [SegmentAction.RELEASE, SegmentAction.RESERVE],
        [30 * MIB, 40 * MIB],
    ]
    assert rows.position.tolist() == [0, 0]
    assert any("lost" in note for note in source.notes())


def test_streams_are_as_the_allocator_gives_them(gpu: ModelCuda, source: CudaSource) -> None:
    source.start({})
    gpu.malloc(512, 0)
    gpu.malloc(512, 94_000)
    assert source.drain().stream.tolist() == [0, 94_000]


def test_python_stacks_come_outermost_first(gpu: ModelCuda, source: CudaSource) -> None:
    frames = [
        {"filename": "/env/torch/nn/modules/module.py", "line": 5, "name": "_call_impl"},
        {"filename": "/home/net.py", "line": 9, "name": "build"},
        {"filename": "/home/train.py", "line": 40, "name": "<module>"},
    ]
    source.start({})
    gpu.malloc(512, 0, frames)
    gpu.malloc(512)
    window = source.drain()
    assert window.stack is not None
    assert [window.stacks[index] for index in window.stack.tolist()] == [
        "/home/train.py:40 <module>\n/home/net.py:9 build",
        "",
    ]


def test_lost_entries_are_made_good_and_told(gpu: ModelCuda, source: CudaSource) -> None:
    source.start({})
    first, second = gpu.malloc(512), gpu.malloc(1024)
    windows = [source.drain()]
    gpu.free(first)
    third = gpu.malloc(4096)
    gpu.trace.clear()
    gpu.free(second)
    windows.append(source.drain())
    events = events_of(windows)
    assert totals(events)[-1] == third.requested == held(gpu)
    assert len(pair(events)) == 3
    assert any("lost" in note for note in source.notes())


def test_the_device_with_the_largest_peak_is_recorded_and_the_others_are_named(clock: Clock) -> None:
    gpu = ModelCuda(clock, others=(100,))
    source = CudaSource(api=gpu)
    source.start({})
    gpu.malloc(MIB)
    source.drain()
    source.stop()
    assert source.device_name == "Model 0"
    allocator = source.allocator()
    assert allocator is not None
    assert (allocator.device, allocator.peaks) == (0, (MIB, 100))


def test_what_cannot_be_recorded_is_refused(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.why = "torch uses another allocator"
    with pytest.raises(UsageError, match="another allocator"):
        source.check()
    gpu.why = None
    source.check()
    gpu.recording = True
    with pytest.raises(UsageError, match="memory history already"):
        source.check()


def test_how_the_allocator_is_set_and_used(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    gpu = ModelCuda(clock, settings=Settings(expandable_segments=True), tags=False)
    gpu.in_force = "expandable_segments:True"
    source = CudaSource(api=gpu)
    source.start({})
    assert source.allocator() is None
    gpu.malloc(MIB)
    gpu.malloc(MIB, 94_000)
    source.mark(0, "after_forward")
    source.stop()
    assert source.allocator() == AllocatorRecord(
        variable="PYTORCH_ALLOC_CONF",
        settings="expandable_segments:True",
        expandable_segments=True,
        streams=2,
        private_pools=0,
        device=0,
        peaks=(2 * MIB,),
    )
    assert any("cannot tag" in note for note in source.notes())
    assert source.take_layers()[-1].reserved == 4 * MIB


def test_settings_that_the_script_makes_itself_are_in_force(
    gpu: ModelCuda, source: CudaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    gpu.in_force = "max_split_size_mb:64"
    source.start({})
    gpu.malloc(MIB)
    source.drain()
    allocator = source.allocator()
    assert allocator is not None
    assert (allocator.variable, allocator.settings) == (
        "torch.cuda.memory._set_allocator_settings",
        "max_split_size_mb:64",
    )


def test_what_the_driver_counts_as_the_processs_is_asked_once_a_step(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.process = 700 * MIB
    source.start({})
    gpu.malloc(512)
    for mark in ("after_forward", "after_backward", "after_optimizer"):
        source.mark(0, mark)
    source.drain()
    used = {each.mark: each.process_used for each in source.take_layers()}
    assert used == {"after_forward": None, "after_backward": None, "after_optimizer": 700 * MIB, "peak": None}


def test_a_step_with_more_events_than_are_kept_is_told(
    gpu: ModelCuda, source: CudaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "ENTRIES", 10)
    source.start({})
    for _ in range(4):
        gpu.free(gpu.malloc(512))
    del gpu.trace[: len(gpu.trace) - 9]
    source.drain()
    assert not any("more than the" in note for note in source.notes())
    for _ in range(4):
        gpu.free(gpu.malloc(512))
    del gpu.trace[: len(gpu.trace) - 10]  # torch writes over the oldest
    source.drain()
    assert any("more than the 10 allocator events" in note for note in source.notes())


def test_a_device_that_has_failed_hides_no_error_of_the_scripts(gpu: ModelCuda, source: CudaSource) -> None:
    source.start({})
    gpu.malloc(700)
    source.mark(0, "after_forward")
    gpu.broken = True
    assert source.stamp is not None
    source.stamp(1)
    source.mark(0, "after_backward")
    assert source.stop().bytes.tolist() == [700]
    used = {each.mark: each.device_used is None for each in source.take_layers()}
    assert used == {"after_forward": False, "after_backward": True, "peak": True}


def test_nodes_are_followed_from_when_cuda_is_there(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.ready = False
    source.start({})
    assert not source._nodes.running
    source.drain()
    assert not source._nodes.running
    gpu.init()
    assert source._nodes.running


def test_another_thread_may_initialize_cuda(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.ready = False
    source.start({})
    other = threading.Thread(target=gpu.init)
    other.start()
    other.join()
    assert gpu.recording and not source._nodes.running  # a profile belongs to its thread
    gpu.malloc(512)
    source.drain()
    assert source._nodes.running


def test_private_pools_are_noted(gpu: ModelCuda, source: CudaSource) -> None:
    source.start({})
    gpu.allocator.begin_allocate_to_pool(1)
    gpu.malloc(512)
    gpu.allocator.end_allocate_to_pool(1)
    source.drain()
    assert any("CUDA graphs" in note for note in source.notes())


def test_a_failure_keeps_the_segments_and_the_request(clock: Clock) -> None:
    gpu = ModelCuda(clock, total=64 * MIB)
    source = CudaSource(api=gpu)
    source.start({})
    gpu.malloc(40 * MIB)
    with pytest.raises(OutOfMemory):
        gpu.malloc(30 * MIB - 1)
    source.stop()
    (oom,) = source.take_ooms()
    assert (oom.asked, oom.segment, oom.total, oom.free) == (30 * MIB, 30 * MIB, 64 * MIB, 24 * MIB)
    assert (oom.pool, oom.device) == ("0,0", 0)
    assert source.take_ooms() == []


def test_only_some_failures_are_kept(clock: Clock) -> None:
    gpu = ModelCuda(clock, total=16 * MIB)
    source = CudaSource(api=gpu)
    source.start({})
    gpu.malloc(512)
    for _ in range(20):
        with pytest.raises(OutOfMemory):
            gpu.malloc(32 * MIB)
    source.stop()
    assert len(source.take_ooms()) == 8


def test_nodes_run_innermost_first_and_hand_their_number_on() -> None:
    nodes = nodes_of([(10, 50, "outer", 4), (20, 30, "inner", -1), (60, 70, "next", 3)])
    op, sequence = nodes.at(np.array([5, 10, 25, 40, 55, 65, 90]))
    assert [nodes.ops[index] for index in op.tolist()] == ["", "outer", "inner", "outer", "", "next", ""]
    assert sequence.tolist() == [-1, 4, 4, 4, -1, 3, -1]


def test_the_nodes_of_a_backward_are_recorded_with_their_times() -> None:
    recorder = NodeRecorder()
    recorder.start()
    assert recorder.running
    weight = torch.ones(3, 3, requires_grad=True)
    before = time_ns()
    (weight @ weight).exp().sum().backward()
    after = time_ns()
    nodes = recorder.take(go_on=False)
    assert {"MmBackward0", "ExpBackward0", "torch::autograd::AccumulateGrad"} <= set(nodes.ops)
    assert (np.diff(nodes.since_ns) >= 0).all()
    assert before <= nodes.since_ns[0] <= nodes.since_ns[-1] <= after
    assert nodes.name_at(before) == nodes.name_at(after) == ""
    assert recorder.take(go_on=False).ops == ("",)


def test_a_failure_in_backward_is_named_after_its_node(clock: Clock) -> None:
    gpu = ModelCuda(clock, total=16 * MIB)
    source = CudaSource(api=gpu)
    source.start({})
    gpu.malloc(512)
    with pytest.raises(OutOfMemory):
        gpu.malloc(32 * MIB)
    source._oom.name_ops(lambda instant: "MmBackward0")
    source.stop()
    assert source.take_ooms()[0].op == "MmBackward0"


def test_without_the_profiler_events_are_still_recorded(gpu: ModelCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: NodeRecorder) -> None:
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(NodeRecorder, "start", refuse)
    source = CudaSource(api=gpu)
    source.start({})
    gpu.malloc(512)
    assert len(source.stop().time_ns) == 1
    assert any("no profiler here" in note for note in source.notes())


def test_there_may_be_no_nodes() -> None:
    op, sequence = nodes_of([]).at(np.array([1, 2]))
    assert op.tolist() == [0, 0] and sequence.tolist() == [-1, -1]


_CALLS = st.one_of(
    st.tuples(st.just("malloc"), st.integers(1, 24 * MIB), st.integers(0, 2)),
    st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
    st.tuples(st.just("use"), st.integers(0, 1000), st.integers(0, 2)),
    st.tuples(st.just("complete"), st.just(0), st.just(0)),
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
    st.tuples(st.just("drain"), st.just(0), st.just(0)),
    st.tuples(st.just("mark"), st.just(0), st.just(0)),
    st.tuples(st.just("pass"), st.integers(0, 1500), st.just(0)),
)


@settings(max_examples=80, deadline=None)
@given(
    calls=st.lists(_CALLS, max_size=80),
    before=st.lists(st.integers(1, 3 * MIB), max_size=3),
    expandable=st.booleans(),
)
def test_events_and_layers_agree_with_the_allocator(
    calls: list[tuple[str, int, int]], before: list[int], expandable: bool
) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "time_ns", clock)
        patch.setattr(cuda.NodeRecorder, "start", lambda self: None)
        _replay(clock, ModelCuda(clock, settings=Settings(expandable_segments=expandable)), calls, before)


def _check_reserved(windows: list[RawEvents], reserved: list[int], last: int) -> None:
    """Of the windows at each event but those of the baseline, and at the end."""
    now, found = 0, []
    for window in windows:
        found += [
            reserved_after(window, now, index + 1)
            for index, action in enumerate(window.action.tolist())
            if action != Action.BASELINE
        ]
        now = reserved_after(window, now, len(window.action) + 1)
    assert found == reserved
    assert now == last


def _replay(clock: Clock, gpu: ModelCuda, calls: list[tuple[str, int, int]], before: list[int]) -> None:
    source = CudaSource(api=gpu)
    live: list[Block] = [gpu.malloc(size) for size in before]
    source.start({})
    windows: list[RawEvents] = []
    expected: list[tuple[int, int]] = []
    reserved: list[int] = []
    """What the model had reserved after each event of the trace."""
    layers: list[LayersRecord] = []
    for number, (call, value, stream) in enumerate(calls):
        if call == "malloc":
            live.append(gpu.malloc(value, stream))
            reserved.append(gpu.stats(0).reserved)
        elif call == "free" and live:
            gpu.free(live.pop(value % len(live)))
            reserved.append(gpu.stats(0).reserved)
        elif call == "empty":
            gpu.allocator.empty_cache()
            gpu._catch_up()
        elif call == "use" and live:
            gpu.allocator.record_stream(live[value % len(live)], stream)
        elif call == "complete":
            gpu.allocator.complete_events()
        elif call == "pass":
            clock.now += value
        elif call == "mark":
            instant = clock()
            assert source.stamp is not None
            source.stamp(instant)
            source.mark(number, "after_forward")
            if gpu.stats(0).allocated_peak:  # before that there is no device to ask
                expected.append((instant, held(gpu)))
        elif call == "drain":
            windows.append(source.drain())
            layers += source.take_layers()
    windows.append(source.stop())
    layers += source.take_layers()
    events = events_of(windows)
    pair(events)
    _check_reserved(windows, reserved, gpu.stats(0).reserved)
    running = totals(events)
    assert np.array_equal(running, events.allocated)
    assert (np.diff(events.time_ns) >= 0).all()
    assert (running[-1] if len(running) else 0) == held(gpu)
    marks = [each for each in layers if each.mark != "peak"]
    assert [each.requested for each in marks] == [size for _, size in expected]
    for instant, size in expected:
        position = int(np.searchsorted(events.time_ns, instant, side="left"))
        assert (running[position - 1] if position else 0) == size
    assert not any("lost" in note for note in source.notes())
    assert all(replace(each, device_used=None).allocated <= each.active <= each.reserved for each in marks)
