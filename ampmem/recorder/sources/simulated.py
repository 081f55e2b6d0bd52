"""Source ``simulated``: the events of the modelled caching allocator of a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import time_ns

import numpy as np

from ampmem.allocator.blocks import DEFAULT_POOL, DriverCall
from ampmem.allocator.gpus import READINGS, GpuSpec
from ampmem.allocator.oom import OutOfMemory, pack_segments
from ampmem.allocator.segments import RESERVING, SegmentLog, extent_of_call, extents_of
from ampmem.errors import UsageError
from ampmem.events import (
    NO_STEP,
    Action,
    AllocatorRecord,
    Fact,
    LayersRecord,
    OomRecord,
    PredictionRecord,
    SegmentColumns,
)
from ampmem.names import not_modelled
from ampmem.recorder.facts.log import Log
from ampmem.recorder.sources.base import Place, RawEvents, Source
from ampmem.simulator.device import DeviceEvent, SimulatedDevice
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.general import running_node
from ampmem.simulator.where import take_stops
from ampmem.units import format_bytes
from ampmem.vocabulary import Mark, SourceKind

_NO_GPU = "simulated: no GPU was used; tensors had no values, and the step times are this machine's"

_ONE_STEP = (
    "only one step was recorded: what its update left on the device, such as optimizer state, is alive during the "
    "whole next step, whose peak may be higher"
)

_LATER = 8
"""Maximum number of failures kept after the recorded steps, the last ones."""


class SimulatedSource(Source):
    """The events of the device that this process simulates."""

    kind = SourceKind.SIMULATED

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.addresses = device
        self.device_type = device.label
        self.device_name = device.gpu.name
        self._locate: Callable[[], Place] | None = None
        self._log: Log | None = None
        self._events: list[DeviceEvent] = []
        self._segments = SegmentLog()
        self._first_step = True
        """Whether no step has ended so far, and none was skipped."""
        self._marks: dict[tuple[int, Mark], LayersRecord] = {}
        self._peak: LayersRecord | None = None
        self._layers: list[LayersRecord] = []
        self._ooms: list[OomRecord] = []
        self._at_end: Mapping[int, object] = {}
        """The live storages when the recording ended, by address."""
        self._earlier: Callable[[OutOfMemory], None] | None = None
        """Called with later failures, too: an earlier recording of this device keeps them."""

    def again(self) -> Source:
        """A source for another recording of the same device."""
        return SimulatedSource(self._device)

    def attach(self, locate: Callable[[], Place], log: Log) -> None:
        """Set ``log``, for facts that no hook can see."""
        self._locate = locate
        self._log = log

    def owns_mode(self, mode: object) -> bool:
        """Whether ``mode`` is the one that runs the simulated device's ops."""
        return isinstance(mode, SimulatedMode)

    def check(self) -> None:
        """Raise :class:`UsageError` if the device is being recorded already."""
        if self._device.recorder is not None:
            raise UsageError("the simulated device is being recorded already")

    def start(self, baseline: Mapping[int, int]) -> None:
        """Start recording. ``baseline`` is ignored: the device knows what is alive."""
        now = time_ns()
        total = 0
        # What is on the device already was left by a step that was skipped, or by another recording.
        self._first_step = not self._device.live()
        for address, (size, block, stream) in self._device.live().items():
            total += size
            self._events.append(DeviceEvent(now, Action.BASELINE, address, size, block, total, "", -1, stream))
        self._segments.begin(now, extents_of(self._device.segments()))
        self._device.allocator.driver.observer = self._reserve
        self._device.recorder = self._record
        self._device.on_workspace = partial(self._log_fact, Fact.WORKSPACE)
        self._device.on_scratch = partial(self._log_fact, Fact.SCRATCH)
        self._earlier, self._device.on_out_of_memory = self._device.on_out_of_memory, self._failed
        for address, library in self._device.workspaces.items():
            self._log_fact(Fact.WORKSPACE, address, library)

    def drain(self) -> RawEvents:
        """The events since the last call; called when a step has ended."""
        for what in take_stops():
            self._device.warn(f"{what} (the script caught this and went on)")
        self._see_whether_state_is_missing()
        return self._drain()

    def _see_whether_state_is_missing(self) -> None:
        """Warn if the only step so far ended with more memory than its backward.

        The optimizer state that its update left is alive in forward and backward from the second step on.
        """
        left = {mark: layers.requested for (_, mark), layers in self._marks.items()}
        grew = left.get(Mark.AFTER_OPTIMIZER, 0) > left.get(Mark.AFTER_BACKWARD, 0)
        if self._first_step and grew:
            self._device.warn(_ONE_STEP)
        else:
            self._device.retract(_ONE_STEP)
        self._first_step = False

    def _drain(self) -> RawEvents:
        if self._peak is not None:
            self._layers.append(self._peak)
            self._peak = None
        self._layers += self._marks.values()
        self._marks.clear()
        events, self._events = self._events, []
        return _raw(events, self._segments.take())

    def stop(self) -> RawEvents:
        """The last events; later out-of-memory errors are kept for :meth:`take_ooms`."""
        self._device.recorder = self._device.on_workspace = self._device.on_scratch = None
        self._at_end = self._alive()
        # The script runs on without being recorded; whether the whole run fits is still a result.
        self._device.on_out_of_memory = self._earlier or self._failed_later
        self._device.allocator.driver.observer = None
        return self._drain()

    def abandon(self) -> None:
        """Stop in a forked child, where the device goes on."""
        self.stop()
        self._device.on_out_of_memory, self._at_end = None, {}

    def mark(self, step: int, mark: Mark) -> None:
        """Take the modelled allocator's statistics, for ``mark`` of ``step``."""
        self._marks[(step, mark)] = self._statistics(step, mark)

    def take_layers(self) -> list[LayersRecord]:
        """The settled marks."""
        taken, self._layers = self._layers, []
        return taken

    def take_ooms(self) -> list[OomRecord]:
        """The failures since the last call."""
        taken, self._ooms = self._ooms, []
        return taken

    def allocator(self) -> AllocatorRecord:
        """The settings and statistics of the modelled allocator so far."""
        segments = self._device.segments()
        variable, text = self._device.in_force
        return AllocatorRecord(
            variable=variable if text else "",
            settings=text,
            expandable_segments=any(segment.expandable for segment in segments),
            streams=len({segment.stream for segment in segments}),
            private_pools=len({segment.pool_id for segment in segments} - {DEFAULT_POOL}),
            device=0,
            peaks=(self._device.allocator.counters.allocated_peak,),
        )

    def notes(self) -> list[str]:
        """Notes on the assumptions, and on what was left out."""
        device = self._device
        assumed = (_NO_GPU, _context(device.gpu), *device.assumptions)
        return [*device.warnings, *assumed, *map(not_modelled, device.unmodelled)]

    def prediction(self) -> PredictionRecord:
        """The predicted memory of the run on the simulated GPU so far."""
        return self._device.prediction()

    def _record(self, event: DeviceEvent) -> None:
        self._events.append(event)
        step = NO_STEP if self._log is None else self._log.step
        if event.action == Action.ALLOC and step != NO_STEP:
            peak = self._peak
            if peak is None or peak.step != step or event.allocated > peak.requested:
                self._peak = self._statistics(step, Mark.PEAK)

    def _reserve(self, call: DriverCall) -> None:
        change = self._segments.reserve if RESERVING[call.call] else self._segments.release
        change(time_ns(), len(self._events), extent_of_call(call.call, call.address, call.size, call.stream))

    def _statistics(self, step: int, mark: Mark) -> LayersRecord:
        counters = self._device.allocator.counters
        return LayersRecord(
            step=step,
            mark=mark,
            requested=counters.requested - counters.awaiting_requested,
            allocated=counters.allocated,
            active=counters.allocated + counters.awaiting_bytes,
            reserved=counters.reserved,
            device_used=counters.reserved + self._device.outside,
        )

    def _log_fact(self, fact: Fact, address: int, name: str) -> None:
        if self._log is not None:
            self._log.fact(fact, address, self._log.texts.id(name))

    def _failed(self, error: OutOfMemory) -> None:
        if self._earlier is not None:
            self._earlier(error)
        self._device.retract(_ONE_STEP)  # a second step ran, and did not fit
        place = Place() if self._locate is None else self._locate()
        self._ooms.append(self._record_of(error, place))

    def _failed_later(self, error: OutOfMemory) -> None:
        """Keep ``error``: memory ran out after the recorded steps."""
        stack = "" if self._locate is None else self._locate().stack
        now = self._alive()
        later = tuple(address for address, tensor in self._at_end.items() if now.get(address) is tensor)
        record = self._record_of(error, Place(stack=stack))
        self._ooms = [*self._ooms[1 - _LATER :], replace(record, later=later)]

    def _alive(self) -> Mapping[int, object]:
        """The owner of each live block by address: a storage, or the library whose workspace it is."""
        return {**self._device.workspaces, **self._device.tensors()}

    def _record_of(self, error: OutOfMemory, place: Place) -> OomRecord:
        report = error.report
        return OomRecord(
            time_ns=time_ns(),
            step=place.step,
            device=0,
            stream=self._device.order.current(),
            pool="0,0",
            asked=report.rounded,
            segment=report.segment,
            total=report.device_total,
            free=report.device_free,
            op=place.op or running_node()[0],
            module=place.module,
            stack=place.stack,
            segments=pack_segments(self._device.segments()),
            limit=report.allowed,
        )


def _raw(events: list[DeviceEvent], segments: SegmentColumns) -> RawEvents:
    # 0 is the empty name: outside of backward no node runs.
    names: dict[str, int] = {"": 0}
    op = [names.setdefault(event.node, len(names)) for event in events]
    rows = [(e.time_ns, e.action, e.address, e.bytes, e.block_bytes, e.stream, e.allocated, e.sequence) for e in events]
    *table, sequence = np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(-1, 8).T)
    op_column = np.array(op, dtype=np.int64)
    return RawEvents.from_table(table, op=op_column, sequence=sequence, ops=tuple(names), segments=segments)


def _context(gpu: GpuSpec) -> str:
    least, most = map(format_bytes, gpu.context)
    known = "measured on such GPUs" if gpu.chip in READINGS else ("such GPUs were not measured: the range of all GPUs")
    known = "the GPU's model is not known" if gpu.sm_count is None else known
    return f"assumed: from {least} to {most} of the device is used outside of the allocator (CUDA context; {known})"
