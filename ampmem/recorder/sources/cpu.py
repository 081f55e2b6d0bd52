"""Source ``cpu``: torch.profiler's allocation events, which come from the CPU allocator itself.

The profiler is stopped and started again at each :meth:`ProfilerSource.drain`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from ampmem.events import Column
from ampmem.recorder.facts.addresses import Blocks, RealAddresses
from ampmem.recorder.facts.log import See
from ampmem.recorder.sources.base import RawEvents
from ampmem.recorder.sources.ledger import Event, Ledger
from ampmem.recorder.sources.process_total import NOT_COUNTED, count_all_threads
from ampmem.recorder.sources.storages import Storages
from ampmem.recorder.sources.window import (
    COLLECTIVES,
    MARKER,
    Marks,
    ProfileLost,
    Window,
    check_free,
    install,
    shift_between,
)
from ampmem.units import format_bytes
from ampmem.vocabulary import SourceKind

TOLD_BY_SIZE = (
    "{size} were freed on threads that are not recorded. Sums and peaks are the allocator's own all the same; but "
    "which tensors went was told by their sizes, so up to that much may stand in a wrong category"
)
_ALLOCATION = "[memory]"
"""The profiler's name for every allocation and free; cheaper to compare than a node's tag."""


class ProfilerSource:
    """The CPU allocator's events of the calling thread, and what the process's total says of the other threads."""

    kind = SourceKind.CPU
    device_type = "cpu"
    device_name = platform.processor() or platform.machine()
    addresses = RealAddresses()
    uses_profiler = True
    uses_history = False

    def __init__(self, storages: Storages) -> None:
        self._ledger = Ledger(storages)
        self._window = Window(memory=True)
        self._notes: list[str] = []
        self.see: See | None = storages.see

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
        try:
            return self._events(*self._window.close())
        except ProfileLost:
            return self._ledger.settle([], [], {"": 0})

    def abandon(self) -> None:
        """Switch the profiler off."""
        self._window.abandon()

    def owns_mode(self, mode: object) -> bool:
        """A CPU keeps no mode."""
        return False

    def install(self) -> Callable[[], None]:
        """Count all threads, keep the script's ``record_function`` scopes out; returns what undoes it."""
        with ExitStack() as undo:
            restore, problem = count_all_threads()
            undo.callback(restore)
            if problem is not None:
                self._notes = [NOT_COUNTED.format(why=problem)]
            undo.callback(install())
            return undo.pop_all().close

    def blocks(self) -> Blocks:
        """What is alive, by the last events."""
        return self._ledger.blocks()

    def notes(self) -> list[str]:
        """What a reader of the recording has to know."""
        told = self._ledger.told_by_size
        return [*self._notes, TOLD_BY_SIZE.format(size=format_bytes(told))] if told else self._notes

    def _events(self, result: Any, marks: Marks) -> RawEvents:
        walk = _Walk(result.experimental_event_tree())
        times = np.fromiter((event[0] for event in walk.events), dtype=np.int64, count=len(walk.events))
        return self._ledger.settle(walk.events, walk.clock(marks)(times).tolist(), walk.ops)


class _Walk:
    """Reads allocations, frees and the autograd nodes around them out of a profile's event tree."""

    def __init__(self, roots: list[Any]) -> None:
        self.events: list[Event] = []
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
                    total = fields.total_allocated
                    self.events.append((node.start_time_ns, fields.ptr, fields.alloc_size, total, index, sequence))
                continue
            if name == MARKER:
                self._markers.append(node.start_time_ns)
            elif children := node.children:
                if not name.startswith(COLLECTIVES):
                    op, sequence = name, node.extra_fields.sequence_number
                pending += [(child, op, sequence) for child in reversed(children)]
