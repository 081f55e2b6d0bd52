"""What a person must know about a recording that was made from a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ampmem.allocator.snapshots.snapshot import ALLOC, DeviceSnapshot
from ampmem.importer.claims import Conclusions
from ampmem.importer.frames import Reading
from ampmem.importer.phases import Course
from ampmem.importer.replay import BEFORE, TracedBlocks
from ampmem.names import NO_TIMES
from ampmem.units import format_bytes, format_count

_KINDS: Final = 5
"""How many kinds of events that were left out are named."""


def notes_of(
    snapshot: DeviceSnapshot, lives: TracedBlocks, readings: Sequence[Reading], course: Course, found: Conclusions
) -> tuple[str, ...]:
    """The notes, in order of weight."""
    return (
        *_beginning(lives),
        *_checked(snapshot, lives),
        *_failed(snapshot),
        *_stacks(lives, readings),
        *_course(course),
        *found.notes,
        *_types(found),
        *_clock(snapshot),
        *_left_out(snapshot),
    )


def _beginning(lives: TracedBlocks) -> list[str]:
    before = sum(allocation.born == BEFORE for allocation in lives.allocations)
    if not before:
        return []
    return [
        f"{format_count(before)} blocks of {format_bytes(lives.baseline_bytes)} were alive before the trace starts: "
        "what happened earlier was not recorded, or the ring has lost it"
    ]


def _checked(snapshot: DeviceSnapshot, lives: TracedBlocks) -> list[str]:
    if lives.checked:
        return []
    if snapshot.has_strangers:
        return [
            "the trace and the segments disagree, and events were left out that may be why; there is no total to check "
            "against"
        ]
    if lives.strangers:
        return [
            f"the trace does not end where the segments are, in {format_count(lives.strangers)} blocks: recording was "
            "stopped before the snapshot was taken; there is no total to check against"
        ]
    return ["the trace and the segments disagree about sizes; there is no total to check against"]


def _failed(snapshot: DeviceSnapshot) -> list[str]:
    notes = []
    if snapshot.failed:
        count, last = len(snapshot.failed), snapshot.failed[-1]
        notes.append(
            f"there was no memory for {format_count(count)} allocations; the last of them asked for "
            f"{format_bytes(last)}"
        )
    for device, size in snapshot.failed_elsewhere:
        notes.append(
            f"memory ran out on device {device}: the last request that failed there asked for {format_bytes(size)}; "
            f"ampmem import --device {device} shows that device"
        )
    return notes


def _stacks(lives: TracedBlocks, readings: Sequence[Reading]) -> list[str]:
    asked = [readings[event.stack] for event in lives.events if event.action == ALLOC]
    if any(reading.native for reading in asked):
        return []
    if any(reading.known for reading in asked):
        return [
            "the snapshot has no C++ frames, which tell casts, workspaces and gradients apart; "
            'record with stacks="all" to have them'
        ]
    return ['the snapshot has no stacks, so phases are not known; record with stacks="all"']


def _course(course: Course) -> list[str]:
    if not any(step.update for step in course.steps):
        return ["the trace has no optimizer update: it is shown as one step"]
    if not course.steps[-1].update:
        return [f"the trace ends before the update of step {course.steps[-1].index}"]
    return []


def _types(found: Conclusions) -> list[str]:
    if not found.parameters:
        return []
    numbered = (
        "a snapshot has no names: parameters are numbered among those of one size, "
        "and which gradient is whose is not known"
    )
    if found.half:
        return [numbered]
    return [numbered, "a snapshot has no types either: parameters were counted as float32"]


def _clock(snapshot: DeviceSnapshot) -> list[str]:
    notes = []
    if not snapshot.timed:
        notes.append(NO_TIMES)
    return notes


def _left_out(snapshot: DeviceSnapshot) -> list[str]:
    notes = []
    if snapshot.left_out:
        kinds = [f"{action} ({format_count(count)})" for action, count in snapshot.left_out]
        named = ", ".join(kinds[:_KINDS])
        more = f" and {format_count(len(kinds) - _KINDS)} other kinds" if len(kinds) > _KINDS else ""
        notes.append(f"events of these kinds were left out, since ampmem does not read them: {named}{more}")
    if snapshot.host_events:
        notes.append(
            f"the snapshot also has {format_count(snapshot.host_events)} events of pinned host memory, not shown"
        )
    return notes
