"""The file of a watched run: what was written is read, however the writing ends."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampmem.errors import RecordingError, UsageError
from ampmem.failure import FailureKind, FailureRecord
from ampmem.recording import watched
from ampmem.recording.watched import (
    MAGIC,
    Ending,
    Grown,
    HeldMemory,
    Row,
    WatchedFile,
    WatchedHeader,
    Why,
    extract,
    is_watched,
    read_watched,
)

HEADER = WatchedHeader(
    ampmem="1",
    torch="2",
    source="cuda",
    device="a GPU",
    script="train.py",
    arguments=("--lr", "1"),
    started_ns=5,
    every=500,
    limit=80 << 30,
)
ROW = Row(
    step=0,
    time_ns=1,
    peak=9,
    phase="forward",
    alive=4,
    reserved=20,
    host=100,
    retries=0,
    split=0,
    batch="8x512 int64",
    full=False,
)
SIZES = st.integers(min_value=0, max_value=(1 << 63) - 1)
ROWS = st.builds(
    Row,
    step=SIZES,
    time_ns=SIZES,
    peak=SIZES,
    phase=st.sampled_from(["forward", "backward", "between"]),
    alive=SIZES,
    reserved=SIZES,
    host=SIZES,
    retries=SIZES,
    split=SIZES,
    batch=st.text(max_size=30).filter(str.isprintable),
    full=st.booleans(),
)
ENDING = Ending(
    step=3,
    time_ns=9,
    failure=FailureRecord(kind=FailureKind.RAISED, message="CUDA out of memory", error="torch.OutOfMemoryError"),
    out_of_memory=True,
    asked=10,
    free=3,
    total=80,
    reserved=70,
    phase="forward",
    batch="8x4000 int64",
    line="train.py:8",
    held=(
        HeldMemory(what="parameters", bytes=30, count=2),
        HeldMemory(what="train.py:8", bytes=40, count=3, line=True),
    ),
)


def written(path: Path, rows: list[Row]) -> list[int]:
    """The size of the file after the header, and after each row."""
    file = WatchedFile(path, HEADER)
    sizes = [path.stat().st_size]
    for row in rows:
        file.row(row)
        sizes.append(path.stat().st_size)
    file.close()
    return sizes


@given(st.lists(ROWS, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_of_a_file_that_is_cut_anywhere_every_whole_row_is_read(rows: list[Row], data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.ampmem"
        sizes = written(path, rows)
        assert read_watched(path).rows == rows
        cut = data.draw(st.integers(min_value=sizes[0], max_value=sizes[-1]))
        os.truncate(path, cut)
        whole = sum(size <= cut for size in sizes[1:])
        run = read_watched(path)
        assert run.rows == rows[:whole]
        assert run.unread == cut - sizes[whole]


def test_all_that_a_run_can_have(tmp_path: Path) -> None:
    path, full = tmp_path / "run.ampmem", tmp_path / "full"
    full.write_bytes(bytes(range(256)) * 100)
    file = WatchedFile(path, replace(HEADER, device=""))
    file.row(ROW)
    first = file.full(full, Why.START, 0, 2)
    second = file.full(full, Why.EVERY, 500, 502)
    file.drop(first)
    file.header(HEADER)
    file.note("a note")
    grown = Grown(step=40, steps=10, held=(HeldMemory(what="kept[*]", bytes=10240, count=10),))
    file.grown(grown)
    file.end(ENDING)
    file.close()
    assert is_watched(path)
    run = read_watched(path)
    assert (run.header, run.rows, run.notes, run.grown, run.ending) == (HEADER, [ROW], ["a note"], [grown], ENDING)
    assert [(each.number, each.why, each.first, each.last) for each in run.full] == [(second, Why.EVERY, 500, 502)]
    extract(run, run.full[0], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == full.read_bytes()


def test_a_file_of_any_length_keeps_the_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand rows are kept as a few; the highest peak of all, and every row of late, are among them."""
    monkeypatch.setattr(watched, "MOST_ROWS", 400)
    path = tmp_path / "run.ampmem"
    file = WatchedFile(path, HEADER)
    full = tmp_path / "full"
    full.write_bytes(b"x" * 1000)
    file.full(full, Why.START, 0, 2)
    rows = [
        replace(ROW, step=i, peak=1000 + i % 17 + (i == 123) * 9999, alive=500 - (i == 77) * 400) for i in range(5000)
    ]
    for row in rows:
        file.row(row)
    file.end(ENDING)
    file.close()
    run = read_watched(path)
    assert len(run.rows) <= 400
    assert [row.step for row in run.rows] == sorted({row.step for row in run.rows})
    assert max(row.peak for row in run.rows) == 1000 + 123 % 17 + 9999
    assert min(row.alive for row in run.rows) == 100
    assert run.rows[-150:] == rows[-150:]
    assert (len(run.full), run.ending) == (1, ENDING)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_recordings_that_nobody_wants_leave_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_DROPPED", 50_000)
    path, full = tmp_path / "run.ampmem", tmp_path / "full"
    full.write_bytes(os.urandom(20_000))
    file = WatchedFile(path, HEADER)
    sizes = []
    for i in range(40):
        file.row(replace(ROW, step=i))
        number = file.full(full, Why.EVERY, i, i + 2)
        if number:
            file.drop(number - 1)
        sizes.append(path.stat().st_size)
    file.close()
    assert max(sizes) < 120_000
    run = read_watched(path)
    assert ([each.number for each in run.full], len(run.rows)) == ([39], 40)
    extract(run, run.full[0], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == full.read_bytes()


def test_a_full_disk_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ampmem"
    file = WatchedFile(path, HEADER)
    file.row(ROW)
    write, left = os.write, [5]

    def full(descriptor: int, data: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count, left[0] = left[0], 0
        return write(descriptor, data[:count])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        file.row(replace(ROW, step=1))
    monkeypatch.undo()
    run = read_watched(path)
    assert (run.rows, run.unread) == ([ROW], 0)
    file.close()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not a watched run"),
        (b"SQLite format 3\0", "is not a watched run"),
        (MAGIC, "nothing is recorded in it yet"),
        (MAGIC + watched._frame(watched.Kind.HEADER, b"{}"), "is damaged"),
        (MAGIC + watched._frame(watched.Kind.HEADER, b"[1"), "is damaged"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "run.ampmem"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=why):
        read_watched(path)


@pytest.mark.parametrize("row", [b"[]", b"[1,2]", b'["a",1,1,"f",1,1,1,1,1,"",false]', b"[1.5,1,1,1,1,1,1,1,1,1,1]"])
def test_rows_of_another_form_are_refused(tmp_path: Path, row: bytes) -> None:
    path = tmp_path / "run.ampmem"
    written(path, [])
    with path.open("ab") as stream:
        stream.write(watched._frame(watched.Kind.ROW, row))
    with pytest.raises(RecordingError, match="is damaged"):
        read_watched(path)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ampmem"
    written(path, [ROW])
    with pytest.raises(UsageError, match="exists already"):
        WatchedFile(path, HEADER)
    WatchedFile(path, HEADER, force=True).close()
    assert read_watched(path).rows == []
