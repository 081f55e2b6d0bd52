"""Gauges of allocated memory, now and at its peak: of the CPU, a CUDA device, a simulated device.

A gauge changes nothing that a script can see. CUDA's allocator has one peak for each number, and only a reset makes it
the peak of a phase: so the peaks before a reset are added again to all that a script can read.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ampmem.allocator.oom import OutOfMemory
from ampmem.errors import UsageError
from ampmem.patching import Undo, patch_call
from ampmem.recorder.models.live import live_tensors
from ampmem.recorder.sources.cpu import count_all_threads
from ampmem.recorder.sources.cuda.device import Snapshot, TorchCuda, forget_observer
from ampmem.recorder.sources.cuda.oom import last_failure
from ampmem.recorder.sources.storages import cpu_storage
from ampmem.recorder.torch_private import cuda as torch_private
from ampmem.recorder.torch_private.general import CPU_REPORTER
from ampmem.simulator.device import SimulatedDevice
from ampmem.vocabulary import SourceKind

RING = 100_000
"""Maximum number of entries of the allocator's history; older allocations have no stack."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory of one device at the end of a step, in bytes; ``retries`` is a count."""

    peak: int
    alive: int
    reserved: int = 0
    retries: int = 0
    split: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnservedRequest:
    """A request that failed for lack of memory, in bytes, and the blocks in use then.

    ``blocks`` maps addresses to bytes; ``lines`` maps addresses to the line of the script that allocated them, if
    known.
    """

    asked: int
    free: int | None
    total: int | None
    reserved: int
    blocks: Mapping[int, int]
    lines: Mapping[int, str]


class Gauge(ABC):
    """Measures one device. Only a CUDA device knows which line of the script allocated a block."""

    kind: SourceKind
    sampled = False
    """Whether the peak is only the largest of the values at the times of reading."""

    @abstractmethod
    def install(self, short: Callable[[UnservedRequest], None]) -> Undo:
        """Start measuring; ``short`` is called with each failed request. Returns the undo."""

    @abstractmethod
    def peak(self) -> int:
        """The peak of allocated bytes since the last :meth:`take`."""

    @abstractmethod
    def take(self) -> Reading:
        """The reading at the end of a step; resets the peak."""

    @abstractmethod
    def device(self) -> tuple[str, int | None]:
        """The device's name and its memory in bytes; ``""`` while none is in use."""

    def line_of(self, address: int) -> str:
        """The line of the script that allocated the block at ``address``; empty if unknown."""
        return ""

    def keep_lines(self, *, wanted: bool) -> None:  # noqa: B027
        """Start or stop to keep the line of each allocation, which costs time."""

    def pause(self) -> None:  # noqa: B027
        """Stop, because a full recording needs the device's history."""

    def resume(self) -> None:  # noqa: B027
        """Go on after a full recording."""


class CpuGauge(Gauge):
    """The running total of torch's CPU allocator, set to count all threads.

    Source: ``ProfiledCPUMemoryReporter`` in PyTorch's ``c10/core/CPUAllocator.cpp``.
    """

    kind = SourceKind.CPU
    sampled = True

    def __init__(self) -> None:
        self._total: ctypes.c_size_t | None = None
        self._before = self._most = 0

    def install(self, short: Callable[[UnservedRequest], None]) -> Undo:
        found = map(cpu_storage, live_tensors())
        self._before = sum({address: storage.nbytes() for storage, address in found if storage and address}.values())
        undo, why = count_all_threads()
        self._total = _running_total() if why is None else None
        if self._total is None:
            undo()
            why = why or f"this torch ({torch.__version__}) keeps its memory total elsewhere"
            raise UsageError(f"the CPU's memory cannot be watched: {why}; watch a GPU, or simulate one with --gpu h100")
        # What the counter says now is of before, too: from here on only its changes count.
        self._before -= self._total.value
        return undo

    def peak(self) -> int:
        """The largest value read since the last :meth:`take`, including now."""
        self._most = max(self._most, self._allocated_now())
        return self._most

    def take(self) -> Reading:
        peak, self._most = self.peak(), 0
        return Reading(peak, self._allocated_now())

    def device(self) -> tuple[str, int | None]:
        return "CPU", None

    def _allocated_now(self) -> int:
        assert self._total is not None
        return max(self._before + self._total.value, 0)  # what no tensor held at the start may be freed since


_TRIALS = (4 << 20, 12 << 20)
"""Bytes of trial allocations, which show the counter that rises and falls by as much."""
_WORDS = 40


def _running_total() -> ctypes.c_size_t | None:
    """The word of torch's reporter that has the bytes in use: the only one that follows two trials exactly."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        reporter = getattr(library, CPU_REPORTER)
    except (OSError, AttributeError):
        return None
    reporter.restype, reporter.argtypes = ctypes.c_void_p, []
    # The reporter is a static object of C++ with a private layout: its members are found by what they do.
    words = (ctypes.c_size_t * _WORDS).from_address(reporter())
    found = set(range(_WORDS))
    for size in _TRIALS:
        before = list(words)
        # Other threads may allocate meanwhile: two trials of different sizes leave one word.
        block = torch.UntypedStorage(size)
        during = list(words)
        del block
        after = list(words)
        found &= {i for i in range(_WORDS) if during[i] - before[i] == size and after[i] == before[i]}
    if len(found) != 1:
        return None
    return ctypes.c_size_t.from_address(ctypes.addressof(words) + ctypes.sizeof(ctypes.c_size_t) * found.pop())


class SimulatedGauge(Gauge):
    """The modelled allocator's counters, which include a peak since the last reading."""

    kind = SourceKind.SIMULATED

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._short: Callable[[UnservedRequest], None] = lambda _: None

    def install(self, short: Callable[[UnservedRequest], None]) -> Undo:
        self._short = short
        self.resume()
        return self.pause

    def peak(self) -> int:
        return self._device.allocator.counters.window_most

    def take(self) -> Reading:
        counters = self._device.allocator.counters
        peak, counters.window_most = counters.window_most, counters.allocated
        split = counters.inactive_split_bytes
        return Reading(peak, counters.allocated, counters.reserved, counters.num_alloc_retries, split)

    def device(self) -> tuple[str, int | None]:
        return self._device.gpu.name, self._device.gpu.total_memory

    def pause(self) -> None:
        self._device.on_out_of_memory = None

    def resume(self) -> None:
        self._device.on_out_of_memory = self._failed

    def _failed(self, failure: OutOfMemory) -> None:
        blocks = {address: size for address, (_, size, _) in self._device.live().items()}
        self._short(
            UnservedRequest(
                asked=failure.report.asked,
                free=failure.report.device_free,
                total=failure.report.device_total,
                reserved=failure.report.reserved,
                blocks=blocks,
                lines={},
            )
        )


class CudaGauge(Gauge):
    """One CUDA device: the one with the most memory in use at the first reading.

    If wanted, the allocator's history, which has the line of each allocation, is kept as a ring.
    """

    kind = SourceKind.CUDA

    def __init__(self, *, stacks: bool) -> None:
        self._api = TorchCuda()
        self._stacks = stacks
        self._device: int | None = None
        self._on = self._wanted = self._ring = False
        self._keep = stacks
        self._short: Callable[[UnservedRequest], None] = lambda _: None
        self._lines: dict[int, str] = {}
        self._peaks: dict[int, dict[tuple[str, str], int]] = {}
        """Each peak before ampmem's reset, by device: since the script's own reset, or the process's start."""
        self._stats = torch_private.memory_stats()
        self._reset = torch_private.reset_peaks()

    def install(self, short: Callable[[UnservedRequest], None]) -> Undo:
        self._short = short
        self._wanted = True
        with ExitStack() as undo:
            undo.callback(self._end)
            # Below torch.cuda.memory_stats and all that uses it.
            for place in torch_private.ASKS_STATS:
                undo.callback(patch_call(*place, self._put_back))
            for place in torch_private.RESETS_PEAKS:
                undo.callback(patch_call(*place, self._forget))
            self._api.when_ready(self._switch_on)
            return undo.pop_all().close

    def _switch_on(self) -> None:
        """Start when CUDA is ready. Torch calls this inside its own initialization, so it must not raise."""
        if self._wanted:
            self._on = True
            self.resume()

    def _end(self) -> None:
        self.pause()
        self._wanted = False

    def keep_lines(self, *, wanted: bool) -> None:
        self._keep = wanted and self._stacks
        if self._keep != self._ring:
            (self._begin_ring if self._keep else self._end_ring)()

    def line_of(self, address: int) -> str:
        if self._ring and not self._lines:
            self._lines = self._in_use(self._api.snapshot(), self._device or 0)[1]
        return self._lines.get(address, "")

    def pause(self) -> None:
        self._end_ring()
        forget_observer(self._observe)

    def resume(self) -> None:
        if self._on and self._wanted:
            self._api.observe_oom(self._observe)
            if self._keep:
                self._begin_ring()

    def _begin_ring(self) -> None:
        # A process has one history: the script's own must not be emptied.
        if self._on and not self._api.history_is_on():  # else the script records one itself
            self._ring, self._lines = True, {}
            self._api.history(on=True, entries=RING, stacks=True)

    def _end_ring(self) -> None:
        if self._ring:
            self._ring, self._lines = False, {}
            self._api.history(on=False, entries=0, stacks=False)

    def peak(self) -> int:
        device = self._device_index()
        return 0 if device is None else int(self._stats(device)["allocated_bytes"]["all"]["peak"])

    def take(self) -> Reading:
        device = self._device_index()
        if device is None:
            return Reading(0, 0)
        stats = self._stats(device)
        kept = self._peaks.setdefault(device, {})
        for name, pools in stats.items():
            if type(pools) is dict:
                for pool, numbers in pools.items():
                    if type(numbers) is dict and numbers["peak"] > kept.get((name, pool), 0):
                        kept[name, pool] = numbers["peak"]
        # The allocator knows one peak since its last reset: for the peak of a step it must be reset at each step's end.
        self._reset(device)
        allocated = stats["allocated_bytes"]["all"]
        return Reading(
            int(allocated["peak"]),
            int(allocated["current"]),
            int(stats["reserved_bytes"]["all"]["current"]),
            int(stats["num_alloc_retries"]),
            int(stats["inactive_split_bytes"]["all"]["current"]),
        )

    def device(self) -> tuple[str, int | None]:
        device = self._device_index()
        if device is None:
            return "", None
        return self._api.device_name(device), self._api.memory_info(device)[1]

    def _device_index(self) -> int | None:
        if self._device is None and self._on:
            used = {device: self._api.stats(device).allocated for device in range(self._api.device_count())}
            most = max(used.values(), default=0)
            if most:
                self._device = next(device for device, size in used.items() if size == most)
        return self._device

    def _put_back(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def memory_stats(device: Any, *args: Any) -> Any:
            stats = original(device, *args)
            for (name, pool), peak in self._peaks.get(_index(device), {}).items():
                numbers = stats[name][pool]
                if peak > numbers["peak"]:
                    numbers["peak"] = peak
            return stats

        return memory_stats

    def _forget(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reset_peak_memory_stats(device: Any, *args: Any) -> Any:
            result = original(device, *args)
            self._peaks.pop(_index(device), None)
            return result

        return reset_peak_memory_stats

    def _observe(self, device: int, segment: int, total: int, free: int) -> None:
        snapshot = self._api.snapshot()
        blocks, lines = self._in_use(snapshot, device)
        self._short(
            UnservedRequest(
                asked=int(last_failure(snapshot, device).get("size", segment)),
                free=free,
                total=total,
                reserved=int(self._stats(device)["reserved_bytes"]["all"]["current"]),
                blocks=blocks,
                lines=lines,
            )
        )

    @staticmethod
    def _in_use(snapshot: Snapshot, device: int) -> tuple[dict[int, int], dict[int, str]]:
        """The blocks in use: bytes, and the line that allocated them, by address."""
        blocks, lines = {}, {}
        for segment in snapshot["segments"]:
            if segment["device"] == device:
                for block in segment["blocks"]:
                    if block["state"] == "active_allocated":
                        blocks[int(block["address"])] = int(block["size"])
                        lines[int(block["address"])] = _line_of(block.get("frames", ()))
        return blocks, lines


def _index(device: Any) -> int:
    return device if isinstance(device, int) else int(getattr(device, "index", None) or 0)


_ELSEWHERE = (
    f"{os.sep}site-packages{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    str(Path(__file__).parents[2]),
)


def _line_of(frames: Any) -> str:
    """``FILE:LINE`` of the innermost of ``frames`` that is the script's, not a library's, torch's or ampmem's."""
    for frame in frames:
        file = str(frame["filename"])
        if file.endswith(".py") and not any(part in file for part in _ELSEWHERE):
            return f"{file}:{frame['line']}"
    return ""
