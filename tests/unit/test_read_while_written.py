"""A recording is read while it is written: each read is of one state, and no reader hinders the writer."""

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.build import RUN, as_batches, described, small_run, write

from ampmem import output as files
from ampmem.analysis.summary import require_training
from ampmem.errors import NothingRecorded, RecordingError, UsageError
from ampmem.events import Recording
from ampmem.names import NOT_ENDED, STILL_WRITTEN
from ampmem.recording import RecordingWriter, appending, database, job_of, read

_PARTS = 4


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reader and writer take turns on one thread here, where waiting for each other has no end."""
    monkeypatch.setattr(appending, "_PATIENCE_MS", 0)
    monkeypatch.setattr(appending, "_LAST_PATIENCE_MS", 0)
    monkeypatch.setattr(database, "_COMMIT_S", 0.0)


@pytest.fixture
def whole() -> Recording:
    return replace(small_run().recording(), notes=())


class Run:
    """A recording that is written part by part."""

    def __init__(self, path: Path, whole: Recording) -> None:
        self.whole, self._batches = whole, as_batches(whole, _PARTS)
        self.writer = RecordingWriter(path, RUN, force=True)
        self.written = 0

    def append(self) -> None:
        """Write the next part, if there is one."""
        if self.written < _PARTS:
            batch = self._batches[self.written]
            self.written += 1
            self.writer.append(batch, described(self.whole))

    def parts_in(self, found: Recording) -> int:
        """How many parts ``found`` consists of, each of them whole."""
        for parts in range(_PARTS + 1):
            batches = self._batches[:parts]
            times = [time for batch in batches for time in batch.events.time_ns.tolist()]
            facts = sum(len(batch.facts) for batch in batches)
            phases = sum(len(batch.phases) for batch in batches)
            if (found.events.time_ns.tolist(), len(found.facts), len(found.phases)) == (times, facts, phases):
                assert found.texts == (self.whole.texts if parts else ("",))
                assert found.steps == tuple(batch.step for batch in batches if batch.step is not None)
                assert found.parameters == (self.whole.parameters if parts else ())
                return parts
        pytest.fail("no state that was ever committed")


class Interrupted(sqlite3.Connection):
    """A reader's connection; ``between`` is called after each of its statements, and before a file is copied."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        found = super().execute(*arguments)
        type(self).between()
        return found

    def backup(self, *arguments: Any, **options: Any) -> None:
        type(self).between()
        super().backup(*arguments, **options)


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, between: Callable[[], None]) -> Iterator[None]:
    """Readers call ``between`` at each of their SQL points."""
    with monkeypatch.context() as patch:
        patch.setattr(Interrupted, "between", staticmethod(between))
        patch.setattr(database.sqlite3, "connect", partial(sqlite3.connect, factory=Interrupted))
        yield


@pytest.mark.parametrize("elsewhere", [False, True])
def test_whenever_a_step_is_written_a_reader_sees_the_steps_before_or_it_too(
    tmp_path: Path, whole: Recording, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """``elsewhere`` reads as another process does, which opens the file beside SQLite, too."""
    path, seen = tmp_path / "run.ampmem", set()
    point, points = -1, 1
    while point < points:
        point += 1
        run, passed = Run(path, whole), 0
        if elsewhere:
            database.written_here.clear()
        run.append()
        connect = sqlite3.connect

        def between(run: Run = run, point: int = point) -> None:
            nonlocal passed
            passed += 1
            if passed == point + 1:
                with monkeypatch.context() as patch:
                    patch.setattr(Interrupted, "between", staticmethod(lambda: None))
                    run.append()

        with interrupted(monkeypatch, between):
            found = read(path)
        assert database.sqlite3.connect is connect
        points = max(points, passed)
        seen.add(run.parts_in(found))
        assert found.ended is None and STILL_WRITTEN in found.notes
        run.append()
        run.writer.close()
        after = read(path)
        assert run.parts_in(after) == run.written and after.ended is True
    assert seen == {1, 2} and points > 5


def test_at_each_point_of_a_write_a_reader_sees_what_was_there_before_or_is_told_to_try_again(
    tmp_path: Path, whole: Recording
) -> None:
    path, seen = tmp_path / "run.ampmem", set()
    run = Run(path, whole)

    def look() -> None:
        try:
            seen.add(run.parts_in(read(path)) - run.written)
        except RecordingError as error:
            assert str(error) == f"{path} is locked by a program that is writing to it; try again"
            seen.add("locked")

    run.writer._database.set_progress_handler(look, 20)
    while run.written < _PARTS:
        run.append()
        look()
    run.writer._database.set_progress_handler(None, 0)
    run.writer.close()
    assert {0, "locked"} <= seen <= {-1, 0, "locked"}
    assert run.parts_in(read(path)) == _PARTS


@contextmanager
def reader(path: Path) -> Iterator[sqlite3.Connection]:
    """Another program, in the middle of a query."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        assert connection.execute("SELECT COUNT(*) FROM step").fetchone() is not None
        yield connection


def test_steps_that_end_while_the_file_is_read_are_written_after_that(tmp_path: Path, whole: Recording) -> None:
    path = tmp_path / "run.ampmem"
    run = Run(path, whole)
    run.append()
    with reader(path):
        run.append()
        run.append()
        assert run.parts_in(read(path)) == 1
    assert run.parts_in(read(path)) == 1
    run.append()
    assert run.parts_in(read(path)) == 4
    run.writer.close()
    assert run.parts_in(read(path)) == 4


def test_a_recording_that_ends_while_it_is_read_is_whole(tmp_path: Path, whole: Recording) -> None:
    path = tmp_path / "run.ampmem"
    run = Run(path, whole)
    run.append()
    with reader(path) as before:
        run.append()
        run.writer.close()
        found = read(path)
        assert run.parts_in(found) == 2 and found.ended is True and NOT_ENDED not in found.notes
        assert before.execute("SELECT value FROM meta WHERE key = 'ended'").fetchone() == ('{"ended": false}',)
    assert list(tmp_path.iterdir()) == [path]
    assert run.parts_in(read(path)) == 2


def test_what_cannot_be_written_at_the_end_is_said(tmp_path: Path, whole: Recording) -> None:
    path = tmp_path / "run.ampmem"
    run = Run(path, whole)
    run.append()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        run.append()
        with pytest.raises(RecordingError, match=r"cannot append to .*: database is locked; everything written so far"):
            run.writer.close()
    assert run.parts_in(read(path)) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_gone_does_not_come_back_at_the_end(tmp_path: Path, whole: Recording) -> None:
    path = tmp_path / "run.ampmem"
    run = Run(path, whole)
    with reader(path):
        run.append()
        path.unlink()
        run.writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_reader_has_the_recording_before_or_the_new_one_where_one_is_replaced(
    tmp_path: Path, whole: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = write(tmp_path / "run.ampmem", whole), []
    original = Path.replace

    def renamed(half: Path, target: Path) -> Path:
        seen.append(len(read(path).steps))
        return original(half, target)

    monkeypatch.setattr(Path, "replace", renamed)
    with reader(path) as before:
        run = Run(path, whole)
        seen.append(len(read(path).steps))
        assert before.execute("SELECT COUNT(*) FROM step").fetchone() == (len(whole.steps),)
    run.append()
    run.writer.close()
    assert seen == [len(whole.steps), 0]
    assert run.parts_in(read(path)) == 1


def test_the_journal_of_a_killed_run_undoes_nothing_in_the_recording_that_replaces_its_own(tmp_path: Path) -> None:
    path, journal = tmp_path / "run.ampmem", tmp_path / "run.ampmem-journal"
    for file in (path, journal):
        file.write_text("old")
    RecordingWriter(path, RUN, force=True).close()
    assert list(tmp_path.iterdir()) == [path] and read(path).steps == ()


def test_a_file_that_is_just_made_is_said_to_be_written(
    tmp_path: Path, whole: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.ampmem"
    original = Path.replace

    def renamed(half: Path, target: Path) -> Path:
        with pytest.raises(RecordingError, match=r"is being written, and nothing is recorded in it yet; try again"):
            read(path)
        return original(half, target)

    monkeypatch.setattr(Path, "replace", renamed)
    with (
        closing(RecordingWriter(path, RUN)),
        pytest.raises(NothingRecorded, match=r"nothing to show yet: .* try again"),
    ):
        require_training(read(path))
    assert read(path).steps == ()


def test_who_asks_whether_a_file_is_written_keeps_nobody_from_writing_it(
    tmp_path: Path, whole: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "run.ampmem", whole)
    asking = os.open(path, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    original = files._only_looked_at

    def looked_at(descriptor: int) -> bool:
        found = original(descriptor)
        fcntl.flock(asking, fcntl.LOCK_UN)
        return found

    monkeypatch.setattr(files, "_only_looked_at", looked_at)
    writer = RecordingWriter(path, RUN, force=True)
    with pytest.raises(UsageError, match="another ampmem is writing it"):
        RecordingWriter(path, RUN, force=True)
    writer.close()
    os.close(asking)


def test_the_job_of_a_rank_is_known_from_the_moment_on_at_which_its_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "run.ampmem", []
    original = Path.replace

    def renamed(half: Path, target: Path) -> Path:
        found = original(half, target)
        seen.append(job_of(path))
        return found

    monkeypatch.setattr(Path, "replace", renamed)
    RecordingWriter(path, replace(RUN, world_size=2, job="a job")).close()
    assert seen == ["a job"]
