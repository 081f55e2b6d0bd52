"""Source ``cpu``: torch.profiler's allocation events, which come from the CPU allocator itself.

The profiler is stopped and started again at each :meth:`ProfilerSource.drain`. Its times are put
on the clock of ``time.time_ns`` with one marker at each end of a window.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Mapping
from itertools import chain
from time import time_ns
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C._autograd import (
    _disable_profiler,
    _enable_profiler,
    _enable_record_function,
    _prepare_profiler,
    _profiler_enabled,
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)
from torch._C._profiler import ProfilerActivity, RecordScope
from torch.autograd.profiler import profile, record_function

from ampmem.errors import UsageError
from ampmem.events import UNKNOWN, Action, Column, Source
from ampmem.recorder.hooks.patch import patch
from ampmem.recorder.sources.base import RawEvents
from ampmem.recorder.sources.baseline import Baseline

_ALLOCATION = "[memory]"
"""The profiler's name for every allocation and free; cheaper to compare than a node's tag."""
_MARKER = "ampmem::clock"
_MARKERS = 4
"""Markers put at each end of a window; the first of a process is slow."""
_ACTIVITIES = {ProfilerActivity.CPU}
_SCOPES = {RecordScope.USER_SCOPE, RecordScope.BACKWARD_FUNCTION}
"""The markers, and the autograd nodes that backward runs. Recording every op too would double the cost
of profiling; the dispatch mode knows the ops of forward already.
"""


class _Mark(NamedTuple):
    """Which of a burst of markers is meant, and when it was."""

    number: int
    time_ns: int


class ProfilerSource:
    """The CPU allocator's events of the calling thread, and of the backward passes it starts."""

    kind = Source.CPU
    device_type = "cpu"
    device_name = platform.processor() or platform.machine()

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self._ledger = _Ledger()
        self._mark = _Mark(0, 0)

    def check(self) -> None:
        """Raise :class:`UsageError` when another profiler is running: a second one would take its place."""
        if _profiler_enabled():
            raise UsageError(
                "torch.profiler is running, and PyTorch allows only one profiler at a time; start ampmem outside of it"
            )

    def start(self, baseline: Mapping[int, int]) -> None:
        """Begin recording."""
        self._ledger.add_baseline(baseline)
        previous = os.environ.get("KINETO_LOG_LEVEL")
        os.environ["KINETO_LOG_LEVEL"] = "99"  # read at the first start: silences its lines on stderr
        try:
            self._open()
        finally:
            if previous is None:
                del os.environ["KINETO_LOG_LEVEL"]
            else:
                os.environ["KINETO_LOG_LEVEL"] = previous

    def drain(self) -> RawEvents:
        """The events since the last call."""
        result, marks = self._close()
        self._open()
        return self._events(result, marks)

    def stop(self) -> RawEvents:
        """The last events."""
        return self._events(*self._close())

    def install(self) -> Callable[[], None]:
        """Keep the script's ``record_function`` scopes out of the profile; returns what undoes it.

        A scope that the profiler saw begin must not end after that profiler was stopped: it points into
        what the profiler had recorded. Scopes begun while recording is off do nothing.
        """
        return patch(record_function, "__enter__", _without_recording)

    def _open(self) -> None:
        config = profile(profile_memory=True).config()
        _prepare_profiler(config, _ACTIVITIES)
        _enable_profiler(config, _ACTIVITIES, _SCOPES)  # type: ignore[call-arg]
        self._mark = _mark()

    def _close(self) -> tuple[Any, tuple[_Mark, _Mark]]:
        marks = (self._mark, _mark())
        return _disable_profiler(), marks

    def _events(self, result: Any, marks: tuple[_Mark, _Mark]) -> RawEvents:
        walk = _Walk(result.experimental_event_tree())
        shift = walk.clock(marks)
        return self._ledger.settle(walk, shift, self._baseline.take_freed())


class _Walk:
    """Reads allocations, frees and the autograd nodes around them out of a profile's event tree."""

    def __init__(self, roots: list[Any]) -> None:
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        """(time, address, signed bytes, running total, index of the node's name, its sequence number or -1)."""
        self.ops: dict[str, int] = {"": 0}
        self._markers: list[int] = []
        self._only_cpu = not torch.accelerator.is_available()
        self._visit(roots)

    def clock(self, marks: tuple[_Mark, _Mark]) -> Callable[[Column], Column]:
        """What turns the profiler's times into ``time.time_ns``: linear between the two markers."""
        seen = (self._markers[marks[0].number], self._markers[marks[1].number - _MARKERS])
        offsets = (marks[0].time_ns - seen[0], marks[1].time_ns - seen[1])

        def shift(times: Column) -> Column:
            return times + np.interp(times - seen[0], (0, seen[1] - seen[0]), offsets).astype(np.int64)

        return shift

    def _visit(self, roots: list[Any]) -> None:
        """Go through the tree in order of time; every attribute of a node costs a call into C++."""
        pending = [(root, "", -1) for root in reversed(roots)]
        while pending:
            node, op, sequence = pending.pop()
            name = node.name
            if name == _ALLOCATION:
                fields = node.extra_fields
                if self._only_cpu or fields.device.type == "cpu":
                    index = self.ops.setdefault(op, len(self.ops))
                    row = (node.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated, index, sequence)
                    self.rows.append(row)
                continue
            if name == _MARKER:
                self._markers.append(node.start_time_ns)
            elif children := node.children:
                number = node.extra_fields.sequence_number
                pending += [(child, name, number) for child in reversed(children)]


class _Ledger:
    """Makes one stream of the profiler's events and of the deaths of baseline storages.

    The profiler's running total knows nothing of the baseline, and much of earlier profiles in the
    same process: ``_offset`` is what has to be added to it to get the bytes alive.
    """

    def __init__(self) -> None:
        self._baseline: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._offset = 0
        self._counting = False
        """Whether there was an event to take ``_offset`` from."""
        self._pending: list[tuple[int, int]] = []

    def add_baseline(self, blocks: Mapping[int, int]) -> None:
        self._baseline = dict(blocks)
        now = time_ns()
        self._pending = [(now, address) for address in blocks]

    def settle(self, walk: _Walk, shift: Callable[[Column], Column], freed: list[tuple[int, int]]) -> RawEvents:
        """``walk``'s events and the ``freed`` baseline storages, in order."""
        times = np.fromiter((row[0] for row in walk.rows), dtype=np.int64, count=len(walk.rows))
        rows = _Rows()
        for time, address in self._pending:
            rows.add((time, Action.BASELINE, address, self._baseline[address], UNKNOWN, 0, -1))
        self._pending = []
        if not self._counting and walk.rows:
            _, _, size, total, _, _ = walk.rows[0]
            self._offset = sum(self._baseline.values()) - (total - size)
            self._counting = True
        deaths = sorted(freed, reverse=True)
        for time, row in zip(shift(times).tolist(), walk.rows, strict=True):
            while deaths and deaths[-1][0] <= time:
                self._died(rows, *deaths.pop())
            _, address, size, total, op, sequence = row
            if size < 0 and address in self._live:  # nearly every second event
                rows.add((time, Action.FREE, address, self._live.pop(address), total + self._offset, 0, -1))
            else:
                self._profiled(rows, time, address, size, total, op, sequence)
        while deaths:
            self._died(rows, *deaths.pop())
        return rows.events(tuple(walk.ops))

    def _profiled(self, rows: _Rows, time: int, address: int, size: int, total: int, op: int, sequence: int) -> None:
        """An allocation, or the free of a block that was not allocated in this recording."""
        if size > 0:
            if address in self._baseline:  # its death was not seen, but the memory is somebody else's now
                self._died(rows, time, address)
            elif address in self._live:  # freed while the profiler was off
                lost = self._live.pop(address)
                self._offset -= lost
                rows.add((time, Action.FREE, address, lost, UNKNOWN, 0, -1))
            self._live[address] = size
            rows.add((time, Action.ALLOC, address, size, total + self._offset, op, sequence))
        else:
            # A block of an earlier profile: the total falls by what that one knew, we by what we know.
            self._offset -= size
            if address in self._baseline:
                self._died(rows, time, address)

    def _died(self, rows: _Rows, time: int, address: int) -> None:
        size = self._baseline.pop(address, None)
        if size is not None:
            if self._counting:
                self._offset -= size
            rows.add((time, Action.FREE, address, size, UNKNOWN, 0, -1))


class _Rows:
    """Collects rows of :class:`RawEvents`."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self.add = self._rows.append

    def events(self, ops: tuple[str, ...]) -> RawEvents:
        flat = np.fromiter(chain.from_iterable(self._rows), dtype=np.int64, count=7 * len(self._rows))
        columns = np.ascontiguousarray(flat.reshape(-1, 7).T)
        time, action, address, size, allocated, op, sequence = columns
        return RawEvents(
            time_ns=time,
            action=action,
            address=address,
            bytes=size,
            block_bytes=size,
            stream=np.zeros_like(size),
            allocated=allocated,
            op=op,
            sequence=sequence,
            ops=ops,
        )


def _mark() -> _Mark:
    """Put markers into the profile; the one that took the least time says best when it was."""
    times: list[tuple[int, int]] = []
    for _ in range(_MARKERS):
        before = time_ns()
        scope = _record_function_with_args_enter(_MARKER)
        times.append((before, time_ns()))
        _record_function_with_args_exit(scope)
    index = min(range(_MARKERS), key=lambda i: times[i][1] - times[i][0])
    return _Mark(index, sum(times[index]) // 2)


def _without_recording(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __enter__(scope: Any) -> Any:
        _enable_record_function(False)
        try:
            return original(scope)
        finally:
            _enable_record_function(True)

    return __enter__
