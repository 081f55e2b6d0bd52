"""Computes the blocks after a trace of the allocator and, backwards from them, those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampmem.allocator.segments import RESERVING, Extent, SegmentLog, extent_of_call, rewound
from ampmem.allocator.settings import Settings, round_size
from ampmem.allocator.snapshot import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from ampmem.events import Action, Column, SegmentColumns
from ampmem.recorder.sources.base import RawEvents
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


BlockTable: TypeAlias = NDArray[np.int64]
"""A column per block, sorted by address: the kind of the last entry about it, and the rows named below.

The kind is ``IS_ALLOC``, or ``IS_FREE`` for a block that awaits other streams.
"""
_KIND, _ADDRESS, _REQUESTED, _SIZE, _STREAM = range(5)
_COLUMNS = 5


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

    @classmethod
    def in_table(cls, table: BlockTable) -> HeldBlocks:
        """The blocks of a table."""
        found = cls({}, {})
        for kind, address, *block in table.T.tolist():
            (found.alive if kind == IS_ALLOC else found.awaiting)[address] = LiveBlock(*block)
        return found

    @property
    def table(self) -> BlockTable:
        """The blocks as a table."""
        awaiting = {address: (IS_FREE, address, *block) for address, block in self.awaiting.items()}
        both = awaiting | {address: (IS_ALLOC, address, *block) for address, block in self.alive.items()}
        rows = np.array([both[address] for address in sorted(both)], dtype=np.int64).reshape(-1, _COLUMNS)
        return np.ascontiguousarray(rows.T)

    @property
    def counted(self) -> Counted:
        """The counts that torch has for these blocks."""
        return Counted(len(self.alive), sum(block.requested for blocks in self for block in blocks.values()))


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
    """The blocks ``before`` a trace, and its allocs, frees and ends of waits: by address, and there oldest first.

    :attr:`place` is the index of each entry in the trace, :attr:`entries` has their columns in the order of the trace.
    The sizes and streams of their blocks are right once :meth:`follow_blocks` has been called.
    """

    def __init__(self, trace: Trace, before: BlockTable) -> None:
        self.place = np.flatnonzero((trace.kind >= IS_ALLOC) & (trace.kind <= IS_DONE))
        columns = np.array([trace.kind, trace.address, trace.size, trace.block, trace.stream])
        if len(self.place) < len(trace):
            columns = columns.take(self.place, axis=1)
        self._rows = np.concatenate([before, columns], axis=1)
        self.entries = self._rows[:, before.shape[1] :]
        # Stable: what is at one address stays in the order of the trace.
        self._order = np.argsort(self._rows[_ADDRESS], kind="stable")
        self._kind, address, self._size, _, _ = self._sorted = self._rows.take(self._order, axis=1)
        self._same = address[1:] == address[:-1]
        """Whether the next row is at the same address, for each row but the last."""
        self._born = (self._kind == IS_ALLOC) | (self._order < before.shape[1])
        """Whether a row begins the life of a block: it is an alloc, or a block from before the trace."""

    def goes_on(self) -> bool:
        """Whether the entries follow from the blocks before without a gap."""
        kind, size = self._kind, self._size
        # At each address an alloc, a free, the end of its wait and the next alloc follow each other. Anything else is a
        # gap.
        follows = (kind[1:] == _NEXT[kind[:-1]]) & ((kind[1:] == IS_ALLOC) | (size[1:] == size[:-1]))
        return bool(self._born[:1].all() and np.where(self._same, follows, self._born[1:]).all())

    def follow_blocks(self, final: HeldBlocks | None, settings: Settings) -> BlockTable | None:
        """Give each entry the size and the stream of its block; returns the blocks after the trace.

        ``None`` if they are not those of ``final``, or if only a ``final`` can tell the size of some block.
        """
        # A block is there after the trace if the last that happened at its address is not the end of its wait.
        last = np.concatenate([~self._same, _ONE[: len(self._kind)]])
        after = self._order[last & (self._kind != IS_DONE)]
        if final is not None and not _same_blocks(final.table, self._rows.take(after, axis=1)):
            return None
        unknown = np.flatnonzero(self._born & (self._sorted[_SIZE] == 0))
        if len(unknown) and not self._size_blocks(unknown, last[unknown], final, settings):
            return None
        # The row of the alloc, or of the block from before, that each entry is about: the last such row up to it.
        origin = np.maximum.accumulate(np.where(self._born, np.arange(len(self._born)), 0))
        self._rows[_SIZE:, self._order] = self._sorted[_SIZE:].take(origin, axis=1)
        held: BlockTable = self._rows.take(after, axis=1)
        return held

    def _size_blocks(
        self, unknown: Column, left: NDArray[np.bool_], final: HeldBlocks | None, settings: Settings
    ) -> bool:
        """Fill in the sizes of ``unknown`` allocs: of their frees, or of the blocks ``left`` in the end, in ``final``.

        For others the rounded request is the best guess: a block of the large pool may be up to 1 MiB larger. Returns
        false if only a ``final`` can tell some size.
        """
        size, asked = self._sorted[_SIZE], self._size[unknown]
        found = np.where(left, 0, np.roll(size, -1)[unknown])
        if final is not None:
            found[left] = [final.alive[address].size for address in self._sorted[_ADDRESS][unknown[left]].tolist()]
        elif left.any():
            return False
        guessed = (found == 0) | (found < asked)
        found[guessed] = [round_size(each, settings) for each in asked[guessed].tolist()]
        size[unknown] = found
        return True


_ONE = np.ones(1, dtype=bool)
_NEXT = np.array([0, IS_FREE, IS_DONE, IS_ALLOC])
"""The kind of entry that follows each kind at one address."""


def _same_blocks(one: BlockTable, other: BlockTable) -> bool:
    """Whether two tables have the same blocks, except for the rounding of their sizes."""
    return np.array_equal(one[:_SIZE], other[:_SIZE])


def _leads_to(trace: Trace, final: BlockTable) -> bool:
    """Whether ``trace`` leaves at each of its addresses what ``final`` has there.

    Another thread may have allocated the address again after the trace was copied: from the state before alone, that
    alloc could not be missed.
    """
    entries = np.flatnonzero((trace.kind >= IS_ALLOC) & (trace.kind <= IS_DONE))[::-1]
    addresses, last = np.unique(trace.address[entries], return_index=True)
    left = entries[last[trace.kind[entries[last]] != IS_DONE]]
    there = final.compress(np.isin(final[_ADDRESS], addresses), axis=1)
    there = there[:, np.argsort(there[_ADDRESS])]
    return np.array_equal(np.array([trace.kind[left], trace.address[left], trace.size[left]]), there[:_SIZE])


def blocks_before(trace: Trace, final: BlockTable, settings: Settings) -> BlockTable:
    """The blocks before ``trace``, which led to the blocks ``final``: those that it leaves alone, then the others.

    Of a block whose end is the first that the trace has at its address, the order is that of the ends, last first.
    """
    entries = np.flatnonzero((trace.kind >= IS_ALLOC) & (trace.kind <= IS_DONE))
    addresses, first = np.unique(trace.address[entries], return_index=True)
    first = np.sort(entries[first])[::-1]
    ended = first[trace.kind[first] != IS_ALLOC]
    freed = trace.kind[ended] == IS_FREE
    size = np.where(freed, trace.block[ended], 0)
    size[size == 0] = [round_size(asked, settings) for asked in trace.size[ended[size == 0]].tolist()]
    kind = np.where(freed, IS_ALLOC, IS_FREE)
    older = np.array([kind, trace.address[ended], trace.size[ended], size, trace.stream[ended]])
    named = set(addresses.tolist())
    alone = [address not in named for address in final[_ADDRESS].tolist()]
    return np.concatenate([final.compress(alone, axis=1), older], axis=1)


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
    """The events of a window; ``lost`` counts the blocks and segments in which trace and state differ.

    No autograd nodes are known of ``events``. ``seen`` is the index of an event's block in the profiler's, or -1.
    ``awaiting_ns`` and ``awaiting`` are times, and the requested bytes that await other streams from then on. ``peak``
    is the state with the most requested bytes, ``allocated_peak`` the most block bytes of live blocks.
    """

    events: RawEvents
    seen: Column
    awaiting_ns: Column
    awaiting: Column
    peak: Level
    allocated_peak: int
    lost: int

    def awaiting_at(self, instant_ns: int) -> int:
        """Requested bytes that await other streams just before ``instant_ns``."""
        return int(self.awaiting[np.searchsorted(self.awaiting_ns, instant_ns, side="left") - 1])


class History:
    """The events of one device, window after window. Tolerates lost entries: the segments show what is alive."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._held = HeldBlocks({}, {}).table
        self._sums: tuple[int, ...] = (0, 0, 0, 0)
        """Requested and block bytes of the live blocks, and of those that await other streams."""
        self._now = 0
        self._first = True
        self._segments = SegmentLog()
        self.stacks = StackTexts()

    def alive(self) -> dict[int, int]:
        """Requested bytes of the blocks that are alive after the last window, by address."""
        alive = self._held[:, self._held[_KIND] == IS_ALLOC]
        return dict(zip(alive[_ADDRESS].tolist(), alive[_REQUESTED].tolist(), strict=True))

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
        # Each entry is a dictionary of over a kilobyte: a second trace may have to be read.
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
        return rows.settled(self._segments.take(), 0)

    @property
    def extents(self) -> Iterable[Extent]:
        """The segments after the last window."""
        return self._segments.held

    def _clamp(self, trace: Trace, since_ns: int, until_ns: int) -> int:
        """Keep the times of ``trace`` in order and in the window, whatever the system clock did; returns its start."""
        start = max(self._now, since_ns)
        inside = np.minimum(np.maximum(trace.time_ns, start), max(start, until_ns))
        trace.time_ns = np.maximum.accumulate(inside)
        return start

    def _settle(self, window: TraceWindow, start: int) -> Settled:
        trace, held, final = window
        # Segments first: a block must lie in one when it begins.
        lost = self._reconcile_segments(held, trace, start)
        self._now = max(start, int(trace.time_ns[-1])) if len(trace) else start
        rows = self._first_followed(trace, final, start) if self._first else self._followed(trace, final, None)
        if rows is None:
            rows, differ = self._gone_through(trace, final, start)
            lost += differ
        lost += self._segments.agree(self._now, rows.table.shape[1], held)
        self._first = False
        return rows.settled(self._segments.take(), lost)

    def _gone_through(self, trace: Trace, final: HeldBlocks, start: int) -> tuple[_Rows, int]:
        """The rows of a trace that may have gaps, and how many blocks differ from those known."""
        live, known = HeldBlocks.in_table(self._held)
        before, entries = HeldBlocks.in_table(blocks_before(trace, final.table, self._settings)), trace.entries()
        awaiting = self._awaiting_again(before.awaiting, known)
        writer = _Writer(HeldBlocks(live, awaiting), self._settings, final.alive, true_sizes(entries, final.alive))
        lost = self._reconcile(writer, live, before.alive, start)
        self._forward(writer, entries)
        lost += writer.agree(self._now)
        self._held = HeldBlocks(live, awaiting).table
        self._sums = (*_bytes_of(live), *_bytes_of(awaiting))
        return writer.rows(), lost

    def _read(self, traces: Sequence[Any], device: int) -> Trace:
        self.stacks.forget()
        return read_trace(traces[device] if device < len(traces) else (), self.stacks)

    def _follows(self, trace: Trace, final: HeldBlocks, held: list[Extent]) -> bool:
        """Whether the state before ``trace``, computed backwards, is the known one; false for the first window."""
        before = blocks_before(trace, final.table, self._settings)
        reserved = sum(extent.size for extent in _segments_before(held, trace))
        return (
            not self._first
            and reserved == self._segments.held.size
            and _leads_to(trace, final.table)
            and _same_blocks(before[:, np.argsort(before[_ADDRESS])], self._held)
        )

    def _awaiting_again(self, before: dict[int, LiveBlock], known: dict[int, LiveBlock]) -> dict[int, LiveBlock]:
        """The blocks that awaited other streams at the start. The end of a wait may be among the lost entries."""
        awaiting = {}
        for address, block in before.items():
            there = known.get(address)
            if there is None or there.requested != block.requested:
                there = block._replace(size=block.size or round_size(block.requested, self._settings))
            awaiting[address] = there
        return awaiting

    def _reconcile(
        self, writer: _Writer, live: dict[int, LiveBlock], before: dict[int, LiveBlock], start_ns: int
    ) -> int:
        """Make the known blocks equal those that trace and segments show at the start; returns how many differed.

        In the first window they are the baseline. Later they differ only if entries were lost: between a snapshot and
        the clearing of the trace, or because a step had more entries than the trace holds.
        """
        changed = 0
        for address, block in list(live.items()):
            there = before.get(address)
            if there is None or there.requested != block.requested:
                writer.free(start_ns, address)
                changed += 1
        for address, block in before.items():
            if address not in live:
                writer.birth(Action.BASELINE if self._first else Action.ALLOC, start_ns, address, block, 0)
                changed += not self._first
        return changed

    def _reconcile_segments(self, held: list[Extent], trace: Trace, start_ns: int) -> int:
        """Make the known segments equal those at the start, before the blocks in them; returns how many differed."""
        before = _segments_before(held, trace)
        if self._first:
            self._segments.begin(start_ns, before)
            return 0
        return self._segments.agree(start_ns, 0, before)

    def _first_followed(self, trace: Trace, final: HeldBlocks, start_ns: int) -> _Rows | None:
        """The rows of the first ``trace``, which led to ``final``, after the baseline: the blocks before it.

        ``None`` if it has a gap.
        """
        before = blocks_before(trace, final.table, self._settings)
        baseline = before[:, before[_KIND] == IS_ALLOC]
        self._held, self._sums = before[:, np.argsort(before[_ADDRESS])], _sums_of(before)
        rows = self._followed(trace, final, None, baseline.shape[1])
        if rows is None:
            self._held, self._sums = before[:, :0], (0, 0, 0, 0)
            return None
        _, address, requested, size, stream = baseline
        ones = np.ones_like(address)
        births = [start_ns * ones, Action.BASELINE * ones, address, requested, size, stream, 0 * ones, -ones]
        return rows._replace(table=np.concatenate([[*births, np.cumsum(requested)], rows.table], axis=1))

    def _followed(self, trace: Trace, final: HeldBlocks | None, counted: Stats | None, events: int = 0) -> _Rows | None:
        """The rows of a ``trace`` that leads without a gap from the known state to ``final``, or to what was counted.

        ``None`` if it does not. Without ``final`` and ``counted`` only gaps are looked for. ``events`` is the number
        of events before the trace in its window.
        """
        chain = Chain(trace, self._held)
        after = chain.follow_blocks(final, self._settings) if chain.goes_on() else None
        if after is None:
            return None
        kind, address, size, block, stream = chain.entries
        # Before the first entry, and after each: the bytes of live blocks, and of those that await other streams.
        sums = np.empty((2, 2, len(kind) + 1), dtype=np.int64)
        sums[:, :, 0] = np.reshape(self._sums, (2, 2))
        np.multiply(_CHANGE.take(kind, axis=1)[:, None], chain.entries[_REQUESTED:_STREAM], out=sums[:, :, 1:])
        (requested, allocated), (awaiting, awaiting_size) = np.cumsum(sums, axis=2, out=sums)
        calls = list(_segment_calls(trace))
        # Without a snapshot the allocator's own counts show whether an entry was lost.
        if counted is not None and (
            counted.blocks != int((after[_KIND] == IS_ALLOC).sum())
            or counted.requested != int(requested[-1] + awaiting[-1])
            or counted.reserved != self._segments.held.size + _reserved_by(calls)
        ):
            return None
        self._held, self._sums = after, tuple(sums[:, :, -1].ravel().tolist())
        # The end of a wait frees nothing that a tensor has: it is no event, but it changes what awaits other streams.
        is_row, time = kind != IS_DONE, trace.time_ns[chain.place]
        # The first of several equal peaks, as a loop over the events would find it.
        peak = int(np.argmax(requested))
        reserved = self._segments.held.size
        if calls:
            at_peak = int(chain.place[peak - 1]) if peak else -1
            reserved = self._follow_segments(calls, trace, chain.place[is_row], at_peak, events)
        active = int(allocated[peak] + awaiting_size[peak])
        level = Level(int(requested[peak]), int(allocated[peak]), active, reserved)
        stack, seen = trace.stack[chain.place], trace.seen[chain.place]
        table = np.array([time, _ACTION[kind], address, size, block, stream, stack, seen, requested[1:]])
        since = np.concatenate([_START, time])
        return _Rows(table.compress(is_row, axis=1), since, awaiting, level, int(allocated.max()))

    def _follow_segments(
        self, calls: Sequence[SegmentCall], trace: Trace, rows: Column, until: int, events: int
    ) -> int:
        """Note ``calls`` about segments; ``rows`` are the indices of the events in the trace, after ``events`` others.

        Returns the bytes that are reserved after the entry with the index ``until``.
        """
        reserved = self._segments.held.size
        for at, word, extent in calls:
            change = self._segments.reserve if RESERVING[word] else self._segments.release
            change(int(trace.time_ns[at]), events + int(np.searchsorted(rows, at)), extent)
            if at <= until:
                reserved = self._segments.held.size
        return reserved

    def _forward(self, writer: _Writer, entries: list[TraceEntry]) -> None:
        writer.note_peak(self._segments.held.size)
        for index, entry in enumerate(entries):
            if entry.action == ALLOC:
                writer.alloc(index, entry)
            elif entry.action == FREE_REQUESTED:
                freed = writer.free(entry.time_ns, entry.address, entry.seen)
                writer.wait(entry, freed)
            elif entry.action == FREE_COMPLETED:
                writer.done(entry.time_ns, entry.address)
            elif entry.action in RESERVING:
                change = self._segments.reserve if RESERVING[entry.action] else self._segments.release
                extent = extent_of_call(entry.action, entry.address, entry.size, entry.stream)
                change(entry.time_ns, writer.count, extent)
            if entry.action == ALLOC and writer.at_peak():
                writer.note_peak(self._segments.held.size)


_CHANGE = np.zeros((2, len(KINDS)), dtype=np.int64)
_CHANGE[0, [IS_ALLOC, IS_FREE]] = 1, -1
_CHANGE[1, [IS_FREE, IS_DONE]] = 1, -1
"""Change by each kind of entry of the bytes in use, and of the bytes that await other streams."""
_ACTION = np.full(len(KINDS), Action.FREE, dtype=np.int64)
_ACTION[IS_ALLOC] = Action.ALLOC
"""The action of an event of each kind."""
_START = np.zeros(1, dtype=np.int64)

SegmentCall: TypeAlias = tuple[int, str, Extent]
"""(index, action, segment or pages) of an entry about a segment."""


def _segment_calls(trace: Trace) -> Iterator[SegmentCall]:
    """Each entry about a segment."""
    for at in np.flatnonzero(trace.kind >= IS_SEGMENT).tolist():
        action = KINDS[int(trace.kind[at])]
        yield at, action, extent_of_call(action, int(trace.address[at]), int(trace.size[at]), int(trace.stream[at]))


def _reserved_by(calls: Iterable[SegmentCall]) -> int:
    """The bytes that ``calls`` reserve, less those that they return."""
    return sum(extent.size if RESERVING[action] else -extent.size for _, action, extent in calls)


def _bytes_of(blocks: Mapping[int, LiveBlock]) -> tuple[int, int]:
    """Requested bytes, and block bytes."""
    return sum(block.requested for block in blocks.values()), sum(block.size for block in blocks.values())


def _sums_of(table: BlockTable) -> tuple[int, ...]:
    """Requested and block bytes of the live blocks, and of those that await other streams."""
    live, awaiting = (table[_REQUESTED:_STREAM, table[_KIND] == kind].sum(axis=1) for kind in (IS_ALLOC, IS_FREE))
    return (*live.tolist(), *awaiting.tolist())


def _segments_before(held: list[Extent], trace: Trace) -> list[Extent]:
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
    """Events of a window, and the requested bytes that await other streams.

    The rows of ``table`` are time, action, address, bytes, block bytes, stream, stack, ``seen`` and allocated bytes.
    """

    table: NDArray[np.int64]
    awaiting_ns: Column
    awaiting: Column
    peak: Level
    allocated_peak: int

    def settled(self, segments: SegmentColumns, lost: int) -> Settled:
        """The window of these events."""
        *first, stack, seen, allocated = self.table
        none = np.zeros_like(seen)
        return Settled(
            events=RawEvents.from_table(
                [*first, allocated], op=none, sequence=none - 1, stack=stack, segments=segments
            ),
            seen=seen,
            awaiting_ns=self.awaiting_ns,
            awaiting=self.awaiting,
            peak=self.peak,
            allocated_peak=self.allocated_peak,
            lost=lost,
        )


class _Writer:
    """Collects the events of a trace with gaps, and keeps the blocks ``held`` and the running totals."""

    def __init__(
        self, held: HeldBlocks, settings: Settings, final: dict[int, LiveBlock], sizes: dict[int, int]
    ) -> None:
        self._live, self._awaiting = held
        self._settings = settings
        self._final = final
        self._sizes = sizes
        self._rows: list[tuple[int, ...]] = []
        self._requested, self._allocated = _bytes_of(self._live)
        self._most = self._allocated
        self._awaiting_bytes, self._awaiting_size = _bytes_of(self._awaiting)
        self._changes = [(0, self._awaiting_bytes)]
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

    def wait(self, entry: TraceEntry, freed: LiveBlock | None) -> None:
        """Note that the block that ``entry`` frees awaits other streams; its alloc may have been lost."""
        self._no_longer(entry.address)
        block = freed or LiveBlock(entry.size, round_size(entry.size, self._settings), entry.stream)
        self._awaiting[entry.address] = block
        self._awaiting_bytes += block.requested
        self._awaiting_size += block.size
        self._changes.append((entry.time_ns, self._awaiting_bytes))

    def done(self, time_ns: int, address: int) -> None:
        """Note that the block at ``address`` no longer awaits other streams."""
        self._no_longer(address)
        self._changes.append((time_ns, self._awaiting_bytes))

    def _no_longer(self, address: int) -> None:
        block = self._awaiting.pop(address, None)
        if block is not None:
            self._awaiting_bytes -= block.requested
            self._awaiting_size -= block.size

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

    def note_peak(self, reserved: int) -> None:
        active = self._allocated + self._awaiting_size
        self._peak = Level(self._requested, self._allocated, active, reserved)

    def rows(self) -> _Rows:
        """All events as rows."""
        table = np.array(self._rows, dtype=np.int64).reshape(-1, 8).T
        action, size = table[1], table[3]
        # Each row changes the sum by its own bytes.
        delta = np.where(action == Action.FREE, -size, size)
        # Counted backwards from the segments, so that errors of earlier windows do not add up.
        allocated = self._requested - (delta.sum() - np.cumsum(delta))
        since, awaiting = np.array(self._changes, dtype=np.int64).T
        return _Rows(np.concatenate([table, [allocated]]), since, awaiting, self._peak, self._most)
