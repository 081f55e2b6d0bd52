"""The file of a watched run, a database like a recording: a transaction for each step, and readable at any time."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

from ampmem.errors import RecordingError, UsageError
from ampmem.output import being_written
from ampmem.recording.appending import AppendedFile, places
from ampmem.recording.bounds import MOST_WATCHED
from ampmem.recording.database import (
    MESH,
    WATCHED,
    WATCHED_END,
    WATCHED_RUN,
    Database,
    is_watched,
    is_written_here,
    opened,
)
from ampmem.recording.reader import check_whole, header_of, notes_of, record_of, records_of, refused
from ampmem.recording.watched import Ending, Full, Grown, Row, WatchedHeader, WatchedRun, Why
from ampmem.recording.writer import unpack_into

MOST_ROWS = MOST_WATCHED
"""Number of rows at which the older half is thinned out."""
_GROUP = 4
"""Size of a group of neighbouring rows; thinning keeps two rows of each group."""
MOST_UNPACKED = 32
"""Maximum size of a full recording beside its compressed bytes; a real one is 3 to 14 times as large."""

_CELLS = attrgetter(*(each.name for each in fields(Row)))
"""The cells of a row, as a tuple."""
_PLACES = places(len(fields(Row)))


class WatchedFile(AppendedFile):
    """Writes the file of a watched run. Raises :class:`RecordingError` for what cannot be written, as on a full disk.

    Raises :class:`UsageError` if ``path`` exists, unless ``force``, or cannot be written.
    """

    LAYOUT = WATCHED

    def __init__(self, path: Path, header: WatchedHeader, *, force: bool = False) -> None:
        self._header = header
        self._numbers = 0
        super().__init__(path.absolute(), force=force, rows={})  # the script may change the working directory
        # The journal stays: to make and remove a file in each step takes longer, above all on network file systems.
        self._database.execute("PRAGMA journal_mode = PERSIST")

    def _first_entries(self) -> dict[str, object]:
        return {WATCHED_RUN: asdict(self._header), MESH: {"job": self._header.job}}

    def row(self, row: Row) -> None:
        """Append the row of a step."""
        self._write(partial(self._insert_row, _CELLS(row)))

    def _insert_row(self, cells: Sequence[object]) -> None:
        self._insert("ended_step", [cells], _PLACES)
        if self._rows["ended_step"] >= MOST_ROWS:
            older = self._database.execute(
                "SELECT rowid, peak, alive FROM ended_step ORDER BY rowid LIMIT ?", (MOST_ROWS // 2,)
            )
            self._delete("ended_step", "rowid", _left_out(older.fetchall()))

    def full(self, recording: Path, why: Why, first: int, last: int) -> int:
        """Append the recording at ``recording``; returns its number."""
        number, self._numbers = self._numbers, self._numbers + 1
        content = recording.read_bytes()
        packed = zlib.compress(content, 1)
        if len(content) > MOST_UNPACKED * len(packed):
            packed = zlib.compress(content, 0)  # so that no reader takes the file for a hostile one
        full = Full(number=number, why=why, first=first, last=last, packed=packed)
        self._write(partial(self._insert_records, "full_recording", [full]))
        return number

    def drop(self, number: int) -> None:
        """Remove the full recording ``number``; later rows take its room in the file."""
        self._write(partial(self._delete, "full_recording", "number", [number]))

    def _delete(self, table: str, key: str, values: Sequence[int]) -> None:
        self._database.executemany(f"DELETE FROM {table} WHERE {key} = ?", [(value,) for value in values])
        self._rows[table] -= len(values)

    def header(self, header: WatchedHeader) -> None:
        """Replace the header."""
        self._write(partial(self._write_meta, {WATCHED_RUN: asdict(header)}))

    def note(self, message: str) -> None:
        """Append a note for the reader."""
        encodable = message.encode("utf-8", "backslashreplace").decode("utf-8")  # a path may be any bytes
        self._write(partial(self._insert_cells, "note", [encodable], 1))

    def grown(self, grown: Grown) -> None:
        """Append the memory that has grown, by holder."""
        self._write(partial(self._insert_records, "grown", [grown]))

    def end(self, ending: Ending) -> None:
        """Write how the run has ended, even if a row could not be written."""
        self._failed = False
        self._write(partial(self._write_meta, {WATCHED_END: asdict(ending)}))

    def close(self) -> None:
        """Write the inserts that wait for a reader, and close the file; a second call does nothing."""
        try:
            if self._lock is not None:
                self._database.execute("PRAGMA journal_mode = DELETE")
            if self._waiting:
                self._finish()
        except sqlite3.Error as error:
            raise RecordingError(f"cannot append to {self.path}: {error}; everything written so far is kept") from error
        finally:
            self._shut()


def read_watched(path: Path) -> WatchedRun:
    """The run at ``path``, as far as it is written.

    Raises :class:`RecordingError` if it is not a watched run or damaged, :class:`UsageError` if it does not exist.
    """
    here = is_written_here(path)
    if not here and not path.exists():
        raise UsageError(f"{path} does not exist")
    if not here and not is_watched(path):
        raise RecordingError(f"{path} is not a watched run, or another version of ampmem wrote it")
    growing = here or being_written(path)  # asked first: the run may end meanwhile
    with refused(path, WATCHED), opened(path, WATCHED) as database:
        return _read_run(path, database, growing=growing)


def _read_run(path: Path, database: Database, *, growing: bool) -> WatchedRun:
    header = header_of(database)
    ending = header.get(WATCHED_END)
    run = WatchedRun(
        path=path,
        header=record_of(WatchedHeader, header[WATCHED_RUN]),
        rows=records_of(Row, database, "ended_step"),
        full=records_of(Full, database, "full_recording"),
        notes=notes_of(database),
        grown=records_of(Grown, database, "grown"),
        ending=None if ending is None else record_of(Ending, ending),
        running=growing and ending is None,
    )
    check_whole(database, header)
    if any(second.step <= first.step for first, second in pairwise(run.rows)):
        raise ValueError("its steps are not in order")
    ends = () if run.ending is None else (run.ending,)
    if any(each.step < 0 for each in (*run.rows[:1], *run.grown, *ends)):
        raise ValueError("a step has a negative number")
    if len({full.number for full in run.full}) < len(run.full):
        raise ValueError("two full recordings have the same number")
    if run.header.rank >= run.header.world_size:
        raise ValueError("its rank is not in the job")
    return run


def extract(run: WatchedRun, full: Full, into: Path) -> None:
    """Write the full recording to ``into``, replacing it. Raises :class:`RecordingError` if it is damaged."""
    try:
        with into.open("wb") as stream:
            unpack_into(stream, full.packed, MOST_UNPACKED * len(full.packed))
    except (ValueError, zlib.error) as error:
        raise RecordingError(f"full recording {full.number} of {run.path} is damaged: {error}") from error


def _left_out(rows: Sequence[tuple[int, int, int]]) -> list[int]:
    """The ids of ``rows`` (id, peak, alive) to leave out: of each group the highest peak and the least alive stay."""
    left_out: list[int] = []
    for start in range(0, len(rows), _GROUP):
        group = rows[start : start + _GROUP]
        highest = max(group, key=lambda row: row[1])
        least = min((row for row in group if row is not highest), key=lambda row: row[2], default=highest)
        left_out += [row[0] for row in group if row is not highest and row is not least]
    return left_out
