"""Source ``cpu``: the events that the CPU allocator reports, by the compiled extension or by torch.profiler.

The profiler is restarted at each :meth:`ProfilerSource.drain`, because only a stopped profiler returns its events.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ampmem.events import Column
from ampmem.patching import Undo, added
from ampmem.recorder.facts.addresses import AliveBlocks, RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.sources import extension
from ampmem.recorder.sources.base import Place, RawEvents, Source
from ampmem.recorder.sources.extension import Observed
from ampmem.recorder.sources.ledger import NOTHING, Ledger, Profiled
from ampmem.recorder.sources.storages import Storages
from ampmem.recorder.sources.torch_flags import counting_begins, torch_flag
from ampmem.recorder.sources.window import (
    COLLECTIVES,
    MARKER,
    Marks,
    ProfileLost,
    Span,
    Window,
    check_free,
    install,
    shift_between,
)
from ampmem.recorder.torch_private.general import ALLOCATION
from ampmem.units import format_bytes
from ampmem.vocabulary import SourceKind

FLAG = "FLAGS_caffe2_report_cpu_memory_usage"
NOT_COUNTED = "CPU memory that other threads than the recorded one allocate and free is not counted: {why}"
TOLD_BY_SIZE = (
    "{size} were freed on threads that are not recorded. Totals and peaks are still the allocator's own, but the "
    "freed tensors were identified by their sizes, so up to that much memory may be in a wrong category"
)


def count_all_threads() -> tuple[Undo, str | None]:
    """Make torch's CPU allocator count for the whole process; returns the undo, or why it is impossible.

    The profiler records one thread. The running total in its events covers the process once :data:`FLAG` of libc10 is
    set: then every allocation and free is added up. Source: ``ProfiledCPUMemoryReporter`` in PyTorch's
    ``c10/core/CPUAllocator.cpp``.
    """
    # At this log level torch would print a line for each allocation.
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "").upper() in ("INFO", "0"):
        return _nothing, "TORCH_CPP_LOG_LEVEL is INFO"
    flag = torch_flag(FLAG, ctypes.c_bool)
    if flag is None:
        return _nothing, f"this torch ({torch.__version__}) does not export {FLAG}"
    with counting_begins():
        before, flag.value = flag.value, True

    def restore() -> None:
        flag.value = before

    return added("libc10", FLAG, restore), None


def _nothing() -> None:
    """An undo that does nothing."""


class ProfilerSource(Source):
    """The CPU allocator's events of the calling thread, and other threads' memory from the process's total."""

    kind = SourceKind.CPU
    device_type = "cpu"
    device_name = platform.processor() or platform.machine()
    addresses = RealAddresses()
    uses_profiler = True

    def __init__(self, storages: Storages) -> None:
        self._ledger = Ledger(storages)
        self._extension = extension.find()
        self._window = Window()
        """Used where there is no compiled extension."""
        self._notes: list[str] = []
        self.see = storages.see
        self._knows = storages.knows

    def attach(self, locate: Callable[[], Place], log: Log) -> None:
        """Have ``log`` ask which storages are known."""
        log.knows = self._knows

    def check(self) -> None:
        """Raise :class:`~ampmem.errors.UsageError` if another profiler is running: a second would replace it."""
        check_free()

    def start(self, baseline: Mapping[int, int]) -> None:
        """Begin recording."""
        self._ledger.add_baseline(baseline)
        if self._extension is not None:
            self._extension.start()
        else:
            self._window.open()

    def drain(self) -> RawEvents:
        """The events since the last call."""
        if self._extension is not None:
            return self._extension_events(self._extension.take())
        result, marks = self._window.close()
        self._window.open()
        return self._events(result, marks)

    def stop(self) -> RawEvents:
        """The last events."""
        if self._extension is not None:
            self._extension.stop()
            return self._extension_events(self._extension.take())
        try:
            return self._events(*self._window.close())
        except ProfileLost:
            return self._ledger.settle(NOTHING, {"": 0})

    def abandon(self) -> None:
        """Switch the profiler off in a forked child."""
        if self._extension is not None:
            self._extension.stop()
        else:
            self._window.abandon()

    def install(self) -> Callable[[], None]:
        """Count all threads, and keep the script's ``record_function`` scopes out; returns the undo."""
        with ExitStack() as undo:
            restore, problem = count_all_threads()
            undo.callback(restore)
            if problem is not None:
                self._notes = [NOT_COUNTED.format(why=problem)]
            if self._extension is None:
                undo.callback(install())
            return undo.pop_all().close

    def blocks(self) -> AliveBlocks:
        """The live blocks after the last event."""
        return self._ledger.blocks()

    def notes(self) -> list[str]:
        """Notes for the reader of the recording."""
        told = self._ledger.told_by_size
        return [*self._notes, TOLD_BY_SIZE.format(size=format_bytes(told))] if told else self._notes

    def _extension_events(self, seen: Observed) -> RawEvents:
        rows, op, ops = seen.on(extension.CPU)
        events = Profiled(
            time_ns=seen.time_ns[rows],
            address=seen.address[rows],
            bytes=seen.bytes[rows],
            total=seen.total[rows],
            op=op,
            sequence=seen.own[rows],
        )
        return self._ledger.settle(events, {name: place for place, name in enumerate(ops)})

    def _events(self, result: Any, marks: Marks) -> RawEvents:
        walk = _Walk(result.experimental_event_tree())
        return self._ledger.settle(walk.events(marks), walk.ops)


_fields = attrgetter("extra_fields")
_of_allocation = attrgetter("ptr", "alloc_size", "total_allocated")


class _Walk:
    """Reads allocations, frees and their autograd nodes out of a profile's event tree.

    Each attribute of a node costs a call into C++, so it is read only once. All of an allocation is read at once: the
    intermediate objects must not pile up.
    """

    def __init__(self, roots: list[Any]) -> None:
        self._times: list[int] = []
        self._numbers: list[int] = []
        """Three numbers for each allocation: address, bytes, and the total."""
        self._runs: list[tuple[int, str, int]] = []
        """(index of the first allocation, node's name, its sequence number) of each run of allocations."""
        self._markers: list[Span] = []
        self._only_cpu = not torch.accelerator.is_available()
        self._visit(roots)
        self.ops: dict[str, int] = {"": 0}
        """Indices of the names of the nodes that have allocations."""

    def events(self, marks: Marks) -> Profiled:
        """The allocations and frees on the CPU, in order of time."""
        time = shift_between(self._markers, marks)(np.array(self._times, dtype=np.int64))
        address, size, total = np.array(self._numbers, dtype=np.int64).reshape(-1, 3).T
        op, sequence = self._around()
        columns = Profiled(time_ns=time, address=address, bytes=size, total=total, op=op, sequence=sequence)
        # Nodes that ran on another thread of the autograd engine come after those of this thread.
        if np.any(time[1:] < time[:-1]):
            order = np.argsort(time, kind="stable")
            return Profiled(*(column[order] for column in columns))
        return columns

    def _around(self) -> tuple[Column, Column]:
        """Name and sequence number of the node around each allocation."""
        ends = [start for start, _, _ in self._runs[1:]] + [len(self._times)]
        rows = []
        for (start, name, sequence), end in zip(self._runs, ends, strict=True):
            if start < end:
                rows.append((self.ops.setdefault(name, len(self.ops)), sequence, end - start))
        ops, sequences, counts = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return np.repeat(ops, counts), np.repeat(sequences, counts)

    def _visit(self, roots: list[Any]) -> None:
        """Walk through the tree in its order: by time, thread by thread."""
        add_time, add_numbers = self._times.append, self._numbers.extend
        pending = [(_with_fields(roots), "", -1)]
        while pending:
            siblings, op, sequence = pending.pop()
            self._runs.append((len(self._times), op, sequence))
            for node, fields in siblings:
                if type(fields) is ALLOCATION:  # by type, since reading the name costs a call
                    if self._only_cpu or fields.device.type == "cpu":
                        add_time(node.start_time_ns)
                        add_numbers(_of_allocation(fields))
                elif (name := node.name) == MARKER:
                    self._markers.append((node.start_time_ns, node.end_time_ns))
                elif children := node.children:
                    pending.append((siblings, op, sequence))
                    if not name.startswith(COLLECTIVES):
                        op, sequence = name, fields.sequence_number
                    pending.append((_with_fields(children), op, sequence))
                    break


def _with_fields(nodes: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(nodes, map(_fields, nodes), strict=True)
