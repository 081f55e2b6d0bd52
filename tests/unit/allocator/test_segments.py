"""What the allocator holds of the device: followed forwards and backwards, and at every event of a recording."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.build import Story, gpu_run, small_run

from ampmem.allocator.segments import Extent, HeldExtents, SegmentLog, rewound
from ampmem.analysis.analyse import analyse
from ampmem.analysis.comparison import compare, entry_of
from ampmem.analysis.layers import address_map
from ampmem.analysis.summary import summarize
from ampmem.events import LayersRecord, Phase, SegmentAction, SegmentColumns
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.table import render

PAGE = 16
RANGES = st.tuples(st.integers(0, 12), st.integers(1, 5)).map(lambda each: (each[0] * PAGE, each[1] * PAGE))
MOVES = st.lists(st.tuples(st.booleans(), RANGES), max_size=40)


def extent(address: int, size: int, *, expandable: bool = True) -> Extent:
    return Extent(address, size, 0, False, expandable)


def pages(extents: Any) -> set[int]:
    """The pages that ``extents`` cover; none of them twice."""
    covered = [page for each in extents for page in range(each.address, each.end, PAGE)]
    assert len(covered) == len(set(covered))
    return set(covered)


def replayed(rows: SegmentColumns) -> set[int]:
    held: set[int] = set()
    for action, address, size in zip(rows.action.tolist(), rows.address.tolist(), rows.bytes.tolist(), strict=True):
        touched = set(range(address, address + size, PAGE))
        if action == SegmentAction.RELEASE:
            assert touched <= held
            held -= touched
        else:
            assert not touched & held
            held |= touched
    return held


@given(MOVES, RANGES)
def test_ranges_are_kept_like_sets_of_pages(moves: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]) -> None:
    held, there = HeldExtents(), set[int]()
    for takes, (address, size) in moves:
        touched = set(range(address, address + size, PAGE))
        assert pages(held.remove(address, size)) == touched & there
        there -= touched
        if takes:
            held.add(extent(address, size))
            there |= touched
        assert pages(held) == pages(held.joined()) == there
        assert held.size == PAGE * len(there)
        assert held.holds(*asked) == (set(range(asked[0], sum(asked), PAGE)) <= there)


def test_only_pages_of_one_expandable_segment_are_put_together() -> None:
    whole = [extent(0, PAGE, expandable=False), extent(PAGE, PAGE, expandable=False)]
    assert HeldExtents(whole).joined() == whole
    other = extent(3 * PAGE, PAGE)._replace(stream=7)
    assert HeldExtents([extent(PAGE, PAGE), extent(2 * PAGE, PAGE), other]).joined() == [extent(PAGE, 2 * PAGE), other]


@given(MOVES, st.lists(RANGES, max_size=6))
def test_a_log_adds_up_whatever_it_is_told(
    moves: list[tuple[bool, tuple[int, int]]], final: list[tuple[int, int]]
) -> None:
    log = SegmentLog()
    log.begin(0, [extent(0, 2 * PAGE)])
    for takes, where in moves:
        (log.reserve if takes else log.release)(1, 0, extent(*where))
    wanted = HeldExtents()
    for address, size in final:
        wanted.remove(address, size)
        wanted.add(extent(address, size))
    log.agree(2, 0, list(wanted))
    rows = log.take()
    assert replayed(rows) == pages(log.held) == pages(wanted)
    assert log.agree(3, 0, list(wanted)) == len(log.take()) == 0


@given(MOVES)
def test_calls_are_undone_to_where_they_began(moves: list[tuple[bool, tuple[int, int]]]) -> None:
    start = [extent(0, 2 * PAGE), extent(4 * PAGE, PAGE)]
    held, calls = HeldExtents(start), []
    for takes, (address, size) in moves:
        one = extent(address, size)
        if takes and not held.holds(address, PAGE) and not pages(held) & pages([one]):
            held.add(one)
            calls.append(("segment_map", one))
        elif not takes and held.holds(address, size):
            held.remove(address, size)
            calls.append(("segment_unmap", one))
    before, fits = rewound(held, calls)
    assert fits
    assert pages(before) == pages(start)


@pytest.mark.parametrize(
    ("final", "call"),
    [
        ([], ("segment_alloc", extent(0, PAGE))),
        ([extent(0, PAGE)], ("segment_alloc", extent(0, 2 * PAGE))),
        ([extent(0, PAGE)], ("segment_free", extent(0, PAGE))),
        ([extent(0, 2 * PAGE), extent(PAGE, PAGE)], ("segment_map", extent(8 * PAGE, PAGE))),
    ],
)
def test_calls_that_cannot_have_led_there_are_told(final: list[Extent], call: tuple[str, Extent]) -> None:
    assert not rewound(final, [call])[1]


def test_layers_at_every_event() -> None:
    analysis = analyse(gpu_run().recording())
    layers = analysis.layers
    before = 3 * 0x800
    # Each value is that right after an event: what is released after the last free shows with the next event.
    step = [0x3000, 0x6000, 0x6000, 0x6000, 0x6000, 0x6000]
    assert (layers.reserved - before).tolist() == [0, 0, 0x1000, 0x1000, *step, *step]
    blocks = [0, 512, 912, 1112]
    for _ in range(2):
        blocks += [1112 + 0x2000, 1112 + 0x4200, 1112 + 0x2200, 1112 + 0x2200 + 1024, 1112 + 0x2200, 1112]
    assert layers.allocated.tolist() == blocks
    assert (layers.cached == layers.reserved - layers.allocated).all()
    assert layers.cached.min() >= 0


def test_the_layers_of_a_summary() -> None:
    summary = summarize(gpu_run().recording())
    allocator = summary.allocator
    assert allocator.reserved == 3 * 0x800 + 0x1000 + 0x2000 + 0x3000
    assert allocator.requested + allocator.rounding == allocator.allocated
    assert allocator.cached is not None and allocator.allocated + allocator.cached == allocator.reserved
    assert [step.peak_reserved for step in summary.steps] == [allocator.reserved] * 2
    assert summary.conservation.reserved_residual_bytes is None, "nobody asked the allocator"
    nothing = summarize(small_run().recording())
    assert (nothing.allocator.reserved, nothing.allocator.cached) == (None, None)
    assert nothing.steps[0].peak_reserved is None
    assert nothing.conservation.reserved_residual_bytes is None


def test_the_tables_tell_what_was_reserved() -> None:
    entries = [entry_of(gpu_run().recording(), label="gpu"), entry_of(small_run().recording(), label="cpu")]
    assert entries[0].summary is not None and entries[1].summary is not None
    text = render(entries[0].summary, ())
    foot = "requested 16.6 KiB + rounding 960 B + cached 12.4 KiB = reserved 30.0 KiB"
    assert any(line.endswith(foot) for line in text.splitlines())
    (row,) = (line for line in text.splitlines() if line.startswith("   1 "))
    assert row.split()[-4:] == ["30.0", "KiB", "0", "µs"]
    assert "reserved" not in render(entries[1].summary, ())
    together = render_comparison(compare(entries))
    assert [line.split() for line in together.splitlines() if line.startswith("peak reserved")] == [
        ["peak", "reserved", "30.0", "KiB", "-"]
    ]
    assert "peak reserved" not in render_comparison(compare(entries[1:]))


def test_reserved_memory_is_compared_at_the_marks() -> None:
    recording = gpu_run().recording()
    reserved = 3 * 0x800 + 0x1000 + 0x2000
    for off in (0, 4096):
        row = LayersRecord(
            step=1,
            mark="after_forward",
            requested=64 + 600 + 0x1F00,
            allocated=1112 + 0x2000,
            active=1112 + 0x2000,
            reserved=reserved + off,
            device_used=None,
        )
        conservation = summarize(replace(recording, layers=(row,))).conservation
        assert (conservation.residual_bytes, conservation.reserved_residual_bytes) == (0, off)


def test_a_segment_that_goes_between_the_last_event_and_a_mark_counts_at_the_mark() -> None:
    story = Story()
    story.segment(0x1000, 0x1000)
    story.segment(0x8000, 0x1000)
    story.parameter(0x1000, "weight", 10)
    story.begin(0, Phase.FORWARD)
    story.segment(0x8000, 0x1000, SegmentAction.RELEASE)
    mark = story.enter(Phase.BACKWARD)
    story.segment(0x8000, 0x1000)
    story.alloc(0x8000, 8)
    story.end()
    analysis = analyse(story.recording())
    layers = analysis.layers
    assert layers.reserved_at(mark, analysis.timeline.position(mark)) == 0x1000
    assert layers.reserved.tolist() == [0, 0x2000, 0x2000]
    assert layers.peak_between(1, 2) == 0x2000


def test_blocks_without_a_segment_are_a_residual() -> None:
    story = gpu_run()
    story.begin(2)
    story.alloc(0x900000, 1 << 20)
    story.end()
    assert summarize(story.recording()).conservation.reserved_residual_bytes == (1 << 20) + 1112 - 3 * 0x800 - 0x1000


def test_the_address_map_fills_every_segment_at_every_event() -> None:
    analysis = analyse(gpu_run().recording())
    layers, lives = analysis.layers, analysis.lifetimes
    for position in range(len(analysis.recording.events) + 1):
        segments = list(address_map(analysis, position))
        assert sum(each.extent.size for each in segments) == layers.reserved[position]
        placed = []
        for each in segments:
            at = each.extent.address
            for piece in each.pieces:
                assert piece.address == at and piece.bytes > 0
                at += piece.bytes
                placed += [] if piece.allocation is None else [(piece.allocation, piece.address, piece.bytes)]
            assert at == each.extent.end
        alive = np.flatnonzero(lives.alive_at(position))
        assert sorted(placed) == [(i, int(lives.address[i]), int(lives.block_bytes[i])) for i in alive.tolist()]
    ends = [each.extent for each in address_map(analysis, None)]
    assert [each.address for each in ends] == [0x8000, 0x8800, 0x9000, 0x10000]
