"""A CUDA device for tests: the allocator's model behind the calls that source ``cuda`` makes, in torch's words.

It is as unkind as the real one (``c10/cuda/CUDACachingAllocator.cpp``): tags belong to the thread that sets them; the
trace has a clock of its own, cut off at microseconds; trace, segments and statistics are read apart, with other threads
in between; and the profiler of the calling thread is told of each block, with its size.
"""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ampmem.allocator.blocks import AWAITING, Block
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.oom import OutOfMemory
from ampmem.allocator.settings import Settings, round_size
from ampmem.allocator.snapshot import ALLOC, FREE_REQUESTED
from ampmem.events import Action, EventColumns, SegmentAction
from ampmem.recorder.sources.base import RawEvents
from ampmem.recorder.sources.cuda.device import OomObserver, Stats
from ampmem.recorder.sources.cuda.trace import KINDS
from ampmem.recorder.sources.cuda.tracker import CountedStats, Frames, Table, Tracked, Tracker


class Clock:
    """A clock in nanoseconds that the test moves; every look at it takes one."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000_000_000

    def __call__(self) -> int:
        self.now += 1
        return self.now


def _report() -> Any:
    """The allocators' way to torch's profiler, which a build without CUDA has too."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    function = library["_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"]
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint16)
    function.restype = None
    return function


_REPORT = _report()
_CUDA_0 = 1
"""``c10::Device(kCUDA, 0)``: a byte for the type, one for the index."""

DRIFT_NS = 200_000
"""By how much the trace's clock is ahead, more or less than that, of the one that ``time.time_ns`` reads."""


class ModelCuda:
    """One device with a trace; ``others`` are the peaks of further devices, ``tags`` whether events can be tagged.

    ``drift_ns`` says by how much the trace's clock is ahead. ``meanwhile`` is called on a thread of its own where
    other threads of a real process may run: between the ``trace``, the ``segments`` and the ``clear``, and before the
    ``statistics`` are read.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        *,
        total: int = 1 << 34,
        settings: Settings | None = None,
        tags: bool = True,
        others: tuple[int, ...] = (),
        drift_ns: int = DRIFT_NS,
    ) -> None:
        self.clock = clock
        self.drift_ns = drift_ns
        self.meanwhile: Callable[[str], None] | None = None
        self.total = total
        self.settings = settings or Settings()
        self.allocator = DeviceCachingAllocator(settings, total_memory=total)
        self.trace: list[dict[str, Any]] = []
        self.recording = False
        self.caching = True
        self.ready = True
        self.waiting: list[Callable[[], None]] = []
        self.calls: list[str] = []
        self.why: str | None = None
        self.graph = False
        self.in_force = ""
        self.process: int | None = None
        self.broken = False
        self.others = others
        self._tags = tags
        self._metadata = threading.local()
        self._awaiting: list[tuple[Block, int]] = []
        """With the bytes asked for, which are gone with the wait."""
        self._driver_calls = 0
        self._changes = 0
        self._observer: OomObserver | None = None
        self.tracker: ModelTracker | None = None

    def malloc(self, size: int, stream: int = 0, frames: list[dict[str, Any]] | None = None) -> Block:
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemory as error:
            self._catch_up()
            rounded = round_size(size, self.settings)
            self._entry("oom", None, rounded, stream, device_free=self.allocator.driver.free)
            if self._observer is not None:
                self._observer(0, error.report.segment, self.total, self.allocator.driver.free)
            raise
        self._catch_up()
        self._entry("alloc", block.address, size, stream, frames=frames or [])
        self._tell_profiler(block.address, block.size)
        return block

    def free(self, block: Block) -> None:
        self._entry("free_requested", block.address, block.requested, block.segment.stream)
        address, size, requested, stream = block.address, block.size, block.requested, block.segment.stream
        self.allocator.free(block)
        if block.state == AWAITING:
            self._awaiting.append((block, requested))
        else:
            self._entry("free_completed", address, requested, stream)
        self._tell_profiler(address, -size)

    @property
    def tag(self) -> str:
        """What the calling thread's events are tagged with."""
        return getattr(self._metadata, "text", "")

    def elsewhere(self, action: Callable[[], Any]) -> Any:
        """What ``action`` gives on a thread of its own."""
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(action()))
        thread.start()
        thread.join()
        return results[0]

    def init(self) -> None:
        """The script initializes CUDA."""
        self.ready = True
        for action in self.waiting:
            action()

    def problem(self) -> str | None:
        return self.why

    def when_ready(self, action: Callable[[], None]) -> None:
        if self.ready:
            action()
        else:
            self.waiting.append(action)

    def settings_in_force(self) -> str | None:
        return self.in_force

    def set_settings(self, text: str) -> None:
        self.in_force = text

    def caches(self) -> bool:
        return self.caching

    def history_is_on(self) -> bool:
        return self.recording

    def history(self, *, on: bool, entries: int, stacks: bool) -> None:
        if self.recording:
            self._others("clear")
        self.calls.append("on" if on else "off")
        self.recording = on
        self.trace.clear()

    def snapshot(self) -> dict[str, Any]:
        self._others("trace")
        traces = [list(self.trace), *([] for _ in self.others)]
        self._others("segments")
        segments = [
            {
                "device": 0,
                "address": each.address,
                "total_size": each.size,
                "stream": each.stream,
                "segment_type": "small" if each.is_small else "large",
                "segment_pool_id": each.pool_id,
                "is_expandable": each.expandable,
                "blocks": [
                    {
                        "address": block.address,
                        "size": block.size,
                        "requested_size": block.requested,
                        "state": "active_allocated"
                        if block.allocated
                        else "active_pending_free"
                        if block.awaiting
                        else "inactive",
                    }
                    for block in each.blocks
                ],
            }
            for each in self.allocator.snapshot()
        ]
        self._entry("snapshot", 0, 0, 0)
        settings = {"PYTORCH_CUDA_ALLOC_CONF": self.in_force}
        return {"segments": segments, "device_traces": traces, "allocator_settings": settings}

    def stats(self, device: int) -> Stats:
        if device:
            return Stats(
                blocks=0, requested=0, allocated=0, active=0, reserved=0, allocated_peak=self.others[device - 1]
            )
        self._others("statistics")
        found = self.allocator.counters
        return Stats(
            blocks=found.allocations,
            requested=found.requested,
            allocated=found.allocated,
            active=found.memory_stats()["active_bytes.all.current"],
            reserved=found.reserved,
            allocated_peak=found.allocated_peak,
            uses=self._changes,
        )

    def changes(self, device: int) -> tuple[int, ...]:
        return (self._changes,)

    def memory_info(self, device: int) -> tuple[int, int]:
        self._fail()
        return self.allocator.driver.free - (1 << 28), self.total

    def process_used(self, device: int) -> int | None:
        return self.process

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1 + len(self.others)

    def device_name(self, device: int) -> str:
        return f"Model {device}"

    def synchronize(self, device: int) -> None:
        self._fail()
        self.calls.append("synchronize")

    def follow_captures(self) -> Callable[[], None]:
        return lambda: None

    def capturing(self) -> bool:
        return self.graph

    def observe_oom(self, observer: OomObserver) -> None:
        self._observer = observer

    def metadata_setter(self) -> Callable[[str], None] | None:
        return self._tag if self._tags else None

    def _fail(self) -> None:
        """As every call does after a device-side assert."""
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def _tag(self, text: str) -> None:
        self._fail()
        self._metadata.text = text

    def _others(self, before: str) -> None:
        """What other threads do before the calling one comes to read."""
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            self.elsewhere(lambda: meanwhile(before))
        self.meanwhile = meanwhile

    def _tell_profiler(self, address: int, size: int) -> None:
        if self.tracker is not None:
            self.tracker.tell(address, size)
        found = self.allocator.counters
        _REPORT(address, size, found.allocated, found.reserved, _CUDA_0)

    def _catch_up(self) -> None:
        """What the allocator did before it served: waits that ended, and segments that came and went."""
        done = [each for each in self._awaiting if each[0].state != AWAITING]
        for block, requested in done:
            self._awaiting.remove((block, requested))
            self._entry("free_completed", block.address, requested, block.segment.stream)
        calls = self.allocator.driver.calls
        for call in calls[self._driver_calls :]:
            self._entry(str(call.call), call.address, call.size, call.stream)
        self._driver_calls = len(calls)

    def _entry(self, action: str, address: int | None, size: int, stream: int, **more: Any) -> None:
        self._changes += action != "snapshot"
        if self.tracker is not None:
            self.tracker.add(action, address or 0, size, stream, more.get("frames", []))
        if self.recording:
            place = {} if address is None else {"addr": address}
            time_us = (self.clock() + self.drift_ns) // 1000
            tag = {"user_metadata": self.tag} if self._tags else {}
            row = {"action": action, "size": size, "stream": stream, "time_us": time_us}
            self.trace.append(row | place | tag | more)


class ModelTracker(Tracker):
    """The extension's tracker for ``gpu``: ``most`` rows are kept, and the thread that makes it is the recorded one."""

    def __init__(self, gpu: ModelCuda, *, most: int = 1 << 20, works: bool = True) -> None:
        self._gpu = gpu
        self._most = most
        self._works = works
        self._recorded = threading.get_ident()
        self._threads = {self._recorded: 0}
        self._rows: list[list[int]] = []
        self._stacks: dict[tuple[tuple[str, int, str], ...], int] = {}
        self._newest: dict[tuple[int, bool], list[int]] = {}
        self._told = self._taken = 0
        self._lost = False
        self.on = False
        gpu.tracker = self

    def start(self) -> bool:
        self.on = self._works
        return self._works

    def stop(self) -> None:
        self.on = False

    def add(self, action: str, address: int, size: int, stream: int, frames: list[dict[str, Any]]) -> None:
        """The allocator calls the tracker, with its lock held."""
        if not self.on or action not in KINDS:
            return
        if len(self._rows) >= self._most:
            self._lost = True
            return
        thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        stack = tuple((each["filename"], each["line"], each["name"]) for each in frames)
        number = self._stacks.setdefault(stack, len(self._stacks) + 1) if stack else 0
        row = Tracked(*[0] * len(Tracked._fields))._replace(
            time_ns=self._gpu.clock(),
            kind=KINDS.index(action),
            address=address,
            size=size,
            stream=stream,
            thread=thread,
            stack=number,
            number=-1,
        )
        self._rows.append(list(row))
        if action in (ALLOC, FREE_REQUESTED):
            self._newest[thread, action == ALLOC] = self._rows[-1]

    def tell(self, address: int, size: int) -> None:
        """The profiler of the recorded thread is told of a block."""
        row = self._newest.get((0, size > 0)) if threading.get_ident() == self._recorded else None
        places = [Tracked._fields.index(name) for name in ("address", "block")]
        if self.on and row is not None and row[places[0]] == address:
            row[places[1]] = abs(size)

    def take(self) -> tuple[Table, bool]:
        table = np.array(self._rows, dtype=np.int64).reshape(-1, len(Tracked._fields))
        self._rows = []
        self._taken += len(table)
        lost, self._lost = self._lost, False
        return table, lost

    def new_stacks(self) -> list[Frames]:
        found = list(self._stacks)[self._told :]
        self._told += len(found)
        return list(found)

    def names(self) -> list[str]:
        return [""]

    def read(self, device: int) -> CountedStats:
        before = self._taken + len(self._rows)
        stats = self._gpu.stats(device)
        after = self._taken + len(self._rows)
        return CountedStats(stats, after if before == after else None, self._gpu.clock(), 0)


SHARED: list[ModelCuda] = []
"""For scripts that a test runs."""


def events_of(windows: list[RawEvents]) -> EventColumns:
    """The windows one after the other, as a recording has them."""
    names = ("time_ns", "action", "address", "bytes", "block_bytes", "stream", "allocated")
    columns = {name: np.concatenate([getattr(window, name) for window in windows]) for name in names}
    zero = np.zeros_like(columns["time_ns"])
    return EventColumns(**columns, step=zero, phase=zero + 3, op=zero, module=zero, stack=zero)


def totals(events: EventColumns) -> Any:
    """What is alive after each event."""
    return np.cumsum(np.where(events.action == Action.FREE, -events.bytes, events.bytes))


def reserved_after(window: RawEvents, before: int, count: int) -> int:
    """What was reserved right after the first ``count`` events of a window that began with ``before``."""
    rows = window.segments
    there = (rows.action == SegmentAction.BASELINE) | (rows.position < count)
    return before + int(np.where(rows.action == SegmentAction.RELEASE, -rows.bytes, rows.bytes)[there].sum())


def held(gpu: ModelCuda) -> int:
    """What is alive by the model, in requested bytes."""
    return sum(block.requested for each in gpu.allocator.snapshot() for block in each.blocks if block.allocated)
