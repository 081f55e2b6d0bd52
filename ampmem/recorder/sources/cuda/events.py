"""From torch's memory snapshots, one per window, to allocator events without a gap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ampmem.allocator.model.layout import SnapshotSegment
from ampmem.allocator.rounding import round_size
from ampmem.allocator.segments import RESERVING, Extent, SegmentLog, extent_of_call, extents_of, rewound
from ampmem.allocator.settings import Settings
from ampmem.allocator.snapshots.snapshot import ALLOC, FREE_COMPLETED, FREE_REQUESTED, read_segments
from ampmem.events import Action, Column, SegmentColumns
from ampmem.recorder.models.stacks import stack_text
from ampmem.recorder.sources.cuda.device import Snapshot

OOM = "oom"
_LIVES = (ALLOC, FREE_REQUESTED)
_US = 1000


class LiveBlock(NamedTuple):
    """What is alive at an address: asked and set-aside bytes, and the stream it belongs to."""

    requested: int
    size: int
    stream: int


class TraceEntry(NamedTuple):
    """One entry of the trace; ``stack`` is an index into :attr:`Stacks.texts`."""

    action: str
    address: int
    size: int
    stream: int
    time_ns: int
    stack: int


class Level(NamedTuple):
    """The allocator's layers at an instant."""

    requested: int
    allocated: int
    active: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A window's events, as columns; ``lost`` counts the blocks and segments in which trace and final state differ.

    ``awaiting_ns`` and ``awaiting`` say how many requested bytes await other streams from when on. ``peak`` is
    the state with the most requested bytes.
    """

    time_ns: Column
    action: Column
    address: Column
    bytes: Column
    block_bytes: Column
    stream: Column
    allocated: Column
    stack: Column
    awaiting_ns: Column
    awaiting: Column
    peak: Level
    segments: SegmentColumns
    lost: int

    def awaiting_at(self, instant_ns: int) -> int:
        """Requested bytes that await other streams just before ``instant_ns``."""
        return int(self.awaiting[np.searchsorted(self.awaiting_ns, instant_ns, side="left") - 1])


class Stamps:
    """Instants that threads tagged their events with; each holds until the same thread's next."""

    def __init__(self) -> None:
        self._of: dict[int, list[int]] = {}

    def add(self, thread: int, now_ns: int) -> None:
        """What ``thread`` allocates from ``now_ns`` on is tagged so."""
        self._of.setdefault(thread, []).append(now_ns)

    def take(self) -> dict[int, int]:
        """Each instant that is over, with the one after it; the threads' last ones are kept for the next call."""
        over: dict[int, int] = {}
        for instants in list(self._of.values()):
            taken = instants[:]
            over.update(pairwise(taken))
            del instants[: len(taken) - 1]
        return over


class StackTexts:
    """The Python stacks of trace entries, each once."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {"": 0}
        self._known: dict[tuple[int, ...], int] = {}

    def forget(self) -> None:
        """The frames of the last snapshot are gone, and others may have their places in memory."""
        self._known.clear()

    def index(self, frames: Any) -> int:
        """The index of ``frames``, a list as torch gives it; 0 for none."""
        if not frames:
            return 0
        key = tuple(map(id, frames))
        found = self._known.get(key)
        if found is None:
            text = stack_text((frame["filename"], frame["line"], frame["name"]) for frame in frames)
            found = self._known[key] = self.texts.setdefault(text, len(self.texts))
        return found


class History:
    """One device's events, window after window. Tolerates lost entries: the segments say what is alive."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._live: dict[int, LiveBlock] = {}
        self._awaiting: dict[int, LiveBlock] = {}
        self._awaiting_bytes = 0
        self._now = 0
        self._first = True
        self._segments = SegmentLog()
        self.stacks = StackTexts()

    def settle(self, snapshot: Snapshot, device: int, stamps: Mapping[int, int], since_ns: int) -> Settled:
        """The events of ``snapshot``'s trace, in a window that began at ``since_ns``."""
        self.stacks.forget()
        segments = segments_of(snapshot, device)
        traces = snapshot["device_traces"]
        entries = self._entries(traces[device] if device < len(traces) else (), stamps, since_ns)
        final = {
            block.address: LiveBlock(block.requested, block.size, segment.stream)
            for segment in segments
            for block in segment.blocks
            if block.allocated
        }
        writer = _Writer(self._live, self._settings, final, _true_sizes(entries, final))
        start = max(self._now, since_ns)
        held = extents_of(segments)
        lost = self._reconcile_segments(held, entries, start)
        lost += self._reconcile(writer, _rewound(entries, final), start)
        self._forward(writer, entries)
        self._now = max(self._now, entries[-1].time_ns if entries else start)
        lost += writer.agree(self._now)
        lost += self._segments.agree(self._now, writer.count, held)
        self._first = False
        return writer.settled(sum(block.requested for block in final.values()), self._segments.take(), lost)

    def _entries(
        self, trace: Iterable[Mapping[str, Any]], stamps: Mapping[int, int], since_ns: int
    ) -> list[TraceEntry]:
        """Entries on the clock of ``time.time_ns``, in their order.

        torch gives whole microseconds, cut off: an event seems up to 1 µs earlier than it was, so a fact that
        saw it is never earlier than it. Its clock is put on ``time.time_ns``'s by a line through two points,
        which is off by what the system's clock was slewed in between. A thread's stamp is the truth: what
        it tags happened after it, and before that thread's next. The order of the trace is that of the
        allocator's lock, and is kept where several events share an instant: the memory of a free and of the
        alloc that reuses it must not change places.
        """
        entries: list[TraceEntry] = []
        now = max(self._now, since_ns)
        for row in trace:
            when = int(row.get("time_us", 0)) * _US
            stamp = row.get("user_metadata", "")
            if stamp and stamp.isdigit():
                tagged = int(stamp)
                when = max(tagged, min(when, stamps.get(tagged, when + 1) - 1))
            now = max(now, when)
            address, stream = int(row.get("addr", 0)), int(row.get("stream", 0))
            action = str(row["action"])
            stack = self.stacks.index(row.get("frames")) if action == ALLOC else 0  # a free has those of its alloc
            entries.append(TraceEntry(action, address, int(row["size"]), stream, now, stack))
        return entries

    def _reconcile(self, writer: _Writer, before: dict[int, LiveBlock], start_ns: int) -> int:
        """Make what is alive what the trace and the segments say it is at the start; how many blocks that took.

        At first that is the baseline. Later there is a difference only where entries were lost: between a
        snapshot and the clearing of the trace, or because a step had more of them than the trace holds.
        """
        changed = 0
        for address, block in list(self._live.items()):
            there = before.get(address)
            if there is None or there.requested != block.requested:
                writer.free(start_ns, address)
                changed += 1
        for address, block in before.items():
            if address not in self._live:
                writer.birth(Action.BASELINE if self._first else Action.ALLOC, start_ns, address, block, 0)
                changed += not self._first
        return changed

    def _reconcile_segments(self, held: list[Extent], entries: list[TraceEntry], start_ns: int) -> int:
        """The same for segments, which are there before the blocks in them."""
        calls = [(entry.action, _extent(entry)) for entry in entries if entry.action in RESERVING]
        before, _ = rewound(held, calls)
        if self._first:
            self._segments.begin(start_ns, before)
            return 0
        return self._segments.agree(start_ns, 0, before)

    def _forward(self, writer: _Writer, entries: list[TraceEntry]) -> None:
        level = writer.level(self._awaiting_size(), self._segments.held.size)
        writer.note_peak(level)
        writer.note_awaiting(0, self._awaiting_bytes)
        for index, entry in enumerate(entries):
            if entry.action == ALLOC:
                writer.alloc(index, entry)
            elif entry.action == FREE_REQUESTED:
                freed = writer.free(entry.time_ns, entry.address)
                self._await(entry, freed)
                writer.note_awaiting(entry.time_ns, self._awaiting_bytes)
            elif entry.action == FREE_COMPLETED:
                done = self._awaiting.pop(entry.address, None)
                self._awaiting_bytes -= 0 if done is None else done.requested
                writer.note_awaiting(entry.time_ns, self._awaiting_bytes)
            elif entry.action in RESERVING:
                change = self._segments.reserve if RESERVING[entry.action] else self._segments.release
                change(entry.time_ns, writer.count, _extent(entry))
            if entry.action == ALLOC and writer.at_peak():
                writer.note_peak(writer.level(self._awaiting_size(), self._segments.held.size))

    def _await(self, entry: TraceEntry, freed: LiveBlock | None) -> None:
        block = freed or LiveBlock(entry.size, round_size(entry.size, self._settings), entry.stream)
        earlier = self._awaiting.pop(entry.address, None)
        self._awaiting_bytes += block.requested - (0 if earlier is None else earlier.requested)
        self._awaiting[entry.address] = block

    def _awaiting_size(self) -> int:
        return sum(block.size for block in self._awaiting.values())


def segments_of(snapshot: Snapshot, device: int) -> tuple[SnapshotSegment, ...]:
    """The segments of one device."""
    return read_segments(snapshot["segments"], device)


def _extent(entry: TraceEntry) -> Extent:
    return extent_of_call(entry.action, entry.address, entry.size, entry.stream)


def _rewound(entries: list[TraceEntry], final: dict[int, LiveBlock]) -> dict[int, LiveBlock]:
    """What was alive before the first entry: the final state with every entry undone, the newest first."""
    alive = dict(final)
    for entry in reversed(entries):
        if entry.action == ALLOC:
            alive.pop(entry.address, None)
        elif entry.action == FREE_REQUESTED:
            alive[entry.address] = LiveBlock(entry.size, 0, entry.stream)
    return alive


def _true_sizes(entries: list[TraceEntry], final: dict[int, LiveBlock]) -> dict[int, int]:
    """LiveBlock sizes of the allocs, by index, that are alive in the end.

    Of the others the rounded request is the best guess: a block of the large pool may be up to 1 MiB larger.
    """
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if entry.action in _LIVES and entry.address not in seen:
            seen.add(entry.address)
            block = final.get(entry.address)
            if entry.action == ALLOC and block is not None and block.requested == entry.size:
                sizes[index] = block.size
    return sizes


class _Writer:
    """Collects events, and keeps the running totals."""

    def __init__(
        self, live: dict[int, LiveBlock], settings: Settings, final: dict[int, LiveBlock], sizes: dict[int, int]
    ) -> None:
        self._live = live
        self._settings = settings
        self._final = final
        self._sizes = sizes
        self._rows: list[tuple[int, int, int, int, int, int, int]] = []
        self._awaiting: list[tuple[int, int]] = []
        self._requested = sum(block.requested for block in live.values())
        self._allocated = sum(block.size for block in live.values())
        self._peak = Level(0, 0, 0, 0)

    @property
    def count(self) -> int:
        """Events so far."""
        return len(self._rows)

    def alloc(self, index: int, entry: TraceEntry) -> None:
        if entry.address in self._live:  # its free was lost
            self.free(entry.time_ns, entry.address)
        block = LiveBlock(entry.size, self._sizes.get(index, 0), entry.stream)
        self.birth(Action.ALLOC, entry.time_ns, entry.address, block, entry.stack)

    def birth(self, action: Action, time_ns: int, address: int, block: LiveBlock, stack: int) -> None:
        size = block.size or round_size(block.requested, self._settings)
        block = LiveBlock(block.requested, size, block.stream)
        self._live[address] = block
        self._requested += block.requested
        self._allocated += size
        self._rows.append((time_ns, action, address, block.requested, size, block.stream, stack))

    def free(self, time_ns: int, address: int) -> LiveBlock | None:
        block = self._live.pop(address, None)
        if block is not None:
            self._requested -= block.requested
            self._allocated -= block.size
            self._rows.append((time_ns, Action.FREE, address, block.requested, block.size, block.stream, 0))
        return block

    def agree(self, now_ns: int) -> int:
        """Make what is alive what the segments hold; how many blocks that took, sizes apart."""
        changed = 0
        for address, block in list(self._live.items()):
            there = self._final.get(address)
            if there is None or there.requested != block.requested:
                self.free(now_ns, address)
                changed += 1
        for address, block in self._final.items():
            if address not in self._live:
                self.birth(Action.ALLOC, now_ns, address, block, 0)
                changed += 1
        return changed

    def at_peak(self) -> bool:
        return self._requested > self._peak.requested

    def level(self, awaiting: int, reserved: int) -> Level:
        return Level(self._requested, self._allocated, self._allocated + awaiting, reserved)

    def note_peak(self, level: Level) -> None:
        self._peak = level

    def note_awaiting(self, time_ns: int, size: int) -> None:
        self._awaiting.append((time_ns, size))

    def settled(self, final_requested: int, segments: SegmentColumns, lost: int) -> Settled:
        table = np.array(self._rows, dtype=np.int64).reshape(-1, 7)
        time, action, address, size, block, stream, stack = np.ascontiguousarray(table.T)
        delta = np.where(action == Action.FREE, -size, size)
        # Counted back from what the segments hold now, and not on from what was known before: a sum of its own.
        allocated = final_requested - (delta.sum() - np.cumsum(delta))
        since, awaiting = np.array(self._awaiting, dtype=np.int64).reshape(-1, 2).T
        return Settled(
            time_ns=time,
            action=action,
            address=address,
            bytes=size,
            block_bytes=block,
            stream=stream,
            allocated=allocated,
            stack=stack,
            awaiting_ns=since,
            awaiting=awaiting,
            peak=self._peak,
            segments=segments,
            lost=lost,
        )
