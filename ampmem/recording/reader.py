"""Reads a whole recording from any source: each cell is checked once, and nothing in the file is ever run."""

from __future__ import annotations

import json
import shlex
import sqlite3
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from ampmem.errors import RecordingError, UsageError
from ampmem.events import (
    AllocatorRecord,
    LayersRecord,
    MeshAxis,
    OomRecord,
    OptimizerRecord,
    ParameterRecord,
    PrecisionRecord,
    PredictionRecord,
    Recording,
    RunRecord,
    StepRecord,
)
from ampmem.names import NOT_ENDED, STILL_WRITTEN
from ampmem.output import being_written, printable
from ampmem.recording.bounds import DIMENSIONS, INT64, ITEMS, MOST, NAME, STATE, TEXT, check_bounds, integers_of
from ampmem.recording.database import (
    COLUMN_TABLES,
    ENDED,
    MAGIC,
    MESH,
    RECORDING,
    ROWS,
    SUFFIX,
    UNCOUNTED,
    WATCHED,
    WATCHED_END,
    WATCHED_RUN,
    Database,
    FileLayout,
    first_bytes,
    is_watched,
    is_written_here,
    opened,
)
from ampmem.recording.rank_files import claimed_for
from ampmem.vocabulary import Precision

_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_OF_WATCHED = (
    "{path} is a watched run, not a single recording: ampmem show {file} shows it, ampmem report makes its page, and "
    "ampmem show {file} --full N shows one of its full recordings"
)
_STEPS = 1_000_000
"""Maximum number of SQLite's VM steps to read the header: a thousand times what it takes."""


def taken_for_recording(path: Path) -> str | None:
    """The error for a pickle given as a recording, with what to do instead; ``None`` for any other file."""
    if not first_bytes(path).startswith(_PICKLES):
        return None
    command = f"ampmem import {shlex.quote(str(path))} -o {shlex.quote(str(path.with_suffix(SUFFIX)))}"
    return f"{path} is a pickle, not a recording; if it is a PyTorch memory snapshot, convert it with: {command}"


def check_recording(path: Path) -> None:
    """Raise the error of :func:`read` if the first bytes of ``path`` show that it is not a recording."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if path.is_dir():
        raise UsageError(f"{path} is a directory, not a recording")
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    mistaken = taken_for_recording(path)
    if mistaken is not None:
        raise RecordingError(mistaken)
    if is_watched(path):
        raise RecordingError(_OF_WATCHED.format(path=path, file=shlex.quote(str(path))))
    claimed = claimed_for(path) is not None
    if (claimed or path.stat().st_size == 0) and being_written(path):
        raise RecordingError(f"{path} is being written, and nothing is recorded in it yet; try again")
    if claimed:
        raise RecordingError(
            f"{path} is only the placeholder of a rank that was killed before it recorded anything; remove the file, "
            "or let the next run replace it"
        )
    if not (first_bytes(path) or MAGIC).startswith(MAGIC):  # reading reports a file that cannot be opened
        raise RecordingError(f"{path} is not an ampmem recording, or it is damaged (file is not a database)")


def taken_for_script(path: Path) -> str | None:
    """The error for a recording or a pickle given as a script; ``None`` for any other file."""
    if is_watched(path):
        return f"{path} is a watched run, not a script; show it with: ampmem show {shlex.quote(str(path))}"
    if first_bytes(path).startswith(MAGIC):
        return f"{path} is a recording, not a script; show it with: ampmem show {shlex.quote(str(path))}"
    return taken_for_recording(path)


def is_recording(path: Path) -> bool:
    """Whether ``path`` is a recording of any version of ampmem, even if its steps are damaged."""
    if not first_bytes(path).startswith(MAGIC) or is_watched(path):
        return False
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            # The file is untrusted, and its ``meta`` may be an endless view.
            connection.set_progress_handler(lambda: True, _STEPS)
            return connection.execute("SELECT 1 FROM meta WHERE key = 'format_version'").fetchone() is not None
    except sqlite3.Error:
        return False


# From the cells of a row to a typed record: each cell is checked once, against the type of its field.
#
# The types of the records' fields say what a cell may hold, :mod:`ampmem.recording.bounds` how much of it.

_RecordT = TypeVar("_RecordT")

_Check = Callable[[object], Any]
"""A function from a cell to the field's value; raises ``ValueError``."""

_LENGTHS = {"segments": STATE, **dict.fromkeys(("message", "stack", "script", "settings", "arguments"), TEXT)}
"""Maximum characters by field; all other fields are names."""


def record_of(kind: type[_RecordT], row: Mapping[str, object]) -> _RecordT:
    """``row`` as a record: one cell per field; fields with a default may be missing.

    A list or a mapping may be JSON text, and so may ``NaN``. Raises ``ValueError`` for a row that is not such a record.
    """
    checks = _checks_for(kind, row)
    return kind(**{name: _checked_cells(kind, name, check, (row[name],))[0] for name, check in checks.items()})


def records_of(kind: type[_RecordT], database: Database, table: str) -> tuple[_RecordT, ...]:
    """The rows of ``table`` as records; raises as :func:`record_of` does."""
    names = database.names(table)
    checks = _checks_for(kind, names)
    cells = zip(*database.rows(table, *names), strict=True)
    # Column by column, which takes half of the time for the many rows of a watched run.
    columns = [_checked_cells(kind, name, checks[name], column) for name, column in zip(names, cells, strict=False)]
    return tuple(kind(**dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True))


def _checks_for(kind: type[_RecordT], names: Iterable[str]) -> dict[str, _Check]:
    """The check of each field called one of ``names``; raises ``ValueError`` for missing and unknown names."""
    checks, needed = _checks_of(cast(Hashable, kind))
    names = set(names)
    if missing := needed - names:
        raise ValueError(f"{_table(kind)} has no {', '.join(sorted(missing))}")
    if names - checks.keys():
        raise ValueError(f"{_table(kind)} has unknown columns")
    return {name: checks[name] for name in checks if name in names}


def _checked_cells(kind: type[Any], name: str, check: _Check, cells: Sequence[object]) -> list[Any]:
    values = []
    for cell in cells:
        try:
            values.append(check(cell))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_table(kind)}.{name} holds {_short(cell)}: {error}") from error
    return values


def text(cell: object, length: int = TEXT) -> str:
    """``cell`` as a text of at most ``length`` characters."""
    if not isinstance(cell, str):
        raise ValueError("expected text")
    if len(cell) > length:
        raise ValueError(f"it has more than {length} characters")
    return cell


def integer(cell: object, bounds: tuple[int, int] = INT64) -> int:
    """``cell`` as an integer within ``bounds``."""
    if type(cell) is not int or not bounds[0] <= cell <= bounds[1]:
        raise ValueError(f"expected a whole number from {bounds[0]} to {bounds[1]}")
    return cell


def parsed_cell(cell: object) -> object:
    """``cell`` parsed as JSON. Raises ``ValueError`` if it is not JSON, or too long or deep."""
    try:
        return json.loads(text(cell, STATE))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@cache
def _checks_of(kind: Any) -> tuple[dict[str, _Check], frozenset[str]]:
    """The check of each field, and the names of the required fields."""
    hints = get_type_hints(kind)
    needed = {item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING}
    return {item.name: _check_of(item.name, hints[item.name]) for item in fields(kind)}, frozenset(needed)


def _check_of(name: str, hint: Any) -> _Check:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType and len(arguments) == 2 and arguments[1] is type(None):
        inner = _check_of(name, arguments[0])
        return lambda cell: None if cell is None else inner(cell)
    if origin is UnionType:
        return _setting
    if origin is tuple:
        return _list_of(_check_of(name, arguments[0]), DIMENSIONS if arguments[0] is int else ITEMS)
    if origin is not None and issubclass(origin, Mapping):
        check = _check_of(name, arguments[1])
        return lambda cell: {text(key, NAME): check(value) for key, value in _mapping(cell).items()}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda cell: hint(text(cell, NAME))
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda cell: record_of(hint, _mapping(cell))
    return _plain_check_of(name, hint)


def _plain_check_of(name: str, hint: Any) -> _Check:
    if hint is bool:
        return _flag
    if hint is int:
        bounds = integers_of(name)
        return lambda cell: integer(cell, bounds)
    if hint is float:
        return _number
    if hint is bytes:
        return _bytes
    if hint is str:
        length = _LENGTHS.get(name, NAME)
        return lambda cell: text(cell, length)
    raise TypeError(f"no cell can hold {hint}")


def _list_of(check: _Check, most: int) -> _Check:
    def checked(cell: object) -> tuple[Any, ...]:
        items = parsed_cell(cell) if isinstance(cell, str) else cell
        if not isinstance(items, list) or len(items) > most:
            raise ValueError(f"expected a list of at most {most}")
        return tuple(map(check, items))

    return checked


def _mapping(cell: object) -> dict[str, object]:
    items = parsed_cell(cell) if isinstance(cell, str) else cell
    if not isinstance(items, dict) or len(items) > ITEMS:
        raise ValueError("expected a mapping")
    return items


def _flag(cell: object) -> bool:
    if isinstance(cell, int) and cell in (0, 1):
        return bool(cell)
    raise ValueError("expected 0 or 1")


def _bytes(cell: object) -> bytes:
    if not isinstance(cell, bytes):
        raise ValueError("expected bytes")
    return cell


def _number(cell: object) -> float:
    """``cell`` as a number of any kind; NaN is stored as text, because SQLite turns it into NULL."""
    if cell == "NaN":
        return float("nan")
    if isinstance(cell, float):
        return cell
    return float(integer(cell))


def _setting(cell: object) -> bool | int | float | str | None:
    if cell is None or isinstance(cell, (bool, float)):
        return cell
    return integer(cell) if isinstance(cell, int) else text(cell)


def _table(kind: type[Any]) -> str:
    return kind.__name__.removesuffix("Record").lower()


def _short(cell: object) -> str:
    shown = repr(cell[:40] if isinstance(cell, (str, bytes)) else cell)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"


_HEADER = ("run", "failure", "arm", "prediction", "allocator", MESH, ROWS, ENDED, WATCHED_RUN, WATCHED_END)
"""The keys of the header that are read; a later version may have more."""


_TORN = (
    "it contains an unfinished transaction: a killed run leaves a journal next to the recording, with the same name "
    "and -journal at the end; copy both files"
)


_UNKNOWN_PRECISION = PrecisionRecord(name=Precision.AS_IS, dtype=None, cache=None, scaler=False)
"""The precision until the first step has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The place of the process in its job, as in the header besides the run."""

    local_rank: int | None = None
    job: str = ""
    axes: tuple[MeshAxis, ...] = ()
    stages: tuple[int, ...] = ()
    stage_count: int = 0


def read(path: Path) -> Recording:
    """Read a whole recording. Raises :class:`RecordingError` if ``path`` is not one.

    A recording that was not ended gets a note that says so. One that is being written is read as of one of its steps.
    """
    here = is_written_here(path)
    if not here:
        check_recording(path)
    with refused(path, RECORDING):
        recording = _read_whole(path)
        if recording.ended is False and (here or being_written(path)):
            notes = (note for note in recording.notes if note != NOT_ENDED)
            return replace(recording, ended=None, notes=(*notes, STILL_WRITTEN))
        if recording.ended is False and _ended_meanwhile(path):
            return _read_whole(path)
        return recording


_DAMAGED = (sqlite3.Error, KeyError, TypeError, ValueError, OverflowError)
"""The errors that reading a damaged file raises."""


@contextmanager
def refused(path: Path, layout: FileLayout) -> Iterator[None]:
    """Raise one clear :class:`RecordingError` for whatever reading the file at ``path`` raises in the block."""
    try:
        yield
    except _DAMAGED as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            raise RecordingError(f"{path} is locked by a program that is writing to it; try again") from error
        raise RecordingError(
            f"{path} is not an ampmem {layout.called}, or it is damaged ({_error_text(error)})"
        ) from error


def job_of(path: Path) -> str:
    """The job of the recording at ``path``; empty if it has none, or is not a recording (yet)."""
    try:
        with opened(path, WATCHED if is_watched(path) else RECORDING) as database:
            return record_of(_Place, header_of(database).get(MESH, {})).job
    except (RecordingError, OSError, *_DAMAGED):
        return ""


def world_size_of(path: Path) -> int:
    """Number of processes of the job of the recording at ``path``; 1 if unknown."""
    try:
        with opened(path) as database:
            return record_of(RunRecord, header_of(database)["run"]).world_size
    except _DAMAGED:
        return 1


def _error_text(error: Exception) -> str:
    """The text of ``error``, which may quote the file, as one printable line."""
    said = "it takes too much work to read" if str(error) == "interrupted" else str(error)
    if isinstance(error, sqlite3.DatabaseError) and "malformed" in said:
        said += f"; {_TORN}"
    return printable(said[:300])


def check_whole(database: Database, header: Mapping[str, Mapping[str, object]]) -> None:
    """Raise ``ValueError`` if a table has not as many rows as the last transaction has noted, if it has noted them."""
    written, tables = header.get(ROWS), database.rows_read.keys() - set(UNCOUNTED)
    if written is not None and any(database.rows_read[table] != written.get(table, 0) for table in tables):
        raise ValueError(_TORN)


def _recording_of(database: Database, header: Mapping[str, Mapping[str, object]]) -> Recording:
    notes = notes_of(database)
    place = record_of(_Place, header.get(MESH, {}))
    run = record_of(RunRecord, {**header["run"], "failure": header.get("failure")})
    ended = _ended_of_header(header)
    optimizers = records_of(OptimizerRecord, database, "optimizer")
    return Recording(
        run=replace(run, local_rank=place.local_rank, job=place.job),
        precision=_optional(PrecisionRecord, header.get("arm")) or _UNKNOWN_PRECISION,
        texts=_texts(database),
        **{f"{table}s": database.columns(table, kind) for table, kind in COLUMN_TABLES},  # type: ignore[arg-type]
        steps=records_of(StepRecord, database, "step"),
        parameters=records_of(ParameterRecord, database, "parameter"),
        optimizers=tuple(record for record in optimizers if record.stepped),
        waiting=tuple(record for record in optimizers if not record.stepped),
        notes=(*notes, NOT_ENDED) if ended is False else notes,
        plain_step_ns=tuple(integer(each, (0, MOST)) for (each,) in database.rows("plain_step", "duration_ns")),
        layers=records_of(LayersRecord, database, "layers"),
        ooms=records_of(OomRecord, database, "oom"),
        prediction=_optional(PredictionRecord, header.get("prediction")),
        allocator=_optional(AllocatorRecord, header.get("allocator")),
        mesh=place.axes,
        ended=ended,
        stages=place.stages,
        stage_count=place.stage_count,
    )


def _read_whole(path: Path) -> Recording:
    """The recording at ``path`` as of one moment, with all its checks."""
    with opened(path) as database:
        header = header_of(database)
        recording = _recording_of(database, header)
        check_whole(database, header)
    check_bounds(recording)
    return recording


def _ended_meanwhile(path: Path) -> bool:
    """Whether a recording that was not ended when it was read has been ended since."""
    with opened(path) as database:
        return _ended_of_header(header_of(database)) is not False


def _ended_of_header(header: Mapping[str, Mapping[str, object]]) -> bool | None:
    """Whether the recording was ended; ``None`` if the header does not say."""
    return _flag(header[ENDED]["ended"]) if ENDED in header else None


def header_of(database: Database) -> dict[str, Mapping[str, object]]:
    """The entries of the file's header, by key."""
    header: dict[str, Mapping[str, object]] = {}
    for key, value in database.rows("meta", "key", "value"):
        if key in _HEADER:
            row = parsed_cell(value)
            if not isinstance(row, dict) or key in header:
                raise ValueError(f"invalid header field {key}")
            header[key] = row
    return header


def notes_of(database: Database) -> tuple[str, ...]:
    """The notes for the reader."""
    return tuple(text(message) for (message,) in database.rows("note", "message"))


def _texts(database: Database) -> tuple[str, ...]:
    """The texts in the order of their ids, from 0 on."""
    texts = []
    for number, (index, value) in enumerate(database.rows("text", "id", "value")):
        if index != number:
            raise ValueError(f"text {number} is missing")
        texts.append(text(value))
    return tuple(texts)


def _optional(kind: type[_RecordT], row: Mapping[str, object] | None) -> _RecordT | None:
    return None if row is None else record_of(kind, row)
