"""A CUDA device for tests: the allocator's model behind the calls that source ``cuda`` makes, in torch's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampmem.allocator.model.blocks import AWAITING, Block
from ampmem.allocator.model.caching import DeviceCachingAllocator
from ampmem.allocator.model.oom import OutOfMemory
from ampmem.allocator.rounding import round_size
from ampmem.allocator.settings import Settings
from ampmem.recorder.sources.cuda.device import OomObserver, Stats


class Clock:
    """A clock in nanoseconds that the test moves; every look at it takes one."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000_000_000

    def __call__(self) -> int:
        self.now += 1
        return self.now


class ModelCuda:
    """One device with a trace; ``others`` are the peaks of further devices, ``tags`` whether events can be tagged."""

    def __init__(
        self,
        clock: Callable[[], int],
        *,
        total: int = 1 << 34,
        settings: Settings | None = None,
        tags: bool = True,
        others: tuple[int, ...] = (),
    ) -> None:
        self.clock = clock
        self.total = total
        self.settings = settings or Settings()
        self.allocator = DeviceCachingAllocator(settings, total_memory=total)
        self.trace: list[dict[str, Any]] = []
        self.recording = False
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
        self._metadata = ""
        self._awaiting: list[Block] = []
        self._driver_calls = 0
        self._observer: OomObserver | None = None

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
        return block

    def free(self, block: Block) -> None:
        self._entry("free_requested", block.address, block.requested, block.segment.stream)
        address, size, stream = block.address, block.requested, block.segment.stream
        self.allocator.free(block)
        if block.state == AWAITING:
            self._awaiting.append(block)
        else:
            self._entry("free_completed", address, size, stream)

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

    def history_is_on(self) -> bool:
        return self.recording

    def history(self, *, on: bool, entries: int, stacks: bool) -> None:
        self.calls.append("on" if on else "off")
        self.recording = on
        self.trace.clear()

    def snapshot(self) -> dict[str, Any]:
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
                        else "active_awaiting_free"
                        if block.awaiting
                        else "inactive",
                    }
                    for block in each.blocks
                ],
            }
            for each in self.allocator.snapshot()
        ]
        traces = [list(self.trace), *([] for _ in self.others)]
        self._entry("snapshot", 0, 0, 0)
        settings = {"PYTORCH_CUDA_ALLOC_CONF": self.in_force}
        return {"segments": segments, "device_traces": traces, "allocator_settings": settings}

    def stats(self, device: int) -> Stats:
        if device:
            return Stats(requested=0, allocated=0, active=0, reserved=0, allocated_peak=self.others[device - 1])
        found = self.allocator.statistics()
        return Stats(
            requested=found.requested_bytes.current,
            allocated=found.allocated_bytes.current,
            active=found.active_bytes.current,
            reserved=found.reserved_bytes.current,
            allocated_peak=found.allocated_bytes.peak,
        )

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
        self._metadata = text

    def _catch_up(self) -> None:
        """What the allocator did before it served: waits that ended, and segments that came and went."""
        done = [block for block in self._awaiting if block.state != AWAITING]
        for block in done:
            self._awaiting.remove(block)
            self._entry("free_completed", block.address, 0, 0)
        calls = self.allocator.driver.calls
        for call in calls[self._driver_calls :]:
            self._entry(str(call.call), call.address, call.size, call.stream)
        self._driver_calls = len(calls)

    def _entry(self, action: str, address: int | None, size: int, stream: int, **more: Any) -> None:
        if self.recording:
            place = {} if address is None else {"addr": address}
            time_us = self.clock() // 1000
            tag = {"user_metadata": self._metadata} if self._tags else {}
            row = {"action": action, "size": size, "stream": stream, "time_us": time_us}
            self.trace.append(row | place | tag | more)


SHARED: list[ModelCuda] = []
"""For scripts that a test runs."""
