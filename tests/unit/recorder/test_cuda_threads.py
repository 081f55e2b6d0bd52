"""Any sequence of calls, on any thread, at any moment: what is recorded agrees with the allocator's own counts."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cuda_model import Clock, ModelCuda, ModelTracker, events_of, held, reserved_after, totals

from ampmem.allocator.blocks import Block
from ampmem.allocator.settings import MIB, Settings
from ampmem.analysis.timeline.lifetimes import pair
from ampmem.events import Action, LayersRecord, SegmentColumns
from ampmem.recorder.sources.base import RawEvents
from ampmem.recorder.sources.cuda import source as cuda
from ampmem.recorder.sources.cuda.events import Chain, History
from ampmem.recorder.sources.cuda.nodes import NodeRecorder
from ampmem.recorder.sources.cuda.source import CudaSource

_FREE = st.tuples(st.just("free"), st.integers(0, 1000), st.just(0))
_MALLOC = st.tuples(st.just("malloc"), st.integers(1, 24 * MIB), st.integers(0, 2))
_USE = st.tuples(st.just("use"), st.integers(0, 1000), st.integers(0, 2))
_COMPLETE = st.tuples(st.just("complete"), st.just(0), st.just(0))
_CALLS = st.one_of(
    _MALLOC,
    _FREE,
    _FREE,
    _USE,
    _COMPLETE,
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
    st.tuples(st.just("drain"), st.just(0), st.just(0)),
    st.tuples(st.just("mark"), st.just(0), st.just(0)),
    st.tuples(st.just("pass"), st.integers(0, 1500), st.just(0)),
)
_OF_OTHERS = st.lists(st.one_of(_MALLOC, _FREE, _USE, _COMPLETE), max_size=3)
_DRIFT = st.integers(-400_000, 400_000)


@dataclass
class Replay:
    """A source that records a model, and what the model itself says at every mark and after every event."""

    clock: Clock
    gpu: ModelCuda
    tracked: bool = False
    live: list[Block] = field(default_factory=list)
    windows: list[RawEvents] = field(default_factory=list)
    layers: list[LayersRecord] = field(default_factory=list)
    expected: list[tuple[int, int]] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    """What was reserved after each event of the trace."""

    def __post_init__(self) -> None:
        self.source = CudaSource(api=self.gpu, tracker=ModelTracker(self.gpu) if self.tracked else None)

    def alloc(self, call: str, value: int, stream: int) -> None:
        gpu = self.gpu
        if call == "malloc":
            self.live.append(gpu.malloc(value, stream))
            self.reserved.append(gpu.allocator.counters.reserved)
        elif call == "free" and self.live:
            gpu.free(self.live.pop(value % len(self.live)))
            self.reserved.append(gpu.allocator.counters.reserved)
        elif call == "use" and self.live:
            gpu.allocator.record_stream(self.live[value % len(self.live)], stream)
        elif call == "complete":
            gpu.allocator.complete_events()

    def alloc_all(self, calls: list[tuple[str, int, int]]) -> None:
        for call in calls:
            self.alloc(*call)

    def run(self, calls: list[tuple[str, int, int]]) -> None:
        for number, (call, value, stream) in enumerate(calls):
            if call == "empty":
                self.gpu.allocator.empty_cache()
                self.gpu._catch_up()
            elif call == "pass":
                self.clock.now += value
            elif call == "mark":
                self.mark(number)
            elif call == "drain":
                self.windows.append(self.source.drain())
                self.layers += self.source.take_layers()
            else:
                self.alloc(call, value, stream)

    def mark(self, number: int) -> None:
        instant = self.clock()
        self.source.stamp(instant)
        self.source.mark(number, "after_forward")  # type: ignore[arg-type]
        if self.source._device is not None:  # before the first alloc there is none to ask
            self.expected.append((instant, held(self.gpu)))

    def end(self) -> Any:
        self.windows.append(self.source.stop())
        self.layers += self.source.take_layers()
        return events_of(self.windows)


def check(replay: Replay) -> None:
    """The laws: whatever was lost, the events come to what is there, and at every mark to what was counted."""
    events = replay.end()
    pair(events)
    running = totals(events)
    assert np.array_equal(running, events.allocated)
    assert (np.diff(events.time_ns) >= 0).all()
    assert (running[-1] if len(running) else 0) == held(replay.gpu)
    marks = [each for each in replay.layers if each.mark != "peak"]
    assert [each.requested for each in marks] == [size for _, size in replay.expected]
    for instant, size in replay.expected:
        position = int(np.searchsorted(events.time_ns, instant, side="left"))
        assert (running[position - 1] if position else 0) == size
    assert all(replace(each, device_used=None).allocated <= each.active <= each.reserved for each in marks)


def recorded(patch: pytest.MonkeyPatch, drift: int, *, tracked: bool, **options: Any) -> Replay:
    """A replay on a clock of the test's; nothing is profiled."""
    clock = Clock()
    patch.setattr(cuda, "time_ns", clock)
    patch.setattr(NodeRecorder, "start", lambda self: None)
    return Replay(clock, ModelCuda(clock, drift_ns=drift, **options), tracked)


def _check_reserved(replay: Replay) -> None:
    """Of the windows at each event but those of the baseline, and at the end."""
    now, found = 0, []
    for window in replay.windows:
        found += [
            reserved_after(window, now, index + 1)
            for index, action in enumerate(window.action.tolist())
            if action != Action.BASELINE
        ]
        now = reserved_after(window, now, len(window.action) + 1)
    assert found == replay.reserved
    assert now == replay.gpu.stats(0).reserved


@pytest.mark.parametrize("tracked", [False, True])
@settings(max_examples=80)
@given(
    calls=st.lists(_CALLS, max_size=80),
    before=st.lists(st.integers(1, 3 * MIB), max_size=3),
    expandable=st.booleans(),
    drift=_DRIFT,
)
def test_events_and_layers_agree_with_the_allocator(
    calls: list[tuple[str, int, int]], before: list[int], expandable: bool, drift: int, tracked: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        replay = recorded(patch, drift, tracked=tracked, settings=Settings(expandable_segments=expandable))
        replay.live += [replay.gpu.malloc(size) for size in before]
        replay.source.start({})
        replay.run(calls)
        check(replay)
        _check_reserved(replay)
        assert not any("lost" in note for note in replay.source.notes())


@pytest.mark.parametrize("tracked", [False, True])
@settings(max_examples=120)
@given(
    calls=st.lists(_CALLS, max_size=60),
    before=st.lists(st.one_of(_MALLOC, _USE, _FREE), max_size=6),
    others=st.lists(_OF_OTHERS, max_size=12),
    drift=_DRIFT,
)
@example(  # freed while a mark counts, and allocated again while the segments are read
    calls=[("drain", 0, 0), ("mark", 0, 0), ("drain", 0, 0)],
    before=[("malloc", 1, 0)],
    others=[[], [], [], [], [], [("free", 0, 0)], [], [("malloc", 1, 0)]],
    drift=0,
)
def test_other_threads_may_allocate_while_the_allocator_is_read(
    calls: list[tuple[str, int, int]],
    before: list[tuple[str, int, int]],
    others: list[list[tuple[str, int, int]]],
    drift: int,
    tracked: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        replay = recorded(patch, drift, tracked=tracked)
        replay.alloc_all(before)
        replay.source.start({})
        rest = iter(others)
        replay.gpu.meanwhile = lambda where: replay.alloc_all(next(rest, []))
        replay.run(calls)
        replay.gpu.meanwhile = None
        check(replay)


def vars_of(record: Any) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}


@settings(max_examples=60, deadline=None)
@given(
    windows=st.lists(st.lists(st.one_of(_MALLOC, _FREE, _USE, _COMPLETE), max_size=12), min_size=2, max_size=4),
    before=st.lists(st.one_of(_MALLOC, _USE, _FREE), max_size=6),
)
def test_a_trace_without_gaps_is_read_in_one_go_as_it_would_be_entry_by_entry(
    windows: list[list[tuple[str, int, int]]], before: list[tuple[str, int, int]]
) -> None:
    replay = Replay(Clock(), ModelCuda(Clock()))
    quick, careful = History(Settings()), History(Settings())
    careful._followed = lambda *_: None  # type: ignore[method-assign]
    replay.alloc_all(before)
    for number, calls in enumerate(windows):
        replay.gpu.history(on=True, entries=1000, stacks=False)
        replay.alloc_all(calls)
        found = []
        for history in (quick, careful):
            window = history.read(replay.gpu.snapshot(), 0, None)
            if number and history is quick:
                chain = Chain(window.trace, quick._held)
                assert chain.goes_on()
                assert chain.follow_blocks(window.final, Settings()) is not None
            found.append(history.settle(window, stamps={}, since_ns=1, until_ns=2**62))
        instants = {0, 1, *(time + more for time in found[0].awaiting_ns.tolist() for more in (0, 1))}
        assert [found[0].awaiting_at(each) for each in instants] == [found[1].awaiting_at(each) for each in instants]
        parts = [vars_of(settled) | vars_of(settled.events) for settled in found]
        for name in parts[0].keys() - {"awaiting_ns", "awaiting", "events"}:
            of_quick, of_careful = (each[name] for each in parts)
            if name == "segments":
                assert [getattr(of_quick, each).tolist() for each in SegmentColumns.names()] == [
                    getattr(of_careful, each).tolist() for each in SegmentColumns.names()
                ]
            elif isinstance(of_quick, np.ndarray):
                assert of_quick.tolist() == of_careful.tolist(), name
            else:
                assert of_quick == of_careful, name
        assert (quick._held.tolist(), quick._sums) == (careful._held.tolist(), careful._sums)
