"""A recording as a trace for Perfetto (https://ui.perfetto.dev), in its protobuf format.

Counters have the live bytes of each category, and the reserved bytes if known; slices are the steps and the phases.
Times are nanoseconds since the recording's first event. Source of the format: the messages ``Trace``, ``TracePacket``,
``TrackDescriptor`` and ``TrackEvent`` in Perfetto's ``protos/perfetto/trace``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.events import Column, Phase
from ampmem.output import open_output

_VARINT: Final = 0
_LENGTH: Final = 2


def varint(number: int) -> bytes:
    """A non-negative number as a varint: groups of seven bits, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def key(number: int) -> bytes:
    """The key of a field that holds a number."""
    return varint(number << 3 | _VARINT)


def field(number: int, value: int | str | bytes) -> bytes:
    """A field with a non-negative number, a text, or an encoded message."""
    if isinstance(value, int):
        return key(number) + varint(value)
    data = value.encode("utf-8", "replace") if isinstance(value, str) else value
    return varint(number << 3 | _LENGTH) + varint(len(data)) + data


def message(fields: dict[int, int | str | bytes]) -> bytes:
    """A message with these ``fields``, without the length that a field puts before it."""
    return b"".join(field(number, value) for number, value in fields.items())


def width_of(largest: int) -> int:
    """The number of bytes of ``largest`` as a varint."""
    return max(1, -(-largest.bit_length() // 7))


def varints(numbers: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Non-negative numbers as varints of ``width`` bytes each, one number per row.

    Shorter ones are padded with groups of 0, which every reader of the format accepts.
    """
    shifts = np.arange(width, dtype=np.int64) * 7
    groups = (numbers[:, np.newaxis] >> shifts & 0x7F).astype(np.uint8)
    groups[:, :-1] |= 0x80
    return groups


_Series: TypeAlias = "dict[str, Column]"
"""By name of counter, the bytes before the first event and after each event."""

# Field numbers, and the values of an enum.
_TRACE_PACKET: Final = 1
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _TRACK_DESCRIPTOR = 8, 10, 11, 60
_UUID, _NAME, _PROCESS, _PARENT, _COUNTER = 1, 2, 3, 5, 8
_PID, _PROCESS_NAME = 1, 6
_UNIT, _SIZE_BYTES = 3, 3
_EVENT_ANNOTATION, _EVENT_TYPE, _EVENT_TRACK, _EVENT_NAME, _EVENT_VALUE = 4, 9, 11, 23, 30
_SLICE_BEGIN, _SLICE_END, _COUNT = 1, 2, 4
_ANNOTATION_INT, _ANNOTATION_NAME = 4, 10

_THIS_SEQUENCE: Final = 1
_PROCESS_TRACK, _STEPS, _PHASES, _FIRST_COUNTER = 1, 2, 3, 4
_CHUNK: Final = 1 << 14


_Mark: TypeAlias = "tuple[int, bytes]"
"""The time of the beginning or end of a slice, and its packet."""


def write_perfetto(analysis: Analysis, path: Path, *, force: bool = False) -> None:
    """Write the trace; ``force`` replaces a file. Raises :class:`~ampmem.errors.UsageError` if it is not writable."""
    with open_output(path, force=force) as stream:
        for packets in _trace(analysis):
            stream.buffer.write(packets)
        stream.buffer.flush()


def _trace(analysis: Analysis) -> Iterator[bytes]:
    """The tracks, then all packets in order of time."""
    series: _Series = {str(category): analysis.timeline.series(category) for category in CATEGORIES}
    if analysis.layers is not None:
        series["reserved"] = analysis.layers.reserved
    yield from _tracks(analysis, list(series))
    start = analysis.start_ns
    marks = sorted([*_steps(analysis, start), *_phases(analysis, start)], key=itemgetter(0))
    times = np.array([time_ns for time_ns, _ in marks], dtype=np.int64)
    written = 0
    for time_ns, packets in _counters(analysis.timeline.time_ns - start, series):
        due = int(np.searchsorted(times, time_ns[-1], side="right"))
        done = 0
        places = np.searchsorted(time_ns, times[written:due])
        for (_, mark), place in zip(marks[written:due], places.tolist(), strict=True):
            yield from (packets[done:place].tobytes(), mark)
            done = place
        yield packets[done:].tobytes()
        written = due
    yield from (mark for _, mark in marks[written:])


def _tracks(analysis: Analysis, counters: list[str]) -> Iterator[bytes]:
    title = " ".join((analysis.recording.run.script, *analysis.recording.run.arguments))
    process = message({_PID: 1, _PROCESS_NAME: f"ampmem: {title}"})
    yield _packet({_TRACK_DESCRIPTOR: message({_UUID: _PROCESS_TRACK, _PROCESS: process})})
    for uuid, name in ((_STEPS, "steps"), (_PHASES, "phases")):
        yield _packet({_TRACK_DESCRIPTOR: message({_UUID: uuid, _NAME: name, _PARENT: _PROCESS_TRACK})})
    in_bytes = message({_UNIT: _SIZE_BYTES})
    for uuid, name in enumerate(counters, start=_FIRST_COUNTER):
        track = message({_UUID: uuid, _NAME: name, _PARENT: _PROCESS_TRACK, _COUNTER: in_bytes})
        yield _packet({_TRACK_DESCRIPTOR: track})


def _packet(fields: dict[int, int | str | bytes]) -> bytes:
    return field(_TRACE_PACKET, message({**fields, _SEQUENCE: _THIS_SEQUENCE}))


def _slice(track: int, name: str, step: int, start_ns: int, end_ns: int) -> Iterator[_Mark]:
    """The marks of a slice; a step before the first recorded one has a negative number, and no annotation."""
    event: dict[int, int | str | bytes] = {_EVENT_TYPE: _SLICE_BEGIN, _EVENT_TRACK: track, _EVENT_NAME: name}
    if step >= 0:
        event[_EVENT_ANNOTATION] = message({_ANNOTATION_NAME: "step", _ANNOTATION_INT: step})
    yield start_ns, _packet({_TIMESTAMP: start_ns, _TRACK_EVENT: message(event)})
    end_ns = max(start_ns, end_ns)
    end = message({_EVENT_TYPE: _SLICE_END, _EVENT_TRACK: track})
    yield end_ns, _packet({_TIMESTAMP: end_ns, _TRACK_EVENT: end})


def _steps(analysis: Analysis, start: int) -> Iterator[_Mark]:
    for step in analysis.recording.steps:
        yield from _slice(_STEPS, f"step {step.index}", step.index, step.start_ns - start, step.end_ns - start)


def _phases(analysis: Analysis, start: int) -> Iterator[_Mark]:
    """The slices of the phases: each lasts until the next, the last until the last event or the last step's end."""
    phases, times = analysis.recording.phases, analysis.timeline.time_ns
    ends = [int(times[-1])] if len(times) else []
    ends += [step.end_ns for step in analysis.recording.steps[-1:]]
    starts = phases.time_ns.tolist()
    bounds = [*starts, max([*ends, *starts[-1:]], default=0)]
    rows = zip(pairwise(bounds), phases.phase.tolist(), phases.step.tolist(), strict=True)
    for (start_ns, end_ns), phase, step in rows:
        yield from _slice(_PHASES, Phase(phase).name.lower(), step, start_ns - start, end_ns - start)


def _counters(time_ns: Column, series: _Series) -> Iterator[tuple[Column, NDArray[np.uint8]]]:
    """Times and packets: every counter's value at the start, and then those that an event changes."""
    if not len(time_ns):
        return
    rows = list(series.values())
    template = _Template(int(time_ns[-1]), max(int(row.max()) for row in rows))
    first = np.full(len(rows), time_ns[0])
    yield first, template.packets(first, np.arange(len(rows)), np.array([row[0] for row in rows]))
    for begin in range(0, len(time_ns), _CHUNK):
        part = np.stack([row[begin : begin + _CHUNK + 1] for row in rows])
        place, row = np.nonzero(np.diff(part, axis=1).T)
        if len(place):
            when = time_ns[begin + place]
            yield when, template.packets(when, row, part[row, place + 1])


class _Template:
    """Packets of counters with equal length, so that a million of them are made as one table of bytes."""

    def __init__(self, last_ns: int, largest: int) -> None:
        self._widths = width_of(last_ns), width_of(largest)
        event = field(_EVENT_TYPE, _COUNT) + key(_EVENT_TRACK)
        value = key(_EVENT_VALUE)
        # A track's number takes one byte.
        size = len(event) + 1 + len(value) + self._widths[1]
        sequence = field(_SEQUENCE, _THIS_SEQUENCE) + _opened(_TRACK_EVENT, size) + event
        size += len(sequence) - len(event) + len(key(_TIMESTAMP)) + self._widths[0]
        self._parts = _opened(_TRACE_PACKET, size) + key(_TIMESTAMP), sequence, value

    def packets(self, time_ns: Column, counter: Column, value: Column) -> NDArray[np.uint8]:
        """The packets, one per row."""
        before_time, before_track, before_value = (
            np.tile(np.frombuffer(part, dtype=np.uint8), (len(time_ns), 1)) for part in self._parts
        )
        time = varints(time_ns, self._widths[0])
        track = (counter[:, np.newaxis] + _FIRST_COUNTER).astype(np.uint8)
        return np.hstack([before_time, time, before_track, track, before_value, varints(value, self._widths[1])])


def _opened(number: int, size: int) -> bytes:
    """The bytes before a message of ``size`` bytes."""
    return field(number, bytes(size))[:-size]
