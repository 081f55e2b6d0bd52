"""Source ``cuda`` with the extension's tracker: the same events from rows, and nothing copied at a step's end."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda_model import Clock, ModelCuda, ModelTracker, events_of, held, totals

from ampmem.allocator.segments import Extent
from ampmem.allocator.settings import MIB, Settings
from ampmem.events import Action
from ampmem.recorder.sources import extension
from ampmem.recorder.sources.cuda import source as cuda
from ampmem.recorder.sources.cuda.device import Stats
from ampmem.recorder.sources.cuda.events import HeldBlocks, History, TraceWindow
from ampmem.recorder.sources.cuda.nodes import SeenNodes
from ampmem.recorder.sources.cuda.source import FEW_ENTRIES, CudaSource
from ampmem.recorder.sources.cuda.trace import IS_ALLOC, IS_FREE, IS_SEGMENT, IS_SNAPSHOT, KINDS
from ampmem.recorder.sources.cuda.tracker import (
    NO_ROWS,
    Table,
    Tracked,
    devices_in,
    pools_in,
    threads_by_device,
    trace_on,
    until_snapshot,
)
from ampmem.units import format_count

_FRAME = {"filename": "/home/me/train.py", "line": 7, "name": "step"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cuda, "time_ns", clock)
    return clock


@pytest.fixture
def gpu(clock: Clock) -> ModelCuda:
    return Snapshots(clock)


@pytest.fixture
def source(gpu: ModelCuda) -> Iterator[CudaSource]:
    source = CudaSource(api=gpu, tracker=ModelTracker(gpu))
    source.start({})
    yield source
    source._nodes.take(go_on=False)


class Snapshots(ModelCuda):
    """A model that counts its snapshots among its calls."""

    kept: int = 0
    after: Callable[[], object] = staticmethod(lambda: None)
    """What another thread does right after a snapshot."""

    def history(self, *, on: bool, entries: int, stacks: bool) -> None:
        self.kept = entries
        super().history(on=on, entries=entries, stacks=stacks)

    def snapshot(self) -> dict[str, Any]:
        self.calls.append("snapshot")
        found = super().snapshot()
        self.elsewhere(self.after)
        return found


def row(kind: int, address: int = 0, *, device: int = 0, **columns: int) -> Tracked:
    """A row of a tracker."""
    return Tracked(*[0] * len(Tracked._fields))._replace(kind=kind, address=address, device=device, **columns)  # type: ignore[arg-type]


def table(*rows: Tracked) -> Table:
    return np.array(rows, dtype=np.int64).reshape(-1, len(Tracked._fields))


def test_the_allocator_is_looked_at_in_the_first_step_and_at_the_end_only(gpu: ModelCuda, source: CudaSource) -> None:
    kept = gpu.malloc(700)
    source.drain()
    gpu.calls.clear()
    for _ in range(5):
        gpu.free(gpu.malloc(3 * MIB))
        source.mark(0, "after_forward")  # type: ignore[arg-type]
        source.drain()
    assert set(gpu.calls) == {"synchronize"}
    gpu.free(kept)
    source.stop()
    assert gpu.calls.count("snapshot") == 1
    assert gpu.calls[-1] == "off"
    assert not gpu.tracker.on


def test_the_history_keeps_few_entries(gpu: ModelCuda, source: CudaSource) -> None:
    assert isinstance(gpu, Snapshots)
    assert gpu.kept == FEW_ENTRIES


def test_an_event_has_the_time_of_its_row_and_a_stack_is_text_once(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.malloc(100)
    source.drain()
    for _ in range(3):
        gpu.free(gpu.malloc(700, frames=[_FRAME]))
    window = source.drain()
    assert all(first < second for first, second in pairwise(window.time_ns.tolist()))
    assert window.stack is not None
    assert [window.stacks[each] for each in window.stack] == ["/home/me/train.py:7 step", ""] * 3
    assert window.stacks == ("", "/home/me/train.py:7 step")


def test_a_tracker_that_torch_refuses_is_replaced_by_the_history(gpu: ModelCuda) -> None:
    assert isinstance(gpu, Snapshots)
    source = CudaSource(api=gpu, tracker=ModelTracker(gpu, works=False))
    source.start({})
    assert gpu.kept == cuda.ENTRIES
    gpu.malloc(700)
    source.drain()
    block = gpu.malloc(3 * MIB)
    window = source.drain()
    assert window.bytes.tolist() == [3 * MIB]
    assert gpu.calls.count("snapshot") == 2
    gpu.free(block)
    source.stop()


def test_a_block_of_another_thread_that_is_left_has_its_true_size(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.malloc(700)
    source.drain()
    gpu.calls.clear()
    block = gpu.elsewhere(lambda: gpu.malloc(11 * MIB + 512))
    window = source.drain()
    assert window.block_bytes.tolist() == [12 * MIB]
    assert gpu.calls.count("snapshot") == 1
    gpu.free(block)
    window = source.drain()
    assert window.block_bytes.tolist() == [12 * MIB]
    assert gpu.calls.count("snapshot") == 1
    source.stop()


def test_rows_that_found_no_place_are_made_good_and_told(clock: Clock) -> None:
    gpu = ModelCuda(clock)
    source = CudaSource(api=gpu, tracker=ModelTracker(gpu, most=6))
    source.start({})
    windows = [source.drain()]
    kept = [gpu.malloc(700 + number) for number in range(3)]
    windows.append(source.drain())
    assert not source.notes()
    kept += [gpu.malloc(2000 + number) for number in range(12)]
    gpu.free(kept.pop(0))
    windows.append(source.drain())
    assert any(f"more than the {format_count(cuda.ENTRIES)} allocator events" in note for note in source.notes())
    assert any("some allocator events were lost" in note for note in source.notes())
    kept.append(gpu.malloc(900))
    windows.append(source.stop())
    events = events_of(windows)
    assert totals(events)[-1] == events.allocated[-1] == held(gpu)


def test_a_step_in_which_the_counts_differ_is_read_from_the_segments(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.malloc(700)
    source.drain()
    tracker = gpu.tracker
    assert tracker is not None
    gpu.tracker = None  # the tracker misses a block
    gpu.malloc(5000)
    gpu.tracker = tracker
    gpu.malloc(900)
    window = source.drain()
    assert sorted(window.bytes.tolist()) == [900, 5000]
    assert any("some allocator events were lost" in note for note in source.notes())
    source.stop()


def test_a_thread_that_never_stops_to_allocate_leaves_the_counts_for_later(gpu: ModelCuda, source: CudaSource) -> None:
    kept = [gpu.malloc(700) for _ in range(20)]
    windows = [source.drain()]
    gpu.meanwhile = lambda where: gpu.free(kept.pop()) if where == "statistics" else None
    gpu.malloc(900)
    gpu.calls.clear()
    windows.append(source.drain())
    assert "snapshot" not in gpu.calls
    gpu.meanwhile = None
    windows.append(source.stop())
    events = events_of(windows)
    assert totals(events).tolist() == events.allocated.tolist()
    assert totals(events)[-1] == held(gpu) == 900 + 700 * len(kept)
    assert not source.notes()


def test_rows_after_the_snapshot_are_of_the_next_step(gpu: ModelCuda, source: CudaSource) -> None:
    assert isinstance(gpu, Snapshots)
    gpu.malloc(700)
    gpu.after = lambda: gpu.malloc(900)
    assert source.drain().bytes.tolist() == [700]
    gpu.after = lambda: None
    gpu.malloc(500)
    window = source.drain()
    assert (window.action.tolist(), window.bytes.tolist()) == ([Action.ALLOC] * 2, [900, 500])
    assert not source.notes()
    source.stop()


def test_a_clock_that_is_set_back_keeps_the_order_and_the_step(
    gpu: ModelCuda, source: CudaSource, clock: Clock
) -> None:
    gpu.malloc(700)
    ended = source.drain().time_ns[-1]
    gpu.malloc(700)
    clock.now -= 10_000
    gpu.malloc(800)
    window = source.drain()
    assert window.bytes.tolist() == [700, 800]
    assert ended <= window.time_ns[0] <= window.time_ns[1]
    source.stop()


@pytest.mark.parametrize("name", ["blocks", "requested", "reserved"])
def test_rows_have_to_come_to_what_the_allocator_counts(name: str) -> None:
    history = History(Settings())
    held = [Extent(0x100000, 2 * MIB, 0, True, False)]
    trace, _ = trace_on(0, NO_ROWS, np.array([0]), [""])
    history.settle_tracked(TraceWindow(trace, held, HeldBlocks({}, {})), since_ns=1, until_ns=5)
    rows = table(
        row(IS_ALLOC, 0x100000, time_ns=7, size=700, block=1024), row(IS_ALLOC, 0x200000, time_ns=8, size=1, block=512)
    )
    counted = Stats(blocks=2, requested=701, allocated=1536, active=1536, reserved=2 * MIB, allocated_peak=1536)
    wrong = replace(counted, **{name: getattr(counted, name) + 1})
    trace, _ = trace_on(0, rows, np.array([0]), [""])
    assert history.follow(trace, since_ns=6, until_ns=9, counted=wrong) is None
    settled = history.follow(trace, since_ns=6, until_ns=9, counted=counted)
    assert (settled.events.allocated.tolist(), settled.events.block_bytes.tolist()) == ([700, 701], [1024, 512])


def test_the_allocator_is_described_without_a_snapshot(clock: Clock) -> None:
    gpu = ModelCuda(clock, settings=Settings(expandable_segments=True))
    source = CudaSource(api=gpu, tracker=ModelTracker(gpu))
    source.start({})
    source._expandable = False
    gpu.malloc(700)
    source.drain()
    source._expandable = False
    gpu.malloc(700, 94_000)
    source.drain()
    allocator = source.allocator()
    assert (allocator.streams, allocator.expandable_segments, allocator.private_pools) == (2, True, 0)
    assert not source.notes()
    source._note_tracked(0, table(row(IS_SEGMENT, 1, pool=0, shared_pool=2)))
    allocator = source.allocator()
    assert allocator.private_pools == 1
    assert any("memory pools of the script" in note for note in source.notes())
    source.stop()


def test_a_block_of_another_thread_has_the_node_that_ran_at_its_time(
    gpu: ModelCuda, source: CudaSource, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.malloc(700)
    source.drain()
    start = clock()
    gpu.free(gpu.malloc(600))
    gpu.elsewhere(lambda: gpu.free(gpu.malloc(500)))
    spans = np.array([(start, clock(), 1, 77, 0)])
    seen = extension.Observed(*np.zeros((9, 0), dtype=np.int64), spans=spans, names=["", "ExpBackward0"])
    monkeypatch.setattr(source._nodes, "take", lambda go_on: SeenNodes(seen))
    window = source.drain()
    assert [window.ops[each] for each in window.op] == ["", "", "ExpBackward0", "ExpBackward0"]
    assert window.sequence.tolist() == [-1, -1, 77, 77]
    monkeypatch.undo()
    source.stop()


def test_a_long_step_is_read_in_parts_also_in_backward(
    gpu: ModelCuda, source: CudaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "PART", 20)
    monkeypatch.setattr(cuda, "in_backward", lambda: True)
    gpu.malloc(700)
    source.drain()
    lengths = []
    for _ in range(30):
        gpu.free(gpu.malloc(3 * MIB))
        source.pause()
        lengths.append(len(gpu.tracker._rows))
    assert max(lengths) < 40
    window = source.drain()
    assert window.action.tolist() == [Action.ALLOC, Action.FREE] * 30
    source.stop()


def test_the_peak_of_a_device_is_known_although_the_script_reset_it(gpu: ModelCuda, source: CudaSource) -> None:
    gpu.malloc(700)
    source.drain()
    gpu.free(gpu.malloc(8 * MIB))
    gpu.allocator.counters.reset_peaks()
    source.stop()
    assert source.allocator().peaks == (8 * MIB + 1024,)


def test_the_peak_of_another_device_is_in_its_rows(clock: Clock) -> None:
    gpu = ModelCuda(clock, others=(100,))
    peaks = cuda.TracePeaks(gpu.device_count, gpu.stats, gpu.settings)
    rows = [
        row(IS_ALLOC, 0x1000, device=1, block=4096),
        row(IS_ALLOC, 0x2000, device=1, block=2048),
        row(IS_FREE, 0x1000, device=1, block=4096),
        row(IS_FREE, 0x2000, device=1, block=2048),
        row(IS_ALLOC, 0x1000, block=1 << 30),
    ]
    peaks.note_rows(table(*rows), 0)
    assert peaks.now() == {0: 0, 1: 6144}
    rows[0] = rows[0]._replace(block=0)  # its size is unknown, so nothing is
    peaks = cuda.TracePeaks(gpu.device_count, gpu.stats, gpu.settings)
    peaks.note_rows(table(*rows), 0)
    assert peaks.now() == {0: 0, 1: 100}


def test_rows_of_one_device_become_a_trace() -> None:
    rows = table(
        row(IS_ALLOC, 0x1000, time_ns=10, size=700, block=1024, stack=1, stream=5, name=2, number=77),
        row(IS_ALLOC, 0x9000, device=1, time_ns=11, size=1, block=512),
        row(IS_FREE, 0x1000, time_ns=12, size=700, block=1024),
        row(IS_ALLOC, 0x2000, time_ns=13, size=300, stack=9),
    )
    trace, seen = trace_on(0, rows, np.array([0, 4]), ["", "A", "B"])
    assert trace.kind.tolist() == [IS_ALLOC, IS_FREE, IS_ALLOC]
    assert trace.address.tolist() == [0x1000, 0x1000, 0x2000]
    assert trace.size.tolist() == [700, 700, 300]
    assert trace.stream.tolist() == [5, 0, 0]
    assert trace.time_ns.tolist() == [10, 12, 13]
    assert trace.block.tolist() == [1024, 1024, 0]
    assert trace.stack.tolist() == [4, 0, 0], "a stack without a text is none"
    assert trace.seen.tolist() == [0, 1, -1], "the last is of a thread that is not recorded"
    assert seen.bytes.tolist() == [1024, -1024, 0]
    assert (seen.ops[seen.op[0]], seen.sequence[0]) == ("B", 77)


def test_events_of_other_threads_between_a_phase_and_its_mark_are_before_the_phase() -> None:
    rows = table(*(row(IS_ALLOC, 0x1000 * n, time_ns=n, size=1, thread=n % 2) for n in range(10, 20)))
    assert trace_on(0, rows, np.array([0]), [""], [(13, 14, 0)])[0].time_ns.tolist() == [10, 11, 12, 12, *range(14, 20)]
    assert trace_on(0, rows, np.array([0]), [""], [(13, 14, 1)])[0].time_ns.tolist() == list(range(10, 20))


def test_what_else_is_in_the_rows() -> None:
    snapshot = KINDS.index("snapshot")
    rows = table(
        row(snapshot),
        row(IS_ALLOC, 1, block=512, thread=3),
        row(IS_SEGMENT, 1, pool=0, shared_pool=2),
        row(IS_FREE, 1, device=1, block=512, thread=3),
        row(snapshot, device=1),
        row(snapshot),
        row(IS_ALLOC, 2, thread=4),
    )
    assert snapshot == IS_SNAPSHOT
    assert (until_snapshot(0, rows, 1), until_snapshot(1, rows, 1), until_snapshot(0, rows, 6)) == (5, 4, 7)
    assert (devices_in(rows), devices_in(rows[:3]), devices_in(NO_ROWS)) == ({0, 1}, {0}, set())
    assert threads_by_device(rows) == {3: {0, 1}}
    assert (pools_in(0, rows), pools_in(1, rows)) == ({(0, 2)}, set())


def test_the_headers_of_cuda_are_looked_for_with_a_cuda_build_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda_runtime_api.h", "crt/host_config.h"):
        header = tmp_path / "include" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert extension.cuda_headers() is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert extension.cuda_headers() == tmp_path / "include"
    header.unlink()
    assert extension.cuda_headers() != tmp_path / "include"
