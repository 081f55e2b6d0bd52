"""The file of a watched run: what was written is read, however the writing ends."""

import os
import signal
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampmem.errors import RecordingError, UsageError
from ampmem.failure import FailureKind, FailureRecord
from ampmem.recording import appending, is_recording, is_watched, job_of, watched_file
from ampmem.recording.watched import Ending, Grown, HeldMemory, Row, WatchedHeader, Why
from ampmem.recording.watched_file import WatchedFile, extract, read_watched

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
    world_size=2,
    job="a job",
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
SIZES = st.integers(min_value=0, max_value=1 << 62)
ROWS = st.builds(
    Row,
    step=st.just(0),
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


def written(path: Path, rows: list[Row]) -> None:
    file = WatchedFile(path, HEADER)
    for row in rows:
        file.row(row)
    file.close()


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement, values)


@given(st.lists(ROWS, max_size=6))
@settings(max_examples=60, deadline=None)
def test_every_row_is_there_after_its_call_and_after_the_end(rows: list[Row]) -> None:
    rows = [replace(row, step=step) for step, row in enumerate(rows)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.ampmem"
        file = WatchedFile(path, HEADER)
        for count, row in enumerate(rows, start=1):
            file.row(row)
            run = read_watched(path)
            assert (list(run.rows), run.running) == (rows[:count], True)
        file.close()
        run = read_watched(path)
        assert (list(run.rows), run.running) == (rows, False)
        assert [each.name for each in Path(folder).iterdir()] == ["run.ampmem"]


def write_until_killed(path: Path, how: str, left: int, told: int) -> None:
    """Write steps and tell each to the descriptor ``told``; SIGKILL comes at so many statements, or steps of SQLite."""

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    file = WatchedFile(path, HEADER)
    file._database.execute("PRAGMA cache_size = 1")  # so that a transaction is in the file before it ends
    if how == "statement":
        file._database.set_trace_callback(count)
    else:
        file._database.set_progress_handler(count, 1)
    for step in range(60):
        file.row(replace(ROW, step=step))
        os.write(told, bytes([step]))


@pytest.mark.parametrize("number", range(40))
def test_of_a_run_that_is_killed_anywhere_each_row_that_was_told_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Before a statement, or at a step of SQLite's inside one; the rows are thinned out meanwhile."""
    monkeypatch.setattr(watched_file, "MOST_ROWS", 12)
    how, amount = ("statement", 1 + 5 * number) if number % 2 else ("instruction", 30 + 60 * number)
    path = tmp_path / "run.ampmem"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            write_until_killed(path, how, amount, writing)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        told = list(stream.read())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "the run ended before"
    run = read_watched(path)
    last = run.rows[-1].step if run.rows else -1
    assert len(told) - 1 <= last <= len(told)
    newest = list(range(last + 1))[-6:]
    assert [row.step for row in run.rows][len(run.rows) - len(newest) :] == newest
    assert not run.running


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
    assert is_watched(path) and not is_recording(path) and job_of(path) == HEADER.job
    run = read_watched(path)
    assert (run.header, run.rows, run.notes, run.grown, run.ending) == (HEADER, (ROW,), ("a note",), (grown,), ENDING)
    assert [(each.number, each.why, each.first, each.last) for each in run.full] == [(second, Why.EVERY, 500, 502)]
    extract(run, run.full[0], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == full.read_bytes()


def test_a_file_of_any_length_keeps_the_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand rows are kept as a few; the highest peak of all, and every row of late, are among them."""
    monkeypatch.setattr(watched_file, "MOST_ROWS", 400)
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
    assert list(run.rows[-150:]) == rows[-150:]
    assert (len(run.full), run.ending) == (1, ENDING)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_dropped_recordings_leave_their_room_to_others(tmp_path: Path) -> None:
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
    assert max(sizes) < 100_000
    run = read_watched(path)
    assert ([each.number for each in run.full], len(run.rows)) == ([39], 40)
    extract(run, run.full[0], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == full.read_bytes()


def test_a_recording_that_shrinks_a_lot_is_read_as_well(tmp_path: Path) -> None:
    """Nothing that ampmem writes may look like what a hostile file does: a few bytes that become many."""
    path, full = tmp_path / "run.ampmem", tmp_path / "full"
    full.write_bytes(bytes(1 << 20))
    file = WatchedFile(path, HEADER)
    file.full(full, Why.START, 0, 2)
    file.close()
    run = read_watched(path)
    extract(run, run.full[0], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == bytes(1 << 20)


def test_a_full_disk_leaves_whole_rows_and_the_end_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.ampmem"
    file = WatchedFile(path, HEADER)
    file.row(ROW)
    file._database.execute("PRAGMA max_page_count = 1")  # which SQLite takes as: no page more than there are
    step = 0
    with pytest.raises(RecordingError, match="full"):
        for step in range(1, 1000):
            file.row(replace(ROW, step=step))
    file.end(ENDING)
    file.note("the disk was full")
    file.close()
    run = read_watched(path)
    assert [row.step for row in run.rows] == list(range(step))
    assert (run.ending, run.notes) == (ENDING, ("the disk was full",))


def test_a_reader_that_holds_the_file_delays_rows_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appending, "_PATIENCE_MS", 0)
    monkeypatch.setattr(appending, "_LAST_PATIENCE_MS", 0)
    path = tmp_path / "run.ampmem"
    file = WatchedFile(path, HEADER)
    file.row(ROW)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM ended_step").fetchone() == (1,)
        file.row(replace(ROW, step=1))
        file.end(ENDING)
        assert reader.execute("SELECT count(*) FROM ended_step").fetchone() == (1,)
        file.close()
    run = read_watched(path)
    assert ([row.step for row in run.rows], run.ending) == ([0, 1], ENDING)
    assert [each.name for each in tmp_path.iterdir()] == ["run.ampmem"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not a watched run"),
        (b"SQLite format 3\0", "is not a watched run"),
        (b"ampmem watched run 1\n", "is not a watched run, or another version of ampmem wrote it"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "run.ampmem"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=why):
        read_watched(path)


@pytest.mark.parametrize(
    ("statement", "value", "why"),
    [
        ("UPDATE ended_step SET alive = ?", -1, "row.alive holds -1: expected a whole number from 0"),
        ("UPDATE ended_step SET peak = ?", 1.5, "row.peak holds 1.5"),
        ("UPDATE ended_step SET batch = ?", "x" * 10_001, "it has more than 10000 characters"),
        ("UPDATE ended_step SET step = ?", 0, "its steps are not in order"),
        ("UPDATE full_recording SET number = ?", 0, "two full recordings have the same number"),
        ("UPDATE full_recording SET packed = ?", "a text", "expected bytes"),
        ("UPDATE full_recording SET why = ?", "why not", "is not a valid Why"),
        ("UPDATE grown SET held = ?", "[" * 100_000, "it is nested too deeply"),
        ("UPDATE meta SET value = ? WHERE key = 'end'", "[" * 100_000, "it is nested too deeply"),
        ("UPDATE meta SET value = ? WHERE key = 'watched'", "{}", "watchedheader has no ampmem"),
        ("DELETE FROM meta WHERE key = ?", "watched", "'watched'"),
        ("DELETE FROM ended_step WHERE step = ?", 1, "unfinished transaction"),
        ("INSERT INTO note VALUES (?)", "more", "unfinished transaction"),
    ],
)
def test_what_no_run_writes_is_refused_in_one_line(tmp_path: Path, statement: str, value: object, why: str) -> None:
    path, full = tmp_path / "run.ampmem", tmp_path / "full"
    full.write_bytes(b"content")
    file = WatchedFile(path, HEADER)
    for step in range(2):
        file.row(replace(ROW, step=step))
        file.full(full, Why.EVERY, step, step)
    file.grown(Grown(step=1, steps=1, held=()))
    file.end(ENDING)
    file.close()
    change(path, statement, value)
    with pytest.raises(RecordingError) as found:
        read_watched(path)
    assert str(found.value).startswith(f"{path} is not an ampmem watched run, or it is damaged (")
    assert why in str(found.value) and str(found.value).isprintable()


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path, full = tmp_path / "run.ampmem", tmp_path / "full"
    full.write_bytes(b"content")
    file = WatchedFile(path, HEADER)
    file.full(full, Why.START, 0, 2)
    file.close()
    change(path, "UPDATE full_recording SET packed = ?", zlib.compress(bytes(1 << 28), 9))
    run = read_watched(path)
    with pytest.raises(
        RecordingError, match=r"full recording 0 of .*run.ampmem is damaged: it unpacks to too many bytes"
    ):
        extract(run, run.full[0], tmp_path / "out")
    assert (tmp_path / "out").stat().st_size < 1 << 24


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ampmem"
    written(path, [ROW])
    with pytest.raises(UsageError, match="exists already"):
        WatchedFile(path, HEADER)
    WatchedFile(path, HEADER, force=True).close()
    assert read_watched(path).rows == ()
