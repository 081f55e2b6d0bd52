"""The ``.ampmem`` file: one SQLite database per process, appended to as the run goes.

One transaction per step, so whatever ends the process leaves every finished step readable.
Two views are a promise to people who query a recording with SQL:

* ``allocator_event(id, time_ns, step, phase, action, address, bytes, block_bytes, stream, op, stack)``
* ``storage_fact(time_ns, address, fact, name, module)``

The tables behind them may change with ``format_version``. A file of another version is refused.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from ampmem.errors import RecordingError, UsageError
from ampmem.events import (
    NO_SEGMENTS,
    Action,
    AllocatorRecord,
    ArmRecord,
    Column,
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
    PredictionRecord,
    Recording,
    RunRecord,
    SegmentAction,
    SegmentColumns,
    StepRecord,
    TermsRecord,
)
from ampmem.failure import FailureKind, FailureRecord, failure_in
from ampmem.outputs import make_way
from ampmem.vocabulary import Arm, Mark, SourceKind

FORMAT_VERSION = 3
SUFFIX = ".ampmem"

_ColumnsT = TypeVar("_ColumnsT", bound=Columns)
_COLUMN_TABLES: tuple[tuple[str, type[Columns]], ...] = (
    ("event", EventColumns),
    ("fact", FactColumns),
    ("phase", PhaseColumns),
    ("segment", SegmentColumns),
)
_RECORD_TABLES: tuple[tuple[str, type[Any]], ...] = (
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
SELECT time_ns, address, {{fact}} AS fact, NULLIF(name.value, '') AS name, NULLIF(module.value, '') AS module
FROM fact JOIN text AS name ON name.id = fact.name JOIN text AS module ON module.id = fact.module
ORDER BY fact.rowid;
PRAGMA user_version = {FORMAT_VERSION};
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one transaction adds: the events, segments, facts, phases and layers of a step, and the step itself.

    ``texts`` are the texts seen for the first time, in the order of their ids. ``step`` is ``None``
    when the script ended before the step did.
    """

    texts: Sequence[str]
    events: EventColumns
    facts: FactColumns
    phases: PhaseColumns
    step: StepRecord | None
    layers: Sequence[LayersRecord] = ()
    ooms: Sequence[OomRecord] = ()
    segments: SegmentColumns = NO_SEGMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What is known of the run as a whole; ``device_name`` is empty where it is what the run began with."""

    arm: ArmRecord
    parameters: tuple[ParameterRecord, ...]
    optimizers: tuple[OptimizerRecord, ...]
    notes: tuple[str, ...]
    device_name: str = ""
    prediction: PredictionRecord | None = None
    allocator: AllocatorRecord | None = None
    failure: FailureRecord | None = None


def _words(column: str, members: Iterable[Action | Phase | Fact]) -> str:
    """SQL that turns the codes in ``column`` into lower-case words."""
    cases = " ".join(f"WHEN {int(member)} THEN '{member.name.lower()}'" for member in members)
    return f"CASE {column} {cases} END"


def _schema() -> str:
    tables = [
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);",
        "CREATE TABLE text (id INTEGER PRIMARY KEY, value TEXT NOT NULL);",
        "INSERT INTO text VALUES (0, '');",
        "CREATE TABLE note (message TEXT NOT NULL);",
        "CREATE TABLE plain_step (duration_ns INTEGER NOT NULL);",
    ]
    for table, columns in _COLUMN_TABLES:
        tables.append(f"CREATE TABLE {table} ({', '.join(f'{name} INTEGER NOT NULL' for name in columns.names())});")
    for table, record in _RECORD_TABLES:
        tables.append(f"CREATE TABLE {table} ({', '.join(f'{_quoted(field.name)}' for field in fields(record))});")
    views = _VIEWS.format(phase=_words("phase", Phase), action=_words("action", Action), fact=_words("fact", Fact))
    return "\n".join(tables) + views


def _quoted(name: str) -> str:
    return f'"{name}"'


class RecordingWriter:
    """Appends to a new recording; every :meth:`append` is one transaction on disk."""

    def __init__(self, path: Path, run: RunRecord, *, force: bool = False) -> None:
        self.path = path
        self._run = run
        self._description: Description | None = None
        make_way(path, path.with_name(f"{path.name}-journal"), force=force)
        try:
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            # A killed process loses nothing that it handed to the kernel; only a power cut could.
            self._database.execute("PRAGMA synchronous = OFF")
            self._database.executescript("BEGIN;" + _schema() + "COMMIT;")
        except (OSError, sqlite3.Error) as error:
            raise UsageError(f"cannot write {path}: {error}") from error
        self._write_meta({"format_version": FORMAT_VERSION} | _run_rows(run))

    def append(self, batch: Batch) -> None:
        """Write ``batch`` and commit it. Raises :class:`RecordingError` when the disk refuses."""
        with self._transaction():
            self._database.executemany("INSERT INTO text (value) VALUES (?)", ((text,) for text in batch.texts))
            columns = (batch.events, batch.facts, batch.phases, batch.segments)
            for (table, _), part in zip(_COLUMN_TABLES, columns, strict=True):
                self._insert_columns(table, part)
            if batch.step is not None:
                self._insert_records("step", [batch.step])
            self._insert_records("layers", batch.layers)
            self._insert_records("oom", batch.ooms)

    def describe(self, description: Description) -> None:
        """Replace what is known of the run as a whole; called again whenever more may be known."""
        if description == self._description:
            return
        self._description = description
        with self._transaction():
            device_name = description.device_name or self._run.device_name
            run = replace(self._run, device_name=device_name, failure=description.failure or self._run.failure)
            self._write_meta({"arm": asdict(description.arm)} | _run_rows(run))
            if description.prediction is not None:
                self._write_meta({"prediction": asdict(description.prediction)})
            if description.allocator is not None:
                self._write_meta({"allocator": asdict(description.allocator)})
            for table, records in (("parameter", description.parameters), ("optimizer", description.optimizers)):
                self._database.execute(f"DELETE FROM {table}")
                self._insert_records(table, records)
            self._database.execute("DELETE FROM note")
            self._database.executemany("INSERT INTO note VALUES (?)", ((note,) for note in description.notes))

    def close(self) -> None:
        """Close the file; appending afterwards is an error."""
        self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing on disk."""
        try:
            self._database.execute("BEGIN")
            yield
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise RecordingError(f"cannot append to {self.path}: {error}; what was written so far is kept") from error

    def _write_meta(self, entries: dict[str, object]) -> None:
        rows = [(key, json.dumps(value)) for key, value in entries.items()]
        self._database.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def _insert_columns(self, table: str, columns: Columns) -> None:
        arrays = [getattr(columns, name).tolist() for name in columns.names()]
        marks = ", ".join("?" * len(arrays))
        self._database.executemany(f"INSERT INTO {table} VALUES ({marks})", zip(*arrays, strict=True))

    def _insert_records(self, table: str, records: Sequence[object]) -> None:
        rows = [tuple(_cell(getattr(record, field.name)) for field in fields(record)) for record in records]  # type: ignore[arg-type]
        if rows:
            self._database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def _run_rows(run: RunRecord) -> dict[str, object]:
    """``run`` for the header; ``failure``, which came later than the format, has a row that older readers skip."""
    rows = asdict(run)
    failure = rows.pop("failure")
    if not run.step_on:  # it came later than the format, too
        del rows["step_on"]
    return {"run": rows} if failure is None else {"run": rows, "failure": failure}


def _cell(value: object) -> object:
    """``value`` as SQLite can hold it, which takes NaN for NULL."""
    return json.dumps(value) if isinstance(value, (tuple, dict)) or value != value else value


def add_plain_steps(path: Path, durations_ns: Sequence[int]) -> None:
    """Add to the recording at ``path`` how long its steps take without instrumentation.

    Raises :class:`RecordingError` when it is no recording or cannot be written.
    """
    read(path)
    try:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("DELETE FROM plain_step")
            database.executemany("INSERT INTO plain_step VALUES (?)", ((duration,) for duration in durations_ns))
    except sqlite3.Error as error:
        raise RecordingError(f"cannot append to {path}: {error}") from error


class _Reader:
    """An open recording; only :func:`read` uses it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def meta(self) -> dict[str, Any]:
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:  # any other program's database, or an empty file
            raise RecordingError(f"{self._path} is not an ampmem recording")
        if version != FORMAT_VERSION:
            raise RecordingError(
                f"{self._path} has recording format {version}, this ampmem reads format {FORMAT_VERSION}; "
                "read it with the version of ampmem that wrote it"
            )
        return {key: json.loads(value) for key, value in self._database.execute("SELECT key, value FROM meta")}

    def columns(self, table: str, kind: type[_ColumnsT]) -> _ColumnsT:
        names = kind.names()
        count = self._database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        rows = self._database.execute(f"SELECT {', '.join(names)} FROM {table} ORDER BY rowid")
        flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=count * len(names))
        by_column = np.ascontiguousarray(flat.reshape(count, len(names)).T)
        return kind(**dict(zip(names, by_column, strict=True)))

    def records(self, table: str) -> list[dict[str, Any]]:
        cursor = self._database.execute(f"SELECT * FROM {table} ORDER BY rowid")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def texts(self, query: str) -> tuple[str, ...]:
        return tuple(row[0] for row in self._database.execute(query))

    def numbers(self, query: str) -> tuple[int, ...]:
        return tuple(int(row[0]) for row in self._database.execute(query))


def read(path: Path) -> Recording:
    """Read a whole recording. Raises :class:`RecordingError` when ``path`` is not one."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if path.is_dir():
        raise UsageError(f"{path} is a directory, not a recording")
    try:
        with _Reader(path) as reader:
            recording = _recording(reader)
            _check_codes(recording)
            return recording
    except (sqlite3.Error, KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"{path} is not an ampmem recording, or it is damaged ({error})") from error


def _check_codes(recording: Recording) -> None:
    """Raise ``ValueError`` for a number that stands for nothing: an unknown enum member, a text that is not there."""
    events, facts, phases, texts = recording.events, recording.facts, recording.phases, len(recording.texts)
    segments = recording.segments
    bounds: tuple[tuple[str, Column, int, int], ...] = (
        ("action", events.action, min(Action), max(Action)),
        ("phase", events.phase, min(Phase), max(Phase)),
        ("phase", phases.phase, min(Phase), max(Phase)),
        ("fact", facts.fact, min(Fact), max(Fact)),
        ("segment action", segments.action, min(SegmentAction), max(SegmentAction)),
        ("position", segments.position, 0, len(events)),
        *(("text", column, 0, texts - 1) for column in (events.op, events.module, events.stack)),
        *(("text", column, 0, texts - 1) for column in (facts.name, facts.module, facts.dtype)),
    )
    for what, column, low, high in bounds:
        if len(column) and not low <= int(column.min()) <= int(column.max()) <= high:
            raise ValueError(f"a column holds an unknown {what}")


def _recording(reader: _Reader) -> Recording:
    meta = reader.meta()
    notes = reader.texts("SELECT message FROM note ORDER BY rowid")
    return Recording(
        run=_run(meta["run"], _failure(meta.get("failure"), notes)),
        arm=_arm(meta.get("arm")),
        texts=reader.texts("SELECT value FROM text ORDER BY id"),
        events=reader.columns("event", EventColumns),
        facts=reader.columns("fact", FactColumns),
        phases=reader.columns("phase", PhaseColumns),
        steps=tuple(map(_step, reader.records("step"))),
        parameters=tuple(map(_parameter, reader.records("parameter"))),
        optimizers=tuple(map(_optimizer, reader.records("optimizer"))),
        notes=notes,
        plain_step_ns=reader.numbers("SELECT duration_ns FROM plain_step ORDER BY rowid"),
        layers=tuple(map(_layers, reader.records("layers"))),
        ooms=tuple(OomRecord(**row) for row in reader.records("oom")),
        segments=reader.columns("segment", SegmentColumns),
        prediction=_prediction(meta.get("prediction")),
        allocator=_allocator(meta.get("allocator")),
    )


def _run(row: dict[str, Any], failure: FailureRecord | None) -> RunRecord:
    known = {"source": SourceKind(row["source"]), "arguments": tuple(row["arguments"]), "failure": failure}
    return RunRecord(**row | known)


def _failure(row: dict[str, Any] | None, notes: Sequence[str]) -> FailureRecord | None:
    """Why the script failed. The first files of this format have no row for it, but a note."""
    return failure_in(notes) if row is None else FailureRecord(**row | {"kind": FailureKind(row["kind"])})


def _arm(row: dict[str, Any] | None) -> ArmRecord:
    """The arm; nothing is known of it until the first step has ended."""
    if row is None:
        return ArmRecord(name=Arm.AS_IS, dtype=None, cache=None, scaler=False)
    return ArmRecord(**row | {"name": Arm(row["name"])})


def _layers(row: dict[str, Any]) -> LayersRecord:
    return LayersRecord(**row | {"mark": Mark(row["mark"])})


def _prediction(row: dict[str, Any] | None) -> PredictionRecord | None:
    if row is None:
        return None
    terms = {key: TermsRecord(**row[key]) for key in ("allocated", "reserved")}
    return PredictionRecord(**row | terms | {"unmodelled": tuple(row["unmodelled"])})


def _allocator(row: dict[str, Any] | None) -> AllocatorRecord | None:
    return None if row is None else AllocatorRecord(**row | {"peaks": tuple(row["peaks"])})


def _step(row: dict[str, Any]) -> StepRecord:
    flags = ("skipped_update", "autocast_in_backward", "finished", "batch_loaded")
    not_numbers = {key: float(row[key]) for key in ("loss", "loss_scale") if row[key] == "NaN"}
    return StepRecord(**row | {key: bool(row[key]) for key in flags if key in row} | not_numbers)


def _parameter(row: dict[str, Any]) -> ParameterRecord:
    shape = tuple(int(size) for size in json.loads(row["shape"]))
    return ParameterRecord(**row | {"trainable": bool(row["trainable"]), "shape": shape})


def _optimizer(row: dict[str, Any]) -> OptimizerRecord:
    bases, settings = tuple(json.loads(row["bases"])), dict(json.loads(row["settings"]))
    return OptimizerRecord(**row | {"bases": bases, "settings": settings})
