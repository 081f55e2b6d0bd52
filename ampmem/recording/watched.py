"""The file of a watched run: frames appended one after the other, so that it can be read at any time.

After :data:`MAGIC` come frames: a letter for the kind, the length of the payload and its CRC-32, each four bytes in
little-endian order, and then the payload. A frame is written by one call: a killed run leaves whole frames and at most
one truncated frame, which the reader leaves out.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

from ampmem.errors import RecordingError, UsageError
from ampmem.failure import FailureKind, FailureRecord
from ampmem.output import half_written, lock_file, lock_output, remove_empty
from ampmem.recording.rank_files import lock_of_claim

MAGIC = b"ampmem watched run 1\n"
_FRAME = struct.Struct("<cII")
_LONGEST = 1 << 31
"""Maximum bytes of a frame: a full recording of a few steps has far fewer."""
MOST_ROWS = 60_000
"""Number of rows at which the older half is thinned out."""
_GROUP = 4
"""Number of neighbouring rows of which two are kept when they are thinned out."""
_DROPPED = 16 << 20
"""Bytes of dropped full recordings at which the file is rewritten."""


class Kind(StrEnum):
    """The kind of a frame."""

    HEADER = "H"
    ROW = "R"
    FULL = "F"
    DROPPED = "D"
    """Numbers of full recordings that are no longer wanted."""
    NOTE = "N"
    GROWN = "G"
    END = "E"


class Why(StrEnum):
    """Why a few steps of a watched run were recorded in full."""

    START = "start"
    EVERY = "every"
    HIGHEST = "highest"
    GROWTH = "growth"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedHeader:
    """The header of a watched run: what is watched. Sizes are bytes; ``limit`` is the device's memory, if known."""

    ampmem: str
    torch: str
    source: str
    device: str
    script: str
    arguments: tuple[str, ...]
    started_ns: int
    every: int
    limit: int | None = None
    rank: int = 0
    world_size: int = 1
    job: str = ""
    """Identifies the job if there are several ranks."""
    sampled: bool = False
    """Whether peaks are sampled (at each module's end and each change of phase), so they are lower bounds.

    Otherwise they are the allocator's own.
    """


@dataclass(frozen=True, slots=True)
class Row:
    """One step. Sizes are bytes."""

    step: int
    time_ns: int
    """Time of the end of the step."""
    peak: int
    """Peak of allocated memory in the step."""
    phase: str
    """Phase of the peak."""
    alive: int
    """Allocated memory at the end of the step."""
    reserved: int
    host: int
    """Resident memory of the process at the end of the step."""
    retries: int
    """Number of times so far that the allocator had to free its cache."""
    split: int
    """Free memory in segments in use: an upper bound for fragmentation."""
    batch: str
    """Shapes and dtypes of the model's first input."""
    full: bool
    """Whether the step is in a full recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """A full recording of a few steps, compressed, at ``offset`` in the file."""

    number: int
    why: Why
    first: int
    """Number of its first step in the run."""
    last: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """Memory allocated in one category, by one line of the script, or held by one holder."""

    what: str
    bytes: int
    count: int
    line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """Memory allocated in the ``steps`` steps before the end of ``step`` and alive then, by holder."""

    step: int
    steps: int
    held: tuple[HeldMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the run ended; for an out-of-memory error the request, its place, and the memory held then."""

    step: int
    """The step that was running."""
    time_ns: int
    failure: FailureRecord | None = None
    out_of_memory: bool = False
    asked: int | None = None
    free: int | None = None
    total: int | None = None
    reserved: int | None = None
    phase: str = ""
    batch: str = ""
    line: str = ""
    held: tuple[HeldMemory, ...] = ()


@dataclass(slots=True, kw_only=True)
class WatchedRun:
    """The content of the file of a watched run; ``unread`` bytes at its end are a truncated frame."""

    path: Path
    header: WatchedHeader
    rows: list[Row] = field(default_factory=list)
    full: list[Full] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    grown: list[Grown] = field(default_factory=list)
    ending: Ending | None = None
    unread: int = 0


class WatchedFile:
    """Writes the file of a watched run. Raises ``OSError`` if a frame cannot be written; it is then left out.

    Raises :class:`UsageError` if ``path`` exists, unless ``force``, or cannot be written.
    """

    def __init__(self, path: Path, header: WatchedHeader, *, force: bool = False) -> None:
        self.path = path.absolute()  # the script may change the working directory
        name = lock_of_claim(path)
        if name is None:
            name = lock_output(path, force=force)
        try:
            self._replace(MAGIC + _frame(Kind.HEADER, _text(asdict(header))))
        except OSError as error:
            remove_empty([path])
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        finally:
            os.close(name)
        self._rows = self._numbers = self._dropped = 0
        self._lengths: dict[int, int] = {}

    def _replace(self, data: bytes) -> None:
        """Write ``data`` to a new, locked file and rename it, so readers see the old file or the new one."""
        new = half_written(self.path)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            lock_file(descriptor)
            _write_all(descriptor, data)
            new.replace(self.path.resolve())
        except OSError:
            os.close(descriptor)
            with suppress(OSError):
                new.unlink()
            raise
        self._descriptor, self._size = descriptor, len(data)

    def row(self, row: Row) -> None:
        """Append the row of a step."""
        self._append(Kind.ROW, _text(_CELLS(row)))
        self._rows += 1
        if self._rows >= MOST_ROWS:
            self._rewrite()

    def full(self, recording: Path, why: Why, first: int, last: int) -> int:
        """Append the recording at ``recording``; returns its number."""
        number = self._numbers
        head = _text({"number": number, "why": why, "first": first, "last": last})
        body = zlib.compress(recording.read_bytes(), 1)
        self._append(Kind.FULL, struct.pack("<I", len(head)) + head + body)
        self._numbers += 1
        self._lengths[number] = len(body)
        return number

    def drop(self, number: int) -> None:
        """Note that the full recording ``number`` is no longer wanted."""
        self._append(Kind.DROPPED, _text(number))
        self._dropped += self._lengths.pop(number)
        if self._dropped >= _DROPPED:
            self._rewrite()

    def header(self, header: WatchedHeader) -> None:
        """Append a new header."""
        self._append(Kind.HEADER, _text(asdict(header)))

    def note(self, message: str) -> None:
        """Append a note for the reader."""
        self._append(Kind.NOTE, _text(message))

    def grown(self, grown: Grown) -> None:
        """Append what has grown."""
        self._append(Kind.GROWN, _text(asdict(grown)))

    def end(self, ending: Ending) -> None:
        """Append how the run has ended."""
        self._append(Kind.END, _text(asdict(ending)))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _append(self, kind: Kind, payload: bytes) -> None:
        self._write(_frame(kind, payload))

    def _write(self, data: bytes) -> None:
        try:
            _write_all(self._descriptor, data)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
            raise
        self._size += len(data)

    def _rewrite(self) -> None:
        """Rewrite the file, with fewer rows if there are many, and without dropped recordings.

        Readers see the old file or the new one.
        """
        data = _read_all(self.path)
        frames = [(kind, payload) for kind, payload, _ in _frames(data)]
        kept = _without_dropped(frames)
        rows_there = [payload for kind, payload in kept if kind == Kind.ROW]
        thinned = _thinned(rows_there) if len(rows_there) >= MOST_ROWS else rows_there
        parts, rows = [MAGIC], iter(thinned)
        following = next(rows, None)
        for kind, payload in kept:
            if kind != Kind.ROW:
                parts.append(_frame(kind, payload))
            elif payload is following:
                parts.append(_frame(kind, payload))
                following = next(rows, None)
        former = self._descriptor
        self._replace(b"".join(parts))
        os.close(former)
        self._rows, self._dropped = len(thinned), 0


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:  # a full disk may accept only a part
        left = left[os.write(descriptor, left) :]


def is_watched(path: Path) -> bool:
    """Whether ``path`` is the file of a watched run."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_watched(path: Path) -> WatchedRun:
    """The run at ``path``, as far as it is written.

    Raises :class:`RecordingError` if it is not a watched run or damaged, :class:`UsageError` if it does not exist.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    data = _read_all(path)
    if not data.startswith(MAGIC):
        raise RecordingError(f"{path} is not a watched run, or another version of ampmem wrote it")
    run: WatchedRun | None = None
    end = len(MAGIC)
    try:
        for kind, payload, offset in _frames(data):
            end = offset + len(payload)
            if kind == Kind.HEADER:
                header = _header(json.loads(payload))
                if run is None:
                    run = WatchedRun(path=path, header=header)
                else:
                    run.header = header
            elif run is not None:
                _take(run, kind, payload, offset)
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise RecordingError(f"{path} is damaged: {error}") from error
    if run is None:
        raise RecordingError(f"{path} is being written, and nothing is recorded in it yet; try again")
    run.unread = len(data) - end
    return run


def extract(run: WatchedRun, full: Full, into: Path) -> None:
    """Write the full recording to ``into``, replacing it. Raises :class:`RecordingError` if it is damaged."""
    with run.path.open("rb") as stream:
        stream.seek(full.offset)
        body = stream.read(full.length)
    try:
        into.write_bytes(zlib.decompress(body))
    except zlib.error as error:
        raise RecordingError(f"a full recording in {run.path} is damaged, or has been removed: {error}") from error


def _take(run: WatchedRun, kind: str, payload: bytes, offset: int) -> None:
    match kind:
        case Kind.ROW:
            run.rows.append(_row(json.loads(payload)))
        case Kind.FULL:
            (length,) = struct.unpack_from("<I", payload)
            head = json.loads(payload[4 : 4 + length])
            place = {"offset": offset + 4 + length, "length": len(payload) - 4 - length}
            run.full.append(_record(Full, head | place | {"why": Why(head["why"])}))
        case Kind.DROPPED:
            number = json.loads(payload)
            run.full = [full for full in run.full if full.number != number]
        case Kind.NOTE:
            run.notes.append(_checked(json.loads(payload), str))
        case Kind.GROWN:
            run.grown.append(_with_held(Grown, json.loads(payload)))
        case Kind.END:
            run.ending = _ending(json.loads(payload))


def _header(found: dict[str, Any]) -> WatchedHeader:
    header: WatchedHeader = _record(WatchedHeader, found | {"arguments": tuple(map(str, found["arguments"]))})
    return header


def _ending(found: dict[str, Any]) -> Ending:
    failure = found["failure"]
    record = None if failure is None else FailureRecord(**failure | {"kind": FailureKind(failure["kind"])})
    ending: Ending = _with_held(Ending, found | {"failure": record})
    return ending


def _with_held(kind: type[Any], found: dict[str, Any]) -> Any:
    return _record(kind, found | {"held": tuple(_record(HeldMemory, each) for each in found["held"])})


_ROW = fields(Row)
_CELLS = attrgetter(*(each.name for each in _ROW))
"""The cells of a row, as a tuple."""
_TYPES = {"int": int, "str": str, "bool": bool}


def _row(cells: list[Any]) -> Row:
    if len(cells) != len(_ROW):
        raise ValueError("a row has a different number of cells than this version of ampmem writes")
    return Row(*(_checked(cell, _TYPES[str(each.type)]) for cell, each in zip(cells, _ROW, strict=True)))


def _checked(cell: Any, kind: type) -> Any:
    if type(cell) is not kind or (isinstance(cell, int) and abs(cell) >= 1 << 63):
        raise ValueError(f"{str(cell)[:40]!r} instead of a value of type {kind.__name__}")
    return cell


def _record(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A record of this class from ``values``; rejects floats for integers, and unknown fields."""
    for each in fields(kind):
        wanted = str(each.type)
        if wanted in _TYPES and each.name in values:
            _checked(values[each.name], _TYPES[wanted])
        elif wanted == "int | None" and values.get(each.name) is not None:
            _checked(values[each.name], int)
    return kind(**values)


def _read_all(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _frame(kind: Kind, payload: bytes) -> bytes:
    return _FRAME.pack(kind.encode(), len(payload), zlib.crc32(payload)) + payload


def _frames(data: bytes) -> Iterator[tuple[str, bytes, int]]:
    """(kind, payload, offset of the payload) of each whole frame."""
    place = len(MAGIC)
    while place + _FRAME.size <= len(data):
        kind, length, checksum = _FRAME.unpack_from(data, place)
        start = place + _FRAME.size
        if length > _LONGEST or start + length > len(data):
            return
        payload = data[start : start + length]
        if zlib.crc32(payload) != checksum:
            return
        yield kind.decode("latin-1"), payload, start
        place = start + length


def _without_dropped(frames: Sequence[tuple[str, bytes]]) -> list[tuple[Kind, bytes]]:
    """``frames`` without dropped full recordings, and without replaced headers."""
    dropped = {json.loads(payload) for kind, payload in frames if kind == Kind.DROPPED}
    headers = [payload for kind, payload in frames if kind == Kind.HEADER]
    kept = [(Kind.HEADER, headers[-1])]
    for kind, payload in frames:
        if kind in (Kind.DROPPED, Kind.HEADER):
            continue
        if kind == Kind.FULL:
            (length,) = struct.unpack_from("<I", payload)
            if json.loads(payload[4 : 4 + length])["number"] in dropped:
                continue
        kept.append((Kind(kind), payload))
    return kept


_PEAK, _ALIVE = (next(i for i, each in enumerate(_ROW) if each.name == name) for name in ("peak", "alive"))


def _thinned(rows: list[bytes]) -> list[bytes]:
    """The newer half of ``rows``; from each group of the older half the highest peak, and the least alive."""
    half = len(rows) // 2
    kept: list[bytes] = []
    for start in range(0, half, _GROUP):
        group = rows[start : min(start + _GROUP, half)]
        cells = [json.loads(row) for row in group]
        numbers = range(len(group))
        highest = max(numbers, key=lambda i: cells[i][_PEAK])
        others = [i for i in numbers if i != highest] or [highest]
        least = min(others, key=lambda i: cells[i][_ALIVE])
        kept += [group[i] for i in sorted({highest, least})]
    return kept + rows[half:]
