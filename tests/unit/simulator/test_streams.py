"""Streams without a clock: which block belongs to which, which freed ones wait, for how long at least and at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from ampmem.allocator.gpus import find_gpu  # noqa: E402
from ampmem.allocator.segments import HeldExtents, extents_of  # noqa: E402
from ampmem.allocator.settings import (  # noqa: E402
    MIB,
    Settings,
    round_size,
)
from ampmem.events import Action  # noqa: E402
from ampmem.recorder.sources.simulated import SimulatedSource  # noqa: E402
from ampmem.simulator.device import KEEPS_UP, SimulatedDevice  # noqa: E402
from ampmem.simulator.memory.order import StreamOrder  # noqa: E402
from ampmem.simulator.memory.peaks import WAITING  # noqa: E402

SIDE = 3


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(find_gpu("a100-80"), Settings())


def tensor(device: SimulatedDevice, size: int) -> torch.Tensor:
    made = torch.empty(size, dtype=torch.uint8, device="meta")
    device.born(made.untyped_storage())
    return made


def test_streams_are_made_out_of_a_pool_of_each_priority() -> None:
    order = StreamOrder(lambda stream: 0)
    usual, high = [order.next(0) for _ in range(33)], [order.next(-1) for _ in range(33)]
    assert len({0, *usual, *high}) == 65
    assert (usual[0], high[0]) == (usual[32], high[32])


def test_a_block_belongs_to_the_stream_that_is_current(device: SimulatedDevice) -> None:
    source = SimulatedSource(device)
    before = tensor(device, 12 * MIB)
    source.start({})
    device.order.set(SIDE)
    side = tensor(device, 12 * MIB)
    side_at = device.storage_address(side)
    del side
    device.order.set(0)
    other = tensor(device, 12 * MIB)  # the free block is another stream's
    device.order.set(SIDE)
    again = tensor(device, 12 * MIB)
    assert device.storage_address(other) not in (side_at, device.storage_address(before))
    assert device.storage_address(again) == side_at
    assert source.allocator().streams == 2
    found = source.drain()
    assert list(zip(found.action.tolist(), found.stream.tolist(), strict=True)) == [
        (Action.BASELINE, 0),
        (Action.ALLOC, SIDE),
        (Action.FREE, SIDE),
        (Action.ALLOC, 0),
        (Action.ALLOC, SIDE),
    ]
    assert found.segments is not None and found.segments.stream.tolist() == [0, SIDE, 0]


def test_a_block_that_another_stream_used_is_free_at_once_or_after_the_script_has_waited(
    device: SimulatedDevice,
) -> None:
    kept = []
    for _ in range(3):
        used = tensor(device, 30 * MIB)
        device.record_stream(used.untyped_storage(), SIDE)
        del used
        kept.append(tensor(device, 1))
    found = device.prediction()
    assert device.allocator.counters.reserved_peak == 32 * MIB
    assert (found.highest_allocated, found.highest_reserved) == (30 * MIB + 1024, 92 * MIB)
    assert found.bounds == {WAITING: 90 * MIB}
    assert list(device.assumptions) == [KEEPS_UP]
    device.synchronize()
    tensor(device, 30 * MIB), tensor(device, 30 * MIB)
    assert device.prediction().highest_reserved == 92 * MIB


def test_before_memory_runs_out_the_allocator_waits_for_other_streams() -> None:
    device = SimulatedDevice(find_gpu("592MiB"), Settings())
    for _ in range(100):
        used = tensor(device, 30 * MIB)
        device.record_stream(used.untyped_storage(), SIDE)
        del used
    found = device.prediction()
    assert found.bounds == {WAITING: 510 * MIB}
    assert found.highest_reserved == 510 * MIB <= found.total - found.outside
    assert not found.ran_out


def test_use_on_the_own_stream_waits_for_nothing(device: SimulatedDevice) -> None:
    device.order.set(SIDE)
    for _ in range(2):
        used = tensor(device, 30 * MIB)
        device.record_stream(used.untyped_storage(), SIDE)
        del used
    found = device.prediction()
    assert (found.highest_reserved, found.bounds, device.assumptions) == (30 * MIB, {}, {})


def test_while_a_block_waits_it_is_cached_and_not_rounding(device: SimulatedDevice) -> None:
    source = SimulatedSource(device)
    source.start({})
    used = tensor(device, 30 * MIB + 1)
    device.record_stream(used.untyped_storage(), SIDE)
    del used
    device._peaks.note()
    layers = source._statistics(0, None)  # type: ignore[arg-type]
    assert (layers.requested, layers.allocated, layers.active) == (0, 0, 30 * MIB + 512)
    assert source.drain().allocated.tolist() == [30 * MIB + 1, 0]


def test_what_libraries_keep_takes_memory_from_the_script() -> None:
    device = SimulatedDevice(find_gpu("592MiB"), Settings())
    device.hold_outside("buffers", 100 * MIB, 300 * MIB)
    assert device.outside == device.gpu.context.least + 100 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        tensor(device, 420 * MIB)
    tensor(device, 400 * MIB)
    found = device.prediction()
    assert (found.outside, found.libraries, found.libraries_at_most) == (
        device.gpu.context.least,
        {"buffers": 100 * MIB},
        {"buffers": 300 * MIB},
    )


# -- whatever the calls, against a graph of what runs after what ---------------------------------------

STREAMS = 3
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), st.integers(1, 24 * MIB), st.just(0)),
        st.tuples(st.just("malloc"), st.integers(1, 4096), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("use"), st.integers(0, 99), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("use"), st.integers(0, 99), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("set"), st.integers(0, STREAMS - 1), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("synchronize"), st.integers(0, STREAMS - 1), st.just(0)),
        st.tuples(st.just("synchronize_all"), st.just(0), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@dataclass(eq=False)
class Work:
    """Something that a stream does after something else."""

    after: tuple[Work, ...] = ()
    done: bool = False

    def finish(self) -> None:
        """It is done, and so is all that came before."""
        if not self.done:
            self.done = True
            for before in self.after:
                before.finish()


@dataclass
class Freed:
    """A freed block, and the work that may still use it."""

    size: int
    users: list[Work]


@dataclass
class Script:
    """Makes the calls, and draws the graph of what the device has to do."""

    device: SimulatedDevice
    live: list[tuple[torch.Tensor, int, set[int]]] = field(default_factory=list)
    last: list[Work] = field(default_factory=lambda: [Work() for _ in range(STREAMS)])
    freed: list[Freed] = field(default_factory=list)
    current: int = 0

    def do(self, call: tuple[str, int, int]) -> None:
        what, number, stream = call
        match what:
            case "malloc":
                self.live.append((tensor(self.device, number), self.current, set()))
                self.freed = [each for each in self.freed if not all(user.done for user in each.users)]
            case "free" if self.live:
                self.free(number % len(self.live))
            case "use" if self.live:
                used, own, uses = self.live[number % len(self.live)]
                self.device.record_stream(used.untyped_storage(), stream)
                uses |= {stream} - {own}
            case "set":
                self.device.order.set(number)
                self.current = number
            case "wait":
                self.device.order.wait(number, self.device.order.reached(stream))
                self.last[number] = Work((self.last[number], self.last[stream]))
            case "synchronize":
                self.device.synchronize(self.device.order.reached(number))
                self.last[number].finish()
            case "synchronize_all" | "empty":
                self.device.synchronize() if what == "synchronize_all" else self.device.empty_cache()
                for each in self.last:
                    each.finish()
                self.freed *= what != "empty"

    def free(self, index: int) -> None:
        used, _, uses = self.live.pop(index)
        size = round_size(used.untyped_storage().nbytes(), Settings())
        del used
        for stream in uses:
            self.last[stream] = Work((self.last[stream],))
        if uses:
            self.freed.append(Freed(size, [self.last[stream] for stream in uses]))


def blocks_of(device: SimulatedDevice) -> Iterator[tuple[int, int, int]]:
    for address, (requested, size, stream) in device.live().items():
        yield address, requested if size else 0, stream


@settings(max_examples=150)
@given(calls=CALLS, expandable=st.booleans())
def test_a_lagging_device_gives_back_what_the_script_has_waited_for(
    calls: list[tuple[str, int, int]], expandable: bool
) -> None:
    device = SimulatedDevice(find_gpu("a100-80"), Settings(expandable_segments=expandable))
    source = SimulatedSource(device)
    source.start({})
    script = Script(device)
    for call in calls:
        script.do(call)
        lagging, prompt = device._highest.counters, device.allocator.counters
        assert lagging.requested - lagging.awaiting_requested == prompt.requested - prompt.awaiting_requested
        if call[0] == "malloc":
            assert lagging.awaiting == len(script.freed)
            assert prompt.awaiting == prompt.awaiting_bytes == prompt.awaiting_requested == 0
        assert {stream for _, _, stream in blocks_of(device)} == {own for _, own, _ in script.live}
    window = source.drain()
    delta = np.where(window.action == Action.FREE, -window.bytes, window.bytes)
    assert window.allocated.tolist() == np.cumsum(delta).tolist()
    assert int(delta.sum()) == sum(requested for _, requested, _ in blocks_of(device))
    held = HeldExtents(extents_of(device.allocator.snapshot()))
    for address, requested, stream in blocks_of(device):
        assert held.holds(address, requested)
        (extent,) = [each for each in held.joined() if each.address <= address < each.end]
        assert extent.stream == stream
