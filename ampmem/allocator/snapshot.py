"""A torch memory snapshot, typed and checked, and the allocator's state when its trace starts.

Versions differ: times, ``free_requested``, addresses and requested sizes of blocks may be missing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

from ampmem.allocator.blocks import DEFAULT_POOL, PoolId, SnapshotBlock, SnapshotSegment
from ampmem.allocator.segments import RESERVING
from ampmem.allocator.settings import (
    ROUNDUP_INTERVALS,
    SMALL_BUFFER,
    SMALL_SIZE,
    VARIABLES,
    Settings,
    parse_settings,
    round_size,
)
from ampmem.errors import AmpmemError, RecordingError, UsageError

ALLOC: Final = "alloc"
FREE_REQUESTED: Final = "free_requested"
FREE_COMPLETED: Final = "free_completed"
_OUT_OF_MEMORY: Final = "oom"
_MARKER: Final = "snapshot"
ANNOTATE: Final = "annotate"
"""The action of an annotation attached to a block (torch 2.15): the only ignored one that changes no block."""
_PLACED: Final = frozenset({ALLOC, FREE_REQUESTED, FREE_COMPLETED, *RESERVING})
_AWAITING: Final = ("active_awaiting_free", "active_pending_free")

_MAX_NUMBER: Final = 2**62
_MAX_DEVICES: Final = 1024
_MAX_FRAMES: Final = 512
_MAX_TEXT: Final = 4000
_MAX_KIND: Final = 40
_US: Final = 1000

_Row: TypeAlias = "dict[Any, Any]"
"""A record as it was unpickled, unchecked."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack; C++ frames have no line."""

    name: str
    filename: str
    line: int


class SnapshotEvent(NamedTuple):
    """One entry of the trace, in torch's words (``TraceEntry``, ``c10/core/CachingDeviceAllocator.h``).

    ``stack`` indexes :attr:`DeviceSnapshot.stacks`; later events have a later ``time_ns``. A tuple, because there are
    hundreds of thousands and a dataclass takes four times as long to make.
    """

    action: str
    address: int
    size: int
    stream: int
    time_ns: int = 0
    stack: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A period that the profiler annotated, such as ``Optimizer.step#AdamW.step``."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAllocation:
    """The last of ``failures`` allocations on ``device`` that failed for lack of memory.

    ``asked`` is the needed block, ``free`` the driver's free memory (``None`` if the trace does not have it), both in
    bytes; ``stack`` is that of the call, innermost frame first. ``reserved`` and ``allocated`` are the bytes in
    segments and in tensors when the snapshot was taken. ``traced`` says whether the device can be imported, ``at_end``
    whether the trace ends with the failure: only then the segments are those of that moment.
    """

    device: int
    failures: int
    asked: int
    free: int | None
    stack: tuple[Frame, ...]
    reserved: int
    allocated: int
    traced: bool
    stream: int = 0
    at_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSnapshot:
    """One device of a snapshot. Stacks are innermost frame first, each once; the first one is empty.

    ``failed`` has the last failed allocation of each device of the snapshot, ``settings`` is ``None`` if the snapshot
    does not have them, ``timed`` says whether times were recorded. ``left_out`` counts, by action, the events without
    information on blocks and segments, as far as this version of ampmem knows; ``host_events`` counts those of pinned
    host memory, which has another allocator. ``text`` is the metadata of the trace's first entry, if that is a marker,
    as in a snapshot of ``ampmem export``.
    """

    segments: tuple[SnapshotSegment, ...]
    events: tuple[SnapshotEvent, ...]
    settings: Settings | None
    device: int = 0
    stacks: tuple[tuple[Frame, ...], ...] = ((),)
    spans: tuple[Span, ...] = ()
    failed: tuple[FailedAllocation, ...] = ()
    timed: bool = True
    left_out: tuple[tuple[str, int], ...] = ()
    host_events: int = 0
    text: str = ""

    @property
    def has_strangers(self) -> bool:
        """Whether events of unknown kinds were left out, which may have changed blocks."""
        return any(action != ANNOTATE for action, _ in self.left_out)


def read_snapshot(data: object, device: int | None = None) -> DeviceSnapshot:
    """The snapshot of ``device`` from unpickled ``data``; by default of the only device with a trace.

    Raises :class:`RecordingError` if it is not a snapshot or has no trace, :class:`UsageError` for a device that the
    snapshot does not have.
    """
    top = _top(data)
    traces = _list(top["device_traces"], "device_traces")
    host_events = _host_events(top.get("host_traces"))
    device = _traced_device(traces, device, host_events)
    trace = _Trace(traces[device])
    return DeviceSnapshot(
        segments=read_segments(top["segments"], device),
        events=tuple(trace.events),
        settings=_settings(top.get("allocator_settings")),
        device=device,
        stacks=tuple(trace.stacks),
        spans=_spans(top.get("external_annotations"), device),
        failed=tuple(_failed(top["segments"], traces)),
        timed=trace.timed,
        left_out=tuple(trace.left_out.items()),
        host_events=host_events,
        text=trace.text,
    )


def read_segments(data: object, device: int) -> tuple[SnapshotSegment, ...]:
    """The segments of ``device``. Raises :class:`RecordingError` for invalid ones."""
    segments: dict[int, SnapshotSegment] = {}
    used: set[int] = set()
    """Addresses of blocks in use, and identities of all records of blocks: each may occur only once."""
    for index, item in enumerate(_list(data, "segments")):
        where = f"segment {index}"
        row = _dict(item, where)
        if row.get("device", 0) != device:
            continue
        address = _number(row.get("address"), where)
        if address in segments:
            raise _damaged(f"{where} is listed twice")
        segments[address] = SnapshotSegment(
            address=address,
            size=_number(row.get("total_size"), where),
            stream=_number(row.get("stream", 0), where),
            is_small=_text(row.get("segment_type"), where) == "small",
            expandable=row.get("is_expandable") is True,
            pool_id=_pool_id(row.get("segment_pool_id", DEFAULT_POOL), where),
            blocks=_blocks(_list(row.get("blocks"), where), address, used, where),
        )
    return tuple(segments.values())


def _blocks(rows: list[Any], address: int, used: set[int], where: str) -> tuple[SnapshotBlock, ...]:
    """The blocks; a missing address follows from the blocks before."""
    blocks = []
    for item in rows:
        row = _dict(item, where)
        state = row.get("state")
        size = _number(row.get("size"), where)
        address = _number(row.get("address", address), where)
        block = SnapshotBlock(
            address=address,
            size=size,
            requested=_requested(row, size, where),
            allocated=state == "active_allocated",
            awaiting=state in _AWAITING,
        )
        # Negative, so that an identity is not mistaken for an address.
        marks = {-id(row), address} if block.allocated or block.awaiting else {-id(row)}
        if not used.isdisjoint(marks):
            raise _damaged(f"{where} has a block twice")
        used |= marks
        blocks.append(block)
        address += size
    return tuple(blocks)


def _requested(row: _Row, size: int, where: str) -> int:
    if "requested_size" in row:
        return _number(row["requested_size"], where)
    history = row.get("history")
    if isinstance(history, list) and history and isinstance(history[0], dict) and "real_size" in history[0]:
        return _number(history[0]["real_size"], where)
    return size


def _pool_id(value: object, where: str) -> PoolId:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise _damaged(f"{where} has a segment_pool_id that is not two whole numbers")
    return _number(value[0], where), _number(value[1], where)


def _top(data: object) -> _Row:
    if isinstance(data, list):
        raise RecordingError(
            "the file has segments but no trace, like the result of torch.cuda.memory_snapshot(); call "
            "torch.cuda.memory._record_memory_history() first, and torch.cuda.memory._dump_snapshot() at the end"
        )
    if not isinstance(data, dict) or "segments" not in data or "device_traces" not in data:
        raise RecordingError("the file is a pickle, but not a memory snapshot: it lacks segments or device_traces")
    return data


def _host_events(traces: object) -> int:
    """Number of events of pinned host memory: in one list (torch 2.15), or in one per device."""
    if not isinstance(traces, list):
        return 0
    return sum(len(each) if isinstance(each, list) else 1 for each in traces)


def _traced_device(traces: list[Any], device: int | None, host_events: int) -> int:
    traced = [index for index, trace in enumerate(traces[:_MAX_DEVICES]) if isinstance(trace, list) and trace]
    # A trace with nothing but failures has nothing to show.
    traced = [index for index in traced if _has_events(traces[index])] or traced
    if not traced and host_events:
        raise RecordingError(
            "the snapshot only has a trace of pinned host memory, which ampmem does not read: record with "
            "record_cuda=True"
        )
    if not traced:
        raise RecordingError(
            "the snapshot has no trace of any device: call torch.cuda.memory._record_memory_history() before the code "
            "to record"
        )
    names = ", ".join(map(str, traced[:16]))
    if device is not None and device not in traced:
        raise UsageError(f"the snapshot has no trace of device {device}, only of {names}")
    if device is None and len(traced) > 1:
        short = [str(index) for index, rows in enumerate(traces[:_MAX_DEVICES]) if _failures_in(rows)]
        failed = f" (out of memory: device{'' if len(short) == 1 else 's'} {', '.join(short[:16])})" if short else ""
        raise UsageError(f"the snapshot has traces of the devices {names}; choose one with --device{failed}")
    return traced[0] if device is None else device


def _failed(segments: object, traces: list[Any]) -> Iterator[FailedAllocation]:
    """The last failed allocation of each device; unreadable ones are left out, since they may be another device's."""
    for device, rows in enumerate(traces[:_MAX_DEVICES]):
        found = _failures_in(rows)
        if not found or not isinstance(found[-1].get("size"), int):
            continue
        last, frames = found[-1], found[-1].get("frames")
        try:
            held = read_segments(segments, device)
            stack = _Trace([{**last, "action": ALLOC, "addr": 0, "time_us": 0, "frames": frames}]).stacks[-1]
            asked = _number(last["size"], "")
        except RecordingError:
            continue
        free, stream = last.get("device_free"), last.get("stream", 0)
        assert isinstance(rows, list)  # _failures_in found failures in it
        after = rows[next(index for index in range(len(rows) - 1, -1, -1) if rows[index] is last) :]
        yield FailedAllocation(
            device=device,
            failures=len(found),
            asked=asked,
            free=free if isinstance(free, int) and 0 <= free < _MAX_NUMBER else None,
            stack=stack,
            reserved=sum(segment.size for segment in held),
            allocated=sum(block.requested for segment in held for block in segment.blocks if block.allocated),
            traced=_has_events(rows),
            stream=stream if isinstance(stream, int) and 0 <= stream < _MAX_NUMBER else 0,
            at_end=not _has_events(after),
        )


def _failures_in(rows: object) -> list[dict[str, Any]]:
    """The entries of a trace for failed allocations."""
    if not isinstance(rows, list):
        return []
    return [row for row in rows if isinstance(row, dict) and row.get("action") == _OUT_OF_MEMORY]


def _has_events(rows: object) -> bool:
    """Whether a trace has allocs, frees or segments, not only markers and failures."""
    return isinstance(rows, list) and any(isinstance(row, dict) and row.get("action") in _PLACED for row in rows)


class _Trace:
    """Reads one trace; each stack is kept once.

    Events that share a microsecond get times a nanosecond apart, so that their order stays.
    """

    def __init__(self, rows: list[Any]) -> None:
        self.stacks: list[tuple[Frame, ...]] = [()]
        self.events: list[SnapshotEvent] = []
        self.timed = _timed(rows)
        self.left_out: dict[str, int] = {}
        self.text = _text_of_marker(rows)
        self._by_list: dict[int, int] = {id(None): 0}
        self._by_frames: dict[tuple[int, ...], int] = {(): 0}
        self._frames: dict[int, Frame] = {}
        self._read(rows)

    def _read(self, rows: list[Any]) -> None:
        timed, by_list = self.timed, self._by_list
        now = -1
        for index, row in enumerate(rows):
            if type(row) is not dict:
                raise _damaged(f"{_event(index)} is not a record")
            action = row.get("action")
            if type(action) is not str:
                raise _damaged(f"{_event(index)} lacks a text")
            if action not in _PLACED:
                self._check_other(action, row, index)
                continue
            address, size, stream = row.get("addr", -1), row.get("size", -1), row.get("stream", 0)
            stamp = row.get("time_us", -1) if timed else index + 1
            for number in (address, size, stream, stamp):
                if type(number) is not int or not 0 <= number < _MAX_NUMBER:
                    raise _no_number(_event(index))
            now = max(stamp * _US, now + 1)
            frames = row.get("frames")
            stack = by_list.get(id(frames))
            if stack is None:
                stack = by_list[id(frames)] = self._stack(frames, index)
            self.events.append(SnapshotEvent(action, address, size, stream, now, stack))
        if now > _MAX_NUMBER:
            raise _damaged("the time of the trace's last event is not a possible date")

    def _check_other(self, action: str, row: _Row, index: int) -> None:
        """Check the size of a failed allocation, and count an event of an unknown kind."""
        if action == _OUT_OF_MEMORY:
            _number(row.get("size"), _event(index))
        elif action != _MARKER:
            kind = _one_line(action[:_MAX_KIND])
            self.left_out[kind] = self.left_out.get(kind, 0) + 1

    def _stack(self, frames: object, index: int) -> int:
        if not isinstance(frames, list):
            return 0
        shown = frames[:_MAX_FRAMES]
        key = tuple(map(id, shown))
        found = self._by_frames.get(key)
        if found is None:
            found = self._by_frames[key] = len(self.stacks)
            self.stacks.append(tuple([self._frame(frame, index) for frame in shown]))
        return found

    def _frame(self, frame: object, index: int) -> Frame:
        found = self._frames.get(id(frame))
        if found is None:
            where = _event(index)
            row = _dict(frame, where)
            line = row.get("line")
            name, filename = _text(row.get("name"), where), _text(row.get("filename"), where)
            # Template names can be endless, and file names may be crafted.
            found = self._frames[id(frame)] = Frame(
                _one_line(name[:_MAX_TEXT]), _one_line(filename[-_MAX_TEXT:]), line if isinstance(line, int) else 0
            )
        return found


def _text_of_marker(rows: list[Any]) -> str:
    """The ``user_metadata`` of the first entry, if that is a marker."""
    first = rows[0] if rows else None
    text = first.get("user_metadata") if isinstance(first, dict) and first.get("action") == _MARKER else None
    return text if isinstance(text, str) else ""


def _timed(rows: list[Any]) -> bool:
    """Whether the trace has times: the first event of a known kind decides, since others may lack a time."""
    for row in rows:
        if type(row) is dict and type(row.get("action")) is str and row["action"] in _PLACED:
            return "time_us" in row
    return False


def _spans(annotations: object, device: int) -> tuple[Span, ...]:
    """Pairs of START and END; entries without a partner are left out."""
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


def _settings(value: object) -> Settings | None:
    """The settings in the environment variable, if this version of ampmem knows them, and those given separately."""
    if not isinstance(value, dict):
        return None
    where = "allocator_settings"
    settings = _of_variable(value)
    if "max_split_size" in value:
        limit = value["max_split_size"]
        settings = replace(settings, max_split_size=None if limit == -1 else _number(limit, where))
    if "garbage_collection_threshold" in value:
        threshold = value["garbage_collection_threshold"]
        if not isinstance(threshold, (int, float)):
            raise _no_number(where)
        settings = replace(settings, garbage_collection_threshold=float(threshold))
    if "expandable_segments" in value:
        settings = replace(settings, expandable_segments=value["expandable_segments"] is True)
    if "roundup_power2_divisions" in value:
        divisions = [_number(each, where) for each in _dict(value["roundup_power2_divisions"], where).values()]
        filled = (divisions + [0] * ROUNDUP_INTERVALS)[:ROUNDUP_INTERVALS]
        settings = replace(settings, roundup_power2_divisions=tuple(filled))
    return settings


def _of_variable(value: _Row) -> Settings:
    """The settings in the environment variable; the defaults if this version of ampmem cannot read them."""
    text = next((text for text in map(value.get, VARIABLES) if isinstance(text, str) and text), "")
    try:
        return parse_settings(text)
    except UsageError:
        return Settings()


def _event(index: int) -> str:
    return f"event {index} of the trace"


def _damaged(what: str) -> RecordingError:
    return RecordingError(f"the snapshot is damaged: {what}")


def _no_number(where: str) -> RecordingError:
    return _damaged(f"{where} lacks a number, or has one that cannot be")


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise RecordingError(f"the file is not a memory snapshot: {where} should hold a list")
    return value


def _dict(value: object, where: str) -> _Row:
    if not isinstance(value, dict):
        raise _damaged(f"{where} is not a record")
    return value


def _number(value: object, where: str) -> int:
    if not isinstance(value, int) or not 0 <= value < _MAX_NUMBER:
        raise _no_number(where)
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _damaged(f"{where} lacks a text")
    return value


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


# The allocator's state when a snapshot's trace starts, found by walking the trace backwards.


class NotReplayable(AmpmemError):
    """The state at the start of the snapshot's trace cannot be rebuilt."""


@dataclass(slots=True)
class _Live:
    """A block in use; ``certain`` says that its size is known, and is not only a lower bound."""

    size: int
    requested: int
    awaiting: bool
    certain: bool


def rebuild(snapshot: DeviceSnapshot, settings: Settings) -> tuple[SnapshotSegment, ...]:
    """The segments before the trace with their blocks in use: every event undone, newest first, from the final ones.

    Free neighbours always merge, so the blocks in use determine the free ones. Only the size of a block that was alive
    at the start and freed in the trace can be undetermined: the large pool does not split a block if at most 1 MiB
    would remain. Since no block of that pool is smaller than that, a smaller gap behind such a block belongs to it. A
    block of undetermined size is assumed to be as large as its rounded request; it may be up to 1 MiB larger.
    Raises :class:`NotReplayable` if trace and segments contradict each other, and for settings under which a gap shows
    nothing.
    """
    if settings.expandable_segments or any(segment.expandable for segment in snapshot.segments):
        raise NotReplayable("the snapshot has expandable segments, and does not say where their address space starts")
    if settings.max_split_size is not None:
        raise NotReplayable("with max_split_size_mb a snapshot does not have the sizes of freed blocks")
    walk = _Walk(snapshot, settings)
    for number in range(len(snapshot.events) - 1, -1, -1):
        walk.undo(snapshot.events[number], number)
    return walk.segments()


def _has_two_events_per_free(events: Iterable[SnapshotEvent]) -> bool:
    """Whether ``free_completed`` follows ``free_requested``; older traces do not have both."""
    born = set()
    for event in events:
        if event.action == FREE_REQUESTED:
            return True
        if event.action == ALLOC:
            born.add(event.address)
        elif event.action == FREE_COMPLETED and event.address in born:
            return False
    return True


class _Walk:
    """Undoes the events of a trace, newest first, and keeps the blocks in use and the segments of that moment."""

    def __init__(self, snapshot: DeviceSnapshot, settings: Settings) -> None:
        self._settings = settings
        self._two_events = _has_two_events_per_free(snapshot.events)
        self._live: dict[int, _Live] = {}
        self._segments = {segment.address: segment for segment in snapshot.segments}
        for segment in snapshot.segments:
            if sum(block.size for block in segment.blocks) != segment.size:
                raise NotReplayable(f"the blocks of the segment at {segment.address:#x} do not fill it")
            for block in segment.blocks:
                if block.allocated or block.awaiting:
                    self._live[block.address] = _Live(block.size, block.requested, block.awaiting, True)
        self._blocks = sorted(self._live)
        self._starts = sorted(self._segments)

    def undo(self, event: SnapshotEvent, number: int) -> None:
        """Go back to before ``event``. Raises :class:`NotReplayable` if it does not fit the blocks and segments."""
        match event.action:
            case "alloc":
                self._take_block(event, number)
                del self._live[event.address]
                del self._blocks[bisect_left(self._blocks, event.address)]
            case "free_requested":
                self._take_block(event, number).awaiting = False
            case "free_completed":
                self._undo_free(event, number)
            case "segment_alloc":
                if self._segments.pop(event.address, None) is None or self._live_in(event.address, event.size):
                    raise NotReplayable(
                        f"event {number} makes a segment that does not exist, or is not free, afterwards"
                    )
                del self._starts[bisect_left(self._starts, event.address)]
            case "segment_free":
                self._segments[event.address] = SnapshotSegment(
                    address=event.address,
                    size=event.size,
                    stream=event.stream,
                    is_small=event.size == SMALL_BUFFER,
                    expandable=False,
                    pool_id=DEFAULT_POOL,
                    blocks=(),
                )
                insort(self._starts, event.address)
            case "segment_map" | "segment_unmap":
                raise NotReplayable("the trace has expandable segments, which cannot be rebuilt")

    def _take_block(self, event: SnapshotEvent, number: int) -> _Live:
        live = self._live.get(event.address)
        if live is None:
            raise NotReplayable(
                f"event {number} ({event.action}) is about {event.address:#x}, where there is no block afterwards"
            )
        return live

    def _live_in(self, address: int, size: int) -> bool:
        at = bisect_left(self._blocks, address)
        return at < len(self._blocks) and self._blocks[at] < address + size

    def _undo_free(self, event: SnapshotEvent, number: int) -> None:
        """Make the freed block live again; the gap behind it may show its size, and it ends another gap."""
        at = bisect_left(self._starts, event.address + 1) - 1
        start = self._starts[at] if at >= 0 else -1
        if start < 0 or event.address >= start + self._segments[start].size:
            raise NotReplayable(f"event {number} frees {event.address:#x}, which is in no segment")
        segment = self._segments[start]
        rounded = round_size(event.size, self._settings)
        place = bisect_left(self._blocks, event.address)
        end = start + segment.size
        if place < len(self._blocks):
            end = min(end, self._blocks[place])
        gap = end - event.address - rounded
        if place and self._blocks[place - 1] >= start:
            self._bound(self._blocks[place - 1], event.address, number)
        if gap < 0:
            raise NotReplayable(f"event {number} frees {event.address:#x}, which overlaps another block")
        certain = segment.is_small or gap <= SMALL_SIZE
        size = rounded + gap if certain and not segment.is_small else rounded
        self._live[event.address] = _Live(size, event.size, self._two_events, certain)
        self._blocks.insert(place, event.address)

    def _bound(self, address: int, end: int, number: int) -> None:
        """Limit the block before ``end``, where another block starts."""
        block = self._live[address]
        gap = end - address - block.size
        if gap < 0:
            raise NotReplayable(f"event {number} frees {end:#x}, which overlaps another block")
        if not block.certain and gap <= SMALL_SIZE:
            block.size += gap
            block.certain = True

    def segments(self) -> tuple[SnapshotSegment, ...]:
        """The current segments, with their blocks in use."""
        return tuple(self._with_blocks(self._segments[start]) for start in self._starts)

    def _with_blocks(self, segment: SnapshotSegment) -> SnapshotSegment:
        first = bisect_left(self._blocks, segment.address)
        last = bisect_left(self._blocks, segment.address + segment.size)
        blocks = []
        for address in self._blocks[first:last]:
            live = self._live[address]
            size, requested, awaiting = live.size, live.requested, live.awaiting
            blocks.append(SnapshotBlock(address, size, requested, allocated=not awaiting, awaiting=awaiting))
        return replace(segment, blocks=tuple(blocks))
