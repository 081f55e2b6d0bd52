"""Recordings that somebody made by hand to do harm: each a change to a sound one, and why it is here."""

import json
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

_COUNT = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {}) "
_PARAMETER = (
    "INSERT INTO parameter SELECT {}, 10, 40, 'float32', 1, '[10]', 'Linear', 0, NULL, 0, NULL, 0, '', 0, NULL FROM n"
)


def _sql(*statements: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as database, database:
            for statement in statements:
                database.execute(statement)

    return change


def _view(table: str, columns: str) -> Callable[[Path], None]:
    """A view without an end in the place of ``table``."""
    endless = f"CREATE VIEW {table} AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) {columns} FROM n"
    return _sql(f"DROP TABLE {table}", endless)


def _circle(path: Path) -> None:
    """Each page of the notes' tree has the next one many times over: more rows than there are atoms."""
    page, pages = 4096, path.stat().st_size // 4096
    _sql("INSERT INTO note SELECT 'a'")(path)
    with closing(sqlite3.connect(path)) as database:
        root = database.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'note'").fetchone()[0]
        pages = database.execute("PRAGMA page_count").fetchone()[0]
    raw = bytearray(path.read_bytes())
    leaf = bytes(raw[(root - 1) * page : root * page])
    for depth in range(10):
        place = root if depth == 0 else pages + depth
        inner = _inner_page(pages + depth + 1, page)
        if depth == 0:
            raw[(place - 1) * page : place * page] = inner
        else:
            raw += inner
    raw += leaf
    raw[28:32] = (len(raw) // page).to_bytes(4, "big")
    path.write_bytes(raw)


def _inner_page(child: int, size: int) -> bytes:
    """An interior page of a table whose children are all ``child``. Source: sqlite.org/fileformat2.html."""
    cells, cell = 400, child.to_bytes(4, "big") + b"\x01"
    start = size - cells * len(cell)
    head = b"\x05\x00\x00" + cells.to_bytes(2, "big") + start.to_bytes(2, "big") + b"\x00" + child.to_bytes(4, "big")
    pointers = b"".join((start + number * len(cell)).to_bytes(2, "big") for number in range(cells))
    return (head + pointers).ljust(start, b"\x00") + cell * cells


CASES: Mapping[str, Callable[[Path], None]] = {
    "a view without an end": _view("plain_step", "SELECT x AS duration_ns"),
    "a view without an end for the header": _view("meta", "SELECT x AS key, x AS value"),
    "a table of pages that hold each other": _circle,
    "a trigger": _sql("CREATE TRIGGER t AFTER INSERT ON plain_step BEGIN DELETE FROM event; END"),
    "an index that computes": _sql("CREATE INDEX i ON event (hex(address))"),
    "a column that is computed": _sql(
        "DROP TABLE note", "CREATE TABLE note (message TEXT NOT NULL, more AS (zeroblob(100000000)))"
    ),
    "JSON that is nested without an end": _sql(
        "UPDATE meta SET value = replace(hex(zeroblob(200000)), '00', '[') WHERE key = 'run'"
    ),
    "settings that are nested without an end": _sql(
        "UPDATE optimizer SET settings = replace(hex(zeroblob(200000)), '00', '[')"
    ),
    "a number that is none": _sql("UPDATE event SET bytes = 1.5 WHERE rowid = 1"),
    "sizes that 64 bits do not hold": _sql("UPDATE event SET bytes = 4611686018427387904"),
    "elements that no float holds": _sql("UPDATE parameter SET elements = 9223372036854775807"),
    "times from one end to the other": _sql("UPDATE event SET time_ns = -9223372036854775808 WHERE rowid = 2"),
    "steps that are there many times": _sql(
        _COUNT.format(98_000) + "INSERT INTO step SELECT 1, 10, 20, 0, 1.0, NULL, 1, 0, 1, 0, 1 FROM n"
    ),
    "as many steps as there may be, each the whole run": _sql(
        "DELETE FROM step",
        _COUNT.format(30_000) + "INSERT INTO step SELECT x, 0, 1000000, 0, 1.0, NULL, 1, 0, 1, 0, 1 FROM n",
    ),
    "names of 20,000 characters": _sql(_COUNT.format(500) + _PARAMETER.format("x || hex(zeroblob(10000))")),
    "modules in modules in modules": _sql(
        _COUNT.format(100) + _PARAMETER.format("x || replace(hex(zeroblob(4000)), '00', '.a')")
    ),
    "steps that lie in each other": _sql(
        "DELETE FROM step",
        _COUNT.format(20_000) + "INSERT INTO step SELECT x, 0, 1000000, 0, 1.0, NULL, 1, 0, 1, 0, 1 FROM n",
        _COUNT.format(20_000) + "INSERT INTO event SELECT 1000 + x, 1, 3, 2, x * 512, 8, 512, 0, 0, 0, 0, -1 FROM n",
    ),
    "a long name in many rows": _sql(
        "UPDATE text SET value = replace(hex(zeroblob(4000)), '00', 'ab') WHERE id = 1",
        _COUNT.format(20_000) + "INSERT INTO event SELECT 1000 + x, 1, 3, 2, x * 512, 8, 512, 0, 1, 0, 0, -1 FROM n",
    ),
    "stacks of more frames than there is code": _sql(
        _COUNT.format(12)
        + "INSERT INTO text SELECT 100 + x, x || replace(hex(zeroblob(100000)), '00', 'a:1 f' || char(10)) FROM n",
        "UPDATE text SET id = (SELECT count(*) FROM text AS other WHERE other.id < text.id)",
        _COUNT.format(12)
        + "INSERT INTO event SELECT 1000 + x, 1, 3, 2, x * 512, 8, 512, 0, 0, 0, (SELECT max(id) FROM text) - x + 1, -1"
        " FROM n",
    ),
    "phases that change without an end": _sql(
        _COUNT.format(100_000) + "INSERT INTO phase SELECT 1000 + x, 1, 3 + x % 3 FROM n"
    ),
    "an optimizer for each parameter": _sql(
        _COUNT.format(9_000) + "INSERT INTO optimizer SELECT 'AdamW', 'foreach', '[]', '{}', 1 FROM n",
        _COUNT.format(20_000) + _PARAMETER.format("'p' || x").replace("'Linear', 0", "'', x % 9000"),
    ),
    "escape sequences in the schema": _sql('CREATE TABLE "\x1b[31m" (a)'),
}


def _bomb(path: Path) -> None:
    """Two megabytes that unpack to two gigabytes."""
    packer, size, times = zlib.compressobj(9), 1 << 24, 128
    once = packer.compress(bytes(size)) + packer.flush(zlib.Z_FULL_FLUSH)  # two bytes of header, then what can repeat
    end = b"\x03\x00" + (size * times % 65521 << 16 | 1).to_bytes(4, "big")  # an empty block, and Adler's checksum
    packed = once[:2] + once[2:] * times + end
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE full_recording SET packed = ?", (packed,))


def _header(key: str, **fields: object) -> Callable[[Path], None]:
    """These fields of one entry of the header replaced."""

    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as database, database:
            (value,) = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            changed = json.dumps(json.loads(value) | fields)
            database.execute("UPDATE meta SET value = ? WHERE key = ?", (changed, key))

    return change


def _each(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        for each in changes:
            each(path)

    return change


ESCAPES = "\x1b]0;pwn\x07\x1b[2J\x9b31m\x00\u202e\r\ud800"
_DEEP = "replace(hex(zeroblob(50000)), '00', '[') || replace(hex(zeroblob(50000)), '00', ']')"
_FAILURE = {"kind": "raised", "error": f"E{ESCAPES}", "message": ESCAPES}
_HELD = [{"what": f"train.py{ESCAPES}:9", "bytes": 5, "count": 1, "line": True}]

WATCHED_CASES: Mapping[str, Callable[[Path], None]] = {
    "two megabytes that become two gigabytes": _bomb,
    "a full recording that is none": _sql("UPDATE full_recording SET packed = zeroblob(100)"),
    "nested JSON for how the run ended": _sql(f"UPDATE meta SET value = {_DEEP} WHERE key = 'end'"),
    "nested JSON for what is watched": _sql(f"UPDATE meta SET value = {_DEEP} WHERE key = 'watched'"),
    "nested JSON for what has grown": _sql(f"UPDATE grown SET held = {_DEEP}"),
    "a negative number": _sql("UPDATE ended_step SET alive = -50000000 WHERE rowid = 40"),
    "a peak that is none": _sql("UPDATE ended_step SET peak = 1e300 WHERE rowid = 40"),
    "a number that no 64 bits hold": _header("end", asked=10**400),
    "digits without an end": _sql(
        "UPDATE meta SET value = replace(value, '\"asked\": 536870912', '\"asked\": ' || replace(hex(zeroblob(2500)), "
        "'0', '9')) WHERE key = 'end'"
    ),
    "a view without an end for the steps": _view(
        "ended_step",
        "SELECT x AS step, x AS time_ns, 1 AS peak, 'forward' AS phase, 1 AS alive, 1 AS reserved, 1 AS host, "
        "1 AS retries, 1 AS split, '' AS batch, 0 AS full",
    ),
    "more steps than there may be": _sql(
        _COUNT.format(70_000) + "INSERT INTO ended_step SELECT 100 + x, x, 1, 'forward', 1, 1, 1, 0, 0, '', 0 FROM n"
    ),
    "more full recordings than anybody keeps": _sql(
        _COUNT.format(500)
        + "INSERT INTO full_recording SELECT 100 + x, why, first, last, packed FROM n, full_recording"
    ),
    "notes in pages that hold each other": _circle,
    "a trigger on notes": _sql("CREATE TRIGGER t AFTER INSERT ON note BEGIN DELETE FROM ended_step; END"),
    "the tables of a recording": _sql("CREATE TABLE event (a)"),
    "a phase of a megabyte": _sql("UPDATE ended_step SET phase = hex(zeroblob(500000)) WHERE rowid = 40"),
}
"""Watched runs that are refused."""

WATCHED_TEXTS: Mapping[str, Callable[[Path], None]] = {
    "escape sequences": _each(
        _header("watched", script=f"train{ESCAPES}.py", arguments=[ESCAPES, f"--batch-size={ESCAPES}"], device=ESCAPES),
        _header("end", failure=_FAILURE, held=_HELD, line=ESCAPES, phase=ESCAPES, batch=ESCAPES),
        _sql(
            "UPDATE ended_step SET phase = 'a' || char(27) || '[2J', batch = char(155) || '31m'",
            "INSERT INTO note VALUES (char(27) || ']0;pwn' || char(7))",
        ),
    ),
    "escape sequences in a run without an end": _each(
        _header("watched", script=f"-m {ESCAPES}", world_size=1),
        _sql("DELETE FROM meta WHERE key = 'end'", "UPDATE note SET message = char(27) || '[2J'"),
    ),
    "a script with a name of 300,000 characters": _header("watched", script="B" * 300_000),
    "arguments of a million characters": _header("watched", script="train.py", arguments=["1." * 100_000] * 4),
    "a failure of a million characters": _each(
        _header("end", failure={"kind": "raised", "error": "E", "message": "m." * 500_000}),
        _sql("UPDATE note SET message = replace(hex(zeroblob(500000)), '00', '7.')"),
    ),
    "a batch of ten thousand characters in each step": _sql(
        "UPDATE ended_step SET batch = hex(zeroblob(5000)), phase = hex(zeroblob(5000))"
    ),
}
"""Watched runs with texts that are shown, but neither whole nor as they are."""


def make(name: str, whole: Path, path: Path) -> Path:
    """The case ``name`` at ``path``, made from a copy of the sound file at ``whole``."""
    shutil.copyfile(whole, path)
    {**CASES, **WATCHED_TEXTS, **WATCHED_CASES}[name](path)
    return path
