"""Reads a recording, whole, from whoever it comes: each cell is checked once, and nothing in the file is ever run."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ampmem.errors import RecordingError
from ampmem.events import (
    AllocatorRecord,
    ArmRecord,
    EventColumns,
    FactColumns,
    LayersRecord,
    MeshAxis,
    OomRecord,
    OptimizerRecord,
    ParameterRecord,
    PhaseColumns,
    PredictionRecord,
    Recording,
    RunRecord,
    SegmentColumns,
    StepRecord,
)
from ampmem.failure import FailureRecord, failure_in
from ampmem.names import NOT_ENDED, STILL_WRITTEN
from ampmem.output import being_written
from ampmem.recording.bounds import MOST, check
from ampmem.recording.cells import integer, parsed, record_of, text
from ampmem.recording.database import Database, is_written_here, opened
from ampmem.recording.kinds import check_recording
from ampmem.recording.layout import ENDED, MESH, ROWS, UNCOUNTED
from ampmem.vocabulary import Arm

_RecordT = TypeVar("_RecordT")

_HEADER = ("run", "failure", "arm", "prediction", "allocator", MESH, ROWS, ENDED)
"""What is read of the header; a later version may have more in it."""


_TORN = (
    "a part of a transaction is in it: where its run was killed, a journal, named as the recording with -journal after "
    "it, was left beside it; copy both"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where in its job the process is, as the header has it beside the run."""

    local_rank: int | None = None
    job: str = ""
    axes: tuple[MeshAxis, ...] = ()
    stages: tuple[int, ...] = ()
    stage_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """Whether the recording was ended, as the header has it."""

    ended: bool


def read(path: Path) -> Recording:
    """Read a whole recording. Raises :class:`RecordingError` when ``path`` is not one.

    One that was not ended has a note that says so. One that is being written is read as it was after one of its steps.
    """
    here = is_written_here(path)
    if not here:
        check_recording(path)
    try:
        recording = _checked(path)
        if recording.ended is False and (here or being_written(path)):
            return _still_growing(recording)
        if recording.ended is False and _ended_meanwhile(path):
            return _checked(path)
        return recording
    except (sqlite3.Error, KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, sqlite3.Error) and _is_locked(error):
            raise RecordingError(f"{path} is locked by a program that is writing to it; try again") from error
        raise RecordingError(f"{path} is not an ampmem recording, or it is damaged ({_said(error)})") from error


def job_of(path: Path) -> str:
    """The job that the recording at ``path`` says it is of; empty where it says none, or is no recording (yet)."""
    try:
        with opened(path) as database:
            place = _optional(_Place, _header(database).get(MESH))
    except (RecordingError, OSError, sqlite3.Error, KeyError, TypeError, ValueError, OverflowError):
        return ""
    return "" if place is None else place.job


def world_size_of(path: Path) -> int:
    """How many processes the job of the recording at ``path`` has; 1 where that cannot be read."""
    try:
        with opened(path) as database:
            return record_of(RunRecord, {**_header(database)["run"], "failure": None}).world_size
    except (sqlite3.Error, KeyError, TypeError, ValueError, OverflowError):
        return 1


def _is_locked(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _said(error: Exception) -> str:
    """What SQLite or a check says, which may have words of the file's in it, in a line that only shows."""
    said = "it takes more work than a whole file" if str(error) == "interrupted" else str(error)
    if isinstance(error, sqlite3.DatabaseError) and "malformed" in said:
        said += f"; {_TORN}"
    return "".join(character if character.isprintable() else "?" for character in said[:300])


def _recording(database: Database) -> Recording:
    header = _header(database)
    recording = _recording_of(database, header)
    if ROWS in header:  # the first files of this format have none
        _check_whole(database.rows_read, header[ROWS])
    return recording


def _check_whole(read: Mapping[str, int], written: Mapping[str, object]) -> None:
    """Raise ``ValueError`` unless each table has as many rows as the last transaction has left there."""
    if any(count != written.get(table, 0) for table, count in read.items() if table not in UNCOUNTED):
        raise ValueError(_TORN)


def _recording_of(database: Database, header: Mapping[str, Mapping[str, object]]) -> Recording:
    notes = tuple(text(message) for (message,) in database.rows("note", "message"))
    place = _optional(_Place, header.get(MESH)) or _Place()
    ended = _ended(header)
    optimizers = [record_of(OptimizerRecord, row) for row in database.records("optimizer")]
    return Recording(
        run=replace(_run(header["run"], header.get("failure"), notes), local_rank=place.local_rank, job=place.job),
        arm=_arm(header.get("arm")),
        texts=_texts(database),
        events=database.columns("event", EventColumns),
        facts=database.columns("fact", FactColumns),
        phases=database.columns("phase", PhaseColumns),
        steps=tuple(record_of(StepRecord, row) for row in database.records("step")),
        parameters=tuple(record_of(ParameterRecord, row) for row in database.records("parameter")),
        optimizers=tuple(record for record in optimizers if record.stepped),
        waiting=tuple(record for record in optimizers if not record.stepped),
        notes=(*notes, NOT_ENDED) if ended is False else notes,
        plain_step_ns=tuple(integer(each, (0, MOST)) for (each,) in database.rows("plain_step", "duration_ns")),
        layers=tuple(record_of(LayersRecord, row) for row in database.records("layers")),
        ooms=tuple(record_of(OomRecord, row) for row in database.records("oom")),
        segments=database.columns("segment", SegmentColumns),
        prediction=_optional(PredictionRecord, header.get("prediction")),
        allocator=_optional(AllocatorRecord, header.get("allocator")),
        mesh=place.axes,
        ended=ended,
        stages=place.stages,
        stage_count=place.stage_count,
    )


def _checked(path: Path) -> Recording:
    with opened(path) as database:
        recording = _recording(database)
    check(recording)
    return recording


def _ended_meanwhile(path: Path) -> bool:
    """Whether a recording that was not ended when it was read is so now."""
    with opened(path) as database:
        return _ended(_header(database)) is not False


def _ended(header: Mapping[str, Mapping[str, object]]) -> bool | None:
    """Whether the recording was ended; ``None`` where the header does not say."""
    ending = _optional(_Ending, header.get(ENDED))
    return None if ending is None else ending.ended


def _still_growing(recording: Recording) -> Recording:
    """``recording``, of which nobody knows yet whether it will be ended."""
    notes = (note for note in recording.notes if note != NOT_ENDED)
    return replace(recording, ended=None, notes=(*notes, STILL_WRITTEN))


def _header(database: Database) -> dict[str, Mapping[str, object]]:
    header: dict[str, Mapping[str, object]] = {}
    for key, value in database.rows("meta", "key", "value"):
        if key in _HEADER:
            row = parsed(value)
            if not isinstance(row, dict) or key in header:
                raise ValueError(f"invalid header field {key}")
            header[key] = row
    return header


def _texts(database: Database) -> tuple[str, ...]:
    """The texts, whose ids count from 0."""
    texts = []
    for number, (index, value) in enumerate(database.rows("text", "id", "value")):
        if index != number:
            raise ValueError(f"text {number} is missing")
        texts.append(text(value))
    return tuple(texts)


def _run(row: Mapping[str, object], failure: Mapping[str, object] | None, notes: Sequence[str]) -> RunRecord:
    """The run; why the script failed has a row of its own, and in the first files of this format but a note."""
    failed = failure_in(notes) if failure is None else record_of(FailureRecord, failure)
    return replace(record_of(RunRecord, {**row, "failure": None}), failure=failed)


def _arm(row: Mapping[str, object] | None) -> ArmRecord:
    """The arm; nothing is known of it until the first step has ended."""
    if row is None:
        return ArmRecord(name=Arm.AS_IS, dtype=None, cache=None, scaler=False)
    return record_of(ArmRecord, row)


def _optional(kind: type[_RecordT], row: Mapping[str, object] | None) -> _RecordT | None:
    return None if row is None else record_of(kind, row)
