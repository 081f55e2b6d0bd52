"""The tables of a ``.ampmem`` file, and opening one that anybody may have made: plain tables alone, and bounded work.

Two views are a promise to people who query a recording with SQL:

* ``allocator_event(id, time_ns, step, phase, action, address, bytes, block_bytes, stream, op, stack)``
* ``storage_fact(time_ns, address, fact, name, module, dtype, shape)``

A view may get more columns, after those that it has; older files lack them: the last two of ``storage_fact``. The
tables behind them may change with ``format_version``. A file of another version is refused.
"""

from __future__ import annotations

import os
import re
import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
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

FORMAT_VERSION = 3
SUFFIX = ".ampmem"
ROWS = "rows"
"""The key in ``meta`` of how many rows each table has, which every transaction writes last: a copy of a file whose
run was killed inside a transaction, made without the journal beside it, does not have that many.
"""
MESH = "mesh"
"""The key in ``meta`` of where in its job this process is, beside its rank; there only where something is known."""
ENDED = "ended"
"""The key in ``meta`` of whether the recording was ended: false until its writer is closed, and so where its run was
killed. The first files of this format have no such key.
"""
UNCOUNTED = ("meta", "plain_step")
"""Tables that are not among them: the key is in the one, and the other is written later, by another process."""

COLUMN_TABLES: tuple[tuple[str, type[Columns]], ...] = (
    ("event", EventColumns),
    ("fact", FactColumns),
    ("phase", PhaseColumns),
    ("segment", SegmentColumns),
)
RECORD_TABLES: tuple[tuple[str, type[Any]], ...] = (
    ("step", StepRecord),
    ("parameter", ParameterRecord),
    ("optimizer", OptimizerRecord),
    ("layers", LayersRecord),
    ("oom", OomRecord),
)

_VIEWS = f"""
CREATE VIEW allocator_event AS
SELECT event.rowid AS id, time_ns, NULLIF(step, -1) AS step,
       {{phase}} AS phase, {{action}} AS action, address, bytes, block_bytes, stream,
       NULLIF(op.value, '') AS op, NULLIF(stack.value, '') AS stack
FROM event JOIN text AS op ON op.id = event.op JOIN text AS stack ON stack.id = event.stack
ORDER BY event.rowid;
CREATE VIEW storage_fact AS
SELECT time_ns, address, {{fact}} AS fact, NULLIF(name.value, '') AS name, NULLIF(module.value, '') AS module,
       NULLIF(dtype.value, '') AS dtype, NULLIF(shape.value, '') AS shape
FROM fact JOIN text AS name ON name.id = fact.name JOIN text AS module ON module.id = fact.module
     JOIN text AS dtype ON dtype.id = fact.dtype JOIN text AS shape ON shape.id = fact.shape
ORDER BY fact.rowid;
PRAGMA user_version = {FORMAT_VERSION};
"""


def _words(column: str, members: Iterable[Action | Phase | Fact]) -> str:
    """SQL that turns the codes in ``column`` into lower-case words."""
    cases = " ".join(f"WHEN {int(member)} THEN '{member.name.lower()}'" for member in members)
    return f"CASE {column} {cases} END"


def schema() -> str:
    """The SQL that makes an empty recording."""
    tables = [
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);",
        "CREATE TABLE text (id INTEGER PRIMARY KEY, value TEXT NOT NULL);",
        "INSERT INTO text VALUES (0, '');",
        "CREATE TABLE note (message TEXT NOT NULL);",
        "CREATE TABLE plain_step (duration_ns INTEGER NOT NULL);",
    ]
    for table, columns in COLUMN_TABLES:
        tables.append(f"CREATE TABLE {table} ({', '.join(f'{name} INTEGER NOT NULL' for name in columns.names())});")
    for table, record in RECORD_TABLES:
        tables.append(f"CREATE TABLE {table} ({', '.join(f'{_quoted(field.name)}' for field in fields(record))});")
    views = _VIEWS.format(phase=_words("phase", Phase), action=_words("action", Action), fact=_words("fact", Fact))
    return "\n".join(tables) + views


def _quoted(name: str) -> str:
    return f'"{name}"'


# Opens a ``.ampmem`` file that anybody may have made: plain tables alone, and no more work than a file can be worth.
#
# Nothing in the file can make SQLite run anything: what is asked is asked of tables, which are what the layout says.

_ColumnsT = TypeVar("_ColumnsT", bound=Columns)

_LAYOUT = {name: kind.lower() for kind, name in re.findall(r"CREATE (TABLE|VIEW) (\w+)", schema())}
"""Everything that there is in a recording, and what it is."""

_COLUMN = r'(?:\w+|"\w+")(?: INTEGER| TEXT)?(?: NOT NULL| PRIMARY KEY)*'
_TABLE = re.compile(rf"CREATE TABLE (\w+) \({_COLUMN}(?:, {_COLUMN})*\)", re.ASCII)
"""A table of the layout, of whatever columns: nothing in it is computed."""

_INDEX = "sqlite_autoindex_meta_1"
"""What SQLite makes by itself, for the keys of the header."""

_SCHEMA_ROWS = 40
_SCHEMA_TEXT = 10_000

_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""What a journal ends with that names another file: SQLite would read that file, and may delete it.

Source: "Database File Format", sqlite.org/fileformat2.html, and ``readSuperJournal`` in SQLite's ``pager.c``.
"""

_ROWS_AT_ONCE = 2048

_COMMIT_S = 20.0
"""How long to wait at most while the file's writer writes one step."""

_STEPS_BETWEEN_LOOKS = 50_000
_STEPS_FOR_ANY_FILE = 2_000_000


class Database:
    """An open recording, whose tables are those of the layout; what is in it has at ``most`` so many bytes."""

    def __init__(self, path: Path, connection: sqlite3.Connection, most: int) -> None:
        self._path = path
        self._connection = connection
        self.rows_read: dict[str, int] = {}
        """By table, once it is read whole."""
        self._steps = 0
        self._size = 0
        self._text_left = _SCHEMA_ROWS * _SCHEMA_TEXT
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _SCHEMA_TEXT)
        connection.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(self._worked, _STEPS_BETWEEN_LOOKS)
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            connection.execute(f"PRAGMA {pragma}")
        self._check_version()
        self._check_schema()
        self._size = min(self._number("page_count") * self._number("page_size"), most)
        self._text_left = self._size
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(self._size, _SCHEMA_TEXT))

    def columns(self, table: str, kind: type[_ColumnsT]) -> _ColumnsT:
        """The rows of ``table``. Raises ``ValueError`` or ``TypeError`` for what is no whole number."""
        names = self._there(table, kind)
        cursor, left = self._select(table, names), self._most(table, names)
        cells = array("q")  # unlike a numpy column it takes whole numbers only
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            left -= len(rows)
            if left < 0:
                raise self._too_many(table)
            cells.fromlist(list(chain.from_iterable(rows)))
        self.rows_read[table] = len(cells) // len(names)
        by_column = np.ascontiguousarray(np.frombuffer(cells, dtype=np.int64).reshape(-1, len(names)).T)
        nothing = np.zeros(by_column.shape[1], dtype=np.int64)
        return kind(**(dict.fromkeys(kind.LATER, nothing) | dict(zip(names, by_column, strict=True))))

    def _there(self, table: str, kind: type[Columns]) -> tuple[str, ...]:
        """The columns of ``kind``, but for those that came later than the file; others SQLite would take for words."""
        there = set(self._names(table))
        if missing := set(kind.names()) - kind.LATER - there:
            raise ValueError(f"the table {table} has no {', '.join(sorted(missing))}")
        return tuple(name for name in kind.names() if name in there)

    def _names(self, table: str) -> tuple[str, ...]:
        """The columns that the file has."""
        return tuple(column[0] for column in self._connection.execute(f"SELECT * FROM {table} LIMIT 0").description)

    def rows(self, table: str, *names: str) -> Iterator[tuple[Any, ...]]:
        """The columns ``names`` of ``table``."""
        most, number = self._most(table, names), 0
        for number, row in enumerate(self._select(table, names), start=1):
            if number > most:
                raise self._too_many(table)
            self._count(row)
            yield row
        self.rows_read[table] = number

    def records(self, table: str) -> Iterator[dict[str, object]]:
        """The rows of ``table``, by the names of the columns that the file has."""
        names = self._names(table)
        return (dict(zip(names, row, strict=True)) for row in self.rows(table, *names))

    def _select(self, table: str, names: tuple[str, ...]) -> sqlite3.Cursor:
        columns = ", ".join(f'"{name}"' for name in names)
        return self._connection.execute(f"SELECT {columns} FROM {table} ORDER BY rowid")

    def _most(self, table: str, names: tuple[str, ...]) -> int:
        """The most rows that the file can have: a row takes at least a byte for each column and five more."""
        return min(self._size // (len(names) + 5), MOST_ROWS.get(table, self._size))

    def _too_many(self, table: str) -> ValueError:
        return ValueError(f"the table {table} has more rows than a recording, or a file of its size, can have")

    def _count(self, row: tuple[Any, ...]) -> None:
        """All texts together are no longer than the file, unless several rows share one."""
        self._text_left -= sum(len(cell) for cell in row if isinstance(cell, (str, bytes)))
        if self._text_left < 0:
            raise ValueError("its texts are longer than the file")

    def _worked(self) -> bool:
        """Called by SQLite every now and then: whether to give up."""
        self._steps += _STEPS_BETWEEN_LOOKS
        return self._steps > _STEPS_FOR_ANY_FILE + 2 * self._size

    def _number(self, pragma: str) -> int:
        return int(self._connection.execute(f"PRAGMA {pragma}").fetchone()[0])

    def _check_version(self) -> None:
        version = self._number("user_version")
        if version == 0:  # any other program's database, or an empty file
            raise RecordingError(f"{self._path} is not an ampmem recording")
        if version != FORMAT_VERSION:
            raise RecordingError(
                f"{self._path} has recording format {version}, this ampmem reads format {FORMAT_VERSION}; "
                "read it with the version of ampmem that wrote it"
            )

    def _check_schema(self) -> None:
        """Raise ``ValueError`` for what the layout does not have; of a table that is missing SQLite speaks itself."""
        rows = self._connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema")
        for number, (kind, name, table, sql) in enumerate(rows):
            known = kind == _LAYOUT.get(name) and name == table and (kind == "view" or _is_plain(name, sql))
            if not (known or (kind, name, sql) == ("index", _INDEX, None)) or number >= _SCHEMA_ROWS:
                raise ValueError(f"it has the {kind} {name!r:.100}, which is in no recording")


def _is_plain(name: str, sql: object) -> bool:
    """Whether ``sql`` makes the table ``name``, and nothing in it is computed."""
    match = _TABLE.fullmatch(sql) if isinstance(sql, str) and len(sql) <= _SCHEMA_TEXT else None
    return match is not None and match[1] == name


def _bytes_in(path: Path) -> int:
    """The size of the file without its holes: they cost its maker nothing, and nothing is in them."""
    with path.open("rb") as stream:
        size, place = 0, 0
        while True:
            try:
                start = os.lseek(stream.fileno(), place, os.SEEK_DATA)
                place = os.lseek(stream.fileno(), start, os.SEEK_HOLE)
            except OSError:  # no data after this place; where holes are not known, all is data
                return size
            size += place - start


written_here: set[tuple[int, int]] = set()
"""Device and inode of the files that this process writes. Closing any descriptor of a file lets go of all the locks
that SQLite has on it in this process, so these files are opened through SQLite alone."""


def is_written_here(path: Path) -> bool:
    """Whether this process writes the recording at ``path``."""
    return bool(written_here) and identity_of(path) in written_here


def identity_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at ``path``; ``None`` where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def opened(path: Path) -> Iterator[Database]:
    """The recording at ``path``, in one state: what is written meanwhile is not seen.

    Of a file that is being written a copy in memory is read, so that its writer waits for no more than the copying. Any
    other file is opened for writing, too: a run that was killed has left a journal, and SQLite undoes what that says.
    """
    growing = is_written_here(path) or being_written(path)
    connection, most = _copied(path) if growing else (None, 0)
    if connection is None:
        _check_journal(path)
        most = _bytes_in(path)  # before it is opened: closing a file lets go of the locks that SQLite has on it
        connection = _connected(path, "rw")
    with closing(connection):
        connection.execute("BEGIN")  # or each statement would see what was committed before it
        yield Database(path, connection, most)


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_COMMIT_S, isolation_level=None)


def _copied(path: Path) -> tuple[sqlite3.Connection | None, int]:
    """The recording at ``path``, which is being written, as a copy in memory, and its size.

    ``None`` in place of the copy where the file itself must be read.
    It is opened for reading alone: its journal is its writer's, and nothing for this process to undo.
    """
    copy = sqlite3.connect(":memory:", isolation_level=None)
    try:
        with closing(_connected(path, "ro")) as connection:
            connection.execute("BEGIN")
            size = 1
            for pragma in (
                "page_count",
                "page_size",
            ):  # the first takes the lock, for which copying would wait for ever
                size *= int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])
            if size <= path.stat().st_size:  # else it was not ampmem that wrote it
                connection.backup(copy)
                return copy, size
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            copy.close()
            raise
    except BaseException:
        copy.close()
        raise
    copy.close()  # its writer was killed meanwhile, or it is no recording: reading it says which
    return None, 0


def _check_journal(path: Path) -> None:
    """Raise ``ValueError`` for a journal that speaks of other files than ``path``; ampmem never writes one."""
    whole = path.resolve()
    journal = whole.with_name(f"{whole.name}-journal")
    if not journal.is_file() or journal.stat().st_size < len(_JOURNAL_MAGIC):
        return
    with journal.open("rb") as stream:
        stream.seek(-len(_JOURNAL_MAGIC), 2)
        if stream.read() == _JOURNAL_MAGIC:
            raise ValueError(f"its journal {journal.name} names another file")
