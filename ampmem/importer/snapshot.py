"""A memory snapshot as typed data: checked, for one device, whatever version of torch wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ampmem.errors import RecordingError, UsageError
from ampmem.importer.unpickle import Plain

ALLOC: Final = "alloc"
FREE_REQUESTED: Final = "free_requested"
FREE_COMPLETED: Final = "free_completed"
RESERVING: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_OUT_OF_MEMORY: Final = "oom"
_OTHERS: Final = frozenset({_OUT_OF_MEMORY, "snapshot"})
_BLOCK_ACTIONS: Final = frozenset({ALLOC, FREE_REQUESTED, FREE_COMPLETED})

_MAX_NUMBER: Final = 2**62
_MAX_FRAMES: Final = 512
_MAX_TEXT: Final = 4000
_US: Final = 1000


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack; C++ frames have no line."""

    name: str
    filename: str
    line: int


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the trace. ``stack`` indexes :attr:`Snapshot.stacks`; later events have a later ``time_ns``."""

    action: str
    address: int
    size: int
    stream: int
    time_ns: int
    stack: int


@dataclass(frozen=True, slots=True)
class Block:
    """A block that is allocated when the snapshot is taken; ``requested`` is its size where that is not known."""

    address: int
    size: int
    requested: int
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time that the profiler named, such as ``Optimizer.step#AdamW.step``."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One device of a snapshot. Stacks are innermost frame first, each once; the first one is empty.

    ``failed`` are the sizes of the allocations that there was no memory for, ``reserved`` is the sum of all
    segments at the end, ``timed`` says whether times were recorded, ``unknown`` how many events have an action
    that this version of ampmem does not know.
    """

    device: int
    blocks: tuple[Block, ...]
    events: tuple[Event, ...]
    stacks: tuple[tuple[Frame, ...], ...]
    spans: tuple[Span, ...]
    failed: tuple[int, ...]
    settings: Mapping[str, Plain]
    reserved: int
    timed: bool
    unknown: int


def snapshot_of(data: Plain, device: int | None = None) -> Snapshot:
    """``data``, as it was unpickled, for ``device``; by default for the only one that has a trace.

    Raises :class:`RecordingError` when it is no snapshot or has no trace, :class:`UsageError` for a choice
    of device that the snapshot does not leave.
    """
    top = _top(data)
    traces = _list(top.get("device_traces"), "device_traces")
    device = _chosen(traces, device)
    reader = _Reader()
    events = reader.events(_list(traces[device], f"device_traces[{device}]"))
    blocks, reserved = _segments(_list(top.get("segments"), "segments"), device)
    settings = top.get("allocator_settings")
    return Snapshot(
        device=device,
        blocks=blocks,
        events=tuple(events),
        stacks=tuple(reader.stacks),
        spans=_spans(top.get("external_annotations"), device),
        failed=tuple(reader.failed),
        settings={str(key): value for key, value in settings.items()} if isinstance(settings, dict) else {},
        reserved=reserved,
        timed=reader.timed,
        unknown=reader.unknown,
    )


def _top(data: Plain) -> dict[str | int, Plain]:
    if isinstance(data, list):
        raise RecordingError(
            "the file has segments but no trace, as torch.cuda.memory_snapshot() gives; "
            "call torch.cuda.memory._record_memory_history() first, and torch.cuda.memory._dump_snapshot() at the end"
        )
    if not isinstance(data, dict) or "segments" not in data or "device_traces" not in data:
        raise RecordingError("the file is a pickle, but no memory snapshot: it lacks segments or device_traces")
    return data


def _chosen(traces: list[Plain], device: int | None) -> int:
    traced = [index for index, trace in enumerate(traces[:1024]) if isinstance(trace, list) and trace]
    if not traced:
        raise RecordingError(
            "the snapshot has no trace of any device: "
            "call torch.cuda.memory._record_memory_history() before what is to be recorded"
        )
    names = ", ".join(map(str, traced[:16]))
    if device is None:
        if len(traced) > 1:
            raise UsageError(f"the snapshot has traces of the devices {names}; choose one with --device")
        return traced[0]
    if device not in traced:
        raise UsageError(f"the snapshot has no trace of device {device}, only of {names}")
    return device


class _Reader:
    """Reads one trace; every stack is kept once."""

    def __init__(self) -> None:
        self.stacks: list[tuple[Frame, ...]] = [()]
        self.timed = False
        self.failed: list[int] = []
        self.unknown = 0
        self._by_list: dict[int, int] = {}
        self._by_frames: dict[tuple[int, ...], int] = {(): 0}
        self._frames: dict[int, Frame] = {}

    def events(self, trace: list[Plain]) -> list[Event]:
        """Times of events that share a microsecond are a nanosecond apart, so that their order stays."""
        events: list[Event] = []
        first = trace[0]
        self.timed = isinstance(first, dict) and "time_us" in first
        now = -1
        for index, item in enumerate(trace):
            where = f"event {index} of the trace"
            row = _dict(item, where)
            action = _text(row.get("action"), where)
            if action not in _BLOCK_ACTIONS and action not in RESERVING:
                self.unknown += action not in _OTHERS
                if action == _OUT_OF_MEMORY:
                    self.failed.append(_number(row.get("size"), where))
                continue
            stamp = _number(row.get("time_us"), where) if self.timed else index + 1
            now = max(stamp * _US, now + 1)
            if now > _MAX_NUMBER:
                raise RecordingError(f"the snapshot is damaged: {where} is in no known century")
            events.append(
                Event(
                    action,
                    _number(row.get("addr"), where),
                    _number(row.get("size"), where),
                    _number(row.get("stream", 0), where),
                    now,
                    self._stack(row.get("frames"), where),
                )
            )
        return events

    def _stack(self, frames: Plain, where: str) -> int:
        if not isinstance(frames, list):
            return 0
        found = self._by_list.get(id(frames))
        if found is None:
            key = tuple(id(frame) for frame in frames[:_MAX_FRAMES])
            found = self._by_frames.get(key)
            if found is None:
                found = self._by_frames[key] = len(self.stacks)
                self.stacks.append(tuple(self._frame(frame, where) for frame in frames[:_MAX_FRAMES]))
            self._by_list[id(frames)] = found
        return found

    def _frame(self, frame: Plain, where: str) -> Frame:
        found = self._frames.get(id(frame))
        if found is None:
            row = _dict(frame, where)
            line = row.get("line")
            name, filename = _text(row.get("name"), where), _text(row.get("filename"), where)
            # Names of templates can be endless, and those of files of a stranger's making.
            found = self._frames[id(frame)] = Frame(
                _one_line(name[:_MAX_TEXT]), _one_line(filename[-_MAX_TEXT:]), line if isinstance(line, int) else 0
            )
        return found


def _segments(segments: list[Plain], device: int) -> tuple[tuple[Block, ...], int]:
    """The blocks that are allocated, by address, and the sum of all segments."""
    blocks: dict[int, Block] = {}
    starts: set[int] = set()
    reserved = 0
    for index, item in enumerate(segments):
        where = f"segment {index}"
        segment = _dict(item, where)
        if segment.get("device", 0) != device:
            continue
        start = address = _number(segment.get("address"), where)
        if start in starts:
            raise RecordingError(f"the snapshot is damaged: {where} is there twice")
        starts.add(start)
        reserved += _number(segment.get("total_size"), where)
        stream = _number(segment.get("stream", 0), where)
        for part in _list(segment.get("blocks"), where):
            row = _dict(part, where)
            size = _number(row.get("size"), where)
            # A block's place follows from those before it where it is not said.
            address = _number(row.get("address", address), where)
            if row.get("state") == "active_allocated":
                if address in blocks:
                    raise RecordingError(f"the snapshot is damaged: {where} has a block twice")
                blocks[address] = Block(address, size, _requested(row, size, where), stream)
            address += size
    return tuple(blocks[address] for address in sorted(blocks)), reserved


def _requested(row: Mapping[str | int, Plain], size: int, where: str) -> int:
    if "requested_size" in row:
        return _number(row["requested_size"], where)
    history = row.get("history")
    if isinstance(history, list) and history and isinstance(history[0], dict) and "real_size" in history[0]:
        return _number(history[0]["real_size"], where)
    return size


def _spans(annotations: Plain, device: int) -> tuple[Span, ...]:
    """Pairs of START and END; what has no partner is left out."""
    if not isinstance(annotations, list):
        return ()
    spans: list[Span] = []
    open_since: dict[str, int] = {}
    for item in annotations:
        if not isinstance(item, dict) or item.get("device", device) != device:
            continue
        name, stage, time_us = item.get("name"), item.get("stage"), item.get("time_us")
        if not isinstance(name, str) or not isinstance(time_us, int) or not 0 <= time_us * _US < _MAX_NUMBER:
            continue
        if stage == "START":
            open_since[name] = time_us * _US
        elif stage == "END" and name in open_since:
            spans.append(Span(name=name, start_ns=open_since.pop(name), end_ns=time_us * _US + _US - 1))
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def _list(value: Plain, where: str) -> list[Plain]:
    if not isinstance(value, list):
        raise RecordingError(f"the file is no memory snapshot: {where} should hold a list")
    return value


def _dict(value: Plain, where: str) -> dict[str | int, Plain]:
    if not isinstance(value, dict):
        raise RecordingError(f"the snapshot is damaged: {where} is no record")
    return value


def _number(value: Plain, where: str) -> int:
    if not isinstance(value, int) or not 0 <= value < _MAX_NUMBER:
        raise RecordingError(f"the snapshot is damaged: {where} lacks a number, or has one that cannot be")
    return value


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _text(value: Plain, where: str) -> str:
    if not isinstance(value, str):
        raise RecordingError(f"the snapshot is damaged: {where} lacks a text")
    return value
