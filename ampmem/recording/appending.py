"""A file that a run appends to, of either layout: each transaction is on disk as a whole, and readers never block it.

If the process is killed, everything written before stays readable.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, fields
from functools import cache
from itertools import chain
from json import dumps
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from ampmem.errors import RecordingError, UsageError
from ampmem.output import half_written, lock_file, lock_output, remove_empty
from ampmem.recording.database import ROWS, FileLayout, identity_of, written_here
from ampmem.recording.rank_files import lock_of_claim

AT_ONCE = (32, 4, 1)
"""Rows of a statement: one statement per row would take twice as long, and more rows gain nothing."""
_PATIENCE_MS = 100
"""Milliseconds that a step waits for a reader's lock; ampmem's own readers hold it for one copy."""
_LAST_PATIENCE_MS = 2000
"""Milliseconds that the end of the file waits for a reader's lock."""


class AppendedFile:
    """A new file of ``LAYOUT`` at ``path``; each :meth:`_write` is one transaction on disk.

    ``rows`` are the numbers of rows in the layout's tables from the start.

    A reader never blocks the training: what cannot be written while a reader holds its lock is kept, and written with
    the next transaction. Until :meth:`_shut`, no other process can replace the file.
    """

    LAYOUT: ClassVar[FileLayout]

    def __init__(self, path: Path, *, force: bool, rows: Mapping[str, int]) -> None:
        self.path = path
        self._rows = dict(rows)
        """Number of rows of each table."""
        self._waiting: list[Callable[[], None]] = []
        """Inserts to be written with the next transaction."""
        self._failed = False
        self._lock: int | None = None
        self._create(force=force)

    def _first_entries(self) -> dict[str, object]:
        """The entries of ``meta`` in a new file."""
        raise NotImplementedError

    def _create(self, *, force: bool) -> None:
        """Make the file under a temporary name, and rename it: readers see the old file or the new one.

        So a reader of the old file does not prevent the new one.
        """
        path = self.path
        name = lock_of_claim(path)
        if name is None:
            name = lock_output(path, force=force)
        half = half_written(path)
        try:
            self._make(half)
            target = path.resolve()
            # A leftover journal belongs to the replaced file; SQLite would apply it to this one.
            target.with_name(f"{target.name}-journal").unlink(missing_ok=True)
            half.replace(target)
            self._database = self._connected(path)
            written_here.add(self._identity())
        except (OSError, sqlite3.Error) as error:
            remove_empty([path])
            self._unlock()
            raise UsageError(f"cannot write {path}: {error}") from error
        finally:
            half.unlink(missing_ok=True)
            os.close(name)

    def _make(self, file: Path) -> None:
        """Make ``file`` a locked file without rows."""
        file.unlink(missing_ok=True)
        self._lock = lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        lock_file(lock)
        with closing(self._connected(file)) as self._database:
            # A file whose making fails is removed, so there is nothing to roll back.
            self._database.execute("PRAGMA journal_mode = OFF")
            self._database.executescript("BEGIN;" + self.LAYOUT.schema())
            self._write_meta({"format_version": self.LAYOUT.version, ROWS: self._rows} | self._first_entries())
            self._database.execute("COMMIT")

    def _connected(self, file: Path) -> sqlite3.Connection:
        database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        # Without fsync a killed process loses nothing, since the kernel has the data; only a power cut would lose it.
        database.execute("PRAGMA synchronous = OFF")
        self._patience_ms: int | None = None  # what Python has set
        return database

    def _write(self, insert: Callable[[], None]) -> None:
        """Call ``insert`` in a transaction, or with the next one if a reader holds the file."""
        if self._failed:
            raise RecordingError(f"cannot append to {self.path}: an earlier write to it failed")
        # The training waits for a reader once, and not again at each step while it goes on reading.
        patience = 0 if self._waiting else _PATIENCE_MS
        self._waiting.append(insert)
        self._commit(patience)

    def _commit(self, patience_ms: int) -> bool:
        """Write all waiting inserts in one transaction; ``False`` while a reader holds the file.

        Either all or nothing is on disk; after an error nothing more is written, as a recording's texts are identified
        by their order.
        """
        self._failed = True
        try:
            if patience_ms != self._patience_ms:
                self._database.execute(f"PRAGMA busy_timeout = {patience_ms}")
                self._patience_ms = patience_ms
            if not self._begun():
                self._failed = False
                return False
            before = dict(self._rows)
            try:
                for insert in self._waiting:
                    insert()
                # Unlike INSERT OR REPLACE, this leaves the table's index as it is: one page less to write.
                self._database.execute("UPDATE meta SET value = ? WHERE key = ?", (dumps(self._rows), ROWS))
                self._database.execute("COMMIT")
            except BaseException:
                self._rows = before
                self._waiting.clear()
                with suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise RecordingError(f"cannot append to {self.path}: {error}; everything written so far is kept") from error
        self._waiting.clear()
        self._failed = False
        return True

    def _begun(self) -> bool:
        """Whether a transaction is open, so that no reader can prevent the commit."""
        try:
            self._database.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False
        return True

    def _insert(self, table: str, rows: Sequence[Sequence[object]], values: str) -> None:
        self._rows.setdefault(table, 0)
        if rows:
            self._rows[table] += self._database.executemany(f"INSERT INTO {table} {values}", rows).rowcount

    def _write_meta(self, entries: dict[str, object]) -> None:
        rows = [(key, dumps(value)) for key, value in entries.items()]
        self._database.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def _insert_cells(self, table: str, cells: list[Any], width: int, columns: str = "") -> None:
        """Insert rows of ``width`` cells each; ``cells`` has the cells of all rows, one row after the other."""
        start = 0
        for at_once in AT_ONCE:
            size = at_once * width
            end = start + (len(cells) - start) // size * size
            together = [cells[place : place + size] for place in range(start, end, size)]
            self._insert(table, together, columns + places(width, at_once))
            start = end

    def _insert_records(self, table: str, records: Sequence[object]) -> None:
        rows = cells_of(records)
        if rows:
            self._insert_cells(table, list(chain.from_iterable(rows)), len(rows[0]))

    def _finish(self) -> None:
        """Write the waiting inserts: into the file, or, if a reader holds its lock, into a copy that replaces it."""
        if not self._commit(_LAST_PATIENCE_MS):
            self._move()

    def _move(self) -> None:
        """Write the waiting inserts into a copy that replaces the file: a reader that never ends keeps the old file."""
        half = half_written(self.path)
        try:
            if self._identity() != identity_of(self.path):
                return  # the file was removed or replaced meanwhile
            self._database.execute("SELECT 1 FROM meta").fetchone()  # raises if not even reading is possible
            copy = self._connected(half)
            self._database.backup(copy)
            self._database.close()
            self._database = copy
            if self._commit(0):
                half.replace(self.path.resolve())
        except (OSError, sqlite3.Error) as error:
            raise RecordingError(f"cannot append to {self.path}: {error}; everything written so far is kept") from error
        finally:
            half.unlink(missing_ok=True)

    def _shut(self) -> None:
        """Close the file; a second call does nothing."""
        self._waiting.clear()
        if self._lock is not None:
            written_here.discard(self._identity())
        self._database.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _identity(self) -> tuple[int, int]:
        """Device and inode of this writer's file, whatever file has its name by now."""
        assert self._lock is not None
        status = os.fstat(self._lock)
        return status.st_dev, status.st_ino


def cells_of(records: Sequence[object]) -> list[tuple[object, ...]]:
    """The rows for ``records``, which are all of one type."""
    values = attrgetter(*(field.name for field in fields(records[0]))) if records else None  # type: ignore[arg-type]
    return [] if values is None else [tuple(map(_cell, values(record))) for record in records]


@cache
def places(count: int, rows: int = 1) -> str:
    """The SQL for the values of ``rows`` rows of ``count`` cells each: ``VALUES (?, ?), (?, ?)``."""
    row = f"({', '.join('?' * count)})"
    return f"VALUES {', '.join([row] * rows)}"


def _cell(value: object) -> object:
    """``value`` as a cell; NaN as text, because SQLite turns it into NULL."""
    return dumps(value, default=asdict) if isinstance(value, (tuple, dict)) or value != value else value
