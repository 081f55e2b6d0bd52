"""Writes a recording: step by step during a run, or packed as a text for files of other formats.

There is one transaction per step, so if the process is killed every finished step stays readable.
"""

from __future__ import annotations

import base64
import binascii
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from itertools import chain
from json import dumps, loads
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import numpy as np

from ampmem.errors import RecordingError, UsageError
from ampmem.events import (
    NO_SEGMENTS,
    AllocatorRecord,
    ArmRecord,
    Columns,
    EventColumns,
    FactColumns,
    LayersRecord,
    OomRecord,
    OptimizerRecord,
    ParameterRecord,
    PhaseColumns,
    PlaceRecord,
    PredictionRecord,
    Recording,
    RunRecord,
    SegmentColumns,
    StepRecord,
)
from ampmem.failure import FailureRecord
from ampmem.names import NOT_ENDED
from ampmem.output import half_written, lock_file, lock_output, remove_empty
from ampmem.recording.database import (
    COLUMN_TABLES,
    ENDED,
    FORMAT_VERSION,
    MESH,
    ROWS,
    identity_of,
    schema,
    written_here,
)
from ampmem.recording.rank_files import lock_of_claim
from ampmem.recording.reader import is_recording, read

_ColumnsT = TypeVar("_ColumnsT", bound=Columns)

_ROWS_AT_ONCE = 1 << 12

_AT_ONCE = (32, 4, 1)
"""Rows of a statement: one statement per row would take twice as long, and more rows gain nothing."""
_PATIENCE_MS = 100
"""Milliseconds that a step waits for a reader's lock; ampmem's own readers hold it for one copy."""
_LAST_PATIENCE_MS = 2000
"""Milliseconds that the end of the recording waits for a reader's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One transaction: the events, segments, facts, phases and layers of a step, and the step itself.

    ``texts`` are new texts, in the order of their ids. ``step`` is ``None`` if the script ended before the step did.
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
    """What is known of the run as a whole; ``device_name`` and ``place`` only if they changed since the start."""

    arm: ArmRecord
    parameters: tuple[ParameterRecord, ...]
    optimizers: tuple[OptimizerRecord, ...]
    notes: tuple[str, ...]
    device_name: str = ""
    prediction: PredictionRecord | None = None
    allocator: AllocatorRecord | None = None
    failure: FailureRecord | None = None
    place: PlaceRecord | None = None


class RecordingWriter:
    """Appends to a new recording; every :meth:`append` is one transaction on disk.

    A reader never blocks the training: what cannot be written while a reader holds its lock is kept, and written with
    the next transaction. Until :meth:`close`, no other process can replace the file.
    """

    def __init__(self, path: Path, run: RunRecord, *, force: bool = False) -> None:
        self.path = path
        self._run = run
        self._description: Description | None = None
        self._rows = {"text": 1}
        """Number of rows of each table."""
        self._waiting: list[Callable[[], None]] = []
        """Inserts to be written with the next transaction."""
        self._failed = self._withdrawn = False
        self._create(force=force)

    def _create(self, *, force: bool) -> None:
        """Make the file under a temporary name, and rename it: readers see the old file or the new one.

        So a reader of the old file does not prevent the new one.
        """
        path = self.path
        name = lock_of_claim(path)
        if name is None:
            name = lock_output(path, force=force)
        half = half_written(path)
        self._lock: int | None = None
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
        """Make ``file`` an empty recording, locked."""
        file.unlink(missing_ok=True)
        self._lock = lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        lock_file(lock)
        with closing(self._connected(file)) as self._database:
            # A file whose making fails is removed, so there is nothing to roll back.
            self._database.execute("PRAGMA journal_mode = OFF")
            self._database.executescript("BEGIN;" + schema())
            header = {"format_version": FORMAT_VERSION, ROWS: self._rows, ENDED: _ending(ended=False)}
            self._write_meta(header | _run_rows(self._run))
            self._database.execute("COMMIT")

    def _connected(self, file: Path) -> sqlite3.Connection:
        database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        # Without fsync a killed process loses nothing, since the kernel has the data; only a power cut would lose it.
        database.execute("PRAGMA synchronous = OFF")
        self._patience_ms: int | None = None  # what Python has set
        return database

    def append(self, batch: Batch, description: Description | None = None) -> None:
        """Write ``batch`` and ``description`` in one transaction.

        Raises :class:`RecordingError` if it cannot be written, as on a full disk.
        """
        if self._withdrawn and batch.step is None and not batch.ooms:
            return
        if self._withdrawn:
            self._return()
        self._write(partial(self._insert_batch, batch, description))

    def _insert_batch(self, batch: Batch, description: Description | None) -> None:
        self._insert_cells("text", list(batch.texts), 1, "(value) ")
        columns = (batch.events, batch.facts, batch.phases, batch.segments)
        for (table, _), part in zip(COLUMN_TABLES, columns, strict=True):
            self._insert_columns(table, part)
        if batch.step is not None:
            self._insert_records("step", [batch.step])
        self._insert_records("layers", batch.layers)
        self._insert_records("oom", batch.ooms)
        if description is not None:
            self._replace_description(description)

    @property
    def prediction(self) -> PredictionRecord | None:
        """The last prediction written for a simulated device, if any."""
        return None if self._description is None else self._description.prediction

    def add_steps(self, steps: Sequence[StepRecord]) -> None:
        """Write ``steps`` in one transaction; their events are there already, or come later."""
        self._write(partial(self._insert_records, "step", steps))

    def describe(self, description: Description) -> None:
        """Replace the description of the run, in a transaction of its own."""
        self._write(partial(self._replace_description, description))

    def close(self, *, ended: bool | None = True) -> None:
        """Note in the file whether the recording was ``ended``, and close it; appending afterwards is an error.

        ``None`` leaves it unknown, as in :attr:`Recording.ended`. Raises :class:`RecordingError` if steps that waited
        for a reader cannot be written.
        """
        steps_wait = bool(self._waiting)
        try:
            if self._failed:
                self._say_ended(ended)
            else:
                self._waiting.append(partial(self._say_ended, ended))
                if not self._commit(_LAST_PATIENCE_MS):
                    self._move()
        except (sqlite3.Error, RecordingError):  # a full disk was reported already
            if steps_wait:
                raise
        finally:
            self._shut()

    def _say_ended(self, ended: bool | None) -> None:
        if ended is None:
            self._database.execute("DELETE FROM meta WHERE key = ?", (ENDED,))
        else:
            self._write_meta({ENDED: _ending(ended=ended)})

    def _move(self) -> None:
        """Write what waits into a copy that replaces the file: a reader that never ends keeps the old one."""
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

    def withdraw(self) -> None:
        """Remove a file without steps; the first step makes it again, unless the name is taken by then."""
        if not (self._withdrawn or self._failed or self._waiting or self._rows != {"text": 1}):
            self.path.unlink(missing_ok=True)
            self._shut()
            self._withdrawn = True

    def discard(self) -> None:
        """Remove the file, unless it was withdrawn: the name may be another file's by now."""
        if not self._withdrawn:
            self.path.unlink(missing_ok=True)

    def _return(self) -> None:
        try:
            self._create(force=False)
        except UsageError as error:
            raise RecordingError(str(error)) from error
        self._withdrawn = False

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

    def _replace_description(self, description: Description) -> None:
        if description == self._description:
            return
        device_name = description.device_name or self._run.device_name
        run = replace(self._run, device_name=device_name, failure=description.failure or self._run.failure)
        self._write_meta({"arm": asdict(description.arm)} | _run_rows(run, description.place))
        if description.prediction is not None:
            self._write_meta({"prediction": asdict(description.prediction)})
        if description.allocator is not None:
            self._write_meta({"allocator": asdict(description.allocator)})
        for table in ("parameter", "optimizer", "note"):
            self._database.execute(f"DELETE FROM {table}")
            self._rows[table] = 0
        self._insert_records("parameter", description.parameters)
        self._insert_records("optimizer", description.optimizers)
        self._insert_cells("note", list(description.notes), 1)
        self._description = description

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

        Either all or nothing is on disk; after an error nothing more is written, because texts are identified by their
        order.
        """
        self._failed = True
        try:
            if patience_ms != self._patience_ms:
                self._database.execute(f"PRAGMA busy_timeout = {patience_ms}")
                self._patience_ms = patience_ms
            if not self._begun():
                self._failed = False
                return False
            try:
                for insert in self._waiting:
                    insert()
                # Unlike INSERT OR REPLACE, this leaves the table's index as it is: one page less to write.
                self._database.execute("UPDATE meta SET value = ? WHERE key = ?", (dumps(self._rows), ROWS))
                self._database.execute("COMMIT")
            except BaseException:
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

    def _insert_columns(self, table: str, columns: Columns) -> None:
        names = columns.names()
        rows = np.array([getattr(columns, name) for name in names]).T
        for at_once in _AT_ONCE:
            whole = len(rows) - len(rows) % at_once
            together = rows[:whole].reshape(-1, at_once * len(names)).tolist()
            self._insert(table, together, _places(len(names), at_once))
            rows = rows[whole:]

    def _insert_cells(self, table: str, cells: list[Any], width: int, columns: str = "") -> None:
        """Insert the rows of ``width`` cells each that ``cells`` has one after the other."""
        start = 0
        for at_once in _AT_ONCE:
            size = at_once * width
            end = start + (len(cells) - start) // size * size
            together = [cells[place : place + size] for place in range(start, end, size)]
            self._insert(table, together, columns + _places(width, at_once))
            start = end

    def _insert_records(self, table: str, records: Sequence[object]) -> None:
        rows = _cells_of(records)
        if rows:
            self._insert_cells(table, list(chain.from_iterable(rows)), len(rows[0]))


def _cells_of(records: Sequence[object]) -> list[tuple[object, ...]]:
    return [tuple(map(_cell, _values_of(type(record))(record))) for record in records]  # type: ignore[arg-type]


@cache
def _values_of(record: type) -> Callable[[object], tuple[object, ...]]:
    """What returns the values of a record of this type, in the order of its fields."""
    return attrgetter(*(field.name for field in fields(record)))


def _ending(*, ended: bool) -> dict[str, bool]:
    return {"ended": ended}


@cache
def _places(count: int, rows: int = 1) -> str:
    row = f"({', '.join('?' * count)})"
    return f"VALUES {', '.join([row] * rows)}"


def _run_rows(run: RunRecord, place: PlaceRecord | None = None) -> dict[str, object]:
    """The header's rows for ``run``, at ``place`` if given.

    Why the script failed and the run's place in its job have rows of their own, if known.
    """
    if place is not None:
        run = replace(run, **{name: getattr(place, name) for name in ("rank", "world_size", "local_rank", "job")})
    rows = asdict(run)
    failure = rows.pop("failure")
    if not run.step_on:
        del rows["step_on"]
    if not run.assume:
        del rows["assume"]
    if not run.script_sha256:
        del rows["script_sha256"]
    later: dict[str, object] = {"local_rank": rows.pop("local_rank"), "job": rows.pop("job")}
    if place is not None:
        later["axes"] = [asdict(axis) for axis in place.mesh]
    if place is not None and place.stages:
        later |= {"stages": place.stages, "stage_count": place.stage_count}
    found: dict[str, object] = {"run": rows}
    if failure is not None:
        found["failure"] = failure
    if any(value not in (None, "", []) for value in later.values()):
        found[MESH] = later
    return found


def _cell(value: object) -> object:
    """``value`` as a cell; NaN as text, because SQLite turns it into NULL."""
    return dumps(value) if isinstance(value, (tuple, dict)) or value != value else value


def write_recording(path: Path, recording: Recording) -> None:
    """Write the whole ``recording`` to the new file ``path``; :func:`read` returns an equal one.

    Raises :class:`UsageError` if ``path`` exists or cannot be written, :class:`RecordingError` if writing fails.
    """
    writer = RecordingWriter(path, recording.run)
    try:
        for batch in _batches(recording):
            writer.append(batch)
        writer.add_steps(recording.steps)
        writer.describe(_description(recording))
    finally:
        writer.close(ended=recording.ended)
    if recording.plain_step_ns:
        _write_plain_steps(path, recording.plain_step_ns)


def _batches(recording: Recording) -> Iterator[Batch]:
    """The recording in transactions: short tables first, then events and facts in pieces, to save memory."""
    no_events, no_facts = _rows_of(recording.events, 0, 0), _rows_of(recording.facts, 0, 0)
    no_phases = _rows_of(recording.phases, 0, 0)
    yield Batch(
        texts=recording.texts[1:],
        events=no_events,
        facts=no_facts,
        phases=recording.phases,
        step=None,
        layers=recording.layers,
        ooms=recording.ooms,
        segments=recording.segments,
    )
    for start in range(0, max(len(recording.events), len(recording.facts)), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        events, facts = _rows_of(recording.events, start, end), _rows_of(recording.facts, start, end)
        yield Batch(texts=(), events=events, facts=facts, phases=no_phases, step=None)


def _rows_of(columns: _ColumnsT, start: int, end: int) -> _ColumnsT:
    return type(columns)(**{name: getattr(columns, name)[start:end] for name in columns.names()})


def _description(recording: Recording) -> Description:
    run = recording.run
    return Description(
        arm=recording.arm,
        parameters=recording.parameters,
        optimizers=(*recording.optimizers, *recording.waiting),
        # The reader adds this note to a recording that was not ended.
        notes=tuple(note for note in recording.notes if recording.ended is not False or note != NOT_ENDED),
        prediction=recording.prediction,
        allocator=recording.allocator,
        place=PlaceRecord(
            rank=run.rank,
            world_size=run.world_size,
            local_rank=run.local_rank,
            job=run.job,
            mesh=recording.mesh,
            stages=recording.stages,
            stage_count=recording.stage_count,
        ),
    )


def add_ending(
    path: Path,
    notes: Iterable[str],
    *,
    prediction: PredictionRecord | None = None,
    failure: FailureRecord | None = None,
    ooms: Sequence[OomRecord] = (),
) -> None:
    """Add to the ended recording at ``path`` what is known only at the end of its script.

    ``notes`` that it has already are not added. ``prediction`` replaces the existing one; ``failure`` is why the script
    failed, and ``ooms`` are out-of-memory errors after the recorded steps. Raises :class:`RecordingError` if it cannot
    be written.
    """
    header: dict[str, object] = {} if prediction is None else {"prediction": asdict(prediction)}
    if failure is not None:
        header["failure"] = asdict(failure)
    try:
        with closing(sqlite3.connect(path)) as database, database:
            known = {note for (note,) in database.execute("SELECT message FROM note")}
            new = [(note,) for note in notes if note not in known]
            database.executemany("INSERT INTO note VALUES (?)", new)
            cells = _cells_of(ooms)
            if cells:
                database.executemany(f"INSERT INTO oom {_places(len(cells[0]))}", cells)
            counted = loads(database.execute("SELECT value FROM meta WHERE key = ?", (ROWS,)).fetchone()[0])
            more = {"note": len(new), "oom": len(cells)}
            header[ROWS] = counted | {table: counted.get(table, 0) + count for table, count in more.items()}
            entries = [(key, dumps(value)) for key, value in header.items()]
            database.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", entries)
    except sqlite3.Error as error:
        raise RecordingError(f"cannot append to {path}: {error}") from error


def add_plain_steps(path: Path, durations_ns: Sequence[int]) -> None:
    """Add to the recording at ``path`` the durations (ns) of its steps without instrumentation.

    Raises :class:`RecordingError` if it is not a recording or cannot be written.
    """
    read(path)
    _write_plain_steps(path, durations_ns)


def _write_plain_steps(path: Path, durations_ns: Sequence[int]) -> None:
    try:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("DELETE FROM plain_step")
            database.executemany("INSERT INTO plain_step VALUES (?)", ((duration,) for duration in durations_ns))
    except sqlite3.Error as error:
        raise RecordingError(f"cannot append to {path}: {error}") from error


# A recording as one text and back, for files of other formats that can contain a text.

PACKED: Final = "ampmem recording, a file in zlib and base64: "
"""The first characters of a packed recording."""

# A recording takes some 200 bytes per event with its facts, which zlib reduces to a third or a tenth.
_LEAST: Final = 4 << 20
_FOR_EACH_EVENT: Final = 1 << 10
_FOR_EACH_BYTE: Final = 12
_PIECE: Final = 1 << 16


def pack(recording: Recording) -> str:
    """``recording`` as a text for :func:`unpack`. Raises :class:`UsageError` if no disk has room."""
    try:
        with TemporaryDirectory(prefix="ampmem-") as folder:
            path = Path(folder) / "recording"
            write_recording(path, recording)
            return PACKED + base64.b64encode(b"".join(_squeezed(path))).decode("ascii")
    except OSError as error:
        raise UsageError(f"cannot write a temporary file: {error}") from error


def _squeezed(path: Path) -> Iterator[bytes]:
    packer = zlib.compressobj()
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            yield packer.compress(piece)
    yield packer.flush()


def unpack(text: str, events: int) -> Recording:
    """The recording in ``text``, which may be from anybody and should have about ``events`` events.

    Raises :class:`RecordingError` for a text that is damaged, or holds more than a recording of so many events would;
    :class:`UsageError` if no disk has room.
    """
    try:
        packed = base64.b64decode(text.removeprefix(PACKED).encode("ascii"), validate=True)
        with TemporaryDirectory(prefix="ampmem-") as folder:
            path = Path(folder) / "recording"
            most = _LEAST + _FOR_EACH_EVENT * events + _FOR_EACH_BYTE * len(packed)
            with path.open("wb") as stream:
                for piece in _stretched(packed, most):
                    stream.write(piece)
            if not is_recording(path):
                raise ValueError("what was packed is not a recording")
            try:
                return read(path)
            except RecordingError as error:
                raise RecordingError(str(error).replace(str(path), "it")) from None
    except (ValueError, binascii.Error, zlib.error) as error:
        raise RecordingError(f"it is damaged ({error})") from None
    except OSError as error:
        raise UsageError(f"cannot write a temporary file: {error}") from error


def _stretched(packed: bytes, most: int) -> Iterator[bytes]:
    """The unpacked bytes in pieces. Raises ``ValueError`` for more than ``most``, and for a truncated stream."""
    unpacker, rest = zlib.decompressobj(), packed
    while piece := unpacker.decompress(rest, _PIECE):
        most -= len(piece)
        if most < 0:
            raise ValueError("it is too large for its events")
        yield piece
        rest = unpacker.unconsumed_tail
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it is cut off, or has extra data after its end")
