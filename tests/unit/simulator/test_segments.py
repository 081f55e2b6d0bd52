"""The segments that source ``simulated`` records, against the counters of the allocator's model at every event."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from ampmem.allocator.blocks import Block  # noqa: E402
from ampmem.allocator.gpus import find_gpu  # noqa: E402
from ampmem.allocator.settings import MIB, Settings  # noqa: E402
from ampmem.events import Action, SegmentAction  # noqa: E402
from ampmem.recorder.sources.simulated import SimulatedSource  # noqa: E402
from ampmem.simulator.device import DeviceEvent, SimulatedDevice  # noqa: E402

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), st.integers(1, 24 * MIB)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("empty"), st.just(0)),
        st.tuples(st.just("drain"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(calls=CALLS, before=st.lists(st.integers(1, 30 * MIB), max_size=3), expandable=st.booleans())
def test_what_is_reserved_is_what_the_model_counts(
    calls: list[tuple[str, int]], before: list[int], expandable: bool
) -> None:
    device = SimulatedDevice(find_gpu("a100-80"), Settings(expandable_segments=expandable))
    live = [device.malloc(size) for size in before]
    source = SimulatedSource(device)
    source.start({})
    counted = [device.allocator.counters.reserved] * len(live)
    count(device, counted)
    now, found = 0, []
    for call, value in [*calls, ("drain", 0)]:
        make(device, live, call, value)
        if call == "drain":
            window = source.drain()
            rows = window.segments
            delta = np.where(rows.action == SegmentAction.RELEASE, -rows.bytes, rows.bytes)
            at_once = rows.action == SegmentAction.BASELINE
            for index in range(len(window.action)):
                found.append(now + int(delta[at_once | (rows.position <= index)].sum()))
            now += int(delta.sum())
            assert now == device.allocator.counters.reserved
    assert found == counted


def make(device: SimulatedDevice, live: list[Block], call: str, value: int) -> None:
    if call == "malloc":
        live.append(device.malloc(value))
    elif call == "free" and live:
        device.free(live.pop(value % len(live)))
    elif call == "empty":
        device.allocator.empty_cache()


def count(device: SimulatedDevice, counted: list[int]) -> None:
    """Append what is reserved at each event from now on; a free is told before the block is given back."""
    tell = device.recorder
    assert tell is not None

    def told(event: DeviceEvent) -> None:
        assert event.action in (Action.ALLOC, Action.FREE)
        counted.append(device.allocator.counters.reserved)
        tell(event)

    device.recorder = told


def test_nothing_is_told_after_the_end() -> None:
    device = SimulatedDevice(find_gpu("a100-80"), Settings())
    source = SimulatedSource(device)
    source.start({})
    source.stop()
    device.malloc(1)
    assert len(source.drain().segments) == 0
