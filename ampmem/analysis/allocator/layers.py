"""The allocator's layers above the tensors, at every event, and whether its own totals agree with ours.

``requested + rounding = allocated`` and ``allocated + cached = reserved``; what else of the device is used is outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.analysis.timeline.marks import Instants
from ampmem.errors import RecordingError
from ampmem.events import Column, LayersRecord, Recording, SegmentAction
from ampmem.vocabulary import Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Bytes of the allocator's layers.

    ``allocated`` and ``reserved`` have an entry for each position, as
    :class:`~ampmem.analysis.timeline.timeline.Timeline` has: right after so many events. ``level`` is what was
    reserved after each of the recording's segment rows, and ``time_ns`` and ``position`` say when that was.
    """

    allocated: Column
    reserved: Column
    level: Column
    time_ns: Column
    position: Column

    @property
    def cached(self) -> Column:
        """Reserved and in no block that is in use."""
        return self.reserved - self.allocated

    def reserved_at(self, instant_ns: int, position: int) -> int:
        """What was reserved at an instant between two events, with so many of them before it."""
        low, high = np.searchsorted(self.position, [position, position + 1]).tolist()
        rows = min(max(int(np.searchsorted(self.time_ns, instant_ns)), low), high)
        return int(self.level[rows - 1]) if rows else 0

    def peak_between(self, first: int, last: int) -> int:
        """The most that was reserved from one position to another."""
        between = (self.position >= first) & (self.position < last)
        return int(max(self.level[between].max(initial=0), self.reserved[first]))

    def allocated_between(self, first: int, last: int) -> int:
        """The most that was allocated from one position to another, blocks with their rounding."""
        return int(self.allocated[first : last + 1].max())


def layers_of(history: MemoryHistory) -> Layers | None:
    """``None`` where no segments are known. Raises :class:`RecordingError` for segments that contradict each other."""
    segments, events = history.recording.segments, history.recording.events
    if not len(segments):
        return None
    delta = np.where(segments.action == SegmentAction.RELEASE, -segments.bytes, segments.bytes)
    # What is reserved between two events is there after the later one; the baseline is there from the start.
    there_at = np.where(segments.action == SegmentAction.BASELINE, 0, segments.position + 1)
    reserved = np.zeros(len(events) + 2, dtype=np.int64)
    np.add.at(reserved, there_at, delta)
    level = np.cumsum(delta)
    if min(level.min(), np.cumsum(reserved).min()) < 0:
        raise RecordingError("the recording is damaged: more memory was given back to the device than taken from it")
    lives = history.lifetimes
    freed = np.flatnonzero(lives.died != ALIVE)
    allocated = np.zeros(len(events) + 1, dtype=np.int64)
    allocated[lives.born + 1] = lives.block_bytes
    allocated[lives.died[freed] + 1] = -lives.block_bytes[freed]
    return Layers(
        allocated=np.cumsum(allocated),
        reserved=np.cumsum(reserved)[:-1],
        level=level,
        time_ns=np.maximum.accumulate(segments.time_ns),
        position=np.maximum.accumulate(segments.position),
    )


def reserved_residual(history: MemoryHistory, layers: Layers | None) -> int | None:
    """How far the segments are from what the allocator itself said was reserved, at the mark where it is most.

    Where blocks take more than is reserved, that counts too. ``None`` where the allocator was never asked.
    """
    if layers is None:
        return None
    lacking = -int(min(layers.cached.min(), 0))
    position = history.timeline.position
    apart = [
        abs(layers.reserved_at(instant, position(instant)) - record.reserved) for record, instant in _marked(history)
    ]
    return max([*apart, lacking]) if apart or lacking else None


def outside_in(recording: Recording, step: int) -> int | None:
    """The most of the device's memory in the step that was not this allocator's: contexts, NCCL, other processes."""
    found = [
        layers.device_used - layers.reserved
        for layers in recording.layers
        if layers.step == step and layers.device_used is not None
    ]
    return max(found, default=None)


def process_outside_in(recording: Recording, step: int) -> int | None:
    """The part of :func:`outside_in` that the driver counts as this process's; ``None`` where it was not asked."""
    found = [
        layers.process_used - layers.reserved
        for layers in recording.layers
        if layers.step == step and layers.process_used is not None
    ]
    return max(found, default=None)


def marks_residual(history: MemoryHistory) -> int | None:
    """How far the events are from the allocator's own count of requested bytes, at the mark where it is most.

    ``None`` where it was never asked.
    """
    timeline = history.timeline
    return max(
        (
            abs(int(timeline.total[timeline.position(instant)]) - layers.requested)
            for layers, instant in _marked(history)
        ),
        default=None,
    )


def _marked(history: MemoryHistory) -> Iterator[tuple[LayersRecord, int]]:
    """Each mark of a step that ended, with its instant."""
    instants = {step.index: marks for step, marks in zip(history.recording.steps, history.marks, strict=True)}
    for layers in history.recording.layers:
        if layers.mark != Mark.PEAK and layers.step in instants:
            instant = _instant(instants[layers.step], layers.mark)
            if instant is not None:
                yield layers, instant


def _instant(marks: Instants, name: str) -> int | None:
    instant: int | None = getattr(marks, name)
    return instant
