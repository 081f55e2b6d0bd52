"""Recordings that were tampered with: by chance, from a seed, and more of what reaches new lines of ampmem.

``tries`` makes them, ``outcome`` says what becomes of one. Run: ``python tests/support/hostile/mutations.py 2000 0``.
"""

import json
import random
import resource
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from support.hostile.outcomes import Reached
from support.hostile.outcomes import outcome as outcome_of
from support.hostile.seeds import on_cpu, on_gpu, write_watched, write_whole

from ampmem.recording.database import COLUMN_TABLES, RECORD_TABLES, WATCHED_TABLES

MEMORY = 1 << 30
"""Bytes that a process may take for any of these files."""

_TABLES = (*(name for name, _ in (*COLUMN_TABLES, *RECORD_TABLES)), "meta", "text", "note", "plain_step")
_WATCHED_TABLES = (*(name for name, _ in WATCHED_TABLES), "meta", "note")
_JSON_CELLS = (*[("meta", "value")] * 5, ("optimizer", "settings"), ("optimizer", "bases"), ("oom", "segments"))
_WATCHED_JSON_CELLS = (*[("meta", "value")] * 5, ("grown", "held"))
_NUMBERS = (-(2**63), -(2**62), -1000, -2, -1, 0, 1, 2, 3, 5, 7, 19, 20, 255, 2**31, 2**40, 2**53, 2**62, 2**63 - 1)
_TEXTS = ("", "x", "x" * 20_000, ".", "a.b", ".".join("a" * 2000), "\x00", "\x1b[31m", "\u202e", "<script>", "=1+1")
_JSON = ("null", "[]", "{}", "[" * 100_000, '{"a":' * 50_000, "[1,2,3]", "1e999", "NaN", '"\\ud800"', "9" * 5000, "{")
_OTHERS = (None, 1.5, float("inf"), -float("inf"), 1e308, b"", b"\xff\xfe", b"\x00" * 100)
VALUES: tuple[Any, ...] = (*_NUMBERS, *_TEXTS, *_JSON, *_OTHERS)

_SCHEMAS = (
    "CREATE VIEW {table} AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT {columns} FROM n",
    "CREATE VIEW {table} AS SELECT {columns} FROM sqlite_schema AS a, sqlite_schema AS b, sqlite_schema AS c",
    "CREATE VIRTUAL TABLE {table} USING fts5({names})",
    "CREATE TABLE {table} ({names}, PRIMARY KEY ({first})) WITHOUT ROWID",
    "CREATE TABLE {table} ({names}, more AS (randomblob(1000000000)))",
    "CREATE TABLE {table} ({names}, CHECK (abs(random()) > 0))",
    "CREATE TABLE {table} ({first})",
    "CREATE TABLE {table} ({names}, more)",
)
_ADDITIONS = (
    "CREATE TRIGGER t AFTER INSERT ON plain_step BEGIN DELETE FROM event; END",
    "CREATE TABLE mine (a)",
    "CREATE VIEW mine AS SELECT randomblob(1000000000)",
    "CREATE INDEX i ON event (address)",
    "CREATE INDEX i ON event (hex(randomblob(100)))",
    "DROP VIEW allocator_event",
    "PRAGMA user_version = 2",
    "PRAGMA journal_mode = WAL",
    "VACUUM",
)


BASES: dict[str, Callable[[Path], Path]] = {
    "on_cpu": lambda path: write_whole(path, on_cpu()),
    "on_gpu": lambda path: write_whole(path, on_gpu()),
    "watched": write_watched,
}
RECORDINGS = ("on_cpu", "on_gpu")


def tries(count: int, seed: int, names: Collection[str] = RECORDINGS) -> Iterator[tuple[str, Path]]:
    """So many hostile files, one at a time, from the bases ``names``: each with a name that says how to make it again.

    The more files are made from what ``outcome`` found new lines with, the further they reach.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        bases = [write(Path(folder) / f"{name}.ampmem") for name, write in BASES.items() if name in names]
        for base in bases:
            _watched(base)
        kept: list[tuple[Path, tuple[int, ...]]] = [(base, ()) for base in bases]
        for _ in range(count):
            base, recipe = chance.choice(kept if chance.random() < 0.8 else kept[: len(bases)])
            recipe = (*recipe, *(chance.getrandbits(32) for _ in range(chance.choice((1, 1, 1, 2, 5)))))
            path = Path(folder) / "try.ampmem"
            make(base, recipe, path)
            before = _REACHED.lines
            yield f"{base.stem}:{'-'.join(map(str, recipe))}", path
            if _REACHED.lines > before and len(recipe) < 8:
                kept.append((base, recipe))


def again(name: str, path: Path) -> Path:
    """The file that :func:`tries` calls ``name``, once more, at ``path``."""
    base, _, recipe = name.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        whole = BASES[base](Path(folder) / "whole.ampmem")
        return make(whole, tuple(int(step) for step in recipe.split("-")), path)


def outcome(path: Path) -> str | None:
    """What is wrong with what ampmem makes of the file at ``path``; ``None`` for a right answer or a clear line."""
    with _REACHED.watching():
        return outcome_of(path)


_REACHED = Reached()


def _watched(path: Path) -> None:
    wrong = outcome(path)
    if wrong is not None:
        raise AssertionError(f"{path.name} as it was written: {wrong}")


def make(base: Path, recipe: tuple[int, ...], path: Path) -> Path:
    """``base`` with one change for each number of ``recipe``, at ``path``."""
    for leftover in path.parent.glob(f"{path.name}*"):
        leftover.unlink()
    shutil.copyfile(base, path)
    for step in recipe:
        chance = random.Random(step)
        chance.choices(tuple(_CHANGES), tuple(_CHANGES.values()))[0](path, chance)
    return path


def _in_sql(change: Callable[[sqlite3.Connection, random.Random], None]) -> Callable[[Path, random.Random], None]:
    """``change`` as one of a file; what SQLite does not let it do is left out."""

    def changed(path: Path, chance: random.Random) -> None:
        try:
            with closing(sqlite3.connect(path)) as database, database:
                database.execute("PRAGMA synchronous = OFF")
                database.set_progress_handler(lambda: True, 1_000_000)  # a change before may have left no end
                change(database, chance)
        except (sqlite3.Error, ValueError, OverflowError, RecursionError):
            pass

    return changed


def _columns(database: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


def _is_watched(database: sqlite3.Connection) -> bool:
    return bool(database.execute("SELECT 1 FROM sqlite_schema WHERE name = 'ended_step'").fetchone())


def _table(database: sqlite3.Connection, chance: random.Random) -> str:
    return chance.choice(_WATCHED_TABLES if _is_watched(database) else _TABLES)


def _cell(database: sqlite3.Connection, chance: random.Random) -> tuple[str, str, int] | None:
    table = _table(database, chance)
    rows, columns = database.execute(f"SELECT rowid FROM {table}").fetchall(), _columns(database, table)
    return (table, chance.choice(columns), chance.choice(rows)[0]) if rows else None


@_in_sql
def _set_cell(database: sqlite3.Connection, chance: random.Random) -> None:
    cell = _cell(database, chance)
    if cell is not None:
        database.execute(f'UPDATE {cell[0]} SET "{cell[1]}" = ? WHERE rowid = ?', (chance.choice(VALUES), cell[2]))


@_in_sql
def _swap_cells(database: sqlite3.Connection, chance: random.Random) -> None:
    """What is a number, or a text, of its column, but of another row."""
    cell = _cell(database, chance)
    if cell is not None:
        table, column, row = cell
        values = [value for (value,) in database.execute(f'SELECT "{column}" FROM {table}')]
        database.execute(f'UPDATE {table} SET "{column}" = ? WHERE rowid = ?', (chance.choice(values), row))


@_in_sql
def _set_column(database: sqlite3.Connection, chance: random.Random) -> None:
    cell = _cell(database, chance)
    if cell is not None:
        value = chance.choice((chance.choice(VALUES), chance.randrange(8)))
        database.execute(f'UPDATE {cell[0]} SET "{cell[1]}" = ?', (value,))


@_in_sql
def _shift_column(database: sqlite3.Connection, chance: random.Random) -> None:
    cell = _cell(database, chance)
    if cell is not None:
        by = chance.choice((1, -1, 10, 1000, 2**40, 2**61))
        database.execute(f'UPDATE {cell[0]} SET "{cell[1]}" = "{cell[1]}" + ? WHERE rowid >= ?', (by, cell[2]))


@_in_sql
def _set_header(database: sqlite3.Connection, chance: random.Random) -> None:
    """Something inside of one of the header's rows, or of another cell with JSON."""
    table, column = chance.choice(_WATCHED_JSON_CELLS if _is_watched(database) else _JSON_CELLS)
    rows = database.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
    if rows:
        row, text = chance.choice(rows)
        changed = json.dumps(_changed(json.loads(str(text)), chance))
        database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (changed, row))


def _changed(value: Any, chance: random.Random) -> Any:
    """``value`` with something in it replaced, added or left out."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        kind = chance.random()
        if kind < 0.8:
            return {**value, key: _changed(value[key], chance)}
        return {k: v for k, v in value.items() if k != key} if kind < 0.9 else {**value, f"{key}2": 1}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        return [*value[:place], _changed(value[place], chance), *value[place + chance.randrange(2) :]]
    plain = (*_NUMBERS, *_TEXTS, None, True, False, 1.5, float("nan"), float("inf"), 10**30, "amp", "cpu", "snapshot")
    return chance.choice((*plain, [], {}, [[]], {"a": 1}, "\ud800"))


@_in_sql
def _drop_rows(database: sqlite3.Connection, chance: random.Random) -> None:
    table = _table(database, chance)
    database.execute(f"DELETE FROM {table} WHERE abs(random()) % 10 < ?", (chance.choice((1, 5, 10)),))


@_in_sql
def _repeat_rows(database: sqlite3.Connection, chance: random.Random) -> None:
    table = _table(database, chance)
    names = [name for name in _columns(database, table) if name not in ("id", "key")]
    listed = ", ".join(f'"{name}"' for name in names)
    for _ in range(chance.choice((1, 1, 2, 6))):
        database.execute(f"INSERT INTO {table} ({listed}) SELECT {listed} FROM {table} ORDER BY random()")


@_in_sql
def _reorder_rows(database: sqlite3.Connection, chance: random.Random) -> None:
    table = _table(database, chance)
    database.execute(f"CREATE TEMP TABLE old AS SELECT * FROM {table} ORDER BY random()")
    database.execute(f"DELETE FROM {table}")
    database.execute(f"INSERT INTO {table} SELECT * FROM old")


@_in_sql
def _replace_table(database: sqlite3.Connection, chance: random.Random) -> None:
    table = _table(database, chance)
    names = [f'"{name}"' for name in _columns(database, table)]
    script = chance.choice(_SCHEMAS).format(
        table=table, names=", ".join(names), first=names[0], columns=", ".join(f"1 AS {name}" for name in names)
    )
    database.execute(f"ALTER TABLE {table} RENAME TO old")
    database.execute(script)
    if script.startswith("CREATE TABLE"):
        database.execute(f"INSERT OR IGNORE INTO {table} SELECT * FROM old")
    database.execute("DROP TABLE old")


@_in_sql
def _add_to_schema(database: sqlite3.Connection, chance: random.Random) -> None:
    database.execute(chance.choice(_ADDITIONS))


@_in_sql
def _write_schema(database: sqlite3.Connection, chance: random.Random) -> None:
    database.execute("PRAGMA writable_schema = ON")
    column = chance.choice(("type", "name", "tbl_name", "rootpage", "sql"))
    value = chance.choice((*VALUES, "table", "event", "CREATE TABLE event (a)"))
    database.execute(f"UPDATE sqlite_schema SET {column} = ? WHERE rowid = ?", (value, chance.randrange(1, 16)))


def _flip_bytes(path: Path, chance: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 2, 8, 100))):
        place = chance.randrange(min(len(raw), chance.choice((100, 2000, len(raw)))))
        raw[place] = chance.choice((0, 1, 0x7F, 0xFF, raw[place] ^ 1 << chance.randrange(8)))
    path.write_bytes(raw)


def _cut(path: Path, chance: random.Random) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: chance.choice((chance.randrange(len(raw)), len(raw) // 4096 * 2048, 100))])


def _move_page(path: Path, chance: random.Random) -> None:
    """One page of the database in the place of another, or nothing there."""
    raw = bytearray(path.read_bytes())
    one, other = (chance.randrange(max(1, len(raw) // 4096)) * 4096 for _ in range(2))  # one may be all that is left
    raw[one : one + 4096] = chance.choice((bytes(4096), bytes(raw[other : other + 4096])))
    path.write_bytes(raw)


_CHANGES: dict[Callable[[Path, random.Random], None], int] = {
    _set_cell: 8,
    _swap_cells: 8,
    _set_column: 3,
    _shift_column: 3,
    _set_header: 6,
    _drop_rows: 3,
    _repeat_rows: 3,
    _reorder_rows: 2,
    _replace_table: 1,
    _add_to_schema: 1,
    _write_schema: 1,
    _flip_bytes: 4,
    _cut: 1,
    _move_page: 1,
}
"""And how often each is made."""


def main() -> None:
    """Try so many from that seed, of recordings or of the bases that are named, and print what went wrong."""
    count, seed = map(int, sys.argv[1:3])
    names = sys.argv[3:] or RECORDINGS
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    found = [
        (name, wrong) for name, path in tries(count, seed, names) for wrong in (outcome(path),) if wrong is not None
    ]
    for name, wrong in found:
        print(name, wrong)
    print(f"{count} tries, {len(found)} failures, {_REACHED.lines} lines reached")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
