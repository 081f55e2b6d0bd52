"""Which memory is reserved from the device after each call to the driver, forwards or backwards in time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ampmem.allocator.blocks import CallKind, SnapshotSegment
from ampmem.allocator.settings import SMALL_BUFFER
from ampmem.events import SegmentAction, SegmentColumns


class Extent(NamedTuple):
    """A segment, or pages of an expandable one."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool

    @property
    def end(self) -> int:
        """The address after the extent's last byte."""
        return self.address + self.size

    def continues(self, before: Extent) -> bool:
        """Whether this extent has the next pages of the expandable segment of ``before``."""
        return self.expandable and before.end == self.address and before[2:] == self[2:]


RESERVING = {
    CallKind.SEGMENT_ALLOC.value: True,
    CallKind.SEGMENT_MAP.value: True,
    CallKind.SEGMENT_FREE.value: False,
    CallKind.SEGMENT_UNMAP.value: False,
}
"""Actions of a torch trace on segments, and whether each reserves memory."""


def extent_of_call(call: str, address: int, size: int, stream: int) -> Extent:
    """The extent of a call to the driver. The size of an unmapped range does not show its pool."""
    return Extent(address, size, stream, size == SMALL_BUFFER, call in (CallKind.SEGMENT_MAP, CallKind.SEGMENT_UNMAP))


def extents_of(segments: Iterable[SnapshotSegment]) -> list[Extent]:
    """The segments of a snapshot."""
    return [Extent(each.address, each.size, each.stream, each.is_small, each.expandable) for each in segments]


class HeldExtents:
    """Extents that do not overlap, by address; ``size`` is their sum."""

    def __init__(self, extents: Iterable[Extent] = ()) -> None:
        self._extents = sorted(extents)
        self._starts = [extent.address for extent in self._extents]
        self.size = sum(extent.size for extent in self._extents)

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._extents)

    def add(self, extent: Extent) -> None:
        """Add ``extent``; overlapping parts have to be removed first."""
        at = bisect_left(self._starts, extent.address)
        self._extents.insert(at, extent)
        self._starts.insert(at, extent.address)
        self.size += extent.size

    def remove(self, address: int, size: int) -> list[Extent]:
        """Remove a range; returns the removed extents."""
        end = address + size
        first = max(0, bisect_right(self._starts, address) - 1)
        last = bisect_left(self._starts, end)
        cut: list[Extent] = []
        kept: list[Extent] = []
        for extent in self._extents[first:last]:
            low, high = max(extent.address, address), min(extent.end, end)
            if low >= high:
                kept.append(extent)
                continue
            cut.append(extent._replace(address=low, size=high - low))
            if extent.address < low:
                kept.append(extent._replace(size=low - extent.address))
            if high < extent.end:
                kept.append(extent._replace(address=high, size=extent.end - high))
        self._extents[first:last] = kept
        self._starts[first:last] = [extent.address for extent in kept]
        self.size -= sum(extent.size for extent in cut)
        return cut

    def holds(self, address: int, size: int) -> bool:
        """Whether the whole range is held."""
        at = bisect_right(self._starts, address) - 1
        end = address + size
        while 0 <= at < len(self._extents) and self._extents[at].address <= address < self._extents[at].end:
            address = self._extents[at].end
            at += 1
        return address >= end

    def joined(self) -> list[Extent]:
        """The extents, with adjacent pages of one expandable segment joined, as in a snapshot."""
        joined: list[Extent] = []
        for extent in self._extents:
            if joined and extent.continues(joined[-1]):
                joined[-1] = joined[-1]._replace(size=joined[-1].size + extent.size)
            else:
                joined.append(extent)
        return joined


class SegmentLog:
    """Collects rows of :class:`~ampmem.events.SegmentColumns`, and knows what is held after the last one.

    Contradictions with the held extents are corrected first, so the rows always add up to what is held.
    """

    def __init__(self) -> None:
        self.held = HeldExtents()
        self._rows: list[tuple[int, ...]] = []

    def begin(self, time_ns: int, extents: Iterable[Extent]) -> None:
        """Add the extents held when the recording starts."""
        for extent in extents:
            self._add_segment(SegmentAction.BASELINE, time_ns, 0, extent)

    def reserve(self, time_ns: int, position: int, extent: Extent) -> None:
        """Add ``extent``, which the allocator reserves."""
        self.release(time_ns, position, extent)
        self._add_segment(SegmentAction.RESERVE, time_ns, position, extent)

    def release(self, time_ns: int, position: int, extent: Extent) -> None:
        """Remove the held parts of ``extent``, which the allocator returns."""
        cut = self.held.remove(extent.address, extent.size)
        if cut and sum(part.size for part in cut) == extent.size:  # pages mapped one by one may be unmapped in one call
            cut = [cut[0]._replace(size=extent.size)]
        for part in cut:
            self._row(SegmentAction.RELEASE, time_ns, position, part)

    def agree(self, time_ns: int, position: int, extents: Iterable[Extent]) -> int:
        """Make the held extents equal ``extents``; returns the number of changes."""
        before = len(self._rows)
        there = HeldExtents(extents)
        if list(there) == list(self.held):
            return 0
        surplus = HeldExtents(self.held)
        for extent in there:
            surplus.remove(extent.address, extent.size)
        for extent in surplus:
            self.release(time_ns, position, extent)
        for extent in self.held:
            there.remove(extent.address, extent.size)
        for extent in list(there):  # what is left is missing
            self.reserve(time_ns, position, extent)
        return len(self._rows) - before

    def take(self) -> SegmentColumns:
        """The rows since the last call."""
        rows, self._rows = self._rows, []
        return SegmentColumns.of_rows(rows)

    def _add_segment(self, action: SegmentAction, time_ns: int, position: int, extent: Extent) -> None:
        self.held.add(extent)
        self._row(action, time_ns, position, extent)

    def _row(self, action: SegmentAction, time_ns: int, position: int, extent: Extent) -> None:
        self._rows.append((time_ns, position, action, *map(int, extent)))


def rewound(final: Iterable[Extent], calls: Sequence[tuple[str, Extent]]) -> tuple[list[Extent], bool]:
    """The extents held before ``calls``, which led to ``final``, and whether there was no contradiction.

    A call is its action in the trace, and its extent.
    """
    held = HeldExtents(final)
    fits = not any(first.end > second.address for first, second in pairwise(held))
    for call, extent in reversed(calls):
        there = sum(part.size for part in held.remove(extent.address, extent.size))
        if RESERVING[call]:
            fits &= there == extent.size
        else:
            fits &= there == 0
            held.add(extent)
    return list(held), fits
