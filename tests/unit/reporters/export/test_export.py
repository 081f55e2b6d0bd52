"""Recordings in other tools' formats, read back with those tools where they are there."""

import pickle
import pickletools
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from support import snapshots
from support.build import RUN, Story, later, small_run, write
from support.command_line import ampmem_here
from support.hostile.seeds import on_gpu

from ampmem.allocator.snapshot import read_snapshot
from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.cli.export import FORMATS
from ampmem.errors import UsageError
from ampmem.events import Phase, Recording
from ampmem.importer.recording import recording_of
from ampmem.importer.unpickle import load_plain
from ampmem.reporters.export.csv import write_csv
from ampmem.reporters.export.perfetto import field, key, message, varints, width_of, write_perfetto
from ampmem.reporters.export.snapshot import Item, Once, PickleWriter, write_snapshot
from ampmem.units import format_bytes

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


@settings(max_examples=100)
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
    assert load_plain(tmp_path / "out.pickle") == data


def test_a_snapshot_has_every_event_with_its_category(tmp_path: Path) -> None:
    recording = small_run().recording()
    trace = as_snapshot(tmp_path, recording)["device_traces"][0]
    actions = Counter(event["action"] for event in trace)
    frees = int((recording.events.action == 3).sum())
    births = len(recording.events) - frees
    assert actions == {"snapshot": 1, "alloc": births, "free_requested": frees, "free_completed": frees}
    categories = Counter(
        event["user_metadata"].split(":")[0].split(" ")[0] for event in trace if event["action"] == "alloc"
    )
    assert categories["gradients"] == 2 and categories["parameters"] == 2 and categories["other"] == 1
    assert set(categories) <= set(map(str, CATEGORIES))
    # The viewer fails unless something is of no category.
    assert trace[0]["category"] == "unknown"
    cast = next(event for event in trace if event.get("category") == "cast_copies")
    assert cast["user_metadata"] == "cast_copies: layers.0.weight"
    assert cast["frames"] == [
        {"name": "aten::_to_copy", "filename": "??", "line": 0},
        {"name": "forward", "filename": "net.py", "line": 3},
        {"name": "main", "filename": "train.py", "line": 9},
    ]


@pytest.mark.parametrize("number", ["9" * 30, "9" * 5000, "٣", "-1"])
def test_a_line_that_is_no_number_is_part_of_the_files_name(tmp_path: Path, number: str) -> None:
    story = small_run()
    story.alloc(0x70000, 8, stack=f"train.py:{number} main")
    last = as_snapshot(tmp_path, story.recording())["device_traces"][0][-1]
    assert last["frames"] == [{"name": "", "filename": f"train.py:{number} main", "line": 0}]


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
    story = small_run()
    story.alloc(0x70000, 8, op="aten::mm", stack="train.py:9 main")
    data = as_snapshot(tmp_path, story.recording())
    assert "segments" in viz.segsum(data)
    births = int((story.recording().events.action != 3).sum())
    text = viz.trace(data)
    assert sum(" = " in line for line in text.splitlines()) == births
    for page in (viz.trace_plot(data), viz.segment_plot(data), viz.trace_plot(data, filter_freed=True)):
        assert "MemoryViz.js" in page
    assert "active_allocated" in viz.memory(data, format_flamegraph=lambda lines: lines)
    assert "train.py:9:main;??:0:aten::mm 8\n" in viz.memory(data, format_flamegraph=lambda lines: lines)
    assert "stream_0" in viz.segments(data, format_flamegraph=lambda lines: lines)


def test_a_snapshot_can_be_imported_again(tmp_path: Path) -> None:
    recording = small_run().recording()
    again = recording_of(read_snapshot(as_snapshot(tmp_path, recording)), "again")
    for column in ("address", "bytes", "block_bytes"):
        before, after = getattr(recording.events, column), getattr(again.events, column)
        if column != "block_bytes":
            assert after.tolist() == before.tolist()
    assert again.events.allocated.tolist() == recording.events.allocated.tolist()


def as_trace(tmp_path: Path, subject: Analysis) -> list[Any]:
    """The packets, as the classes of Perfetto's own Python package read them."""
    path = tmp_path / "trace.pftrace"
    write_perfetto(subject, path, force=True)
    trace = perfetto_trace_pb2.Trace.FromString(path.read_bytes())
    for packet in trace.packet:
        assert not any(map(len, map(UnknownFieldSet, (packet, packet.track_event, packet.track_descriptor))))
    return list(trace.packet)


def tracks_of(packets: list[Any]) -> dict[str, Any]:
    """The descriptors of the tracks, by name; that of the process is first."""
    tracks = [packet.track_descriptor for packet in packets if packet.HasField("track_descriptor")]
    assert len({track.uuid for track in tracks}) == len(tracks)
    process, *others = tracks
    assert process.process.process_name == "ampmem: train.py --epochs 1"
    assert {track.parent_uuid for track in others} == {process.uuid}
    return {track.name: track for track in others}


def events_on(packets: list[Any], track: Any) -> list[Any]:
    """The packets of the events on one track, in order."""
    return [each for each in packets if each.HasField("track_event") and each.track_event.track_uuid == track.uuid]


def start_of(subject: Analysis) -> int:
    return min(int(subject.timeline.time_ns[0]), int(subject.recording.phases.time_ns[0]))


def assert_counter(packets: list[Any], name: str, subject: Analysis, values: Any) -> None:
    """At every instant with events, the counter has what ``values`` has after the last of them."""
    track = tracks_of(packets)[name]
    assert track.counter.unit == perfetto_trace_pb2.CounterDescriptor.UNIT_SIZE_BYTES
    events = events_on(packets, track)
    assert {each.track_event.type for each in events} == {perfetto_trace_pb2.TrackEvent.TYPE_COUNTER}
    stamps = [each.timestamp for each in events]
    assert stamps == sorted(stamps)
    times = subject.timeline.time_ns - start_of(subject)
    instants = np.unique(times)
    told = np.array([each.track_event.counter_value for each in events])
    last = told[np.searchsorted(stamps, instants, side="right") - 1]
    assert last.tolist() == values[np.searchsorted(times, instants, side="right")].tolist()


def imported() -> Recording:
    """A stranger's snapshot as a recording."""
    story = snapshots.Story(old=700)
    story.alloc("new", 1000, snapshots.FORWARD)
    story.free("new")
    return replace(recording_of(read_snapshot(story.snapshot()), "train.py"), run=RUN)


def test_the_counters_of_a_trace_are_the_timeline(tmp_path: Path) -> None:
    for subject in (analysis(), analyse(long_run(150)), analyse(on_gpu()), analyse(imported())):
        packets = as_trace(tmp_path, subject)
        for category in CATEGORIES:
            assert_counter(packets, str(category), subject, subject.timeline.series(category))


def test_the_counters_of_a_trace_have_what_was_reserved(tmp_path: Path) -> None:
    assert "reserved" not in tracks_of(as_trace(tmp_path, analysis()))
    story = snapshots.Story(old=700)
    story.alloc("new", 1000, snapshots.FORWARD)
    story.event("segment_alloc", 1 << 50, 2 << 20, [])
    story.alloc("more", 3000, snapshots.FORWARD)
    story.event("segment_free", 1 << 50, 2 << 20, [])
    story.free("new", "more")
    data = story.snapshot()
    imported = replace(recording_of(read_snapshot(data), "train.py"), run=RUN)
    packets = as_trace(tmp_path, analyse(imported))
    events = events_on(packets, tracks_of(packets)["reserved"])
    segment = data["segments"][0]["total_size"]
    found = [(each.timestamp, each.track_event.counter_value) for each in events]
    # The old block is there an instant before the first event; a microsecond lies between the others.
    assert found == [(0, segment), (2001, segment + (2 << 20)), (4001, segment)]


def test_the_slices_of_a_trace_are_the_steps_and_the_phases(tmp_path: Path) -> None:
    subject = analysis()
    packets = as_trace(tmp_path, subject)
    tracks = tracks_of(packets)
    start = start_of(subject)
    steps = [
        (f"step {step.index}", step.index, step.start_ns - start, step.end_ns - start)
        for step in subject.recording.steps
    ]
    assert slices(events_on(packets, tracks["steps"])) == steps and len(steps) == 2
    phases = slices(events_on(packets, tracks["phases"]))
    rows = subject.recording.phases
    assert [name for name, _, _, _ in phases] == [Phase(phase).name.lower() for phase in rows.phase]
    assert [step for _, step, _, _ in phases] == [None if step < 0 else step for step in rows.step]
    assert [begin for _, _, begin, _ in phases] == (rows.time_ns - start).tolist()
    assert [end for _, _, _, end in phases[:-1]] == [begin for _, _, begin, _ in phases[1:]]
    assert phases[-1][3] == max(steps[-1][3], int(subject.timeline.time_ns[-1]) - start)


def slices(events: list[Any]) -> list[tuple[str, int | None, int, int]]:
    """Name, step, begin and end; on one track no slice begins before the last one has ended."""
    found = []
    kind = perfetto_trace_pb2.TrackEvent
    for begin, end in zip(events[::2], events[1::2], strict=True):
        assert (begin.track_event.type, end.track_event.type) == (kind.TYPE_SLICE_BEGIN, kind.TYPE_SLICE_END)
        notes = {each.name: each.int_value for each in begin.track_event.debug_annotations}
        found.append((begin.track_event.name, notes.get("step"), begin.timestamp, end.timestamp))
    return found


def test_the_packets_of_a_trace_are_one_sequence_in_order(tmp_path: Path) -> None:
    packets = as_trace(tmp_path, analyse(long_run(150)))
    assert {packet.trusted_packet_sequence_id for packet in packets} == {1}
    tracks = {packet.track_descriptor.uuid for packet in packets if packet.HasField("track_descriptor")}
    events = [packet for packet in packets if packet.HasField("track_event")]
    assert {packet.track_event.track_uuid for packet in events} < tracks
    assert len(packets) == len(tracks) + len(events)
    stamps = [packet.timestamp for packet in events]
    assert stamps == sorted(stamps) and stamps[0] == 0


def test_times_of_a_trace_are_exact(tmp_path: Path) -> None:
    recording = small_run().recording()
    early = [packet.timestamp for packet in as_trace(tmp_path, analyse(recording))]
    moved = later(recording, 1_700_000_000_000_000_001)
    assert [packet.timestamp for packet in as_trace(tmp_path, analyse(moved))] == early


@given(st.lists(st.integers(0, 2**62), min_size=1))
def test_numbers_of_one_width_are_what_protobuf_reads(numbers: list[int]) -> None:
    table = varints(np.array(numbers, dtype=np.int64), width_of(max(numbers)))
    for number, row in zip(numbers, table, strict=True):
        packet = perfetto_trace_pb2.TracePacket.FromString(key(8) + row.tobytes() + field(10, 7))
        assert (packet.timestamp, packet.trusted_packet_sequence_id) == (number, 7)


@given(st.text(), st.integers(0, 2**64 - 1))
def test_fields_are_what_protobuf_reads(name: str, uuid: int) -> None:
    track = perfetto_trace_pb2.TrackDescriptor.FromString(message({1: uuid, 2: name}))
    assert (track.uuid, track.name) == (uuid, name.encode("utf-8", "replace").decode())


def empty() -> Story:
    story = Story(begins=Phase.BACKWARD)
    story.end()
    return story


@pytest.mark.parametrize("format_", FORMATS)
def test_a_recording_without_events(format_: str, tmp_path: Path) -> None:
    source = write(tmp_path / "empty.ampmem", empty().recording())
    assert ampmem(tmp_path, "export", source.name, "--format", format_, "-o", "out") == written(tmp_path / "out")


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path / "run.ampmem", small_run().recording())
    for format_ in FORMATS:
        first = ampmem(tmp_path, "export", "run.ampmem", "--format", format_, "-o", format_)
        assert first == written(tmp_path / format_)
        code, said = ampmem(tmp_path, "export", "run.ampmem", "--format", format_, "-o", format_)
        assert code == 2 and "exists already" in said
        assert ampmem(tmp_path, "export", "run.ampmem", "--format", format_, "-o", format_, "--force") == first
    assert ampmem(tmp_path, "export", "gone", "--format", "csv", "-o", "x") == (2, "ampmem: gone does not exist\n")
    assert ampmem(tmp_path, "export", "csv", "--format", "csv", "-o", "x")[0] == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("format_", FORMATS)
def test_a_recording_is_never_replaced_by_its_own_export(format_: str, tmp_path: Path) -> None:
    source = write(tmp_path / "run.ampmem", small_run().recording())
    before = source.read_bytes()
    (tmp_path / "link").symlink_to(source)
    for name in ("run.ampmem", "link"):
        said = ampmem(tmp_path, "export", "run.ampmem", "--format", format_, "-o", name, "--force")
        assert said == (2, f"ampmem: cannot write {name}: it is also the input file; give another name with -o\n")
    assert source.read_bytes() == before


def test_a_snapshot_is_never_replaced_by_its_own_import(tmp_path: Path) -> None:
    write_snapshot(analysis(), tmp_path / "run.pickle")
    before = (tmp_path / "run.pickle").read_bytes()
    code, said = ampmem(tmp_path, "import", "run.pickle", "-o", "run.pickle", "--force")
    assert (code, said) == (
        2,
        "ampmem: cannot write run.pickle: it is also the input file; give another name with -o\n",
    )
    assert (tmp_path / "run.pickle").read_bytes() == before


def test_of_several_recordings_each_is_exported_by_itself(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"my run.rank{rank}.ampmem", small_run().recording())
    files = ("my run.rank0.ampmem", "my run.rank1.ampmem", "my run.rank1.ampmem-journal")
    said = "export takes one recording, and 2 are given: export each to its own file, such as ampmem export "
    said += "'my run.rank0.ampmem' --format csv -o 'my run.rank0.csv'"
    assert ampmem(tmp_path, "export", *files, "--format", "csv", "-o", "x") == (2, f"ampmem: {said}\n")
    assert not (tmp_path / "x").exists()


def written(file: Path) -> tuple[int, str]:
    """What ``ampmem`` says that has written ``file``, and no more."""
    return 0, f"ampmem: wrote {file.name}, {format_bytes(file.stat().st_size)}\n"


def ampmem(folder: Path, *arguments: str) -> tuple[int, str]:
    code, _, stderr = ampmem_here(folder, *arguments)
    return code, stderr


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    for write_format in FORMATS.values():
        with pytest.raises(UsageError):
            write_format(analysis(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def long_run(steps: int) -> Recording:
    story = Story(weight=10)
    for step in range(steps):
        story.begin(step, Phase.FORWARD)
        for address in range(0x10_000, 0x10_000 + 100 * 1024, 1024):
            story.alloc(address, 1000, op="aten::mm", stack="train.py:1 main")
        story.enter(Phase.BACKWARD)
        for address in range(0x10_000, 0x10_000 + 100 * 1024, 1024):
            story.free(address)
        story.end()
    return story.recording()


@pytest.mark.slow
@pytest.mark.parametrize("write_format", [write_snapshot, write_perfetto, write_csv])
def test_a_long_recording_is_written_in_little_memory(write_format: Any, tmp_path: Path) -> None:
    subject = analyse(long_run(80))
    tracemalloc.start()
    try:
        write_format(subject, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert (tmp_path / "out").stat().st_size > 250_000
