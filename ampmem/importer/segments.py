"""The allocator's segments: those at the end of a snapshot, walked back to where its trace starts."""

from __future__ import annotations

from typing import Final

from ampmem.allocator.segments import RESERVING, Extent, SegmentLog, extent_of_call, extents_of, rewound
from ampmem.allocator.snapshot import ALLOC, DeviceSnapshot, SnapshotEvent
from ampmem.events import NO_SEGMENTS, SegmentColumns
from ampmem.importer.replay import BEFORE, TracedBlocks

_UNKNOWN: Final = "the trace and the segments do not fit together, so what the allocator had reserved is not known"


def segments_of(snapshot: DeviceSnapshot, lives: TracedBlocks, start_ns: int) -> tuple[SegmentColumns, tuple[str, ...]]:
    """What was reserved when, for a recording that has the events of ``lives``; and what is to be said of it.

    Nothing where the trace does not lead to the segments, or has blocks in none: then no state is known.
    """
    calls = [(event.action, _extent(event)) for event in snapshot.events if event.action in RESERVING]
    before, fits = rewound(extents_of(snapshot.segments), calls)
    log = SegmentLog()
    log.begin(start_ns, before)
    there = [allocation for allocation in lives.allocations if allocation.born == BEFORE]
    fits &= all(log.held.holds(each.address, each.bytes) for each in there)
    position = len(there)
    counted = {event.action for event in lives.events}
    for event in snapshot.events:
        if event.action == ALLOC:
            fits &= log.held.holds(event.address, event.size)
        if event.action in counted:
            position += 1
        elif event.action in RESERVING:
            change = log.reserve if RESERVING[event.action] else log.release
            change(event.time_ns, position, _extent(event))
    return (log.take(), ()) if fits else (NO_SEGMENTS, (_UNKNOWN,))


def _extent(event: SnapshotEvent) -> Extent:
    return extent_of_call(event.action, event.address, event.size, event.stream)
