"""The allocator's trace by the compiled extension: rows of integers, written while the allocator works (trace.cpp).

Nothing is copied, cleared or matched at a step's end: a row has the time of ``time.time_ns``, the size of its block and
the autograd node around it. The rows of one device are in the order of the allocator's lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import CodeType
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampmem.recorder.models.stacks import Ranges, code_at, line_at
from ampmem.recorder.sources.cuda.device import Stats
from ampmem.recorder.sources.cuda.trace import IS_FREE, IS_SNAPSHOT, SeenBlocks, Trace, devices_by_thread
from ampmem.recorder.sources.extension import CompiledExtension

Frames: TypeAlias = Sequence[tuple[str, int, str]]
"""File, line and function of each frame of a stack, innermost first."""
Mark: TypeAlias = tuple[int, int, int]
"""The last time before a mark at which a thread began a phase or an op, the mark's own time, and that thread."""
Table: TypeAlias = NDArray[np.int64]
"""Rows with the columns of :class:`Tracked`."""
_POINTER = ctypes.POINTER(ctypes.c_int64)
_COUNTS, _STATS = ctypes.c_int64 * 3, ctypes.c_int64 * 11
_TRIES = 3
"""Number of attempts to read the allocator's counts, which fail while another thread allocates."""


class Tracked(NamedTuple):
    """Rows as columns. ``kind`` is an index of :data:`~ampmem.recorder.sources.cuda.trace.KINDS`.

    ``block`` is the block's size, 0 on a thread that is not recorded; ``name`` and ``number`` are those of the node
    around a row on a recorded thread. ``stack`` counts from 1, 0 is none. The pool is that of two numbers.
    """

    time_ns: NDArray[np.int64]
    kind: NDArray[np.int64]
    device: NDArray[np.int64]
    address: NDArray[np.int64]
    size: NDArray[np.int64]
    stream: NDArray[np.int64]
    thread: NDArray[np.int64]
    stack: NDArray[np.int64]
    name: NDArray[np.int64]
    number: NDArray[np.int64]
    block: NDArray[np.int64]
    pool: NDArray[np.int64]
    shared_pool: NDArray[np.int64]


class CountedStats(NamedTuple):
    """The allocator's statistics at ``time_ns``, when it had made ``rows`` rows, ``None`` if others were just added.

    ``thread`` is the number of the thread that asked.
    """

    stats: Stats
    rows: int | None
    time_ns: int
    thread: int


def tracker_of(extension: CompiledExtension | None) -> Tracker | None:
    """The tracker of ``extension``; ``None`` if it was compiled without."""
    if extension is None or not hasattr(extension.library, "ampmem_trace_start"):
        return None
    return Tracker(extension)


class Tracker:
    """The extension's tracker of the allocator, from :meth:`start` to :meth:`stop`."""

    def __init__(self, extension: CompiledExtension) -> None:
        self._extension = extension
        self._library = extension.library
        self._library.ampmem_trace_take.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._library.ampmem_trace_take.restype = ctypes.c_int64
        self._library.ampmem_trace_stats.argtypes = (ctypes.c_int64, ctypes.c_void_p)
        self._library.ampmem_trace_stack.argtypes = (ctypes.c_int64, ctypes.POINTER(_POINTER))
        self._library.ampmem_trace_stack.restype = ctypes.c_int64
        self._taken = self._dropped = self._stacks = 0
        self._ranges: dict[CodeType, Ranges] = {}
        self._places: dict[tuple[int, int], tuple[str, int, str]] = {}
        """File, line and function of each instruction in the stacks, which keep the code objects alive."""

    def start(self) -> bool:
        """Begin, once CUDA is initialized; returns whether torch allows it."""
        self._taken = self._dropped = self._stacks = 0
        self._places.clear()
        self._ranges.clear()
        started: int = self._library.ampmem_trace_start()
        return started == 0

    def stop(self) -> None:
        """Stop; what was not taken is dropped."""
        self._library.ampmem_trace_stop()

    def take(self) -> tuple[Table, bool]:
        """The rows since the last call, of all devices, and whether there were more than are kept."""
        rows, _, dropped = self._counts()
        table = np.empty((rows, len(Tracked._fields)), np.int64)
        taken = self._library.ampmem_trace_take(table.ctypes.data, rows)
        self._taken += taken
        lost, self._dropped = dropped > self._dropped, dropped
        return table[:taken], lost

    def take_counted(self, device: int) -> tuple[Table, bool, Stats | None]:
        """The result of :meth:`take`, and the statistics of ``device`` right after it.

        The statistics are ``None`` if other threads allocate all the time.
        """
        tables, lost, stats = [], False, None
        # Rows first, counts second: they belong together only if no row was added in between.
        for _ in range(_TRIES):
            table, more = self.take()
            tables.append(table)
            lost |= more
            reading = self.read(device)
            if reading.rows == self._taken:
                stats = reading.stats
                break
        return tables[0] if len(tables) == 1 else np.concatenate(tables), lost, stats

    def new_stacks(self) -> list[Frames]:
        """The stacks since the last call, in the order of their numbers."""
        first, self._stacks = self._stacks, self._counts()[1]
        return [self._frames(index) for index in range(first, self._stacks)]

    def names(self) -> Sequence[str]:
        """The names of nodes, for the rows' ``name``."""
        return self._extension.names()

    def read(self, device: int) -> CountedStats:
        """The allocator's statistics of ``device``. Raises ``RuntimeError`` if torch has none."""
        found = _STATS()
        for _ in range(_TRIES):
            if self._library.ampmem_trace_stats(device, found):
                raise RuntimeError("the allocator has no statistics")
            *stats, before, after, now, thread = found
            # The allocator has made no row meanwhile: the statistics are those after exactly so many rows.
            if before == after:
                break
        return CountedStats(Stats(*stats), after if before == after else None, now, thread)

    def _counts(self) -> tuple[int, ...]:
        found = _COUNTS()
        self._library.ampmem_trace_count(found)
        return tuple(found)

    def _frames(self, index: int) -> Frames:
        start = _POINTER()
        length = self._library.ampmem_trace_stack(index, ctypes.byref(start))
        # Code object and instruction in turns; C++ holds references to the code objects.
        stack = start[:length]
        return list(map(self._place, zip(stack[::2], stack[1::2], strict=True)))

    def _place(self, place: tuple[int, int]) -> tuple[str, int, str]:
        known = self._places.get(place)
        if known is None:
            code = code_at(place[0])
            known = self._places[place] = code.co_filename, line_at(code, place[1], self._ranges), code.co_name
        return known


def trace_on(
    device: int, table: Table, stack_of: NDArray[np.int64], names: Sequence[str], marks: Sequence[Mark] = ()
) -> tuple[Trace, SeenBlocks]:
    """The rows of ``device`` as a trace, and as the blocks of recorded threads; ``stack_of`` maps stacks to texts."""
    rows = Tracked(*np.ascontiguousarray(on_device(device, table).T))
    known = rows.block > 0
    trace = Trace(
        kind=rows.kind,
        address=rows.address,
        size=rows.size,
        stream=rows.stream,
        time_ns=_dated(rows, marks),
        stack=stack_of[np.where(rows.stack < len(stack_of), rows.stack, 0)],
        tag=np.zeros_like(rows.kind),
        block=rows.block,
        seen=np.where(known, np.arange(len(known)), -1),
    )
    seen = SeenBlocks(
        time_ns=rows.time_ns,
        address=rows.address,
        bytes=np.where(rows.kind == IS_FREE, -rows.block, rows.block),
        op=rows.name,
        sequence=rows.number,
        ops=tuple(names),
    )
    return trace, seen


def _dated(rows: Tracked, marks: Sequence[Mark]) -> NDArray[np.int64]:
    """The times of ``rows``, those of other threads between the begin of a phase and its mark before that begin.

    The phase's begin is the instant of the mark, at which the allocator is asked only a little later.
    """
    times = rows.time_ns.copy()
    for since_ns, time_ns, thread in marks:
        between = (times >= since_ns) & (times < time_ns)
        if between.any() and not (rows.thread[between] == thread).any():
            times[between] = since_ns - 1
    return times


def devices_in(table: Table) -> set[int]:
    """The devices of the rows."""
    column = table[:, _DEVICE]
    return set() if len(column) == 0 else {int(column[0])} if (column == column[0]).all() else set(column.tolist())


def on_device(device: int, table: Table) -> Table:
    """The rows of ``device``."""
    there = table[:, _DEVICE] == device
    return table if there.all() else table[there]


def until_snapshot(device: int, table: Table, first: int) -> int:
    """The number of rows up to the snapshot of ``device`` that was taken after the ``first`` rows; all if none was."""
    later = table[first:]
    found = np.flatnonzero((later[:, _DEVICE] == device) & (later[:, _KIND] == IS_SNAPSHOT))
    return first + int(found[0]) if len(found) else len(table)


def threads_by_device(table: Table) -> dict[int, set[int]]:
    """The devices on which each recorded thread allocated or freed."""
    # Only rows of recorded threads have the size of their block.
    rows = table[table[:, _BLOCK] > 0]
    return devices_by_thread(rows[:, _DEVICE], rows[:, _THREAD])


def pools_in(device: int, table: Table) -> set[tuple[int, int]]:
    """The pools of segments that were reserved on ``device``, or returned."""
    rows = table[(table[:, _KIND] > IS_SNAPSHOT) & (table[:, _DEVICE] == device)]
    return {(first, second) for first, second in rows[:, _POOLS].tolist()}


NO_ROWS: Table = np.zeros((0, len(Tracked._fields)), dtype=np.int64)
_KIND, _DEVICE, _THREAD, _BLOCK = map(Tracked._fields.index, ("kind", "device", "thread", "block"))
_POOLS = [Tracked._fields.index(name) for name in ("pool", "shared_pool")]
