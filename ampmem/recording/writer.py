"""Writes a recording: step by step during a run, or packed as a text for files of other formats.

There is one transaction per step, so if the process is killed every finished step stays readable.
"""

from __future__ import annotations

import base64
import binascii
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from json import dumps, loads
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Final

import numpy as np

from ampmem.errors import RecordingError, UsageError
from ampmem.events import (
    NO_SEGMENTS,
    AllocatorRecord,
    Columns,
    EventColumns,
    FactColumns,
    LayersRecord,
    OomRecord,
    OptimizerRecord,
    ParameterRecord,
    PhaseColumns,
    PlaceRecord,
    PrecisionRecord,
    PredictionRecord,
    Recording,
    RunRecord,
    SegmentColumns,
    StepRecord,
)
from ampmem.failure import FailureRecord
from ampmem.names import NOT_ENDED
from ampmem.recording.appending import AT_ONCE, AppendedFile, cells_of, places
from ampmem.recording.database import COLUMN_TABLES, ENDED, MESH, RECORDING, ROWS
from ampmem.recording.reader import is_recording, read

_ROWS_AT_ONCE = 1 << 12


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
    """The properties of the run as a whole; ``device_name`` and ``place`` only if they changed since the start."""

    precision: PrecisionRecord
    parameters: tuple[ParameterRecord, ...]
    optimizers: tuple[OptimizerRecord, ...]
    notes: tuple[str, ...]
    device_name: str = ""
    prediction: PredictionRecord | None = None
    allocator: AllocatorRecord | None = None
    failure: FailureRecord | None = None
    place: PlaceRecord | None = None
    step_on: str = ""
    """What ends a step, if that is known only now."""


class RecordingWriter(AppendedFile):
    """Appends to a new recording; every :meth:`append` is one transaction on disk."""

    LAYOUT = RECORDING

    def __init__(self, path: Path, run: RunRecord, *, force: bool = False) -> None:
        self._run = run
        self._description: Description | None = None
        self._withdrawn = False
        super().__init__(path, force=force, rows={"text": 1})

    def _first_entries(self) -> dict[str, object]:
        return {ENDED: {"ended": False}} | _run_rows(self._run)

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
        for table, _ in COLUMN_TABLES:
            self._insert_columns(table, getattr(batch, f"{table}s"))
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
                self._finish()
        except (sqlite3.Error, RecordingError):  # a full disk was reported already
            if steps_wait:
                raise
        finally:
            self._shut()

    def _say_ended(self, ended: bool | None) -> None:
        if ended is None:
            self._database.execute("DELETE FROM meta WHERE key = ?", (ENDED,))
        else:
            self._write_meta({ENDED: {"ended": ended}})

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

    def _replace_description(self, description: Description) -> None:
        if description == self._description:
            return
        device_name = description.device_name or self._run.device_name
        known_now = {name: getattr(description, name) or getattr(self._run, name) for name in ("failure", "step_on")}
        run = replace(self._run, device_name=device_name, **known_now)
        records = {
            "arm": description.precision,
            "prediction": description.prediction,
            "allocator": description.allocator,
        }
        known = {key: asdict(record) for key, record in records.items() if record is not None}
        self._write_meta(known | _run_rows(run, description.place))
        for table in ("parameter", "optimizer", "note"):
            self._database.execute(f"DELETE FROM {table}")
            self._rows[table] = 0
        self._insert_records("parameter", description.parameters)
        self._insert_records("optimizer", description.optimizers)
        self._insert_cells("note", list(description.notes), 1)
        self._description = description

    def _insert_columns(self, table: str, columns: Columns) -> None:
        names = columns.names()
        rows = np.array([getattr(columns, name) for name in names]).T
        for at_once in AT_ONCE:
            whole = len(rows) - len(rows) % at_once
            together = rows[:whole].reshape(-1, at_once * len(names)).tolist()
            self._insert(table, together, places(len(names), at_once))
            rows = rows[whole:]


def _run_rows(run: RunRecord, place: PlaceRecord | None = None) -> dict[str, object]:
    """The header's rows for ``run``, at ``place`` if given.

    Why the script failed and the run's place in its job have rows of their own, if known.
    """
    if place is not None:
        run = replace(run, **{name: getattr(place, name) for name in ("rank", "world_size", "local_rank", "job")})
    rows = asdict(run)
    failure = rows.pop("failure")
    for name in ("step_on", "assume", "script_sha256"):
        if not rows[name]:
            del rows[name]
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
    no_phases = recording.phases.part(0, 0)
    yield Batch(
        texts=recording.texts[1:],
        events=recording.events.part(0, 0),
        facts=recording.facts.part(0, 0),
        phases=recording.phases,
        step=None,
        layers=recording.layers,
        ooms=recording.ooms,
        segments=recording.segments,
    )
    for start in range(0, max(len(recording.events), len(recording.facts)), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        events, facts = recording.events.part(start, end), recording.facts.part(start, end)
        yield Batch(texts=(), events=events, facts=facts, phases=no_phases, step=None)


def _description(recording: Recording) -> Description:
    run = recording.run
    return Description(
        precision=recording.precision,
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
    given = {"prediction": prediction, "failure": failure}
    header: dict[str, object] = {key: asdict(record) for key, record in given.items() if record is not None}
    try:
        with closing(sqlite3.connect(path)) as database, database:
            known = {note for (note,) in database.execute("SELECT message FROM note")}
            new = [(note,) for note in notes if note not in known]
            database.executemany("INSERT INTO note VALUES (?)", new)
            cells = cells_of(ooms)
            if cells:
                database.executemany(f"INSERT INTO oom {places(len(cells[0]))}", cells)
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
            return PACKED + base64.b64encode(zlib.compress(path.read_bytes())).decode("ascii")
    except OSError as error:
        raise UsageError(f"cannot write a temporary file: {error}") from error


def unpack(text: str, events: int) -> Recording:
    """The recording in ``text``, which is untrusted and should have about ``events`` events.

    Raises :class:`RecordingError` for a text that is damaged, or holds more than a recording of so many events would;
    :class:`UsageError` if no disk has room.
    """
    try:
        packed = base64.b64decode(text.removeprefix(PACKED).encode("ascii"), validate=True)
        with TemporaryDirectory(prefix="ampmem-") as folder:
            path = Path(folder) / "recording"
            most = _LEAST + _FOR_EACH_EVENT * events + _FOR_EACH_BYTE * len(packed)
            with path.open("wb") as stream:
                unpack_into(stream, packed, most)
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


def unpack_into(stream: BinaryIO, packed: bytes, most: int) -> None:
    """Write the unpacked bytes to ``stream``. Raises ``ValueError`` for more than ``most``, and for a cut-off end."""
    unpacker, rest = zlib.decompressobj(), packed
    while piece := unpacker.decompress(rest, _PIECE):
        most -= len(piece)
        if most < 0:
            raise ValueError("it unpacks to too many bytes")
        stream.write(piece)
        rest = unpacker.unconsumed_tail
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it is cut off, or has extra data after its end")
