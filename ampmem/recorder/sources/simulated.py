"""Source ``simulated``: what the model of the caching allocator did for the tensors of a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import time_ns

import numpy as np

from ampmem.allocator.oom import OutOfMemory
from ampmem.allocator.shortage import pack
from ampmem.errors import UsageError
from ampmem.events import NO_STEP, PEAK_MARK, Action, Fact, LayersRecord, OomRecord, Source
from ampmem.recorder.log import Log
from ampmem.recorder.simulated.device import CONTEXT, Event, SimulatedDevice
from ampmem.recorder.sources.base import Place, RawEvents
from ampmem.units import format_bytes

ALWAYS = (
    "simulated: no GPU was used; tensors had no values, and the step times are this machine's",
    f"assumed: {format_bytes(CONTEXT)} of the device is used outside of the allocator (CUDA context, libraries)",
    "not modelled: the scratch that large reductions give back at once",
)

_NOWHERE = Place(step=NO_STEP, op="", module="", stack="")


class SimulatedSource:
    """The events of the device that is simulated in this process."""

    kind = Source.SIMULATED
    stamp: Callable[[int], None] | None = None

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.device_type = device.label
        self.device_name = device.gpu.name
        self.locate: Callable[[], Place] | None = None
        self._log: Log | None = None
        self._events: list[Event] = []
        self._step = NO_STEP
        self._marks: dict[tuple[int, str], LayersRecord] = {}
        self._peak: LayersRecord | None = None
        self._layers: list[LayersRecord] = []
        self._ooms: list[OomRecord] = []

    @property
    def ran_out(self) -> bool:
        """Whether a request failed for want of memory."""
        return self._device.out_of_memory is not None

    def tell(self, log: Log) -> None:
        """Log facts about what no hook can see."""
        self._log = log

    def install(self) -> Callable[[], None]:
        """Nothing to patch: the device was put in place before the script started."""
        return lambda: None

    def check(self) -> None:
        """Raise :class:`UsageError` when the device is recorded already."""
        if self._device.recorder is not None:
            raise UsageError("the simulated device is being recorded already")

    def start(self, baseline: Mapping[int, int]) -> None:
        """Begin. ``baseline`` is ignored: the device knows what is alive."""
        now = time_ns()
        total = 0
        for address, (size, block) in self._device.live().items():
            total += size
            self._events.append(Event(now, Action.BASELINE, address, size, block, total, "", -1))
        self._device.recorder = self._record
        self._device.on_workspace = self._workspace
        self._device.on_out_of_memory = self._failed
        for address in self._device.workspaces:
            self._workspace(address)

    def drain(self) -> RawEvents:
        """The events since the last call."""
        if self._peak is not None:
            self._layers.append(self._peak)
            self._peak = None
        self._layers += self._marks.values()
        self._marks.clear()
        events, self._events = self._events, []
        return _raw(events)

    def stop(self) -> RawEvents:
        """The last events."""
        self._device.recorder = self._device.on_workspace = self._device.on_out_of_memory = None
        return self.drain()

    def mark(self, step: int, mark: str) -> None:
        """Take the model's statistics."""
        self._marks[(step, mark)] = self._statistics(step, mark)

    def take_layers(self) -> list[LayersRecord]:
        """The settled marks."""
        taken, self._layers = self._layers, []
        return taken

    def take_ooms(self) -> list[OomRecord]:
        """The failures since the last call."""
        taken, self._ooms = self._ooms, []
        return taken

    def notes(self) -> list[str]:
        """What was taken for granted, and what was left out."""
        return [*ALWAYS, *self._device.assumptions]

    def _record(self, event: Event) -> None:
        self._events.append(event)
        step = NO_STEP if self._log is None else self._log.step
        if event.action == Action.ALLOC and step != NO_STEP:
            peak = self._peak
            if peak is None or peak.step != step or event.allocated > peak.requested:
                self._peak = self._statistics(step, PEAK_MARK)

    def _statistics(self, step: int, mark: str) -> LayersRecord:
        counters = self._device.allocator.counters
        return LayersRecord(
            step=step,
            mark=mark,
            requested=counters.requested - counters.awaiting_bytes,
            allocated=counters.allocated,
            active=counters.allocated + counters.awaiting_bytes,
            reserved=counters.reserved,
            device_used=counters.reserved + CONTEXT,
        )

    def _workspace(self, address: int) -> None:
        if self._log is not None:
            self._log.fact(Fact.WORKSPACE, address)

    def _failed(self, error: OutOfMemory) -> None:
        place = _NOWHERE if self.locate is None else self.locate()
        report = error.report
        self._ooms.append(
            OomRecord(
                time_ns=time_ns(),
                step=place.step,
                device=0,
                stream=0,
                pool="0,0",
                asked=report.rounded,
                segment=report.segment,
                total=report.device_total,
                free=report.device_free,
                op=place.op,
                module=place.module,
                stack=place.stack,
                segments=pack(self._device.allocator.snapshot()),
            )
        )


def _raw(events: list[Event]) -> RawEvents:
    names: dict[str, int] = {"": 0}
    op = [names.setdefault(event.node, len(names)) for event in events]
    rows = [(e.time_ns, e.action, e.address, e.bytes, e.block_bytes, e.allocated, e.sequence) for e in events]
    columns = np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(-1, 7).T)
    time, action, address, size, block, allocated, sequence = columns
    return RawEvents(
        time_ns=time,
        action=action,
        address=address,
        bytes=size,
        block_bytes=block,
        stream=np.zeros_like(time),
        allocated=allocated,
        op=np.array(op, dtype=np.int64),
        sequence=sequence,
        ops=tuple(names),
    )
