"""Recordings in other tools' formats, read back with those tools where they are there."""

from __future__ import annotations

import csv
import json
import pickle
import pickletools
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from build import Story, small_run, write
from hypothesis import given, settings
from hypothesis import strategies as st

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.categories import CATEGORIES
from ampmem.analysis.lifetimes import ALIVE
from ampmem.errors import UsageError
from ampmem.events import Phase, Recording
from ampmem.importer.recording import recording_of
from ampmem.importer.snapshot import snapshot_of
from ampmem.importer.unpickle import load
from ampmem.reporters.csv import HEADER, write_csv
from ampmem.reporters.perfetto import write_perfetto
from ampmem.reporters.pickling import Item, Once, PickleWriter
from ampmem.reporters.snapshot import write_snapshot

VIEWER = {
    *("PROTO", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST", "TUPLE", "APPENDS", "SETITEMS", "MEMOIZE", "BINGET"),
    *("LONG_BINGET", "BINUNICODE", "BININT", "BININT1", "LONG1", "NEWTRUE", "NEWFALSE"),
}
"""What the unpickler of pytorch.org/memory_viz knows, of what is written here."""

ITEMS = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=15,
)


def analysis(**options: Any) -> Analysis:
    return analyse(small_run().recording(**options))


def as_snapshot(tmp_path: Path, recording: Recording | None = None) -> Any:
    path = tmp_path / "out.pickle"
    write_snapshot(analyse(recording or small_run().recording()), path)
    return pickle.loads(path.read_bytes())


@settings(max_examples=100, deadline=None)
@given(ITEMS)
def test_the_pickle_writer_writes_what_pickle_reads(tmp_path_factory: pytest.TempPathFactory, data: Item) -> None:
    path = tmp_path_factory.mktemp("pickles") / "data"
    with path.open("wb") as stream:
        writer = PickleWriter(stream)
        shared = Once(data)
        writer.mapping([("first", [data, shared]), ("second", iter([shared]))])
        writer.end()
    assert pickle.loads(path.read_bytes()) == {"first": [data, data], "second": [data]}


def test_a_snapshot_is_plain_data_in_opcodes_that_the_viewer_knows(tmp_path: Path) -> None:
    data = as_snapshot(tmp_path)
    raw = (tmp_path / "out.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(raw)} <= VIEWER
    assert load(tmp_path / "out.pickle") == data


def test_a_snapshot_has_every_event_with_its_category(tmp_path: Path) -> None:
    recording = small_run().recording()
    trace = as_snapshot(tmp_path, recording)["device_traces"][0]
    actions = Counter(event["action"] for event in trace)
    frees = int((recording.events.action == 3).sum())
    births = len(recording.events) - frees
    assert actions == {"snapshot": 1, "alloc": births, "free_requested": frees, "free_completed": frees}
    categories = Counter(event["user_metadata"] for event in trace if event["action"] == "alloc")
    assert categories["gradients"] == 2 and categories["parameters"] == 2 and categories["other"] == 1
    assert set(categories) <= set(map(str, CATEGORIES))
    # The viewer fails unless something is of no category.
    assert trace[0]["category"] == "unknown"
    cast = next(event for event in trace if event.get("user_metadata") == "cast_copies")
    assert [frame["name"] for frame in cast["frames"]] == ["forward", "main"]
    assert cast["frames"][0] == {"name": "forward", "filename": "net.py", "line": 3}


def test_the_segments_of_a_snapshot_cover_every_block_and_nothing_twice(tmp_path: Path) -> None:
    data = as_snapshot(tmp_path)
    spans = sorted((segment["address"], segment["address"] + segment["total_size"]) for segment in data["segments"])
    assert all(end < start for (_, end), (start, _) in pairwise(spans))
    for event in data["device_traces"][0][1:]:
        assert any(start <= event["addr"] and event["addr"] + event["size"] <= end for start, end in spans)
    for segment in data["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    alive = [block for segment in data["segments"] for block in segment["blocks"] if block["state"] != "inactive"]
    lives = analysis().lifetimes
    assert sorted(block["requested_size"] for block in alive) == sorted(lives.bytes[lives.died == ALIVE].tolist())


def test_torchs_own_code_reads_a_snapshot(tmp_path: Path) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    data = as_snapshot(tmp_path)
    assert "segments" in viz.segsum(data)
    births = int((small_run().recording().events.action != 3).sum())
    text = viz.trace(data)
    assert sum(" = " in line for line in text.splitlines()) == births
    for page in (viz.trace_plot(data), viz.segment_plot(data), viz.trace_plot(data, filter_freed=True)):
        assert "MemoryViz.js" in page
    assert "active_allocated" in viz.memory(data, format_flamegraph=lambda lines: lines)
    assert "stream_0" in viz.segments(data, format_flamegraph=lambda lines: lines)


def test_a_snapshot_can_be_imported_again(tmp_path: Path) -> None:
    recording = small_run().recording()
    again = recording_of(snapshot_of(as_snapshot(tmp_path, recording)), "again")
    for column in ("address", "bytes", "block_bytes"):
        before, after = getattr(recording.events, column), getattr(again.events, column)
        if column != "block_bytes":
            assert after.tolist() == before.tolist()
    assert again.events.allocated.tolist() == recording.events.allocated.tolist()


def test_the_counters_of_a_trace_follow_the_timeline(tmp_path: Path) -> None:
    subject = analysis()
    events = as_trace(tmp_path, subject)
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == set(map(str, CATEGORIES))
    for category in CATEGORIES:
        mine = [event for event in counters if event["name"] == category]
        assert mine[-1]["args"]["bytes"] == int(subject.timeline.series(category)[-1])
        assert max(event["args"]["bytes"] for event in mine) == int(subject.timeline.series(category).max())
        assert [event["ts"] for event in mine] == sorted(event["ts"] for event in mine)


def test_the_slices_of_a_trace_are_the_steps_and_the_phases(tmp_path: Path) -> None:
    subject = analysis()
    slices = [event for event in as_trace(tmp_path, subject) if event["ph"] == "X"]
    steps = [event for event in slices if event["tid"] == 1]
    phases = [event for event in slices if event["tid"] == 2]
    assert [event["name"] for event in steps] == ["step 0", "step 1"]
    record = subject.recording.steps[0]
    start = min(int(subject.timeline.time_ns[0]), int(subject.recording.phases.time_ns[0]))
    assert steps[0]["ts"] == pytest.approx((record.start_ns - start) / 1000)
    assert steps[0]["dur"] == pytest.approx((record.end_ns - record.start_ns) / 1000)
    assert len(phases) == len(subject.recording.phases)
    assert {event["name"] for event in phases} == {"between", "data", "forward", "backward", "optimizer"}
    for before, after in pairwise(phases):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"])


def test_a_trace_has_the_fields_that_the_format_asks_for(tmp_path: Path) -> None:
    needed = {"M": {"args"}, "X": {"ts", "dur", "tid", "args"}, "C": {"ts", "args"}}
    for event in as_trace(tmp_path, analysis()):
        assert needed[event["ph"]] | {"name", "pid"} <= set(event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())


def test_times_of_a_trace_are_exact(tmp_path: Path) -> None:
    story = small_run()
    recording = story.recording()
    recording.events.time_ns[:] += 1_700_000_000_000_000_000
    recording.phases.time_ns[:] += 1_700_000_000_000_000_000
    times = {event["ts"] for event in as_trace(tmp_path, analyse(recording)) if event["ph"] == "C"}
    assert min(times) == 0.0
    assert {round(time * 1000) % 10 for time in times} == {0}  # a story's tick is ten nanoseconds


def as_trace(tmp_path: Path, subject: Analysis) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    write_perfetto(subject, path, force=True)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_a_table_has_a_row_per_allocation(tmp_path: Path) -> None:
    subject = analysis()
    path = tmp_path / "table.csv"
    write_csv(subject, path)
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == HEADER
    assert len(rows) == len(subject.lifetimes)
    for category in CATEGORIES:
        total = sum(int(row["bytes"]) for row in rows if row["category"] == category)
        assert total == int(subject.lifetimes.bytes[subject.classes.of(category)].sum())
    assert [row["died_ns"] for row in rows].count("") == int((subject.lifetimes.died == ALIVE).sum())
    cast = next(row for row in rows if row["category"] == "cast_copies")
    assert (cast["name"], cast["module"], cast["op"]) == ("layers.0.weight", "layers.0", "aten::_to_copy")
    assert (cast["step"], cast["phase"]) == ("0", "forward")
    assert (rows[0]["step"], rows[0]["phase"]) == ("", "setup")


def empty() -> Story:
    story = Story()
    story.begin(0)
    story.enter(Phase.BACKWARD)
    story.end()
    return story


@pytest.mark.parametrize("format_", ["snapshot", "perfetto", "csv"])
def test_a_recording_without_events(format_: str, tmp_path: Path) -> None:
    source = write(tmp_path / "empty.ampmem", empty().recording())
    assert ampmem(tmp_path, "export", source.name, "--format", format_, "-o", "out") == (0, "")


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path / "run.ampmem", small_run().recording())
    for format_ in ("snapshot", "perfetto", "csv"):
        assert ampmem(tmp_path, "export", "run.ampmem", "--format", format_, "-o", format_) == (0, "")
        code, said = ampmem(tmp_path, "export", "run.ampmem", "--format", format_, "-o", format_)
        assert code == 2 and "exists already" in said
        assert ampmem(tmp_path, "export", "run.ampmem", "--format", format_, "-o", format_, "--force") == (0, "")
    assert ampmem(tmp_path, "export", "gone", "--format", "csv", "-o", "x") == (2, "ampmem: gone does not exist\n")
    assert ampmem(tmp_path, "export", "csv", "--format", "csv", "-o", "x")[0] == 1
    assert not (tmp_path / "x").exists()


def ampmem(cwd: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ampmem", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)
    return done.returncode, done.stderr


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    for write_format in (write_snapshot, write_perfetto, write_csv):
        with pytest.raises(UsageError):
            write_format(analysis(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def long_run(steps: int) -> Recording:
    story = Story()
    story.parameter(0x1000, "weight", 10)
    for step in range(steps):
        story.begin(step)
        story.enter(Phase.FORWARD)
        for address in range(0x10_000, 0x10_000 + 100 * 1024, 1024):
            story.alloc(address, 1000, op="aten::mm", stack="train.py:1 main")
        story.enter(Phase.BACKWARD)
        for address in range(0x10_000, 0x10_000 + 100 * 1024, 1024):
            story.free(address)
        story.end()
    return story.recording()


@pytest.mark.parametrize("write_format", [write_snapshot, write_perfetto, write_csv])
def test_a_long_recording_is_written_in_little_memory(write_format: Any, tmp_path: Path) -> None:
    subject = analyse(long_run(50))
    tracemalloc.start()
    try:
        write_format(subject, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert (tmp_path / "out").stat().st_size > 250_000
