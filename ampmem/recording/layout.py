"""What is in a ``.ampmem`` file: its tables, one for each kind of row, and the views that people query.

Two views are a promise to people who query a recording with SQL:

* ``allocator_event(id, time_ns, step, phase, action, address, bytes, block_bytes, stream, op, stack)``
* ``storage_fact(time_ns, address, fact, name, module, dtype, shape)``

A view may get more columns, after those that it has; older files lack them: the last two of ``storage_fact``. The
tables behind them may change with ``format_version``. A file of another version is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

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
