"""From torch's memory snapshots, one per window, to allocator events without a gap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ampmem.allocator.blocks import SnapshotSegment
from ampmem.allocator.segments import RESERVING, Extent, SegmentLog, extent_of_call, extents_of, rewound
from ampmem.allocator.settings import Settings, round_size
from ampmem.allocator.snapshot import ALLOC, FREE_COMPLETED, FREE_REQUESTED, read_segments
from ampmem.events import Action, Column, SegmentColumns
from ampmem.recorder.sources.cuda.blocks import NO_BLOCKS, SeenBlocks, Use, found_in
from ampmem.recorder.sources.cuda.device import Snapshot
from ampmem.recorder.sources.cuda.states import Blocks, LiveBlock, rewound_blocks, true_sizes
from ampmem.recorder.sources.cuda.trace import MarkCount, StackTexts, TraceEntry, read_trace, timed

OOM = "oom"
_SNAPSHOT = "snapshot"


class Window(NamedTuple):
    """One step's trace, with the instants that its entries are tagged with, and what there is after it."""

    entries: list[TraceEntry]
    tags: list[int]
    held: list[Extent]
    final: Blocks


class Level(NamedTuple):
    """The allocator's layers at an instant."""

    requested: int
    allocated: int
    active: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A window's events, as columns; ``lost`` counts the blocks and segments in which trace and final state differ.

    ``seen`` says which of the profiler's blocks an event is, or -1. ``awaiting_ns`` and ``awaiting`` say how many
    requested bytes await other streams from when on. ``peak`` is the state with the most requested bytes.
    """

    time_ns: Column
    action: Column
    address: Column
    bytes: Column
    block_bytes: Column
    stream: Column
    allocated: Column
    stack: Column
    seen: Column
    awaiting_ns: Column
    awaiting: Column
    peak: Level
    segments: SegmentColumns
    lost: int

    def awaiting_at(self, instant_ns: int) -> int:
        """Requested bytes that await other streams just before ``instant_ns``."""
        return int(self.awaiting[np.searchsorted(self.awaiting_ns, instant_ns, side="left") - 1])


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

    def read(self, snapshot: Snapshot, device: int, again: Callable[[], Snapshot] | None) -> Window:
        """What ``snapshot`` has of ``device``, before the trace is emptied. Takes the traces out of ``snapshot``.

        torch reads the trace first and then the segments, each under a lock of its own: what other threads did in
        between is in the segments alone. Where the two do not follow from what was known, ``again`` takes another
        snapshot, whose trace says what that was. It costs as much as the first one, which may be seconds: ``None``
        says that nothing happened while the snapshot was taken. There is never more than one trace in memory.
        """
        segments = segments_of(snapshot, device)
        held, final = extents_of(segments), Blocks.of(segments)
        traces = snapshot["device_traces"]
        entries, tags = self._read(traces, device)
        traces.clear()
        if again is not None and not self._follows(entries, final, held):
            whole = _until_snapshot(again()["device_traces"], device, len(entries))
            entries, tags = (entries, tags) if whole is None else self._read(whole, device)
        return Window(entries, tags, held, final)

    def settle(
        self,
        window: Window,
        *,
        stamps: Mapping[int, int],
        since_ns: int,
        until_ns: int,
        seen: SeenBlocks = NO_BLOCKS,
        marks: Sequence[MarkCount] = (),
    ) -> Settled:
        """The events of ``window``, which was from ``since_ns`` to ``until_ns``."""
        entries, tags, held, final = window
        entries = _with_blocks(entries, seen)
        start = max(self._now, since_ns)
        span = (start, max(start, until_ns))
        entries = timed(entries, tags, stamps, seen, marks, span=span, final=final.counted)
        before = rewound_blocks(entries, final)
        self._await_again(before.awaiting)
        writer = _Writer(self._live, self._settings, final.alive, true_sizes(entries, final.alive))
        lost = self._reconcile_segments(held, entries, start)
        lost += self._reconcile(writer, before.alive, start)
        self._forward(writer, entries)
        self._now = max(start, entries[-1].time_ns) if entries else start
        lost += writer.agree(self._now)
        lost += self._segments.agree(self._now, writer.count, held)
        self._first = False
        return writer.settled(sum(block.requested for block in final.alive.values()), self._segments.take(), lost)

    def _read(self, traces: Sequence[Any], device: int) -> tuple[list[TraceEntry], list[int]]:
        self.stacks.forget()
        return read_trace(traces[device] if device < len(traces) else (), self.stacks)

    def _follows(self, entries: list[TraceEntry], final: Blocks, held: list[Extent]) -> bool:
        """Whether what there was before ``entries``, by where they led, is what is known. At first nothing is."""
        before = rewound_blocks(entries, final)
        reserved = sum(extent.size for extent in _before(held, entries))
        return not self._first and reserved == self._segments.held.size and before.same(self._live, self._awaiting)

    def _await_again(self, before: dict[int, LiveBlock]) -> None:
        """What awaited other streams at the start. torch may have lost when a wait was over, as any entry."""
        known = self._awaiting
        self._awaiting = {}
        for address, block in before.items():
            there = known.get(address)
            if there is None or there.requested != block.requested:
                there = block._replace(size=block.size or round_size(block.requested, self._settings))
            self._awaiting[address] = there
        self._awaiting_bytes = sum(block.requested for block in self._awaiting.values())

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
        before = _before(held, entries)
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
                freed = writer.free(entry.time_ns, entry.address, entry.seen)
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


def _before(held: list[Extent], entries: list[TraceEntry]) -> list[Extent]:
    """The segments that were there before ``entries``."""
    calls = [(entry.action, _extent(entry)) for entry in entries if entry.action in RESERVING]
    return rewound(held, calls)[0]


def _until_snapshot(traces: Sequence[Any], device: int, count: int) -> Sequence[Any] | None:
    """The later ``traces`` up to where the snapshot before them read the segments.

    ``None`` where they have lost that, or the ``count`` entries which that snapshot had.
    """
    trace = traces[device] if device < len(traces) else ()
    places = [index for index, row in enumerate(trace) if row["action"] == _SNAPSHOT and index >= count]
    return [*traces[:device], trace[: places[-1]]] if places else None


def _with_blocks(entries: list[TraceEntry], seen: SeenBlocks) -> list[TraceEntry]:
    """``entries`` with what the profiler saw of them."""
    uses = [
        Use(index, entry.address, entry.size, entry.action != ALLOC)
        for index, entry in enumerate(entries)
        if entry.action in (ALLOC, FREE_REQUESTED)
    ]
    sizes = seen.bytes.tolist()
    for index, which in found_in(uses, seen):
        entry = entries[index]
        entry.block, entry.seen = abs(sizes[which]), which
    return entries


class _Writer:
    """Collects events, and keeps the running totals."""

    def __init__(
        self, live: dict[int, LiveBlock], settings: Settings, final: dict[int, LiveBlock], sizes: dict[int, int]
    ) -> None:
        self._live = live
        self._settings = settings
        self._final = final
        self._sizes = sizes
        self._rows: list[tuple[int, ...]] = []
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
        self.birth(Action.ALLOC, entry.time_ns, entry.address, block, entry.stack, entry.seen)

    def birth(self, action: Action, time_ns: int, address: int, block: LiveBlock, stack: int, seen: int = -1) -> None:
        size = block.size or round_size(block.requested, self._settings)
        block = LiveBlock(block.requested, size, block.stream)
        self._live[address] = block
        self._requested += block.requested
        self._allocated += size
        self._rows.append((time_ns, action, address, block.requested, size, block.stream, stack, seen))

    def free(self, time_ns: int, address: int, seen: int = -1) -> LiveBlock | None:
        block = self._live.pop(address, None)
        if block is not None:
            self._requested -= block.requested
            self._allocated -= block.size
            self._rows.append((time_ns, Action.FREE, address, block.requested, block.size, block.stream, 0, seen))
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
        table = np.array(self._rows, dtype=np.int64).reshape(-1, 8)
        time, action, address, size, block, stream, stack, seen = np.ascontiguousarray(table.T)
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
            seen=seen,
            awaiting_ns=since,
            awaiting=awaiting,
            peak=self._peak,
            segments=segments,
            lost=lost,
        )
