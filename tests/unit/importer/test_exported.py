"""What ``ampmem export`` writes as a snapshot and ``ampmem import`` reads again: the same recording, to the byte."""

import base64
import pickle
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.build import RUN, gpu_run, small_run
from support.command_line import ampmem_here
from support.hostile.handmade import make
from support.hostile.seeds import on_cpu, on_gpu, write_whole

from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summarize
from ampmem.events import Columns, MeshAxis, Recording
from ampmem.importer.recording import import_snapshot
from ampmem.recording import PACKED, pack, read, write_recording
from ampmem.reporters.export.snapshot import write_snapshot

Change = Callable[[str], str]


def as_rank() -> Recording:
    """The second of two ranks, with all that is known of its place."""
    recording = small_run().recording(run=replace(RUN, rank=1, world_size=2, local_rank=1, job="a job"))
    mesh = (MeshAxis(name="dp", size=2, coordinate=1),)
    return replace(recording, mesh=mesh, stages=(1,), stage_count=2)


RECORDINGS = {"cpu": on_cpu, "gpu, out of memory": on_gpu, "segments": lambda: gpu_run().recording(), "rank": as_rank}


def assert_same(before: Recording, after: Recording) -> None:
    for field in fields(Recording):
        one, other = getattr(before, field.name), getattr(after, field.name)
        if isinstance(one, Columns):
            for name in one.names():
                assert np.array_equal(getattr(one, name), getattr(other, name)), (field.name, name)
        else:
            assert one == other, field.name


def there_and_back(folder: Path, recording: Recording) -> Recording:
    """What a user has in the end, who exports the recording's file and imports the snapshot."""
    write_recording(folder / "before.ampmem", recording)
    for arguments in (
        ("export", "before.ampmem", "--format", "snapshot", "-o", "run.pickle"),
        ("import", "run.pickle", "-o", "after.ampmem"),
    ):
        code, _, said = ampmem_here(folder, *arguments)
        assert (code, said.count("\n")) == (0, 1), said
    return read(folder / "after.ampmem")


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_comes_back_whole(tmp_path: Path, name: str) -> None:
    before = replace(RECORDINGS[name](), ended=True)
    after = there_and_back(tmp_path, before)
    assert_same(before, after)
    assert summarize(after).to_json() == summarize(before).to_json()
    first, second = analyse(before), analyse(after)
    for mark, same_mark in zip(first.marks, second.marks, strict=True):
        for instant in ("after_forward", "after_backward", "after_optimizer"):
            when = getattr(mark, instant)
            assert when == getattr(same_mark, instant)
            if when is not None:
                found = second.timeline.breakdown(second.timeline.position(when))
                assert found == first.timeline.breakdown(first.timeline.position(when))
    assert [second.timeline.breakdown(at) for at in second.peaks] == [
        first.timeline.breakdown(at) for at in first.peaks
    ]


@pytest.mark.parametrize("ended", [True, False, None])
def test_whether_a_recording_was_ended_comes_back(tmp_path: Path, ended: bool | None) -> None:
    write_recording(tmp_path / "run.ampmem", replace(on_cpu(), ended=ended))
    before = read(tmp_path / "run.ampmem")
    write_snapshot(analyse(before), tmp_path / "run.pickle")
    import_snapshot(tmp_path / "run.pickle", tmp_path / "again.ampmem")
    after = read(tmp_path / "again.ampmem")
    assert_same(before, after)
    assert after.ended is ended


def test_an_imported_recording_comes_back(tmp_path: Path) -> None:
    """The import of a stranger's snapshot, exported and imported once more."""
    write_snapshot(analyse(gpu_run().recording()), tmp_path / "run.pickle")
    change(tmp_path / "run.pickle", lambda text: "")
    foreign = import_snapshot(tmp_path / "run.pickle", tmp_path / "foreign.ampmem")
    assert foreign.run.source == "snapshot"
    write_snapshot(analyse(foreign), tmp_path / "again.pickle")
    assert_same(foreign, import_snapshot(tmp_path / "again.pickle", tmp_path / "again.ampmem"))
    assert_same(foreign, read(tmp_path / "again.ampmem"))


def change(path: Path, text_of: Change) -> None:
    """Change the text of the snapshot's marker."""
    data = pickle.loads(path.read_bytes())
    marker = data["device_traces"][0][0]
    marker["user_metadata"] = text_of(marker["user_metadata"])
    path.write_bytes(pickle.dumps(data, protocol=4))


def packed(content: bytes) -> str:
    return PACKED + base64.b64encode(zlib.compress(content, 9)).decode()


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text.removeprefix(PACKED)))


def flipped(text: str) -> bytes:
    """A file whose second page is not one."""
    content = unpacked(text)
    return content[:4096] + b"\xff" * 4096 + content[8192:]


DAMAGED: dict[str, tuple[Change, str]] = {
    "not base64": (lambda text: text + "*", "it is damaged ("),
    "not ASCII": (lambda text: text + "é", "it is damaged ("),
    "not zlib": (lambda text: PACKED + base64.b64encode(b"x" * 100).decode(), "it is damaged ("),
    "nothing": (lambda text: PACKED, "it is damaged (it is cut off"),
    "half of it": (lambda text: text[: len(text) // 8 * 4], "it is damaged ("),
    "two of it": (
        lambda text: PACKED + base64.b64encode(2 * zlib.compress(unpacked(text))).decode(),
        "it is damaged (",
    ),
    "a bomb": (lambda text: packed(bytes(32 << 20)), "it is damaged (it unpacks to too many bytes)"),
    "a pickle": (lambda text: packed(pickle.dumps({"segments": []})), "it is damaged (what was packed is not a rec"),
    "another database": (lambda text: packed(b"SQLite format 3\0" + bytes(4080)), "it is damaged (what was packed"),
    "a broken database": (lambda text: packed(flipped(text)), "it is "),
    "another run": (lambda text: pack(gpu_run().recording()), "its events are not those of the trace"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_recording_in_a_snapshot_is_not_used_and_a_note_says_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.pickle"
    write_snapshot(analyse(small_run().recording()), path)
    changed, reason = DAMAGED[name]
    change(path, changed)
    code, said, error = ampmem_here(tmp_path, "import", path.name, "-o", "run.ampmem")
    assert (code, error.count("\n")) == (0, 1)
    start = f"note: the snapshot contains an ampmem recording that cannot be used: {reason}"
    (line,) = [line for line in said.splitlines() if "an ampmem recording" in line]
    assert line.startswith(start) and line.isprintable()
    after = read(tmp_path / "run.ampmem")
    assert after.run.source == "snapshot"
    # All else is as in a snapshot that has no recording in it.
    change(path, lambda text: "")
    foreign = import_snapshot(path, tmp_path / "foreign.ampmem")
    assert_same(replace(foreign, notes=(line.removeprefix("note: "), *foreign.notes)), after)


@pytest.mark.parametrize(
    "name",
    [
        "a view without an end for the header",
        "a table of pages that hold each other",
        "JSON that is nested without an end",
        "names of 20,000 characters",
        "escape sequences in the schema",
    ],
)
def test_a_hostile_recording_in_a_snapshot_is_one_clear_line(tmp_path: Path, name: str) -> None:
    hostile = make(name, write_whole(tmp_path / "whole.ampmem", on_cpu()), tmp_path / "hostile.ampmem").read_bytes()
    path = tmp_path / "run.pickle"
    write_snapshot(analyse(on_cpu()), path)
    change(path, lambda text: packed(hostile))
    code, said, error = ampmem_here(tmp_path, "import", path.name, "-o", "run.ampmem")
    assert (code, error.count("\n")) == (0, 1)
    (line,) = [line for line in said.splitlines() if "an ampmem recording" in line]
    assert "that cannot be used: it is" in line and line.isprintable() and len(line) < 700
    assert read(tmp_path / "run.ampmem").run.source == "snapshot"


@pytest.mark.parametrize("index", [1, -1])
def test_a_recording_is_not_used_where_the_trace_was_changed(tmp_path: Path, index: int) -> None:
    path = tmp_path / "run.pickle"
    write_snapshot(analyse(small_run().recording()), path)
    data = pickle.loads(path.read_bytes())
    trace: list[Any] = data["device_traces"][0]
    allocs = [event for event in trace if event["action"] == "alloc"]
    address = allocs[index]["addr"]
    for event in trace:
        if event["addr"] == address:
            event["size"] += 1
    for block in (block for segment in data["segments"] for block in segment["blocks"]):
        block["requested_size"] += block["address"] == address
    path.write_bytes(pickle.dumps(data, protocol=4))
    after = import_snapshot(path, tmp_path / "run.ampmem")
    assert "its events are not those of the trace" in after.notes[0]
    assert after.run.source == "snapshot"


def test_only_the_first_entry_of_a_trace_has_a_recording(tmp_path: Path) -> None:
    """An annotation that begins like a recording is a stranger's, as all of a snapshot with such a text elsewhere."""
    path = tmp_path / "run.pickle"
    write_snapshot(analyse(small_run().recording()), path)
    data = pickle.loads(path.read_bytes())
    trace = data["device_traces"][0]
    trace[1]["user_metadata"] = trace.pop(0)["user_metadata"]
    path.write_bytes(pickle.dumps(data, protocol=4))
    after = import_snapshot(path, tmp_path / "run.ampmem")
    assert after.run.source == "snapshot" and not any("an ampmem recording" in note for note in after.notes)


def test_the_file_of_an_import_is_as_it_was(tmp_path: Path) -> None:
    write_snapshot(analyse(small_run().recording()), tmp_path / "run.pickle")
    change(tmp_path / "run.pickle", lambda text: "")
    after = import_snapshot(tmp_path / "run.pickle", tmp_path / "run.ampmem")
    assert_same(after, read(tmp_path / "run.ampmem"))
