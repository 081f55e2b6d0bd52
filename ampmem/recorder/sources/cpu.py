"""Source ``cpu``: torch.profiler's allocation events, which come from the CPU allocator itself.

The profiler is stopped and started again at each :meth:`ProfilerSource.drain`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from itertools import chain
from time import time_ns
from typing import Any

import numpy as np
import torch

from ampmem.events import UNKNOWN, Action, Column
from ampmem.recorder.facts.addresses import RealAddresses
from ampmem.recorder.sources.base import RawEvents
from ampmem.recorder.sources.baseline import Baseline
from ampmem.recorder.sources.window import MARKER, Marks, Window, check_free, install, shift_between
from ampmem.vocabulary import SourceKind

_ALLOCATION = "[memory]"
"""The profiler's name for every allocation and free; cheaper to compare than a node's tag."""


class ProfilerSource:
    """The CPU allocator's events of the calling thread, and of the backward passes it starts."""

    kind = SourceKind.CPU
    device_type = "cpu"
    device_name = platform.processor() or platform.machine()
    addresses = RealAddresses()
    uses_profiler = True
    uses_history = False

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self._ledger = _Ledger()
        self._window = Window(memory=True)

    def check(self) -> None:
        """Raise :class:`~ampmem.errors.UsageError` when another profiler is running: a second one would replace it."""
        check_free()

    def start(self, baseline: Mapping[int, int]) -> None:
        """Begin recording."""
        self._ledger.add_baseline(baseline)
        self._window.open()

    def drain(self) -> RawEvents:
        """The events since the last call."""
        result, marks = self._window.close()
        self._window.open()
        return self._events(result, marks)

    def stop(self) -> RawEvents:
        """The last events."""
        return self._events(*self._window.close())

    def owns_mode(self, mode: object) -> bool:
        """A CPU keeps no mode."""
        return False

    def install(self) -> Callable[[], None]:
        """Keep the script's ``record_function`` scopes out of the profile; returns what undoes it."""
        return install()

    def _events(self, result: Any, marks: Marks) -> RawEvents:
        walk = _Walk(result.experimental_event_tree())
        return self._ledger.settle(walk, walk.clock(marks), self._baseline.take_freed())


class _Walk:
    """Reads allocations, frees and the autograd nodes around them out of a profile's event tree."""

    def __init__(self, roots: list[Any]) -> None:
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        """(time, address, signed bytes, running total, index of the node's name, its sequence number or -1)."""
        self.ops: dict[str, int] = {"": 0}
        self._markers: list[int] = []
        self._only_cpu = not torch.accelerator.is_available()
        self._visit(roots)

    def clock(self, marks: Marks) -> Callable[[Column], Column]:
        """What turns the profiler's times into ``time.time_ns``."""
        return shift_between(self._markers, marks)

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
            if name == MARKER:
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
