"""A recording as a memory snapshot, for PyTorch's own viewer (https://pytorch.org/memory_viz).

The ``user_metadata`` of every event has ampmem's category and name; ``category`` has the category, which the viewer
colours by. The ``user_metadata`` of the first entry, a marker, has the whole recording as text: ``ampmem import`` reads
from it what PyTorch's format has no place for (steps, phases, facts, names, layers). A recording without segments, such
as one of CPU memory, gets them here: contiguous stretches of memory that have blocks.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampmem.allocator.segments import Extent
from ampmem.analysis.analyse import Analysis
from ampmem.analysis.layers import SegmentMap, address_map, pieces_of
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.events import Action, Column, SegmentAction
from ampmem.output import open_output
from ampmem.recording import pack

Item: TypeAlias = "bool | int | str | tuple[Item, ...] | Iterable[Item] | Mapping[str, Item] | Once"

_BATCH: Final = 1000
"""Items per pickle opcode: the viewer passes them as the arguments of one call."""


class Once:
    """A value that is written once, where it is first met, and referred to afterwards."""

    def __init__(self, value: Item) -> None:
        self.value = value


class PickleWriter:
    """Writes one pickle of protocol 4 to ``stream``."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._memo: dict[str | int, bytes] = {}
        """The references to values already written: to texts by themselves, to other values by id."""
        self._kept: list[Once] = []
        stream.write(b"\x80\x04")

    def end(self) -> None:
        """Finish the pickle; exactly one value must have been written."""
        self._stream.write(b".")

    def mapping(self, items: Iterable[tuple[str, Iterable[Item]]]) -> None:
        """Write a dict of lists, taking the lists' items one by one."""
        self._stream.write(b"}(")
        for key, values in items:
            self.value(key)
            self.items(values)
        self._stream.write(b"u")

    def items(self, values: Iterable[Item]) -> None:
        """Write a list, taking its items one by one."""
        write = self._stream.write
        write(b"]")
        rest = iter(values)
        while batch := list(islice(rest, _BATCH)):
            write(b"(")
            for value in batch:
                self.value(value)
            write(b"e")

    def value(self, value: Item) -> None:
        """Write one value small enough to be in memory as a whole."""
        if isinstance(value, str):
            self._text(value)
        elif isinstance(value, bool):
            self._stream.write(b"\x88" if value else b"\x89")
        elif isinstance(value, int):
            self._integer(value)
        elif isinstance(value, Once):
            self._once(value)
        elif isinstance(value, Mapping):
            self._dict(value)
        elif isinstance(value, tuple):
            self._stream.write(b"(")
            for item in value:
                self.value(item)
            self._stream.write(b"t")
        else:
            self.items(value)

    def _integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._stream.write(struct.pack("<BB", ord("K"), value))
        elif -(1 << 31) <= value < 1 << 31:
            self._stream.write(struct.pack("<Bi", ord("J"), value))
        else:
            # The viewer reads integers of at most eight bytes, which is enough for addresses and times.
            raw = value.to_bytes(8, "little", signed=True)
            self._stream.write(struct.pack("<BB", 0x8A, len(raw)) + raw)

    def _text(self, text: str) -> None:
        known = self._memo.get(text)
        if known is not None:
            self._stream.write(known)
            return
        raw = text.encode("utf-8", "replace")
        self._stream.write(struct.pack("<BI", ord("X"), len(raw)) + raw)
        self._memoize(text)

    def _once(self, once: Once) -> None:
        known = self._memo.get(id(once))
        if known is not None:
            self._stream.write(known)
            return
        self.value(once.value)
        self._memoize(id(once))
        self._kept.append(once)  # keeps it alive, or another object could get its id

    def _memoize(self, key: str | int) -> None:
        """Memoize the value written last, to be referred to by ``key``."""
        place = len(self._memo)
        short = place < 1 << 8
        self._memo[key] = struct.pack("<BB", ord("h"), place) if short else struct.pack("<BI", ord("j"), place)
        self._stream.write(b"\x94")

    def _dict(self, items: Mapping[str, Item]) -> None:
        self._stream.write(b"}(")
        for key, value in items.items():
            self.value(key)
            self.value(value)
        self._stream.write(b"u")


_UNKNOWN: Final = "unknown"
"""The viewer's category for events without one; it fails unless some event has this category."""

_LINE: Final = re.compile(r"^(.*):(\d{1,9}) (.*)$", re.DOTALL | re.ASCII)
_US: Final = 1000


def write_snapshot(analysis: Analysis, path: Path, *, force: bool = False) -> None:
    """Write a snapshot; ``force`` replaces a file. Raises :class:`~ampmem.errors.UsageError` if it is not writable."""
    with open_output(path, force=force) as stream:
        writer = PickleWriter(stream.buffer)
        frames = _Frames(analysis)
        writer.mapping(
            [
                ("segments", _segments(analysis, frames)),
                ("device_traces", [_trace(analysis, frames)]),
                ("external_annotations", _annotations(analysis)),
            ]
        )
        writer.end()
        stream.buffer.flush()


def _words(analysis: Analysis, allocation: int) -> str:
    """An allocation in words: ``parameters: h.0.weight``, ``temporaries in h.0``, or only its category."""
    classes, lives, texts = analysis.classes, analysis.lifetimes, analysis.recording.texts
    category, name = str(CATEGORIES[classes.category[allocation]]), texts[classes.name[allocation]]
    module = texts[lives.module[allocation]] or texts[classes.module[allocation]]
    if name:
        return f"{category}: {name}"
    return f"{category} in {module}" if module else category


class _Frames:
    """The frames of each stack, innermost first: the op, as PyTorch's C++ frames are, then the script's own.

    All allocations of autograd's engine have the same line of the script; the node distinguishes them. Each frame is
    written once.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._texts = analysis.recording.texts
        self.of = cache(self._of)
        self._frame = cache(lambda filename, line, name: Once({"name": name, "filename": filename, "line": int(line)}))

    def _of(self, stack: int, op: int) -> Once:
        lines = [line for line in self._texts[stack].split("\n") if line]
        native = [self._frame("??", "0", self._texts[op])] if self._texts[op] else []
        matches = ((line, _LINE.match(line)) for line in reversed(lines))
        parsed = [(line, "0", "") if match is None else match.groups() for line, match in matches]
        return Once([*native, *(self._frame(*frame) for frame in parsed)])


def _trace(analysis: Analysis, frames: _Frames) -> Iterator[Item]:
    """The events; memory alive before the recording becomes a segment and an alloc at the start."""
    events, lives, times = analysis.recording.events, analysis.lifetimes, analysis.timeline.time_ns
    calls = _calls(analysis)
    if len(events):
        # A marker, of which viewers show only the word; ampmem import reads the recording from it.
        marker: dict[str, Item] = {"category": _UNKNOWN, "user_metadata": pack(analysis.recording)}
        yield _entry("snapshot", 0, 0, 0, int(times[0])) | marker
    owner = lives.owners(len(events))
    names, other = [str(category) for category in CATEGORIES], str(Category.OTHER)
    for index in range(len(events)):
        yield from calls(index)
        allocation = int(owner[index])
        category = names[analysis.classes.category[allocation]]
        about: dict[str, Item] = {
            "compile_context": "N/A",
            "user_metadata": _words(analysis, allocation),
            "category": _UNKNOWN if category == other else category,
            "frames": frames.of(int(events.stack[index]), int(events.op[index])),
        }
        born = events.action[index] != Action.FREE
        for action in ("alloc",) if born else ("free_requested", "free_completed"):
            address, size = int(lives.address[allocation]), int(lives.bytes[allocation])
            yield _entry(action, address, size, int(events.stream[index]), int(times[index])) | about
    yield from calls(len(events))


def _calls(analysis: Analysis) -> Callable[[int], Iterator[Item]]:
    """A function that gives, for the index of an event, the segment entries before it that it has not given yet."""
    segments = analysis.recording.segments
    rows = iter(zip(*(getattr(segments, name).tolist() for name in segments.names()), strict=True))
    waiting = next(rows, None)

    def until(index: int) -> Iterator[Item]:
        nonlocal waiting
        while waiting is not None and waiting[1] <= index:
            time_ns, _, action, address, size, stream, _, expandable = waiting
            word = _CALLS[bool(expandable), action == SegmentAction.RELEASE]
            yield _entry(word, address, size, stream, time_ns) | {"category": _UNKNOWN}
            waiting = next(rows, None)

    return until


_CALLS: Final = {
    (False, False): "segment_alloc",
    (False, True): "segment_free",
    (True, False): "segment_map",
    (True, True): "segment_unmap",
}


def _entry(action: str, address: int, size: int, stream: int, time_ns: int) -> dict[str, Item]:
    place: dict[str, Item] = {"action": action, "addr": address, "size": size, "stream": stream}
    return {**place, "time_us": time_ns // _US, "frames": []}


def _segments(analysis: Analysis, frames: _Frames) -> Iterator[Item]:
    """The segments at the end, or the stretches of memory that ever had blocks, each with its blocks at the end."""
    if len(analysis.recording.segments):
        for each in address_map(analysis, None):
            yield _segment(analysis, frames, each)
        return
    lives = analysis.lifetimes
    starts, ends = _stretches(lives.address, lives.address + np.maximum(lives.block_bytes, lives.bytes))
    alive = np.flatnonzero(lives.died == ALIVE)
    alive = alive[np.argsort(lives.address[alive], kind="stable")]
    bounds = [*np.searchsorted(lives.address[alive], starts).tolist(), len(alive)]
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        inside = alive[bounds[number] : bounds[number + 1]].tolist()
        stream = int(analysis.recording.events.stream[lives.born[inside[0]]]) if inside else 0
        extent = Extent(start, end - start, stream, small=False, expandable=False)
        yield _segment(analysis, frames, SegmentMap(extent=extent, pieces=tuple(pieces_of(analysis, extent, inside))))


def _stretches(begin: Column, end: Column) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The union of the intervals, as sorted intervals that do not touch."""
    if not len(begin):
        return begin, end
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    first = np.append(True, begin[1:] > reach[:-1])
    return begin[first], reach[np.append(np.flatnonzero(first)[1:] - 1, len(begin) - 1)]


def _segment(analysis: Analysis, frames: _Frames, segment: SegmentMap) -> Item:
    lives, extent = analysis.lifetimes, segment.extent
    blocks: list[Item] = []
    used = requested = 0
    for piece in segment.pieces:
        block: dict[str, Item] = {"address": piece.address, "size": piece.bytes}
        if piece.allocation is None:
            blocks.append(block | {"requested_size": 0, "state": "inactive", "frames": []})
            continue
        asked = min(int(lives.bytes[piece.allocation]), piece.bytes)
        used, requested = used + piece.bytes, requested + asked
        calls = frames.of(int(lives.stack[piece.allocation]), int(lives.op[piece.allocation]))
        block |= {"requested_size": asked, "state": "active_allocated", "frames": calls}
        blocks.append(block | {"user_metadata": _words(analysis, piece.allocation)})
    return {
        "device": 0,
        "address": extent.address,
        "total_size": extent.size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": requested,
        "stream": extent.stream,
        "segment_type": "small" if extent.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": extent.expandable,
        "frames": [],
        "blocks": blocks,
    }


def _annotations(analysis: Analysis) -> Iterator[Item]:
    """The steps as annotations, as the profiler writes its spans."""
    for step in analysis.recording.steps:
        for stage, time_ns in (("START", step.start_ns), ("END", step.end_ns)):
            yield {"stage": stage, "name": f"step {step.index}", "device": 0, "time_us": time_ns // _US}
