"""The tables of a ``.ampmem`` file, and safe opening of an untrusted file: plain tables only, and bounded work.

A file has one of two layouts: that of a recording, which is here, or that of a watched run.

Two views are a promise to people who query a recording with SQL:

* ``allocator_event(id, time_ns, step, phase, action, address, bytes, block_bytes, stream, op, stack)`` *
``storage_fact(time_ns, address, fact, name, module, dtype, shape)``

A view may get more columns, after the existing ones. The tables behind them may change with ``format_version``. A file
of another version is refused.
"""

from __future__ import annotations

import os
import re
import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ampmem.errors import RecordingError
from ampmem.events import (
    Action,
    Columns,
    EventColumns,
    Fact,
    FactColumns,
    LayersRecord,
    OomRecord,
    OptimizerRecord,
    ParameterRecord,
    Phase,
    PhaseColumns,
    SegmentColumns,
    StepRecord,
)
from ampmem.output import being_written
from ampmem.recording.bounds import MOST_ROWS
from ampmem.recording.watched import Full, Grown, Row

FORMAT_VERSION = 3
SUFFIX = ".ampmem"
ROWS = "rows"
"""The key in ``meta`` for the number of rows of each table, which every transaction writes last.

The numbers do not match in a copy, made without the journal, of a file whose run was killed in a transaction.
"""
MESH = "mesh"
"""The key in ``meta`` for this process's place in its job, besides its rank; only present if known."""
ENDED = "ended"
"""The key in ``meta`` for whether the recording was ended.

It is false until the writer is closed, so it stays false if the run was killed. A file that was not made by recording
may have no such key.
"""
WATCHED_RUN, WATCHED_END = "watched", "end"
"""The keys in ``meta`` for what is watched, and for how the run ended."""
UNCOUNTED = ("meta", "plain_step")
"""Tables without a number of rows: ``meta`` contains the numbers, another process writes ``plain_step`` later."""

COLUMN_TABLES: tuple[tuple[str, type[Columns]], ...] = (
    ("event", EventColumns),
    ("fact", FactColumns),
    ("phase", PhaseColumns),
    ("segment", SegmentColumns),
)
"""Tables of columns. A recording, and a transaction of one, has each under the table's name and an ``s``."""
RECORD_TABLES: tuple[tuple[str, type[Any]], ...] = (
    ("step", StepRecord),
    ("parameter", ParameterRecord),
    ("optimizer", OptimizerRecord),
    ("layers", LayersRecord),
    ("oom", OomRecord),
)
WATCHED_TABLES: tuple[tuple[str, type[Any]], ...] = (("ended_step", Row), ("full_recording", Full), ("grown", Grown))

_VIEWS = """
CREATE VIEW allocator_event AS
SELECT event.rowid AS id, time_ns, NULLIF(step, -1) AS step,
       {phase} AS phase, {action} AS action, address, bytes, block_bytes, stream,
       NULLIF(op.value, '') AS op, NULLIF(stack.value, '') AS stack
FROM event JOIN text AS op ON op.id = event.op JOIN text AS stack ON stack.id = event.stack
ORDER BY event.rowid;
CREATE VIEW storage_fact AS
SELECT time_ns, address, {fact} AS fact, NULLIF(name.value, '') AS name, NULLIF(module.value, '') AS module,
       NULLIF(dtype.value, '') AS dtype, NULLIF(shape.value, '') AS shape
FROM fact JOIN text AS name ON name.id = fact.name JOIN text AS module ON module.id = fact.module
     JOIN text AS dtype ON dtype.id = fact.dtype JOIN text AS shape ON shape.id = fact.shape
ORDER BY fact.rowid;
"""


def _words(column: str, members: Iterable[Action | Phase | Fact]) -> str:
    """SQL that turns the codes in ``column`` into lower-case words."""
    cases = " ".join(f"WHEN {int(member)} THEN '{member.name.lower()}'" for member in members)
    return f"CASE {column} {cases} END"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """One kind of file: its tables and views as SQL, and the two numbers in SQLite's header that identify it."""

    called: str
    application: int
    version: int
    sql: str

    def schema(self) -> str:
        """The SQL that makes an empty file."""
        return f"{self.sql}\nPRAGMA application_id = {self.application};\nPRAGMA user_version = {self.version};"


HEADER_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);",
    "CREATE TABLE note (message TEXT NOT NULL);",
)
"""The tables that files of every kind have."""


def record_tables(records: Iterable[tuple[str, type[Any]]]) -> Iterator[str]:
    """The SQL for a table for each type of record, by name."""
    for table, record in records:
        names = ", ".join(f'"{field.name}"' for field in fields(record))
        yield f"CREATE TABLE {table} ({names});"


def _recording_sql() -> str:
    meta, note = HEADER_TABLES
    tables = [
        meta,
        "CREATE TABLE text (id INTEGER PRIMARY KEY, value TEXT NOT NULL);",
        "INSERT INTO text VALUES (0, '');",
        note,
        "CREATE TABLE plain_step (duration_ns INTEGER NOT NULL);",
    ]
    for table, columns in COLUMN_TABLES:
        tables.append(f"CREATE TABLE {table} ({', '.join(f'{name} INTEGER NOT NULL' for name in columns.names())});")
    tables += record_tables(RECORD_TABLES)
    views = _VIEWS.format(phase=_words("phase", Phase), action=_words("action", Action), fact=_words("fact", Fact))
    return "\n".join(tables) + views


RECORDING = FileLayout(called="recording", application=0, version=FORMAT_VERSION, sql=_recording_sql())

MAGIC = b"SQLite format 3\0"
_WATCHED_ID = int.from_bytes(b"ampW", "big")
_APPLICATION_AT = 68
"""The offset of the application's number in SQLite's header. Source: sqlite.org/fileformat2.html."""


WATCHED = FileLayout(
    called="watched run",
    application=_WATCHED_ID,
    version=1,
    sql="\n".join((*HEADER_TABLES, *record_tables(WATCHED_TABLES))),
)


def first_bytes(path: Path) -> bytes:
    """The first bytes of the file at ``path``; none if it cannot be read, or is a pipe or a device."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as stream:
                return stream.read(_APPLICATION_AT + 4)
    return b""


def is_watched(path: Path) -> bool:
    """Whether ``path`` is the file of a watched run, even if it is damaged."""
    start = first_bytes(path)
    return start.startswith(MAGIC) and start[_APPLICATION_AT:] == _WATCHED_ID.to_bytes(4, "big")


# Opens an untrusted ``.ampmem`` file: plain tables only, and work in proportion to the file's size.
#
# Nothing in the file can make SQLite run code: all queries are of tables, whose definitions are checked.

_ColumnsT = TypeVar("_ColumnsT", bound=Columns)


@cache
def _parts(sql: str) -> dict[str, str]:
    """The kind of each table and view that ``sql`` makes, by name; nothing else may be in a file."""
    return {name: kind.lower() for kind, name in re.findall(r"CREATE (TABLE|VIEW) (\w+)", sql)}


_COLUMN = r'(?:\w+|"\w+")(?: INTEGER| TEXT)?(?: NOT NULL| PRIMARY KEY)*'
_TABLE = re.compile(rf"CREATE TABLE (\w+) \({_COLUMN}(?:, {_COLUMN})*\)", re.ASCII)
"""A table of the layout, with any columns, none of which is computed."""

_INDEX = "sqlite_autoindex_meta_1"
"""The index that SQLite makes for the keys of the header."""

_SCHEMA_ROWS = 40
_SCHEMA_TEXT = 10_000

_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""The end of a journal that names another file: SQLite would read that file, and may delete it.

Source: "Database File Format", sqlite.org/fileformat2.html, and ``readSuperJournal`` in SQLite's ``pager.c``.
"""

_ROWS_AT_ONCE = 2048

_COMMIT_S = 20.0
"""Maximum seconds to wait while the file's writer commits a step."""

_STEPS_BETWEEN_LOOKS = 50_000
_STEPS_FOR_ANY_FILE = 2_000_000


class Database:
    """An open file, whose tables are those of ``layout`` and whose content has at most ``most`` bytes."""

    def __init__(self, path: Path, connection: sqlite3.Connection, most: int, layout: FileLayout) -> None:
        self._path, self._layout = path, layout
        self._connection = connection
        self.rows_read: dict[str, int] = {}
        """Number of rows by table, for tables that were read whole."""
        self._steps = 0
        self._size = 0
        self._text_left = _SCHEMA_ROWS * _SCHEMA_TEXT
        # Precautions that SQLite advises for untrusted files (sqlite.org/security.html).
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _SCHEMA_TEXT)
        connection.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(self._works_too_much, _STEPS_BETWEEN_LOOKS)
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            connection.execute(f"PRAGMA {pragma}")
        self._check_version()
        self._check_schema()
        self._size = min(self._number("page_count") * self._number("page_size"), most)
        self._text_left = self._size
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(self._size, _SCHEMA_TEXT))

    def columns(self, table: str, kind: type[_ColumnsT]) -> _ColumnsT:
        """The rows of ``table``. Raises ``ValueError`` or ``TypeError`` for a value that is not an integer."""
        names = kind.names()
        if missing := set(names).difference(self.names(table)):  # SQLite would read missing names as strings
            raise ValueError(f"the table {table} has no {', '.join(sorted(missing))}")
        cursor, left = self._select(table, names), self._most_rows(table, names)
        cells = array("q")  # unlike a numpy array, it rejects floats
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            left -= len(rows)
            if left < 0:
                raise self._too_many(table)
            cells.fromlist(list(chain.from_iterable(rows)))
        self.rows_read[table] = len(cells) // len(names)
        by_column = np.ascontiguousarray(np.frombuffer(cells, dtype=np.int64).reshape(-1, len(names)).T)
        return kind(**dict(zip(names, by_column, strict=True)))

    def names(self, table: str) -> tuple[str, ...]:
        """The columns of ``table`` in the file."""
        return tuple(column[0] for column in self._connection.execute(f"SELECT * FROM {table} LIMIT 0").description)

    def rows(self, table: str, *names: str) -> Iterator[tuple[Any, ...]]:
        """The columns ``names`` of each row of ``table``."""
        most, number = self._most_rows(table, names), 0
        for number, row in enumerate(self._select(table, names), start=1):
            if number > most:
                raise self._too_many(table)
            self._count(row)
            yield row
        self.rows_read[table] = number

    def _select(self, table: str, names: tuple[str, ...]) -> sqlite3.Cursor:
        columns = ", ".join(f'"{name}"' for name in names)
        return self._connection.execute(f"SELECT {columns} FROM {table} ORDER BY rowid")

    def _most_rows(self, table: str, names: tuple[str, ...]) -> int:
        """The maximum number of rows that fit into the file: each takes at least a byte per column and five more."""
        return min(self._size // (len(names) + 5), MOST_ROWS.get(table, self._size))

    def _too_many(self, table: str) -> ValueError:
        return ValueError(f"the table {table} has more rows than a recording, or a file of its size, can have")

    def _count(self, row: tuple[Any, ...]) -> None:
        """Raise ``ValueError`` once the texts read so far are longer than the file."""
        self._text_left -= sum(len(cell) for cell in row if isinstance(cell, (str, bytes)))
        if self._text_left < 0:
            raise ValueError("its texts are longer than the file")

    def _works_too_much(self) -> bool:
        """Whether SQLite, which calls this every :data:`_STEPS_BETWEEN_LOOKS` steps, works too long for such a file."""
        self._steps += _STEPS_BETWEEN_LOOKS
        return self._steps > _STEPS_FOR_ANY_FILE + 2 * self._size

    def _number(self, pragma: str) -> int:
        return int(self._connection.execute(f"PRAGMA {pragma}").fetchone()[0])

    def _check_version(self) -> None:
        version, wanted = self._number("user_version"), self._layout
        # Without a version it is another program's database, or an empty file.
        if version == 0 or self._number("application_id") != wanted.application:
            raise RecordingError(f"{self._path} is not an ampmem {wanted.called}")
        if version != wanted.version:
            raise RecordingError(
                f"{self._path} has {wanted.called} format {version}, and this ampmem reads format {wanted.version}; "
                "read it with the version of ampmem that wrote it"
            )

    def _check_schema(self) -> None:
        """Raise ``ValueError`` for anything outside the layout; SQLite itself reports a missing table."""
        parts = _parts(self._layout.sql)
        rows = self._connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema")
        for number, (kind, name, table, sql) in enumerate(rows):
            known = kind == parts.get(name) and name == table and (kind == "view" or _is_plain(name, sql))
            if not (known or (kind, name, sql) == ("index", _INDEX, None)) or number >= _SCHEMA_ROWS:
                raise ValueError(f"it has the {kind} {name!r:.100}, which does not belong in a recording")


def _is_plain(name: str, sql: object) -> bool:
    """Whether ``sql`` creates the table ``name`` without computed columns."""
    match = _TABLE.fullmatch(sql) if isinstance(sql, str) and len(sql) <= _SCHEMA_TEXT else None
    return match is not None and match[1] == name


def _bytes_in(path: Path) -> int:
    """The size of the file without its holes: a sparse file costs nothing, and must not raise the bounds."""
    with path.open("rb") as stream:
        size, place = 0, 0
        while True:
            try:
                start = os.lseek(stream.fileno(), place, os.SEEK_DATA)
                place = os.lseek(stream.fileno(), start, os.SEEK_HOLE)
            except OSError:  # no data after this offset; a system without holes reports all as data
                return size
            size += place - start


written_here: set[tuple[int, int]] = set()
"""Device and inode of the files that this process writes.

Closing any descriptor of a file releases all POSIX locks that SQLite has on it in this process, so these files are only
opened through SQLite.
"""


def is_written_here(path: Path) -> bool:
    """Whether this process writes the recording at ``path``."""
    return bool(written_here) and identity_of(path) in written_here


def identity_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at ``path``; ``None`` if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def opened(path: Path, layout: FileLayout = RECORDING) -> Iterator[Database]:
    """The file at ``path`` as of one moment: later writes are not seen.

    A file that is being written is copied into memory, so that its writer waits only for the copy. Any other file is
    opened for writing, too: a killed run has left a journal, and SQLite must roll it back.
    """
    growing = is_written_here(path) or being_written(path)
    connection, most = _copied(path) if growing else (None, 0)
    if connection is None:
        _check_journal(path)
        most = _bytes_in(path)  # before SQLite opens it: closing a descriptor releases SQLite's locks
        connection = _connected(path, "rw")
    with closing(connection):
        connection.execute("BEGIN")  # else each statement would see later commits
        yield Database(path, connection, most, layout)


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_COMMIT_S, isolation_level=None)


def _copied(path: Path) -> tuple[sqlite3.Connection | None, int]:
    """An in-memory copy of the recording at ``path``, which is being written, and its size.

    ``None`` instead of the copy if the file itself must be read. It is opened read-only: its journal belongs to its
    writer, and this process must not roll it back.
    """
    try:
        with ExitStack() as undo, closing(_connected(path, "ro")) as connection:
            copy = undo.enter_context(closing(sqlite3.connect(":memory:", isolation_level=None)))
            connection.execute("BEGIN")
            size = 1
            # The first pragma takes the lock, for which backup() would wait forever.
            for pragma in ("page_count", "page_size"):
                size *= int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])
            if size <= path.stat().st_size:  # else the writer is not ampmem
                connection.backup(copy)
                undo.pop_all()
                return copy, size
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise
    return None, 0  # its writer was killed meanwhile, or it is not a recording: reading tells


def _check_journal(path: Path) -> None:
    """Raise ``ValueError`` for a journal that names other files than ``path``; ampmem never writes one."""
    whole = path.resolve()
    journal = whole.with_name(f"{whole.name}-journal")
    if not journal.is_file() or journal.stat().st_size < len(_JOURNAL_MAGIC):
        return
    with journal.open("rb") as stream:
        stream.seek(-len(_JOURNAL_MAGIC), 2)
        if stream.read() == _JOURNAL_MAGIC:
            raise ValueError(f"its journal {journal.name} names another file")
