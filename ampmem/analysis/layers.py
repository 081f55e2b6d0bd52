"""The allocator's layers above the tensors at every event, and its address space: which segment has which blocks.

``requested + rounding = allocated`` and ``allocated + cached = reserved``; other memory of the device is outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ampmem.allocator.segments import Extent, HeldExtents
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.analysis.timeline.timeline import MemoryHistory
from ampmem.errors import RecordingError
from ampmem.events import Column, LayersRecord, Recording, SegmentAction, SegmentColumns
from ampmem.vocabulary import Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorLayers:
    """Bytes of the allocator's layers.

    ``allocated`` and ``reserved`` have an entry for each position, as
    :class:`~ampmem.analysis.timeline.timeline.Timeline` has: right after so many events. ``level`` is the reserved
    memory after each segment row of the recording, and ``time_ns`` and ``position`` are the instants of these rows.
    """

    allocated: Column
    reserved: Column
    level: Column
    time_ns: Column
    position: Column

    @property
    def cached(self) -> Column:
        """Bytes that are reserved but in no block in use, at each position."""
        return self.reserved - self.allocated

    def reserved_at(self, instant_ns: int, position: int) -> int:
        """The bytes reserved at an instant between two events, where ``position`` events came before."""
        low, high = np.searchsorted(self.position, [position, position + 1]).tolist()
        rows = min(max(int(np.searchsorted(self.time_ns, instant_ns)), low), high)
        return int(self.level[rows - 1]) if rows else 0

    def peak_between(self, first: int, last: int) -> int:
        """The peak of reserved bytes between two positions."""
        between = (self.position >= first) & (self.position < last)
        return int(max(self.level[between].max(initial=0), self.reserved[first]))


def layers_of(history: MemoryHistory) -> AllocatorLayers | None:
    """The allocator's layers; ``None`` without segments. Raises :class:`RecordingError` for contradictory segments."""
    segments, events = history.recording.segments, history.recording.events
    if not len(segments):
        return None
    delta = np.where(segments.action == SegmentAction.RELEASE, -segments.bytes, segments.bytes)
    # A segment reserved between two events counts from the later one on; the baseline counts from the start.
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
    return AllocatorLayers(
        allocated=np.cumsum(allocated),
        reserved=np.cumsum(reserved)[:-1],
        level=level,
        time_ns=np.maximum.accumulate(segments.time_ns),
        position=np.maximum.accumulate(segments.position),
    )


def reserved_residual(history: MemoryHistory, layers: AllocatorLayers | None) -> int | None:
    """The largest difference between the segments and the allocator's own reserved bytes, at the steps' marks.

    Blocks that take more than is reserved count too. ``None`` if the allocator was never asked.
    """
    if layers is None:
        return None
    lacking = -int(min(layers.cached.min(), 0))
    there = ((record, layers.reserved_at(at, history.timeline.position(at))) for record, at in _marked(history))
    apart = [abs(reserved - record.reserved) for record, reserved in there]
    return max([*apart, lacking]) if apart or lacking else None


def outside_in(recording: Recording, step: int) -> tuple[int | None, int | None]:
    """The most device memory outside of the allocator in ``step``, and the part that belongs to this process.

    In bytes, of contexts, NCCL and other processes; ``None`` if the driver was not asked.
    """
    layers = [each for each in recording.layers if each.step == step]
    used = [each.device_used - each.reserved for each in layers if each.device_used is not None]
    by_process = [each.process_used - each.reserved for each in layers if each.process_used is not None]
    return max(used, default=None), max(by_process, default=None)


def marks_residual(history: MemoryHistory) -> int | None:
    """The largest difference between the events and the allocator's own requested bytes, at the steps' marks.

    ``None`` if the allocator was never asked.
    """
    total, position = history.timeline.total, history.timeline.position
    apart = (abs(int(total[position(instant)]) - layers.requested) for layers, instant in _marked(history))
    return max(apart, default=None)


def _marked(history: MemoryHistory) -> Iterator[tuple[LayersRecord, int]]:
    """The marks of finished steps, each with its instant in ns."""
    instants = {step.index: marks for step, marks in zip(history.recording.steps, history.marks, strict=True)}
    for layers in history.recording.layers:
        if layers.mark != Mark.PEAK and layers.step in instants:
            instant: int | None = getattr(instants[layers.step], layers.mark)
            if instant is not None:
                yield layers, instant


# The allocator's address space: which segment has which blocks.


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPiece:
    """A part of a segment: the block of an ``allocation``, or free memory if that is ``None``."""

    address: int
    bytes: int
    allocation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMap:
    """A segment, and the pieces that fill it from its start to its end."""

    extent: Extent
    pieces: tuple[SegmentPiece, ...]


def segments_at(segments: SegmentColumns, position: int | None) -> list[Extent]:
    """The reserved segments after the first ``position`` events, or at the end, by address."""
    held = HeldExtents()
    there = np.ones(len(segments), dtype=np.bool_)
    if position is not None:
        there = (segments.action == SegmentAction.BASELINE) | (segments.position < position)
    columns = (segments.action, segments.address, segments.bytes, segments.stream, segments.small, segments.expandable)
    for action, address, size, stream, small, expandable in zip(
        *(each[there].tolist() for each in columns), strict=True
    ):
        held.remove(address, size)
        if action != SegmentAction.RELEASE:
            held.add(Extent(address, size, stream, bool(small), bool(expandable)))
    return held.joined()


def address_map(history: MemoryHistory, position: int | None) -> Iterator[SegmentMap]:
    """The segments with their blocks after the first ``position`` events, or at the end, by address."""
    lives = history.lifetimes
    alive = np.flatnonzero(lives.alive_at(len(history.recording.events) if position is None else position))
    alive = alive[np.argsort(lives.address[alive], kind="stable")]
    starts = lives.address[alive]
    for extent in segments_at(history.recording.segments, position):
        first, last = np.searchsorted(starts, [extent.address, extent.end]).tolist()
        yield SegmentMap(extent=extent, pieces=tuple(pieces_of(history, extent, alive[first:last].tolist())))


def pieces_of(history: MemoryHistory, extent: Extent, inside: list[int]) -> Iterator[SegmentPiece]:
    """The pieces of ``extent`` with the blocks of the allocations ``inside`` it, which are sorted by address."""
    lives, at = history.lifetimes, extent.address
    starts = [int(lives.address[allocation]) for allocation in inside]
    for allocation, address, limit in zip(inside, starts, [*starts[1:], extent.end], strict=False):
        if address > at:
            yield SegmentPiece(address=at, bytes=address - at, allocation=None)
        # The size of a block that is freed by now may be a guess; a block ends at the latest where the next one starts.
        at = min(address + int(lives.block_bytes[allocation]), limit)
        if at > address:
            yield SegmentPiece(address=address, bytes=at - address, allocation=allocation)
    if at < extent.end:
        yield SegmentPiece(address=at, bytes=extent.end - at, allocation=None)
