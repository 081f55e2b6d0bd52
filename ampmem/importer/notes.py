"""What a person must know about a recording that was made from a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ampmem.allocator.snapshot import ALLOC, DeviceSnapshot, Frame
from ampmem.events import ArmRecord, Phase
from ampmem.importer.claims import Conclusions
from ampmem.importer.frames import Reading, read_stack
from ampmem.importer.phases import Course
from ampmem.importer.replay import BEFORE, TracedBlocks
from ampmem.names import NO_TIMES
from ampmem.units import format_bytes, format_count
from ampmem.vocabulary import Arm

_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/torch/")
_KINDS: Final = 5
"""How many kinds of events that were left out are named."""


def notes_of(
    snapshot: DeviceSnapshot,
    lives: TracedBlocks,
    readings: Sequence[Reading],
    course: Course,
    found: Conclusions,
    arm: ArmRecord,
    dtype: str,
) -> tuple[str, ...]:
    """The notes, in order of weight; ``dtype`` is the type as which parameters were counted."""
    return (
        *_beginning(lives),
        *_checked(snapshot, lives),
        *_failed(snapshot),
        *_stacks(lives, readings),
        *_course(course, lives, readings),
        *found.notes,
        *_types(found, arm, dtype),
        *_autocast(lives, readings, arm),
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
    """That memory ran out: on the device that is shown, and on others, of which a failure ends the script as well."""
    said = []
    for failed in sorted(snapshot.failed, key=lambda each: each.device != snapshot.device):
        here = failed.device == snapshot.device
        which = "" if here else f" on device {failed.device}, which is not the one shown"
        count = f"{format_count(failed.failures)} allocation{'' if failed.failures == 1 else 's'}"
        last = "it" if failed.failures == 1 else "the last of them"
        text = f"there was no memory for {count}{which}; {last} asked for {format_bytes(failed.asked)}"
        if failed.free is not None:
            text += f" while the device had {format_bytes(failed.free)} free"
        text += _asked_by(failed.stack)
        if not here and failed.reserved:
            text += (
                f"; of device {failed.device} the allocator holds {format_bytes(failed.reserved)} at the end, "
                f"{format_bytes(failed.allocated)} of that in tensors"
            )
        if not here and failed.traced:
            text += f"; --device {failed.device} imports that device"
        said.append(text)
    return said


def _asked_by(stack: tuple[Frame, ...]) -> str:
    """The op and the script's innermost line, as the end of a message."""
    reading = read_stack(stack)
    lines = list(reversed(reading.text.splitlines()))
    own = next((line for line in lines if not any(part in line for part in _LIBRARIES)), next(iter(lines), ""))
    return (f", in {reading.op}" if reading.op else "") + (f", at {own}" if own else "")


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


def _course(course: Course, lives: TracedBlocks, readings: Sequence[Reading]) -> list[str]:
    known = any(readings[event.stack].known for event in lives.events)
    if known and not any(stretch.phase != Phase.BETWEEN for stretch in course.stretches):
        return [
            "no stack of the trace is of a module, a backward or an optimizer, so phases are not known: the trace is "
            "shown as one step, and what the blocks were is not known"
        ]
    if not any(step.update for step in course.steps):
        return ["the trace has no optimizer update: it is shown as one step"]
    if not course.steps[-1].update:
        return [f"the trace ends before the update of step {course.steps[-1].index}"]
    return []


def _types(found: Conclusions, arm: ArmRecord, dtype: str) -> list[str]:
    if not found.parameters:
        return []
    numbered = (
        "a snapshot has no names: parameters are numbered among those of one size, "
        "and which gradient is whose is not known"
    )
    if found.half or arm.name is Arm.FP32:
        return [numbered]
    if dtype != "float32":
        return [
            numbered,
            f"C++ frames show products of {dtype} matrices and no cast: parameters were counted as {dtype}",
        ]
    return [numbered, "a snapshot has no types either: parameters were counted as float32"]


def _autocast(lives: TracedBlocks, readings: Sequence[Reading], arm: ArmRecord) -> list[str]:
    if arm.name is Arm.AMP or not any(readings[event.stack].autocast for event in lives.events):
        return []
    return ["stacks go through torch.autocast, but no cast was recognised: whether autocast was on is not known"]


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
