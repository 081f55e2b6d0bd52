"""Computes the blocks after a trace of the allocator and, backwards from them, those before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ampmem.allocator.blocks import SnapshotSegment
from ampmem.allocator.segments import RESERVING, Extent, SegmentLog, extent_of_call, rewound
from ampmem.allocator.settings import Settings, round_size
from ampmem.allocator.snapshot import ALLOC, FREE_COMPLETED, FREE_REQUESTED, read_segments
from ampmem.events import Action, Column, SegmentColumns
from ampmem.recorder.sources.cuda.device import Snapshot, Stats
from ampmem.recorder.sources.cuda.trace import (
    IS_ALLOC,
    IS_DONE,
    IS_FREE,
    IS_SEGMENT,
    KINDS,
    NO_BLOCKS,
    Counted,
    MarkCount,
    SeenBlocks,
    StackTexts,
    Trace,
    TraceEntry,
    Uses,
    found_in,
    read_trace,
    timed,
)

_ALLOCATED, _FREE = "active_allocated", "inactive"
"""Torch's states for a block in use and a free block; the other states await other streams."""


class LiveBlock(NamedTuple):
    """A live block at some address: requested bytes, block bytes, and its stream."""

    requested: int
    size: int
    stream: int


class HeldBlocks(NamedTuple):
    """The blocks in use by tensors, and the freed blocks that still await other streams."""

    alive: dict[int, LiveBlock]
    awaiting: dict[int, LiveBlock]

    @classmethod
    def of(cls, snapshot: Snapshot, device: int) -> HeldBlocks:
        """The held blocks of ``device`` in a snapshot."""
        found = cls({}, {})
        for segment in snapshot["segments"]:
            if segment["device"] == device:
                for block in segment["blocks"]:
                    if block["state"] != _FREE:
                        there = found.alive if block["state"] == _ALLOCATED else found.awaiting
                        there[block["address"]] = LiveBlock(block["requested_size"], block["size"], segment["stream"])
        return found

    @property
    def counted(self) -> Counted:
        """The counts that torch has for these blocks."""
        return Counted(len(self.alive), sum(block.requested for blocks in self for block in blocks.values()))

    def same(self, alive: dict[int, LiveBlock], awaiting: dict[int, LiveBlock]) -> bool:
        """Whether these are the same blocks, except for the rounding of their sizes."""
        return all(
            mine.keys() == theirs.keys() and all(theirs[at].requested == block.requested for at, block in mine.items())
            for mine, theirs in zip(self, (alive, awaiting), strict=True)
        )


def extents_in(snapshot: Snapshot, device: int) -> list[Extent]:
    """The segments of ``device`` in a snapshot."""
    return [
        Extent(
            segment["address"],
            segment["total_size"],
            segment["stream"],
            segment["segment_type"] == "small",
            segment.get("is_expandable") is True,
        )
        for segment in snapshot["segments"]
        if segment["device"] == device
    ]


class Chain:
    """The entries of a trace sorted by address: allocs, frees and ends of waits, oldest first.

    ``live`` and ``awaiting`` are the blocks before the trace. :attr:`place` is the index of an entry in the trace,
    :attr:`bytes` the size of its block, which :meth:`size_blocks` fills in.
    """

    def __init__(self, trace: Trace, live: dict[int, LiveBlock], awaiting: dict[int, LiveBlock]) -> None:
        moves = np.flatnonzero((trace.kind >= IS_ALLOC) & (trace.kind <= IS_DONE))
        self.place = moves[np.argsort(trace.address[moves], kind="stable")]
        self.address, self.kind, self.size = (each[self.place] for each in (trace.address, trace.kind, trace.size))
        self._seen = trace.block[self.place]
        changes = self.address[1:] != self.address[:-1]
        some = np.ones(min(1, len(moves)), dtype=bool)
        self._first, self._last = np.concatenate([some, changes]), np.concatenate([changes, some])
        self._live, self._awaiting = live, awaiting
        touched = self.address[self._first].tolist()
        self._before = [live.get(address) or awaiting.get(address) or _NO_BLOCK for address in touched]
        self._kind_before = [IS_ALLOC if at in live else IS_FREE if at in awaiting else IS_DONE for at in touched]
        self.bytes = self._with_known(np.zeros_like(self.size), [block.size for block in self._before])
        self.stream = np.where(self.kind == IS_ALLOC, trace.stream[self.place], 0)
        self.stream = self._handed_on(self._with_known(self.stream, [block.stream for block in self._before]))

    def goes_on(self) -> bool:
        """Whether the entries follow from the blocks before without a gap."""
        kind = self._with_known(np.roll(self.kind, 1), self._kind_before, always=True)
        size = self._with_known(np.roll(self.size, 1), [block.requested for block in self._before], always=True)
        goes_on = (self.kind == _NEXT[kind]) & ((self.kind == IS_ALLOC) | (self.size == size))
        return bool(goes_on.all())

    def after(self) -> HeldBlocks:
        """The blocks after the trace."""
        blocks = HeldBlocks(dict(self._live), dict(self._awaiting))
        last = (self.address, self.kind, self.size, self.bytes, self.stream)
        for address, kind, *block in zip(*(column[self._last].tolist() for column in last), strict=True):
            blocks.alive.pop(address, None)
            blocks.awaiting.pop(address, None)
            if kind != IS_DONE:
                (blocks.alive if kind == IS_ALLOC else blocks.awaiting)[address] = LiveBlock(*block)
        return blocks

    def size_blocks(self, final: HeldBlocks | None, settings: Settings) -> bool:
        """Fill in the sizes of the blocks: from the profiler, or from ``final``.

        For others the rounded request is the best guess: a block of the large pool may be up to 1 MiB larger. Returns
        false if only a ``final`` can tell some size.
        """
        born = self.kind == IS_ALLOC
        later = np.where(self._last, 0, np.roll(self._seen, -1))
        left = np.flatnonzero(self._last & born)
        if final is not None:
            later[left] = [final.alive[address].size for address in self.address[left].tolist()]
        elif not self._seen[left].all():
            return False
        found = np.where(self._seen > 0, self._seen, np.where(later >= self.size, later, 0))
        guessed = np.flatnonzero(born & (found == 0))
        found[guessed] = [round_size(size, settings) for size in self.size[guessed].tolist()]
        self.bytes = self._handed_on(np.where(born, found, self.bytes))
        return True

    def _with_known(self, column: Column, known: list[int], *, always: bool = False) -> NDArray[np.int64]:
        """``column`` with the ``known`` earlier value in each address's first row, unless that is an alloc."""
        column = column.astype(np.int64)
        of_first = np.array(known, dtype=np.int64)
        column[self._first] = np.where(always | (self.kind[self._first] != IS_ALLOC), of_first, column[self._first])
        return column

    def _handed_on(self, column: NDArray[np.int64]) -> NDArray[np.int64]:
        """``column`` with an alloc's value copied to its free, and a free's to the end of its wait."""
        for kind in (IS_FREE, IS_DONE):
            rows = np.flatnonzero((self.kind == kind) & ~self._first)
            column[rows] = column[rows - 1]
        return column


_NO_BLOCK = LiveBlock(0, 0, 0)
_NEXT = np.array([0, IS_FREE, IS_DONE, IS_ALLOC])
"""The kind of entry that follows each kind at one address."""


def rewound_blocks(entries: list[TraceEntry], final: HeldBlocks) -> HeldBlocks:
    """The blocks before the first entry: ``final`` with every entry undone, newest first."""
    before = HeldBlocks(dict(final.alive), dict(final.awaiting))
    for entry in reversed(entries):
        if entry.action == ALLOC:
            before.alive.pop(entry.address, None)
        elif entry.action == FREE_REQUESTED:
            before.awaiting.pop(entry.address, None)
            before.alive[entry.address] = LiveBlock(entry.size, entry.block, entry.stream)
        elif entry.action == FREE_COMPLETED:
            before.awaiting[entry.address] = LiveBlock(entry.size, 0, entry.stream)
    return before


def true_sizes(entries: list[TraceEntry], final: dict[int, LiveBlock]) -> dict[int, int]:
    """Block sizes of the allocs, by index: from the profiler, or from ``final``.

    For others the rounded request is the best guess: a block of the large pool may be up to 1 MiB larger.
    """
    sizes: dict[int, int] = {}
    later: dict[int, int] = {address: block.size for address, block in final.items()}
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if entry.action == FREE_REQUESTED:
            later[entry.address] = entry.block
        elif entry.action == ALLOC:
            known = later.pop(entry.address, 0)
            sizes[index] = entry.block or (known if known >= entry.size else 0)
    return sizes


OOM = "oom"
_SNAPSHOT = "snapshot"


class TraceWindow(NamedTuple):
    """The trace of one step, and the blocks and segments after it."""

    trace: Trace
    held: list[Extent]
    final: HeldBlocks


class Level(NamedTuple):
    """The bytes in the allocator's layers at one time."""

    requested: int
    allocated: int
    active: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The events of a window as columns; ``lost`` counts the blocks and segments in which trace and state differ.

    ``seen`` is the index of an event's block in the profiler's, or -1. ``awaiting_ns`` and ``awaiting`` are times, and
    the requested bytes that await other streams from then on. ``peak`` is the state with the most requested bytes,
    ``allocated_peak`` the most block bytes of live blocks.
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
    allocated_peak: int
    segments: SegmentColumns
    lost: int

    def awaiting_at(self, instant_ns: int) -> int:
        """Requested bytes that await other streams just before ``instant_ns``."""
        return int(self.awaiting[np.searchsorted(self.awaiting_ns, instant_ns, side="left") - 1])


class History:
    """The events of one device, window after window. Tolerates lost entries: the segments show what is alive."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._live: dict[int, LiveBlock] = {}
        self._awaiting: dict[int, LiveBlock] = {}
        self._requested = self._allocated = self._awaiting_bytes = 0
        """Sums over the blocks: requested and block bytes of live ones, requested bytes of others."""
        self._now = 0
        self._first = True
        self._segments = SegmentLog()
        self.stacks = StackTexts()

    def alive(self) -> dict[int, int]:
        """Requested bytes of the blocks that are alive after the last window, by address."""
        return {address: block.requested for address, block in self._live.items()}

    def read(self, snapshot: Snapshot, device: int, again: Callable[[], Snapshot] | None) -> TraceWindow:
        """The trace and final state of ``device`` in ``snapshot``; removes the traces from ``snapshot``.

        Torch copies first the trace and then the segments, each under a lock of its own: events of other threads in
        between are in the segments alone. If the two do not follow from the state before, ``again`` takes another
        snapshot, whose trace has those events. It costs as much as the first, perhaps seconds; ``None`` says that
        nothing happened during the snapshot. There is never more than one trace in memory.
        """
        held, final = extents_in(snapshot, device), HeldBlocks.of(snapshot, device)
        traces = snapshot["device_traces"]
        trace = self._read(traces, device)
        traces.clear()
        if again is not None and not self._follows(trace, final, held):
            whole = _until_snapshot(again()["device_traces"], device, len(trace))
            trace = trace if whole is None else self._read(whole, device)
        return TraceWindow(trace, held, final)

    def settle(
        self,
        window: TraceWindow,
        *,
        stamps: Mapping[int, int],
        since_ns: int,
        until_ns: int,
        seen: SeenBlocks = NO_BLOCKS,
        marks: Sequence[MarkCount] = (),
    ) -> Settled:
        """The events of ``window``, which lasted from ``since_ns`` to ``until_ns``."""
        trace = window.trace
        _add_blocks(trace, seen)
        start = max(self._now, since_ns)
        span = (start, max(start, until_ns))
        trace.time_ns = timed(trace, stamps, seen, marks, span=span, final=window.final.counted)
        return self._settle(window, start)

    def settle_tracked(self, window: TraceWindow, *, since_ns: int, until_ns: int) -> Settled:
        """The events of ``window``, whose entries have their times and blocks already."""
        return self._settle(window, self._clamp(window.trace, since_ns, until_ns))

    def follow(self, trace: Trace, *, since_ns: int, until_ns: int, counted: Stats | None) -> Settled | None:
        """The events of ``trace``, as :meth:`settle_tracked` gives them, without a look at the segments.

        ``None`` if that is necessary: in the first window, if the trace does not lead from the known state to what the
        allocator has ``counted``, or if only the segments tell the size of some block.
        """
        if self._first:
            return None
        start = self._clamp(trace, since_ns, until_ns)
        rows = self._followed(trace, None, counted)
        if rows is None:
            return None
        self._now = max(start, int(trace.time_ns[-1])) if len(trace) else start
        return rows.settled(self._requested, self._segments.take(), 0)

    @property
    def extents(self) -> Iterable[Extent]:
        """The segments after the last window."""
        return self._segments.held

    def _clamp(self, trace: Trace, since_ns: int, until_ns: int) -> int:
        """Keep the times of ``trace`` in order and in the window, whatever the system clock did; returns its start."""
        start = max(self._now, since_ns)
        trace.time_ns = np.maximum.accumulate(np.clip(trace.time_ns, start, max(start, until_ns)))
        return start

    def _settle(self, window: TraceWindow, start: int) -> Settled:
        trace, held, final = window
        lost = self._reconcile_segments(held, trace, start)
        self._now = max(start, int(trace.time_ns[-1])) if len(trace) else start
        rows = None if self._first else self._followed(trace, final, None)
        if rows is None:
            entries = trace.entries()
            writer = _Writer(self._live, self._settings, final.alive, true_sizes(entries, final.alive))
            before = rewound_blocks(entries, final)
            self._await_again(before.awaiting)
            lost += self._reconcile(writer, before.alive, start)
            self._forward(writer, entries)
            lost += writer.agree(self._now)
            rows = writer.rows()
            self._requested = sum(block.requested for block in self._live.values())
            self._allocated = sum(block.size for block in self._live.values())
        lost += self._segments.agree(self._now, rows.table.shape[1], held)
        self._first = False
        return rows.settled(self._requested, self._segments.take(), lost)

    def _read(self, traces: Sequence[Any], device: int) -> Trace:
        self.stacks.forget()
        return read_trace(traces[device] if device < len(traces) else (), self.stacks)

    def _follows(self, trace: Trace, final: HeldBlocks, held: list[Extent]) -> bool:
        """Whether the state before ``trace``, computed backwards, is the known one; false for the first window."""
        before = rewound_blocks(trace.entries(), final)
        reserved = sum(extent.size for extent in _before(held, trace))
        return not self._first and reserved == self._segments.held.size and before.same(self._live, self._awaiting)

    def _await_again(self, before: dict[int, LiveBlock]) -> None:
        """Note the blocks that awaited other streams at the start. The end of a wait may be among the lost entries."""
        known = self._awaiting
        self._awaiting = {}
        for address, block in before.items():
            there = known.get(address)
            if there is None or there.requested != block.requested:
                there = block._replace(size=block.size or round_size(block.requested, self._settings))
            self._awaiting[address] = there
        self._awaiting_bytes = sum(block.requested for block in self._awaiting.values())

    def _reconcile(self, writer: _Writer, before: dict[int, LiveBlock], start_ns: int) -> int:
        """Make the known blocks equal those that trace and segments show at the start; returns how many differed.

        In the first window they are the baseline. Later they differ only if entries were lost: between a snapshot and
        the clearing of the trace, or because a step had more entries than the trace holds.
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

    def _reconcile_segments(self, held: list[Extent], trace: Trace, start_ns: int) -> int:
        """Make the known segments equal those at the start, before the blocks in them; returns how many differed."""
        before = _before(held, trace)
        if self._first:
            self._segments.begin(start_ns, before)
            return 0
        return self._segments.agree(start_ns, 0, before)

    def _followed(self, trace: Trace, final: HeldBlocks | None, counted: Stats | None) -> _Rows | None:
        """The rows of a ``trace`` that leads without a gap from the known state to ``final``, or to what was counted.

        ``None`` if it does not. Without both any end is right.
        """
        chain = Chain(trace, self._live, self._awaiting)
        if not chain.goes_on() or not (final is None or final.same(*chain.after())):
            return None
        if not chain.size_blocks(final, self._settings):
            return None
        in_order = np.argsort(chain.place)
        place, kind, size = chain.place[in_order], chain.kind[in_order], chain.size[in_order]
        block, stream = chain.bytes[in_order], chain.stream[in_order]
        is_row, time = kind != IS_DONE, trace.time_ns[place]
        count = np.cumsum(is_row)
        # Bytes before the first entry, and after each.
        sign, waiting = _SIGN[kind], _WAITING[kind]
        requested = _sums(self._requested, sign * size)
        allocated = _sums(self._allocated, sign * block)
        awaiting = _sums(self._awaiting_bytes, waiting * size)
        if counted is not None and (
            counted.blocks != len(self._live) + int(sign.sum())
            or counted.requested != int(requested[-1] + awaiting[-1])
            or counted.reserved != self._segments.held.size + _reserved_by(trace)
        ):
            return None
        active = allocated + _sums(self._awaiting_size(), waiting * block)
        reserved_after, reserved = [-1], [self._segments.held.size]
        for at, word, extent in _segment_calls(trace):
            change = self._segments.reserve if RESERVING[word] else self._segments.release
            known = int(np.searchsorted(place, at))
            change(int(trace.time_ns[at]), int(count[known - 1]) if known else 0, extent)
            reserved_after.append(at)
            reserved.append(self._segments.held.size)
        peak = int(np.argmax(np.where(np.concatenate([[True], kind == IS_ALLOC]), requested, -1)))
        at_peak = bisect_right(reserved_after, int(place[peak - 1])) - 1 if peak else 0
        most = int(allocated.max())
        level = Level(int(requested[peak]), int(allocated[peak]), int(active[peak]), reserved[at_peak])
        self._live, self._awaiting = chain.after()
        self._requested, self._allocated = int(requested[-1]), int(allocated[-1])
        self._awaiting_bytes = int(awaiting[-1])
        action = np.where(kind == IS_ALLOC, int(Action.ALLOC), int(Action.FREE))
        columns = (time, action, chain.address[in_order], size, block, stream, trace.stack[place], trace.seen[place])
        changed = np.concatenate([[True], waiting != 0])
        since = np.concatenate([[0], time])
        return _Rows(np.stack(columns)[:, is_row], np.stack([since, awaiting], axis=1)[changed], level, most)

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
                extent = extent_of_call(entry.action, entry.address, entry.size, entry.stream)
                change(entry.time_ns, writer.count, extent)
            if entry.action == ALLOC and writer.at_peak():
                writer.note_peak(writer.level(self._awaiting_size(), self._segments.held.size))

    def _await(self, entry: TraceEntry, freed: LiveBlock | None) -> None:
        block = freed or LiveBlock(entry.size, round_size(entry.size, self._settings), entry.stream)
        earlier = self._awaiting.pop(entry.address, None)
        self._awaiting_bytes += block.requested - (0 if earlier is None else earlier.requested)
        self._awaiting[entry.address] = block

    def _awaiting_size(self) -> int:
        return sum(block.size for block in self._awaiting.values())


def device_segments(snapshot: Snapshot, device: int) -> tuple[SnapshotSegment, ...]:
    """The segments of one device, in the form of the recording."""
    return read_segments(snapshot["segments"], device)


_SIGN, _WAITING = np.zeros(len(KINDS), dtype=np.int64), np.zeros(len(KINDS), dtype=np.int64)
_SIGN[[IS_ALLOC, IS_FREE]] = 1, -1
_WAITING[[IS_FREE, IS_DONE]] = 1, -1
"""Change by each kind of entry of the bytes in use, and of the bytes that await other streams."""


def _sums(start: int, changes: Column) -> Column:
    """``start``, and the running total after each of ``changes``."""
    return np.cumsum(np.concatenate([[start], changes]))


def _segment_calls(trace: Trace) -> Iterator[tuple[int, str, Extent]]:
    """(index, action, segment or pages) of each entry about a segment."""
    for at in np.flatnonzero(trace.kind >= IS_SEGMENT).tolist():
        action = KINDS[int(trace.kind[at])]
        yield at, action, extent_of_call(action, int(trace.address[at]), int(trace.size[at]), int(trace.stream[at]))


def _reserved_by(trace: Trace) -> int:
    """The bytes that the entries of ``trace`` reserve, less those that they return."""
    return sum(extent.size if RESERVING[action] else -extent.size for _, action, extent in _segment_calls(trace))


def _before(held: list[Extent], trace: Trace) -> list[Extent]:
    """The segments before ``trace``, which led to ``held``."""
    return rewound(held, [(action, extent) for _, action, extent in _segment_calls(trace)])[0]


def _until_snapshot(traces: Sequence[Any], device: int, count: int) -> Sequence[Any] | None:
    """The later ``traces`` up to the point at which the snapshot before them read the segments.

    ``None`` if they have lost that point, or any of the ``count`` entries of that snapshot.
    """
    trace = traces[device] if device < len(traces) else ()
    places = [index for index, row in enumerate(trace) if row["action"] == _SNAPSHOT and index >= count]
    return [*traces[:device], trace[: places[-1]]] if places else None


def _add_blocks(trace: Trace, seen: SeenBlocks) -> None:
    """Write into ``trace`` what the profiler saw of its blocks."""
    uses = np.flatnonzero((trace.kind == IS_ALLOC) | (trace.kind == IS_FREE))
    freed = trace.kind[uses] == IS_FREE
    entries, which = found_in(Uses(uses, trace.address[uses], trace.size[uses], freed), seen)
    trace.block[entries], trace.seen[entries] = np.abs(seen.bytes[which]), which


class _Rows(NamedTuple):
    """Events of a window, with the columns of :class:`Settled` as rows, and the requested bytes that await streams."""

    table: NDArray[np.int64]
    awaiting: NDArray[np.int64]
    peak: Level
    allocated_peak: int

    def settled(self, final_requested: int, segments: SegmentColumns, lost: int) -> Settled:
        """The columns of :class:`Settled`; ``final_requested`` are the bytes alive at the end, by the segments."""
        time, action, address, size, block, stream, stack, seen = self.table
        delta = np.where(action == Action.FREE, -size, size)
        # Counted backwards from the segments, so that errors of earlier windows do not add up.
        allocated = final_requested - (delta.sum() - np.cumsum(delta))
        since, awaiting = np.ascontiguousarray(self.awaiting.T)
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
            peak=self.peak,
            allocated_peak=self.allocated_peak,
            segments=segments,
            lost=lost,
        )


class _Writer:
    """Collects the events of a trace with gaps, and keeps the running totals."""

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
        self._allocated = self._most = sum(block.size for block in live.values())
        self._peak = Level(0, 0, 0, 0)

    @property
    def count(self) -> int:
        """Number of events so far."""
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
        self._most = max(self._most, self._allocated)
        self._rows.append((time_ns, action, address, block.requested, size, block.stream, stack, seen))

    def free(self, time_ns: int, address: int, seen: int = -1) -> LiveBlock | None:
        block = self._live.pop(address, None)
        if block is not None:
            self._requested -= block.requested
            self._allocated -= block.size
            self._rows.append((time_ns, Action.FREE, address, block.requested, block.size, block.stream, 0, seen))
        return block

    def agree(self, now_ns: int) -> int:
        """Make the live blocks equal those in the segments; returns how many differed, sizes aside."""
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

    def rows(self) -> _Rows:
        """All events as rows."""
        awaiting = np.array(self._awaiting, dtype=np.int64).reshape(-1, 2)
        table = np.ascontiguousarray(np.array(self._rows, dtype=np.int64).reshape(-1, 8).T)
        return _Rows(table, awaiting, self._peak, self._most)
