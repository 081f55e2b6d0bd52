"""The packed events: what a browser unpacks is what the analysis has, at every event."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.build import Story, gpu_run, small_run
from support.page_reader import PHASES, container, exact, reduced

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.largest import largest
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.analysis.timeline.lifetimes import Tensors
from ampmem.events import Fact, Phase, Recording
from ampmem.reporters.html import stream as stream_module
from ampmem.reporters.html.stream import (
    Kinds,
    compressed_within,
    exact_stream,
    extreme_positions,
    framed,
    kept_positions,
    kinds_header,
    kinds_of,
    planes,
    reduced_stream,
    stream_view,
)

NO_LIMIT = 1 << 40

actions = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 2**45), st.sampled_from(["", "a", "b"]), st.sampled_from(list(Phase))),
    max_size=80,
)


def run_of(moves: Sequence[tuple[int, int, str, Phase]], steps: int = 1) -> Recording:
    """Each move allocates at its slot or frees what is there; some of what is allocated was saved."""
    story = Story()
    story.parameter(0x100, "a.weight", 10)
    alive: set[int] = set()
    for step in range(steps):
        story.begin(step)
        for slot, size, text, phase in moves[step * len(moves) // steps : (step + 1) * len(moves) // steps]:
            story.enter(phase)
            address = 0x1000 * (slot + 1)
            if slot in alive:
                story.free(address)
                alive.remove(slot)
            else:
                story.alloc(
                    address, size, op=text, module=text and f"m.{text}", stack=text and f"f.py:1 {text}\ng.py:2 g"
                )
                alive.add(slot)
                if size % 3 == 0:
                    story.fact(Fact.SAVED, address, "MmBackward0", dtype="bool", shape=f"[3, {size // 3}]")
        story.end()
    return story.recording()


def packed_exactly(analysis: Analysis) -> bytes:
    packed = exact_stream(analysis, *kinds_of(analysis), NO_LIMIT)
    assert packed is not None
    return packed


def peaks_of(analysis: Analysis) -> list[int]:
    position, total = analysis.timeline.position, analysis.timeline.total.tolist()
    spans = [range(position(step.start_ns), position(step.end_ns) + 1) for step in analysis.recording.steps]
    return [max(span, key=total.__getitem__) for span in spans]


def run_peak(analysis: Analysis) -> int:
    return max(peaks_of(analysis), key=lambda position: int(analysis.timeline.total[position]))


@given(actions)
def test_an_exact_stream_is_the_timeline_of_the_analysis_at_every_event(
    moves: list[tuple[int, int, str, Phase]],
) -> None:
    analysis = analyse(run_of(moves))
    stream = exact(packed_exactly(analysis))
    assert (stream.live == analysis.timeline.live).all()
    assert stream.live.sum(axis=0).argmax() == analysis.timeline.total.argmax()
    assert (stream.times_ns == analysis.timeline.time_ns - analysis.timeline.time_ns[0]).all()
    for position in {0, len(stream.codes) // 2, len(stream.codes)}:
        sizes = np.repeat(stream.header["kinds"]["bytes"], stream.alive_at(position))
        assert sorted(sizes.tolist()) == sorted(
            analysis.lifetimes.bytes[analysis.lifetimes.alive_at(position)].tolist()
        )


def test_a_kind_says_all_that_the_tables_say_of_an_allocation() -> None:
    story = small_run()
    story.begin(9)
    for address, size, shape in ((0x90000, 1000, "[10, 25]"), (0x91000, 4, "[]")):
        story.tensor(Fact.OUTPUT, address, size, stack="train.py:9 main", dtype="float32", shape=shape)
    story.end()
    analysis = analyse(story.recording())
    stream, position = exact(packed_exactly(analysis)), len(analysis.recording.events)
    texts, frames, kinds = (stream.header[name] for name in ("texts", "frames", "kinds"))
    told = []
    for kind in np.repeat(np.arange(len(kinds["bytes"])), stream.alive_at(position)).tolist():
        words = [texts[kinds[column][kind]] or None for column in ("name", "module", "op")]
        stack = tuple(frames[frame] for frame in stream.header["stacks"][kinds["stack"][kind]])
        tensor = texts[kinds["dtype"][kind]] or None, stream.header["shapes"][kinds["shape"][kind]]
        told.append((kinds["bytes"][kind], CATEGORIES[kinds["category"][kind]], *words, stack, *tensor))
    expected = [
        (item.bytes, item.category, item.name, item.module, item.op, item.stack, item.dtype, shown(item.shape))
        for item in largest(analysis, analysis.tensors, position)
    ]
    assert sorted(told, key=repr) == sorted(expected, key=repr)
    assert any(stack for *_, stack, _, _ in told)
    assert {kind[-2:] for kind in told} == {("float32", "[10, 25]"), ("float32", "[]"), (None, "")}


def shown(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else str([*shape])


def test_temporaries_know_the_phase_of_their_birth() -> None:
    analysis = analyse(small_run().recording())
    stream, temporaries = exact(packed_exactly(analysis)), CATEGORIES.index("temporaries")  # type: ignore[arg-type]
    kinds = stream.header["kinds"]
    for position in range(len(stream.codes) + 1):
        sums = dict.fromkeys(PHASES, 0)
        for kind, count in enumerate(stream.alive_at(position).tolist()):
            if kinds["category"][kind] == temporaries:
                sums[PHASES[kinds["phase"][kind]]] += count * kinds["bytes"][kind]
        assert sums == analysis.timeline.temporaries_by_phase(position)


def test_an_exact_stream_has_the_layers_and_the_addresses() -> None:
    analysis = analyse(gpu_run().recording())
    layers, lives = analysis.layers, analysis.lifetimes
    view = stream_view(analysis, [], 0, NO_LIMIT)
    stream = exact(view.packed)
    assert (view.mode, view.addresses) == ("exact", True)
    assert (stream.reserved == layers.reserved).all()
    assert (stream.sums(stream.header["block_bytes"]) == layers.allocated).all()
    addresses = np.cumsum(stream.header["addresses"])
    assert stream.places is not None
    assert addresses[stream.places].tolist() == analysis.recording.events.address.tolist()
    assert addresses.tolist() == sorted(set(lives.address.tolist()))


def test_addresses_are_left_out_before_events_are() -> None:
    analysis = analyse(gpu_run().recording())
    whole = stream_view(analysis, [], 0, NO_LIMIT)
    view = stream_view(analysis, [], 0, len(whole.packed) - 8)
    assert (view.mode, view.addresses) == ("exact", False)
    stream = exact(view.packed)
    assert stream.places is None
    assert stream.reserved[-1] == 3 * 0x800 + 0x1000 + 0x5000


def test_a_reduced_stream_has_the_layers() -> None:
    analysis = analyse(gpu_run().recording())
    layers = analysis.layers
    view = stream_view(analysis, peaks_of(analysis), run_peak(analysis), 8)
    assert (view.mode, view.addresses) == ("reduced", False)
    stream = reduced(view.packed)
    rounding, cached = stream.layers
    at = stream.positions
    assert (rounding == (layers.allocated - analysis.timeline.total)[at]).all()
    assert (cached == layers.cached[at]).all()
    assert layers.reserved.max() in (stream.live.sum(axis=0) + rounding + cached)


def test_a_stream_without_an_event() -> None:
    story = small_run().recording()
    nothing = type(story.events)(**{name: getattr(story.events, name)[:0] for name in story.events.names()})
    analysis = analyse(replace(story, events=nothing))
    stream = exact(packed_exactly(analysis))
    assert len(stream.codes) == 0
    assert stream.header["texts"] == [""]
    assert stream.header["stacks"] == [[]]


def test_times_of_long_recordings_are_rounded_without_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "SHORT", 10)
    recording = small_run().recording()
    slow = replace(recording.events, time_ns=recording.events.time_ns * 199)
    analysis = analyse(replace(recording, events=slow))
    stream = exact(packed_exactly(analysis))
    assert stream.header["time_unit_ns"] == 1000
    late = analysis.timeline.time_ns - analysis.timeline.time_ns[0] - stream.times_ns
    assert (late >= 0).all()
    assert (late < 1000).all()


def test_names_that_differ_stay_different() -> None:
    long = "n" * 1_000_000
    story = Story()
    for number in range(3):
        story.alloc(0x1000 * (number + 1), 8, op=long + str(number), stack=long + str(number))
    story.alloc(0x9000, 8, op="a\u202eb")
    story.alloc(0xA000, 8, op="a\\u202eb")
    packed = packed_exactly(analyse(story.recording()))
    header, _ = container(packed)
    assert len(packed) < 5000
    assert len(header["kinds"]["op"]) == 5
    assert len(set(header["texts"])) == len(header["texts"]) == 6
    assert len(set(header["frames"])) == 3
    assert all(len(text) <= 400 and text.isprintable() for text in header["texts"] + header["frames"])


@given(st.lists(st.tuples(*[st.sampled_from([0, 1, 5, 2**40, 2**62 - 1])] * 10), max_size=40))
def test_kinds_are_the_different_rows(rows: list[tuple[int, ...]]) -> None:
    analysis = analyse(small_run().recording())
    names = ("category", "bytes", "block_bytes", "name", "module", "op", "stack", "phase", "dtype", "shape")
    columns = {name: np.array([row[i] for row in rows], dtype=np.int64) for i, name in enumerate(names)}
    lifetimes = replace(
        analysis.lifetimes,
        **{name: columns[name] for name in ("bytes", "block_bytes", "module", "op", "stack", "phase")},
    )
    classes = replace(
        analysis.classes, category=columns["category"], name=columns["name"], module=np.zeros(len(rows), dtype=np.int64)
    )
    other = replace(analysis, lifetimes=lifetimes, classes=classes)
    vars(other)["tensors"] = Tensors(dtype=columns["dtype"], shape=columns["shape"])
    kinds, kind = kinds_of(other)
    again = [tuple(int(getattr(kinds, name)[place]) for name in names) for place in kind.tolist()]
    assert again == rows
    assert len(kinds) == len(set(rows))
    assert kind.tolist() == [list(dict.fromkeys(rows)).index(row) for row in rows]


@given(st.lists(st.integers(0, 2**62), max_size=20))
def test_planes_hold_every_byte(values: list[int]) -> None:
    parts = planes(np.array(values, dtype=np.int64))
    assert [sum(part[i] << 8 * place for place, part in enumerate(parts)) for i in range(len(values))] == values
    assert len(parts) == 1 or any(parts[-1])


def test_compression_stops_at_the_limit() -> None:
    noise = np.random.default_rng(0).bytes(3 << 20)
    assert compressed_within([noise], 1 << 20) is None
    assert compressed_within([noise], 4 << 20) is not None
    assert compressed_within([], 5) is None


def test_the_same_run_gives_the_same_bytes() -> None:
    analysis = analyse(small_run().recording())
    assert packed_exactly(analysis) == packed_exactly(analysis)


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=400), st.integers(1, 500))
def test_every_bucket_keeps_its_lowest_and_its_highest(values: list[int], buckets: int) -> None:
    total = np.array(values, dtype=np.int64)
    kept = extreme_positions(total, buckets)
    width = -(-len(total) // buckets)
    assert len(kept) <= 2 * buckets
    assert (np.diff(kept) > 0).all()
    for start in range(0, len(total), width):
        here = total[start : start + width]
        drawn = total[kept[(kept >= start) & (kept < start + width)]]
        assert (drawn.min(), drawn.max()) == (here.min(), here.max())
        assert start + here.argmax() in kept


@given(actions, st.integers(1, 3), st.integers(1, 30))
def test_a_reduced_stream_keeps_peaks_and_ends(
    moves: list[tuple[int, int, str, Phase]], steps: int, buckets: int
) -> None:
    analysis = analyse(run_of(moves, steps))
    timeline, peaks, peak = analysis.timeline, peaks_of(analysis), run_peak(analysis)
    kinds, kind = kinds_of(analysis)
    view = reduced_stream(analysis, kinds, kind, peaks, peak, buckets=buckets)
    stream = reduced(view.packed)
    positions = stream.positions
    assert (positions[0], positions[-1]) == (0, len(analysis.recording.events))
    assert {*peaks, peak} <= set(positions.tolist())
    assert (stream.live == timeline.live[:, positions]).all()
    assert stream.times_ns[0] == 0
    assert (stream.times_ns[1:] == (timeline.time_ns - timeline.time_ns[0])[positions[1:] - 1]).all()
    assert view.mode == "reduced"
    assert view.note
    sums = np.zeros(len(CATEGORIES), dtype=np.int64)
    for number, count in stream.header["peak_kinds"]:
        sums[stream.header["kinds"]["category"][number]] += count * stream.header["kinds"]["bytes"][number]
    assert (sums == timeline.live[:, peak]).all()


def test_windows_around_peaks_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "WINDOW", 3)
    monkeypatch.setattr(stream_module, "WINDOWS", 8)
    moves = [(i % 8, 100 + i, "a", Phase.FORWARD) for i in range(80)]
    analysis = analyse(run_of(moves, 2))
    peaks = peaks_of(analysis)
    kept = set(kept_positions(analysis, peaks, peaks[1], 1).tolist())
    assert {*range(peaks[0] - 2, peaks[0] + 3), *range(peaks[1] - 3, peaks[1] + 4)} <= kept
    assert len(kept) < 60


def test_the_smallest_of_very_many_kinds_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_PEAK_KINDS", 2)
    analysis = analyse(small_run().recording())
    kinds, kind = kinds_of(analysis)
    peak = run_peak(analysis)
    header = reduced(reduced_stream(analysis, kinds, kind, peaks_of(analysis), peak).packed).header
    names = [header["texts"][name] for name in header["kinds"]["name"]]
    assert any(name.endswith("smaller allocations") for name in names)
    total = sum(header["kinds"]["bytes"][number] * count for number, count in header["peak_kinds"])
    assert total == analysis.timeline.total[peak]
    everyone = int(analysis.lifetimes.alive_at(peak).sum())
    put_together = sum(int(name.split()[0]) for name in names if name.endswith("smaller allocations"))
    apart = sum(
        count
        for (number, count), name in zip(header["peak_kinds"], names, strict=True)
        if not name.endswith("smaller allocations")
    )
    assert put_together + apart == everyone


def test_the_mode_follows_the_limit() -> None:
    analysis = analyse(small_run().recording())
    arguments = (analysis, peaks_of(analysis), run_peak(analysis))
    assert stream_view(*arguments, NO_LIMIT).mode == "exact"
    assert stream_view(*arguments, NO_LIMIT).note == ""
    assert stream_view(*arguments, 100).mode == "reduced"


def test_a_header_is_ascii_and_aligned() -> None:
    for length in range(20):
        frame = framed({"texts": ["\ud800\u2028" + "x" * length]})
        assert len(frame) % 8 == 0
        assert frame[4:].isascii()


def test_tables_begin_with_the_empty_text() -> None:
    one = np.ones(1, dtype=np.int64)
    texts = ["", "x", "a.py:1 f\n\nb.py:2 g", "float32", "[2, 3]"]
    columns = dict.fromkeys(("category", "bytes", "block_bytes", "name", "module", "op", "phase"), one)
    kinds = Kinds(**columns, stack=one * 2, dtype=one * 3, shape=one * 4)
    header: Any = kinds_header(kinds, texts)
    assert header["texts"] == ["", "x", "float32"]
    assert (header["shapes"], header["kinds"]["dtype"], header["kinds"]["shape"]) == (["", "[2, 3]"], [2], [1])
    assert header["frames"] == ["a.py:1 f", "b.py:2 g"]
    assert header["stacks"] == [[], [0, 1]]
    assert (header["kinds"]["name"], header["kinds"]["stack"]) == ([1], [1])
