"""Reads a recording, whole."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from ampmem.errors import RecordingError, UsageError
from ampmem.events import (
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
from ampmem.recording.layout import FORMAT_VERSION
from ampmem.vocabulary import Arm, Mark, SourceKind

_ColumnsT = TypeVar("_ColumnsT", bound=Columns)


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
