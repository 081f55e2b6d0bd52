"""Source ``cpu``: the events that the CPU allocator reports, by the compiled extension or by torch.profiler.

The profiler is restarted at each :meth:`ProfilerSource.drain`, because only a stopped profiler returns its events.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Mapping

import torch

from ampmem.patching import Undo, added, undone_together
from ampmem.recorder.facts.addresses import AliveBlocks, RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.sources import extension
from ampmem.recorder.sources.base import Place, RawEvents, Source
from ampmem.recorder.sources.extension import NOTHING_OBSERVED, Observed
from ampmem.recorder.sources.ledger import Ledger, Profiled
from ampmem.recorder.sources.storages import Storages
from ampmem.recorder.sources.torch_flags import counting_begins, torch_flag
from ampmem.recorder.sources.window import ProfileLost, Window, check_free, install
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
        return lambda: None, "TORCH_CPP_LOG_LEVEL is INFO"
    flag = torch_flag(FLAG, ctypes.c_bool)
    if flag is None:
        return lambda: None, f"this torch ({torch.__version__}) does not export {FLAG}"
    # A global variable of libc10, which the allocator reads at each allocation.
    with counting_begins():
        before, flag.value = flag.value, True

    def restore() -> None:
        flag.value = before

    return added("libc10", FLAG, restore), None


class ProfilerSource(Source):
    """The CPU allocator's events of the calling thread, and other threads' memory from the process's total."""

    kind = SourceKind.CPU
    device_type = "cpu"
    device_name = platform.processor() or platform.machine()
    addresses = RealAddresses()
    uses_profiler = True

    def __init__(self, storages: Storages) -> None:
        self._ledger = Ledger(storages)
        self._observer = extension.find() or Window()
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
        self._observer.start()

    def drain(self) -> RawEvents:
        """The events since the last call."""
        return self._settle(self._observer.take(go_on=True))

    def stop(self) -> RawEvents:
        """The last events."""
        try:
            return self._settle(self._observer.take(go_on=False))
        except ProfileLost:
            return self._settle(NOTHING_OBSERVED)

    def abandon(self) -> None:
        """Switch the profiler off in a forked child."""
        self._observer.abandon()

    @undone_together
    def install(self) -> Iterator[Undo]:
        """Count all threads, and keep the script's ``record_function`` scopes out; returns the undo."""
        restore, problem = count_all_threads()
        yield restore
        if problem is not None:
            self._notes = [NOT_COUNTED.format(why=problem)]
        if isinstance(self._observer, Window):
            yield install()

    def blocks(self) -> AliveBlocks:
        """The live blocks after the last event."""
        return self._ledger.blocks()

    def notes(self) -> list[str]:
        """Notes for the reader of the recording."""
        told = self._ledger.told_by_size
        return [*self._notes, TOLD_BY_SIZE.format(size=format_bytes(told))] if told else self._notes

    def _settle(self, seen: Observed) -> RawEvents:
        rows, op, ops = seen.on(extension.CPU)
        time, address, size, total = (column[rows] for column in (seen.time_ns, seen.address, seen.bytes, seen.total))
        events = Profiled(time, address, size, total, op, seen.own[rows])
        return self._ledger.settle(events, {name: place for place, name in enumerate(ops)})
