import threading
from collections.abc import Iterator
from dataclasses import replace
from time import time_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda_model import Clock, ModelCuda, events_of, held, totals

from ampmem.allocator.blocks import Block
from ampmem.allocator.oom import OutOfMemory
from ampmem.allocator.settings import MIB, Settings
from ampmem.allocator.snapshot import ALLOC
from ampmem.analysis.timeline.lifetimes import pair
from ampmem.errors import UsageError
from ampmem.events import Action, AllocatorRecord, LayersRecord, SegmentAction
from ampmem.names import is_warning
from ampmem.recorder.compiled.code import CompiledCode
from ampmem.recorder.facts.addresses import AliveBlocks, RealAddresses
from ampmem.recorder.facts.log import ELSEWHERE, Log
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.sources import extension
from ampmem.recorder.sources import window as windows
from ampmem.recorder.sources.base import NO_EVENTS
from ampmem.recorder.sources.cuda import source as cuda
from ampmem.recorder.sources.cuda.device import TorchCuda
from ampmem.recorder.sources.cuda.nodes import NodeRecorder, Ran, SeenNodes, nodes_of
from ampmem.recorder.sources.cuda.source import CudaSource, TracePeaks
from ampmem.recorder.sources.cuda.trace import (
    NO_BLOCKS,
    Counted,
    MarkCount,
    SeenBlocks,
    StackTexts,
    Stamps,
    read_trace,
    timed,
)
from ampmem.recorder.sources.window import MARKER, ClockMark, EventTree
from ampmem.recorder.torch_private import cuda as torch_private
from ampmem.recorder.torch_private import general
from ampmem.recorder.torch_private.general import next_node
from ampmem.recorder.writing import Joiner
from ampmem.vocabulary import Mark


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cuda, "time_ns", clock)
    return clock


@pytest.fixture
def gpu(clock: Clock) -> ModelCuda:
    return ModelCuda(clock)


@pytest.fixture
def idle(gpu: ModelCuda) -> Iterator[CudaSource]:
    """A source that has not started."""
    source = CudaSource(api=gpu)
    yield source
    source._nodes.take(go_on=False)


@pytest.fixture
def source(idle: CudaSource) -> CudaSource:
    """One that has, before the test does anything."""
    idle.start({})
    return idle


def started(api: ModelCuda, **options: Any) -> CudaSource:
    """A source of ``api``, started, with other options than the fixture's."""
    source = CudaSource(api=api, **options)
    source.start({})
    return source


def test_what_was_alive_before_is_the_baseline_with_its_true_sizes(gpu: ModelCuda, idle: CudaSource) -> None:
    before = gpu.malloc(1000)
    idle.start({})
    after = gpu.malloc(3 * MIB - 100)
    gpu.free(before)
    window = idle.drain()
    assert window.action.tolist() == [Action.BASELINE, Action.ALLOC, Action.FREE]
    assert window.address.tolist() == [before.address, after.address, before.address]
    assert window.bytes.tolist() == [1000, 3 * MIB - 100, 1000]
    assert window.block_bytes.tolist() == [1024, 3 * MIB, 1024]
    assert window.allocated.tolist() == [1000, 1000 + 3 * MIB - 100, 3 * MIB - 100]


def test_what_is_alive_at_the_end_is_known_with_its_requested_bytes(gpu: ModelCuda, idle: CudaSource) -> None:
    before, freed = gpu.malloc(1000), gpu.malloc(700)
    idle.start({})
    gpu.free(freed)
    after = gpu.malloc(3 * MIB - 100)
    idle.drain()
    assert idle.blocks() == AliveBlocks({before.address: 1000, after.address: 3 * MIB - 100}, 1000 + 3 * MIB - 100)
    gpu.free(before)
    idle.stop()
    assert idle.blocks() == AliveBlocks({after.address: 3 * MIB - 100}, 3 * MIB - 100)
    idle._extension = SimpleNamespace(workspaces=lambda: {after.address, 64})  # type: ignore[assignment]
    assert idle.blocks() == AliveBlocks({}, 3 * MIB - 100, frozenset({after.address}))


def test_an_unsplit_block_that_stays_has_its_true_size(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.malloc(11 * MIB + 512)
    window = source.drain()
    assert window.block_bytes.tolist() == [12 * MIB]


def test_a_step_empties_the_trace_and_the_end_switches_it_off(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.malloc(512)
    source.drain()
    assert gpu.calls == ["on", "synchronize", "on"]
    assert len(source.drain().time_ns) == 0
    source.stop()
    assert gpu.calls[-2:] == ["synchronize", "off"]
    assert not gpu.recording
    assert gpu.tag == ""


def test_without_synchronization_nothing_waits_for_the_device(gpu: ModelCuda) -> None:
    source = started(gpu, synchronize=False)
    gpu.malloc(512)
    source.drain()
    source.stop()
    assert "synchronize" not in gpu.calls


def test_nothing_waits_while_a_graph_is_captured(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.malloc(512)
    gpu.graph = True
    source.mark(0, "after_forward")
    source.drain()
    assert "synchronize" not in gpu.calls
    assert source.take_layers()[0].device_used is None


def test_a_forked_worker_is_not_recorded(gpu: ModelCuda, idle: CudaSource, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.ready = False
    idle.start({})
    monkeypatch.setattr(cuda.os, "getpid", lambda: 1)
    gpu.init()
    assert gpu.calls == []


def test_nothing_initializes_cuda_before_the_script_does(gpu: ModelCuda, idle: CudaSource) -> None:
    gpu.ready = False
    idle.start({})
    assert len(idle.drain().time_ns) == 0
    assert gpu.calls == []
    gpu.init()
    gpu.malloc(700)
    assert idle.drain().bytes.tolist() == [700]


def test_cuda_that_is_initialized_after_the_recording_stays_untouched(gpu: ModelCuda, idle: CudaSource) -> None:
    gpu.ready = False
    idle.start({})
    idle.stop()
    gpu.init()
    assert gpu.calls == []
    assert idle.notes() == []


def test_an_address_that_is_reused_within_a_microsecond_keeps_its_order(
    gpu: ModelCuda, source: CudaSource, clock: Clock
) -> None:
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
    clock.now += 1000 - clock.now % 1000 + 300
    gpu.malloc(512)
    clock.now += 100
    entered = clock()
    source.stamp(entered)
    gpu.malloc(512)
    before, after = source.drain().time_ns.tolist()
    assert before < entered <= after <= clock.now


def test_a_clock_that_runs_ahead_is_held_back_by_the_next_stamp(
    gpu: ModelCuda, source: CudaSource, clock: Clock
) -> None:
    first = clock()
    source.stamp(first)
    gpu.malloc(512)
    gpu.trace[-1]["time_us"] += 50
    second = clock()
    source.stamp(second)
    gpu.malloc(512)
    times = source.drain().time_ns.tolist()
    assert first <= times[0] < second <= times[1]


def test_a_stamp_holds_until_the_next_one() -> None:
    stamps = Stamps()
    assert (stamps.take(), stamps.last) == ({}, 0)
    stamps.add(10)
    stamps.add(20)
    assert stamps.take() == {10: 20, 20: 2**62}
    stamps.add(30)
    assert (stamps.take(), stamps.last) == ({20: 30, 30: 2**62}, 30)


def test_only_the_recorded_thread_is_tagged_since_nobody_could_clear_the_others(
    gpu: ModelCuda, source: CudaSource
) -> None:
    gpu.malloc(512)
    stamp = source.stamp
    stamp(5)
    assert gpu.tag == "5"

    def engine() -> str:
        stamp(7)
        return gpu.tag

    assert gpu.elsewhere(engine) == ""
    source.stop()
    assert gpu.tag == ""


def test_a_free_counts_when_it_is_requested_and_the_wait_counts_as_active(
    gpu: ModelCuda, source: CudaSource, clock: Clock
) -> None:
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
    gpu: ModelCuda, idle: CudaSource, clock: Clock
) -> None:
    gpu.malloc(100)
    gone = gpu.malloc(30 * MIB)
    idle.start({})
    clock.now -= clock.now % 1000
    gpu.malloc(11 * MIB)
    gpu.free(gone)
    gpu.allocator.empty_cache()
    gpu._catch_up()
    window = idle.drain()
    rows = window.segments
    sizes = [2 * MIB, 30 * MIB, 12 * MIB, 30 * MIB]
    actions = [SegmentAction.BASELINE, SegmentAction.BASELINE, SegmentAction.RESERVE, SegmentAction.RELEASE]
    assert (rows.action.tolist(), rows.bytes.tolist()) == (actions, sizes)
    assert rows.small.tolist() == [1, 0, 0, 0]
    assert rows.expandable.tolist() == [0, 0, 0, 0]
    assert window.action.tolist() == [Action.BASELINE, Action.BASELINE, Action.ALLOC, Action.FREE]
    assert rows.position.tolist() == [0, 0, 2, 4]
    assert rows.time_ns[2] == window.time_ns[2], "in one microsecond"
    assert len(idle.drain().segments) == 0


def test_segments_that_the_trace_has_lost_are_made_good(gpu: ModelCuda, source: CudaSource) -> None:
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
    gpu.malloc(512, 0)
    gpu.malloc(512, 94_000)
    assert source.drain().stream.tolist() == [0, 94_000]


def test_python_stacks_come_outermost_first(gpu: ModelCuda, idle: CudaSource) -> None:
    frames = [
        {"filename": "/env/torch/nn/modules/module.py", "line": 5, "name": "_call_impl"},
        {"filename": "/home/net.py", "line": 9, "name": "build"},
        {"filename": "/home/train.py", "line": 40, "name": "<module>"},
    ]
    idle.start({})
    gpu.malloc(512, 0, frames)
    gpu.malloc(512)
    window = idle.drain()
    assert [window.stacks[index] for index in window.stack.tolist()] == [
        "/home/train.py:40 <module>\n/home/net.py:9 build",
        "",
    ]


def test_lost_entries_are_made_good_and_told(gpu: ModelCuda, source: CudaSource) -> None:
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
    source = started(gpu)
    gpu.malloc(MIB)
    source.drain()
    source.stop()
    assert source.device_name == "Model 0"
    allocator = source.allocator()
    assert (allocator.device, allocator.peaks) == (0, (MIB, 100))


def test_what_cannot_be_recorded_is_refused(gpu: ModelCuda, idle: CudaSource) -> None:
    gpu.why = "torch uses another allocator"
    with pytest.raises(UsageError, match="another allocator"):
        idle.check()
    gpu.why = None
    idle.check()
    gpu.recording = True
    with pytest.raises(UsageError, match="memory history already"):
        idle.check()


def test_how_the_allocator_is_set_and_used(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    gpu = ModelCuda(clock, settings=Settings(expandable_segments=True), tags=False)
    gpu.in_force = "expandable_segments:True"
    source = started(gpu)
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
    gpu: ModelCuda, idle: CudaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    gpu.in_force = "max_split_size_mb:64"
    idle.start({})
    gpu.malloc(MIB)
    idle.drain()
    allocator = idle.allocator()
    assert (allocator.variable, allocator.settings) == (
        "torch.cuda.memory._set_allocator_settings",
        "max_split_size_mb:64",
    )


def test_a_backend_that_torch_refused_is_not_in_force(gpu: ModelCuda, source: CudaSource) -> None:
    """``_set_allocator_settings`` raises then, and torch names the text as its settings all the same."""
    for gpu.in_force in ("max_split_size_mb:64", "backend:cudaMallocAsync"):
        gpu.malloc(MIB)
        source.drain()
    assert source.allocator().settings == "max_split_size_mb:64"


@pytest.mark.parametrize("read_at_import", [True, False])
def test_settings_that_the_script_makes_before_it_uses_cuda_are_in_force(
    gpu: ModelCuda, monkeypatch: pytest.MonkeyPatch, read_at_import: bool
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    gpu.ready, gpu.in_force = False, "max_split_size_mb:64"
    source = started(gpu)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:4")
    if not read_at_import:
        gpu.in_force = "roundup_power2_divisions:4"
    gpu.init()
    assert gpu.in_force == "roundup_power2_divisions:4"
    gpu.malloc(MIB)
    source.drain()
    allocator = source.allocator()
    assert (allocator.variable, allocator.settings) == ("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:4")
    source.stop()


def test_what_the_driver_counts_as_the_processs_is_asked_once_a_step(gpu: ModelCuda, idle: CudaSource) -> None:
    gpu.process = 700 * MIB
    idle.start({})
    gpu.malloc(512)
    for mark in ("after_forward", "after_backward", "after_optimizer"):
        idle.mark(0, mark)
    idle.drain()
    used = {each.mark: each.process_used for each in idle.take_layers()}
    assert used == {"after_forward": None, "after_backward": None, "after_optimizer": 700 * MIB, "peak": None}


def test_a_step_with_more_events_than_are_kept_is_told(
    gpu: ModelCuda, idle: CudaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "ENTRIES", 10)
    idle.start({})
    for _ in range(4):
        gpu.free(gpu.malloc(512))
    del gpu.trace[: len(gpu.trace) - 9]
    idle.drain()
    assert not any("more than the" in note for note in idle.notes())
    for _ in range(4):
        gpu.free(gpu.malloc(512))
    del gpu.trace[: len(gpu.trace) - 10]  # torch writes over the oldest
    idle.drain()
    assert any("more than the 10 allocator events" in note for note in idle.notes())


def test_a_long_step_is_read_in_parts_that_make_one(monkeypatch: pytest.MonkeyPatch, gpu: ModelCuda) -> None:
    """The same calls, in one part and in several: the same events, marks and peak, and a short trace at each pause."""
    windows, layers = [], []
    for part in (1 << 30, 20):
        clock = Clock()
        monkeypatch.setattr(cuda, "time_ns", clock)
        monkeypatch.setattr(cuda, "PART", part)
        gpu = ModelCuda(clock)
        source = CudaSource(api=gpu)
        source.start({})
        lengths = []
        for batch in range(10):
            kept = [gpu.malloc(3 * MIB + 512 * (batch == 4)), gpu.malloc(700, frames=[_FRAME])]
            source.mark(0, "after_forward")
            for block in kept:
                gpu.free(block)
            source.pause()
            lengths.append(len(gpu.trace))
        windows.append(source.drain())
        layers.append([(each.mark, each.requested, each.allocated) for each in source.take_layers()])
        source.stop()
        assert (max(lengths) < 40) == (part == 20)
    whole, parts = windows
    for name in ("action", "address", "bytes", "block_bytes", "allocated"):
        assert getattr(parts, name).tolist() == getattr(whole, name).tolist()
    assert (np.diff(parts.time_ns) >= 0).all()
    assert parts.stack is not None and whole.stack is not None
    assert [parts.stacks[index] for index in parts.stack] == [whole.stacks[index] for index in whole.stack]
    for name in ("position", "action", "address", "bytes"):
        assert getattr(parts.segments, name).tolist() == getattr(whole.segments, name).tolist()
    assert (
        layers[0]
        == layers[1]
        == [
            ("after_forward", 3 * MIB + 700, 3 * MIB + 1024),
            ("peak", 3 * MIB + 1212, 3 * MIB + 512 + 1024),
        ]
    )


_FRAME = {"filename": "train.py", "line": 3, "name": "train"}


def test_a_device_that_has_failed_hides_no_error_of_the_scripts(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.malloc(700)
    source.mark(0, "after_forward")
    gpu.broken = True
    source.stamp(1)
    source.mark(0, "after_backward")
    assert source.stop().bytes.tolist() == [700]
    used = {each.mark: each.device_used is None for each in source.take_layers()}
    assert used == {"after_forward": False, "after_backward": True, "peak": True}
    (note,) = source.notes()
    assert is_warning(note) and note.endswith(": CUDA error: device-side assert triggered")


def test_nodes_are_followed_from_when_cuda_is_there(gpu: ModelCuda, idle: CudaSource) -> None:
    gpu.ready = False
    idle.start({})
    assert not idle._nodes.running
    idle.drain()
    assert not idle._nodes.running
    gpu.init()
    assert idle._nodes.running


def test_another_thread_may_initialize_cuda(gpu: ModelCuda, idle: CudaSource) -> None:
    gpu.ready = False
    idle.start({})
    other = threading.Thread(target=gpu.init)
    other.start()
    other.join()
    assert gpu.recording and not idle._nodes.running  # a profile belongs to its thread
    gpu.malloc(512)
    idle.drain()
    assert idle._nodes.running


def test_private_pools_are_noted(gpu: ModelCuda, source: CudaSource, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.malloc(512)
    found = gpu.snapshot()
    found["segments"][0]["segment_pool_id"] = (0, 1)
    monkeypatch.setattr(gpu, "snapshot", lambda: found)
    source.drain()
    assert any("CUDA graphs" in note for note in source.notes())


def test_a_failure_keeps_the_segments_and_the_request(clock: Clock) -> None:
    gpu = ModelCuda(clock, total=64 * MIB)
    source = started(gpu)
    gpu.malloc(40 * MIB)
    with pytest.raises(OutOfMemory):
        gpu.malloc(30 * MIB - 1)
    source.stop()
    (oom,) = source.take_ooms()
    assert (oom.asked, oom.segment, oom.total, oom.free) == (30 * MIB, 30 * MIB, 64 * MIB, 24 * MIB)
    assert (oom.pool, oom.device) == ("0,0", 0)
    assert source.take_ooms() == []


def test_the_limit_of_the_process_is_not_taken_for_the_device(clock: Clock) -> None:
    gpu = ModelCuda(clock, total=64 * MIB)
    source = started(gpu)
    gpu.malloc(512)
    gpu._observer(0, 30 * MIB, 20 * MIB, 60 * MIB)  # torch tells the limit as the total
    source.stop()
    (oom,) = source.take_ooms()
    assert (oom.total, oom.limit, oom.free) == (64 * MIB, 20 * MIB, 60 * MIB)


@pytest.mark.parametrize("chosen", [False, True])
def test_a_failure_on_another_device_is_kept_and_chosen_while_none_is(clock: Clock, chosen: bool) -> None:
    gpu = ModelCuda(clock, total=64 * MIB, others=(1 * MIB,))
    source = started(gpu)
    gpu.malloc(40 * MIB)  # device 0 has the larger peak
    if chosen:
        source.drain()
    gpu._observer(1, 30 * MIB, 64 * MIB, 2 * MIB)
    source.stop()
    assert [oom.device for oom in source.take_ooms()] == [1]
    allocator = source.allocator()
    assert allocator is not None and allocator.device == (0 if chosen else 1)


def test_a_failure_on_a_device_that_the_script_only_tried_chooses_nothing(clock: Clock) -> None:
    gpu = ModelCuda(clock, total=64 * MIB, others=(0,))
    source = started(gpu)
    gpu._observer(1, 30 * MIB, 64 * MIB, 2 * MIB)
    gpu.malloc(1 * MIB)
    assert source.drain().bytes.tolist() == [1 * MIB]
    source.stop()
    allocator = source.allocator()
    assert allocator is not None and allocator.device == 0


def test_the_device_is_that_of_the_models_until_events_are_read(clock: Clock) -> None:
    """A data set may take more memory elsewhere, and a model may move after its first forward."""
    gpu = ModelCuda(clock, total=64 * MIB, others=(20 * MIB, 40 * MIB))
    source = CudaSource(api=gpu)
    model = {1}
    source.models_at = lambda: frozenset(model)
    source.start({})
    gpu.malloc(1 * MIB)
    source.mark(0, Mark.AFTER_FORWARD)
    model = {0}
    source.mark(0, Mark.AFTER_BACKWARD)
    assert source.drain().bytes.tolist() == [1 * MIB]
    assert Mark.AFTER_FORWARD not in [layer.mark for layer in source.take_layers()]
    model = {1}
    source.mark(1, Mark.AFTER_FORWARD)
    source.stop()
    allocator = source.allocator()
    assert allocator is not None and allocator.device == 0


def test_an_allocator_that_keeps_no_history_is_the_reason_that_nothing_was_recorded(
    gpu: ModelCuda, idle: CudaSource
) -> None:
    gpu.ready = False
    idle.start({})
    gpu.why = "torch uses the allocator 'pluggable'"
    gpu.init()
    assert idle.stop() is NO_EVENTS
    assert idle.nothing() == "nothing was recorded: torch uses the allocator 'pluggable'"


def test_memory_that_the_allocator_does_not_serve_is_said(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.caching = False
    source.drain()
    assert str(source.nothing()).startswith("nothing was recorded: PyTorch's caching allocator allocated nothing on a")
    gpu.caching = True
    gpu.malloc(512)
    source.drain()
    assert source.nothing() is None
    assert source.notes() == []
    gpu.caching = False
    source.stop()
    (note,) = source.notes()
    assert is_warning(note) and "turned PyTorch's caching allocator off" in note


def test_only_some_failures_are_kept(clock: Clock) -> None:
    gpu = ModelCuda(clock, total=16 * MIB)
    source = started(gpu)
    gpu.malloc(512)
    for _ in range(20):
        with pytest.raises(OutOfMemory):
            gpu.malloc(32 * MIB)
    source.stop()
    assert len(source.take_ooms()) == 8


def test_nodes_run_innermost_first_and_hand_their_number_on() -> None:
    nodes = nodes_of([Ran(10, 50, "outer", 4), Ran(20, 30, "inner", -1), Ran(60, 70, "next", 3)])
    op, sequence = nodes.at(np.array([5, 10, 25, 40, 55, 65, 90]))
    assert [nodes.ops[index] for index in op.tolist()] == ["", "outer", "inner", "outer", "", "next", ""]
    assert sequence.tolist() == [-1, 4, 4, 4, -1, 3, -1]


def test_nodes_of_other_devices_threads_name_nothing_on_this_one() -> None:
    names = ["", "here", "there", "of the recorded thread"]
    spans = np.array([(10, 40, 1, 4, 2), (30, 60, 2, 5, 3), (70, 80, 3, 6, 1)])
    blocks = dict.fromkeys(
        ("time_ns", "address", "bytes", "total", "name", "own", "number"), np.zeros(2, dtype=np.int64)
    )
    allocated = {"device": np.array([0, 1]), "thread": np.array([2, 3])}
    seen = SeenNodes(extension.Observed(**blocks, **allocated, spans=spans, names=names))
    running = {device: [seen.nodes(device).name_at(when) for when in (15, 35, 50, 75)] for device in (0, 1)}
    assert running[0] == ["here", "here", "", "of the recorded thread"]
    assert running[1] == ["", "there", "there", "of the recorded thread"]


def test_where_nodes_of_two_threads_overlap_no_name_is_guessed() -> None:
    nodes = nodes_of([Ran(10, 40, "first", 4, 1), Ran(30, 60, "second", 5, 2), Ran(45, 50, "inner", -1, 2)])
    op, sequence = nodes.at(np.array([20, 35, 42, 47, 55, 65]))
    assert [nodes.ops[index] for index in op.tolist()] == ["first", "", "second", "inner", "second", ""]
    assert sequence.tolist() == [4, -1, 5, 5, 5, -1]


def test_the_nodes_of_a_backward_are_recorded_with_their_times() -> None:
    recorder = NodeRecorder(windows.Window(device=True))
    recorder.start()
    assert recorder.running
    weight = torch.ones(3, 3, requires_grad=True)
    before = time_ns()
    (weight @ weight).exp().sum().backward()
    after = time_ns()
    nodes = recorder.take(go_on=False).nodes(0)
    assert {"MmBackward0", "ExpBackward0", "torch::autograd::AccumulateGrad"} <= set(nodes.ops)
    assert (np.diff(nodes.since_ns) >= 0).all()
    assert before <= nodes.since_ns[0] <= nodes.since_ns[-1] <= after
    assert nodes.name_at(before) == nodes.name_at(after) == ""
    assert recorder.take(go_on=False).nodes(0).ops == ("",)


def test_a_failure_in_backward_is_named_after_its_node(clock: Clock) -> None:
    gpu = ModelCuda(clock, total=16 * MIB)
    source = started(gpu)
    gpu.malloc(512)
    with pytest.raises(OutOfMemory):
        gpu.malloc(32 * MIB)
    source._oom.name_ops(lambda device, instant: "MmBackward0")
    source.stop()
    assert source.take_ooms()[0].op == "MmBackward0"


def test_without_the_profiler_events_are_still_recorded(gpu: ModelCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: NodeRecorder) -> None:
        raise RuntimeError("no profiler here")

    monkeypatch.setenv(extension.VARIABLE, "off")  # the compiled extension would take the profiler's place
    monkeypatch.setattr(NodeRecorder, "start", refuse)
    source = started(gpu)
    gpu.malloc(512)
    assert len(source.stop().time_ns) == 1
    assert any("no profiler here" in note for note in source.notes())


def test_there_may_be_no_nodes() -> None:
    op, sequence = nodes_of([]).at(np.array([1, 2]))
    assert op.tolist() == [0, 0] and sequence.tolist() == [-1, -1]


def test_what_awaits_another_stream_at_the_start_is_no_memory_of_the_scripts(gpu: ModelCuda, idle: CudaSource) -> None:
    waiting, kept = gpu.malloc(5000), gpu.malloc(700)
    gpu.allocator.record_stream(waiting, 7)
    gpu.free(waiting)
    idle.start({})
    idle.mark(0, "after_forward")
    assert idle.drain().bytes.tolist() == [700]
    (mark, peak) = idle.take_layers()
    assert (mark.requested, peak.requested, peak.active) == (kept.requested, 700, 1024 + 5120)


def test_a_wait_that_ended_while_the_trace_was_emptied_is_over(gpu: ModelCuda, source: CudaSource) -> None:
    waiting, kept = gpu.malloc(5000), gpu.malloc(700)
    gpu.allocator.record_stream(waiting, 7)
    gpu.free(waiting)

    def complete(before: str) -> None:
        if before == "clear":
            gpu.allocator.complete_events()
            gpu.free(gpu.malloc(512))

    gpu.meanwhile = complete
    source.drain()
    gpu.meanwhile = None
    source.mark(1, "after_forward")
    source.drain()
    assert [each.requested for each in source.take_layers() if each.mark == "after_forward"] == [kept.requested]


def test_what_another_thread_allocates_while_the_statistics_are_read_counts_before_the_mark(
    gpu: ModelCuda, source: CudaSource
) -> None:
    gpu.malloc(700)
    source.drain()
    source.stamp(at := gpu.clock())

    def load(before: str) -> None:
        gpu.malloc(1000)

    gpu.meanwhile = load
    source.mark(1, "after_forward")
    gpu.meanwhile = None
    gpu.free(gpu.malloc(512))
    window = source.drain()
    assert [each.requested for each in source.take_layers()] == [1700, 2212]
    assert [time < at for time in window.time_ns.tolist()] == [True, False, False]


def row(action: str, address: int) -> dict[str, Any]:
    """An entry of 100 B in a trace."""
    return {"action": action, "addr": address, "size": 100}


def test_what_came_after_a_mark_is_not_put_before_it_by_what_the_profiler_saw() -> None:
    """Of two uses of an address the profiler may have seen the other one: the allocator's count at the mark decides."""
    trace = read_trace([row(ALLOC, 1), row(ALLOC, 2)], StackTexts())
    trace.time_ns[:] = 10, 30
    trace.block[1], trace.seen[1] = 512, 0
    facts = {"time_ns": 15, "address": 2, "bytes": 512, "op": 0, "sequence": 0}
    seen = SeenBlocks(**{name: np.array([value]) for name, value in facts.items()})
    mark = MarkCount(since_ns=0, time_ns=20, counted=Counted(blocks=1, requested=100))
    final = Counted(blocks=2, requested=200)
    assert timed(trace, {}, seen, [mark], span=(0, 100), final=final).tolist() == [10, 20]


def test_a_snapshot_within_a_mark_does_not_move_what_another_thread_does_meanwhile() -> None:
    """It is ampmem's own, which looks for the device with the largest peak; the mark is where its phase began."""
    trace = read_trace([row("snapshot", 0) | {"user_metadata": "5"}, row(ALLOC, 1)], StackTexts())
    trace.time_ns[:] = 7, 12
    counted = Counted(blocks=1, requested=100)
    mark = MarkCount(since_ns=5, time_ns=20, counted=counted)
    found = timed(trace, {5: 20, 20: 2**62}, NO_BLOCKS, [mark], span=(0, 100), final=counted)
    assert found.tolist()[1] == 4


def test_what_another_thread_allocates_between_the_trace_and_the_segments_has_its_time(
    gpu: ModelCuda, source: CudaSource, clock: Clock
) -> None:
    gpu.malloc(700)
    source.drain()
    source.mark(1, "after_forward")
    clock.now += 1_000_000
    late: list[Block] = []

    def load(before: str) -> None:
        if before == "segments":
            late.append(gpu.malloc(1000))

    gpu.meanwhile = load
    window = source.stop()
    assert next(each.requested for each in source.take_layers()) == 700
    assert window.allocated.tolist()[0] == 700 + late[0].requested
    assert not any("lost" in note for note in source.notes())


def test_a_graph_that_any_thread_captures_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def capture_begin(self) -> None:
            pass

        def capture_end(self) -> None:
            raise RuntimeError("spoiled")

    begin, api = Graph.capture_begin, TorchCuda()
    monkeypatch.setattr(torch_private, "BEGIN_CAPTURE", (Graph, "capture_begin"))
    monkeypatch.setattr(torch_private, "END_CAPTURE", (Graph, "capture_end"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    undo, graph, answers = api.follow_captures(), Graph(), [api.capturing()]
    thread = threading.Thread(target=graph.capture_begin)
    thread.start()
    thread.join()
    answers.append(api.capturing())
    with pytest.raises(RuntimeError, match="spoiled"):
        graph.capture_end()
    assert [*answers, api.capturing()] == [False, True, False]
    graph.capture_begin()
    undo()  # in the middle of a capture, whose end is not heard of
    assert (api.capturing(), Graph.capture_begin) == (False, begin)


def test_the_allocator_is_read_twice_only_where_it_must_be(
    gpu: ModelCuda, idle: CudaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    snapshot = gpu.snapshot
    monkeypatch.setattr(gpu, "snapshot", lambda: (taken.append(1), snapshot())[1])
    idle.start({})
    counts = []
    for _ in range(3):
        kept = gpu.malloc(30 * MIB)
        gpu.allocator.record_stream(kept, 7)
        gpu.free(kept)
        idle.drain()
        counts.append(len(taken))
    gpu.malloc(30 * MIB)
    gpu.trace.clear()  # entries are lost: another look would cost as much and say no more
    idle.drain()
    counts.append(len(taken))
    gpu.meanwhile = lambda before: gpu.malloc(700) if before == "segments" else None
    idle.drain()
    counts.append(len(taken))
    assert counts == [1, 2, 3, 4, 6]
    gpu.meanwhile = None


def test_a_script_that_resets_the_peaks_does_not_make_other_devices_smaller(clock: Clock) -> None:
    gpu = ModelCuda(clock, others=(100,))
    source = started(gpu)
    gpu.free(gpu.malloc(8 * MIB))
    source.drain()
    gpu.others = (20,)
    gpu.allocator.counters.reset_peaks()
    source.stop()
    assert source.allocator().peaks == (8 * MIB, 100)


def test_a_peak_that_was_reset_before_anybody_asked_is_in_the_trace(gpu: ModelCuda, clock: Clock) -> None:
    peaks = TracePeaks(gpu.device_count, gpu.stats, Settings())
    gpu.recording = True
    kept = gpu.malloc(30 * MIB - 512)
    gpu.free(gpu.malloc(8 * MIB))
    gpu.allocator.counters.reset_peaks()
    peaks.note(gpu.snapshot())
    assert peaks.now() == {0: 38 * MIB}
    assert kept.size == 30 * MIB


def test_a_block_that_was_not_split_has_its_true_size_although_it_died_within_the_step(gpu: ModelCuda) -> None:
    source = started(gpu)
    gpu.free(gpu.malloc(11 * MIB + 512))
    gpu.elsewhere(lambda: gpu.free(gpu.malloc(700)))  # another thread: the profiler sees none of it
    window = source.stop()
    assert window.block_bytes.tolist() == [12 * MIB, 12 * MIB, 1024, 1024]


class _Allocates(torch.autograd.Function):
    """Takes memory of the modelled GPU in its backward, and gives it back there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gpu: ModelCuda) -> torch.Tensor:
        ctx.gpu = gpu
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.gpu.free(ctx.gpu.malloc(11 * MIB + 512))
        return grad, None


@pytest.mark.parametrize("drift", [-5_000_000, 500_000_000])
def test_what_backward_allocates_is_named_by_the_tree_whatever_the_clocks_say(drift: int) -> None:
    gpu = ModelCuda(time_ns, drift_ns=drift)
    source = started(gpu)
    gpu.malloc(512)
    x = _Allocates.apply(torch.ones(2, requires_grad=True), gpu)
    before = time_ns()
    x.sum().backward()
    after = time_ns()
    gpu.malloc(512)
    window = source.stop()
    ops = [window.ops[index] for index in window.op.tolist()]
    assert ops == ["", "_AllocatesBackward", "_AllocatesBackward", ""]
    assert (window.sequence[1:3] >= 0).all()
    assert (before <= window.time_ns[1:3]).all() and (window.time_ns[1:3] <= after).all()
    assert window.block_bytes.tolist() == [512, 12 * MIB, 12 * MIB, 512]


def _node(name: str, thread: int, number: int, start: int, end: int, *children: Any) -> Any:
    return SimpleNamespace(
        name=name,
        start_time_ns=start,
        end_time_ns=end,
        start_tid=thread,
        children=list(children),
        extra_fields=_OpFields(sequence_number=number),
    )


class _Fields(SimpleNamespace):
    """Those of an allocation."""


class _OpFields(SimpleNamespace):
    """Those of a node or a marker."""


@pytest.fixture
def made_up_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "ALLOCATION", _Fields)
    monkeypatch.setattr(general, "OP_FIELDS", _OpFields)


def _memory(thread: int, when: int, address: int, size: int) -> Any:
    fields = _Fields(device=torch.device("cuda", 0), ptr=address, alloc_size=size, total_allocated=0)
    return SimpleNamespace(start_time_ns=when, start_tid=thread, children=[], extra_fields=fields)


@pytest.mark.usefixtures("made_up_fields")
def test_a_node_that_the_engines_thread_made_is_not_taken_for_one_of_the_recorded_threads() -> None:
    recomputed = _node("MmBackward0", 2, 3, 30, 40, _memory(2, 35, 4096, 512))
    checkpoint = _node("CheckpointFunctionBackward", 2, 3, 20, 50, _memory(2, 25, 512, 512), recomputed)
    markers = [_node(MARKER, 1, -1, when, when + 1) for when in (1, 2, 3, 4, 60, 61, 62, 63)]
    first, last = (
        [ClockMark(when, when + 1, when + 1) for when in burst] for burst in ((1, 2, 3, 4), (60, 61, 62, 63))
    )
    seen = EventTree([*markers, checkpoint]).observed((first, last))
    assert [(seen.names[name], number) for _, _, name, number, _ in seen.spans.tolist()] == [
        ("CheckpointFunctionBackward", 3),
        ("MmBackward0", 3 + ELSEWHERE),
    ]
    assert seen.own.tolist() == [3, 3]
    blocks = SeenNodes(seen).blocks(0)
    assert [blocks.ops[op] for op in blocks.op] == ["CheckpointFunctionBackward", "MmBackward0"]
    assert blocks.sequence.tolist() == [3, 3 + ELSEWHERE]


def test_what_the_engines_thread_computes_again_is_named_after_its_own_op() -> None:
    log = Log(RealAddresses())
    texts = log.texts
    stacks = Stacks(enabled=False)
    joiner = Joiner(log, stacks, CompiledCode(log, Models(log), stacks))
    linear, dropout = texts.id("linear"), texts.id("dropout")
    log.enter_module(linear)
    torch.ones(1, requires_grad=True).exp()
    made = next_node() - 1
    log.op(time_ns(), texts.id("aten::mm"), 0)

    def recompute() -> int:
        log.enter_module(dropout)
        torch.ones(1, requires_grad=True).exp()
        log.op(time_ns(), texts.id("aten::exp"), 0)
        log.enter_module(0)
        return next_node() - 1

    number = ModelCuda(time_ns).elsewhere(recompute)
    now = np.full(3, time_ns())
    raw = replace(
        NO_EVENTS,
        **dict.fromkeys(("time_ns", "address", "bytes", "block_bytes", "stream", "allocated"), now),
        action=np.full(3, Action.ALLOC),
        op=np.zeros(3, dtype=np.int64),
        sequence=np.array([made, number + ELSEWHERE, made + ELSEWHERE]),
    )
    modules = [texts.value(module) for module in joiner.join(raw).events.module.tolist()]
    # The last one is of a node inside another's backward whose forward was on the recorded thread all the same.
    assert modules == ["linear", "dropout", "dropout" if number == made else "linear"]
