"""A snapshot as a recording, with its segments and notes, and that recording as a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ampmem.allocator.blocks import DEFAULT_POOL
from ampmem.allocator.oom import pack_segments
from ampmem.allocator.segments import RESERVING, Extent, SegmentLog, extent_of_call, extents_of, rewound
from ampmem.allocator.settings import Settings, get_allocation_size
from ampmem.allocator.snapshot import ALLOC, FREE_COMPLETED, DeviceSnapshot, Frame, SnapshotEvent, read_snapshot
from ampmem.errors import RecordingError, UsageError
from ampmem.events import (
    NO_SEGMENTS,
    NO_STEP,
    UNKNOWN,
    Action,
    AllocatorRecord,
    Column,
    EventColumns,
    Fact,
    FactColumns,
    OomRecord,
    OptimizerRecord,
    ParameterRecord,
    Phase,
    PhaseColumns,
    PrecisionRecord,
    Recording,
    RunRecord,
    SegmentColumns,
    StepRecord,
)
from ampmem.importer.infer import Conclusions, conclude
from ampmem.importer.replay import BEFORE, Allocation, TracedBlocks, replay
from ampmem.importer.trace import CallSite, Course, Purpose, StackReading, read_stack, script_course
from ampmem.importer.unpickle import load_plain
from ampmem.names import NO_TIMES, NOT_KNOWN
from ampmem.output import check_output, replaced_file
from ampmem.recording import PACKED, unpack, write_recording
from ampmem.units import format_bytes, format_count
from ampmem.version import __version__
from ampmem.vocabulary import Device, Precision, SourceKind

_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/torch/")
_KINDS: Final = 5
"""Maximum number of kinds of left-out events that are named."""


def _beginning(lives: TracedBlocks) -> Iterator[str]:
    before = sum(allocation.born == BEFORE for allocation in lives.allocations)
    if before:
        yield (
            f"{format_count(before)} blocks of {format_bytes(lives.baseline_bytes)} were alive before the trace "
            "starts: earlier events were not recorded, or the trace's ring buffer has lost them"
        )


def _checked(snapshot: DeviceSnapshot, lives: TracedBlocks) -> Iterator[str]:
    if lives.checked:
        return
    if snapshot.has_strangers:
        yield "the trace and the segments disagree, perhaps because events were left out; the totals cannot be checked"
    elif lives.strangers:
        yield (
            f"the trace does not end where the segments are, in {format_count(lives.strangers)} blocks: recording was "
            "stopped before the snapshot was taken; the totals cannot be checked"
        )
    else:
        yield "the trace and the segments disagree about sizes; the totals cannot be checked"


def _failed(snapshot: DeviceSnapshot) -> Iterator[str]:
    """Notes on out-of-memory errors: on the imported device, and on others, whose failure ends the script as well."""
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
                f"; on device {failed.device} the allocator has reserved {format_bytes(failed.reserved)} at the end, "
                f"{format_bytes(failed.allocated)} of it for tensors"
            )
        if not here and failed.traced:
            text += f"; --device {failed.device} imports that device"
        yield text


def _asked_by(stack: tuple[Frame, ...]) -> str:
    """The op and the script's innermost line, as the end of a message."""
    reading = read_stack(stack)
    lines = list(reversed(reading.text.splitlines()))
    own = next((line for line in lines if not any(part in line for part in _LIBRARIES)), next(iter(lines), ""))
    return (f", in {reading.op}" if reading.op else "") + (f", at {own}" if own else "")


def _stacks(lives: TracedBlocks, readings: Sequence[StackReading]) -> Iterator[str]:
    asked = [readings[event.stack] for event in lives.events if event.action == ALLOC]
    if any(reading.native for reading in asked):
        return
    if any(reading.known for reading in asked):
        yield (
            "the snapshot has no C++ frames, which distinguish casts, workspaces and gradients; record with "
            'stacks="all" to get them'
        )
    else:
        yield 'the snapshot has no stacks, so phases are not known; record with stacks="all"'


def _course(course: Course, lives: TracedBlocks, readings: Sequence[StackReading]) -> Iterator[str]:
    known = any(readings[event.stack].known for event in lives.events)
    if known and not any(stretch.phase != Phase.BETWEEN for stretch in course.stretches):
        yield (
            "no stack in the trace contains a module, a backward or an optimizer, so phases are not known: the trace "
            "is shown as one step, and blocks cannot be attributed"
        )
    elif not _updates(course):
        yield "the trace has no optimizer update: it is shown as one step"
    elif not course.steps[-1].update:
        yield f"the trace ends before the update of step {course.steps[-1].index}"


def _types(found: Conclusions, precision: PrecisionRecord, dtype: str) -> Iterator[str]:
    if not found.parameters:
        return
    yield (
        "a snapshot has no names: parameters of the same size are numbered, and it is unknown which gradient belongs "
        "to which parameter"
    )
    if found.half or precision.name is Precision.FP32:
        return
    if dtype == "float32":
        yield "a snapshot has no types either: parameters were counted as float32"
    else:
        yield f"C++ frames show products of {dtype} matrices and no cast: parameters were counted as {dtype}"


def _autocast(lives: TracedBlocks, readings: Sequence[StackReading], precision: PrecisionRecord) -> Iterator[str]:
    if precision.name is not Precision.AMP and any(readings[event.stack].autocast for event in lives.events):
        yield "stacks go through torch.autocast, but no cast was recognized: it is unknown whether autocast was on"


def _left_out(snapshot: DeviceSnapshot) -> Iterator[str]:
    if snapshot.left_out:
        kinds = [f"{action} ({format_count(count)})" for action, count in snapshot.left_out]
        named = ", ".join(kinds[:_KINDS])
        more = f" and {format_count(len(kinds) - _KINDS)} other kinds" if len(kinds) > _KINDS else ""
        yield f"events of these kinds were left out, because ampmem does not read them: {named}{more}"
    if snapshot.host_events:
        yield f"the snapshot also has {format_count(snapshot.host_events)} events of pinned host memory, not shown"


_UNKNOWN: Final = "the trace and the segments do not fit together, so the reserved memory is unknown"


def segments_reserved(
    snapshot: DeviceSnapshot, lives: TracedBlocks, start_ns: int
) -> tuple[SegmentColumns, tuple[str, ...]]:
    """The reserved segments over time, for a recording with the events of ``lives``; and notes on them.

    Empty if the trace does not lead to the segments, or has blocks outside of them: then no state is known.
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


_WITH_BIAS: Final = "aten::addmm"
_WORK: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_ITEMSIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def import_snapshot(path: Path, output: Path, *, device: int | None = None, force: bool = False) -> Recording:
    """Write the snapshot at ``path`` to ``output`` as a recording, and return it.

    Raises :class:`UsageError` if ``path`` cannot be read or ``output`` not be written, :class:`RecordingError` if the
    file is not a snapshot, is damaged, or has no trace.
    """
    check_output(output, force=force, source=path)
    data = load_plain(path)
    try:
        snapshot = read_snapshot(data, device)
        exported = snapshot.text.startswith(PACKED)
        recording = _exported(snapshot, path.name) if exported else recording_of(snapshot, path.name)
    except (RecordingError, UsageError) as error:
        raise type(error)(f"{path}: {error}") from error
    with replaced_file(output, force=force) as half_written:
        write_recording(half_written, recording)
    return recording


def _exported(snapshot: DeviceSnapshot, name: str) -> Recording:
    """The recording that ``ampmem export`` put into the snapshot; if it cannot be used, the snapshot itself imported.

    The trace may have been changed since, and the recording is untrusted.
    """
    events = [event for event in snapshot.events if event.action in (ALLOC, FREE_COMPLETED)]
    try:
        recording = unpack(snapshot.text, len(events))
        if not _agree_on_blocks(events, recording.events):
            raise RecordingError("its events are not those of the trace")
    except RecordingError as error:
        concluded = recording_of(snapshot, name)
        return replace(concluded, notes=(_NOT_USED.format(error), *concluded.notes))
    return recording


_NOT_USED: Final = (
    "the snapshot contains an ampmem recording that cannot be used: {}; everything was inferred from the trace, as "
    "for any snapshot"
)


def _agree_on_blocks(trace: Sequence[SnapshotEvent], events: EventColumns) -> bool:
    """Whether trace and events have the same allocs and frees: order, addresses, and the sizes of allocs."""
    if len(trace) != len(events):
        return False
    born, address, size = _table([(each.action == ALLOC, each.address, each.size) for each in trace], 3)
    births = events.action != Action.FREE
    same = np.array_equal(born, births) and np.array_equal(address, events.address)
    return same and np.array_equal(size[births], events.bytes[births])


def recording_of(snapshot: DeviceSnapshot, name: str) -> Recording:
    """The recording of ``snapshot``; ``name`` is shown as the script. Raises :class:`RecordingError`."""
    lives = replay(snapshot)
    if not lives.events and not lives.allocations:
        raise RecordingError("the snapshot has neither allocations nor frees")
    readings = [read_stack(stack) for stack in snapshot.stacks]
    course = script_course(lives, readings, snapshot.spans)
    found = conclude(lives, readings, course)
    precision, dtype = _precision(lives, readings, found)
    texts = _Texts()
    events = _events(lives, readings, course, found, texts)
    typed = dtype if found.half or precision.name is Precision.FP32 else ""
    facts = _facts(lives, found, texts, typed)
    segments, unknown = segments_reserved(snapshot, lives, _start(lives) - 1)
    ooms = _ooms(snapshot, lives, course)
    optimized = bool(course.optimizer_names) or _updates(course)
    notes = (  # the most important first
        *_beginning(lives),
        *_checked(snapshot, lives),
        *_failed(snapshot),
        *_stacks(lives, readings),
        *_course(course, lives, readings),
        *found.notes,
        *_types(found, precision, dtype),
        *_autocast(lives, readings, precision),
        *([] if snapshot.timed else [NO_TIMES]),
        *_left_out(snapshot),
        *unknown,
    )
    return Recording(
        run=RunRecord(
            ampmem=__version__,
            torch=NOT_KNOWN,
            python=NOT_KNOWN,
            source=SourceKind.SNAPSHOT,
            device_type=Device.CUDA.value,
            device_name=f"device {snapshot.device} of a snapshot",
            rank=0,
            world_size=1,
            script=name,
            arguments=(),
        ),
        precision=precision,
        texts=texts.all(),
        events=events,
        facts=facts,
        phases=PhaseColumns.of_rows([(item.start_ns, item.step, item.phase) for item in course.stretches]),
        steps=tuple(
            StepRecord(
                index=step.index,
                start_ns=step.start_ns,
                end_ns=step.end_ns,
                skipped_update=False,
                loss=None,
                loss_scale=None,
                finished=not ooms or step is not course.steps[-1],
            )
            for step in course.steps
        ),
        parameters=tuple(
            ParameterRecord(
                name=parameter.name,
                elements=parameter.bytes // _ITEMSIZES[dtype],
                bytes=parameter.bytes,
                dtype=dtype,
                trainable=parameter.trained,
                optimizer=0 if optimized and parameter.trained else None,
            )
            for parameter in found.parameters
        ),
        optimizers=_optimizers(course, lives, readings),
        notes=notes,
        segments=segments,
        allocator=_allocator(snapshot),
        ooms=ooms,
        ended=True,
    )


class _Texts:
    """Texts with their indices, each once; the first is empty."""

    def __init__(self) -> None:
        self._ids = {"": 0}

    def id(self, text: str) -> int:
        """The index of ``text``, made storable in SQLite."""
        clean = text.replace("\0", "?").encode("utf-8", "replace").decode("utf-8")
        return self._ids.setdefault(clean, len(self._ids))

    def all(self) -> tuple[str, ...]:
        return tuple(self._ids)


def _start(lives: TracedBlocks) -> int:
    return lives.events[0].time_ns if lives.events else 0


def _events(
    lives: TracedBlocks, readings: Sequence[StackReading], course: Course, found: Conclusions, texts: _Texts
) -> EventColumns:
    """The events: first the blocks alive before the trace, just before it; then its allocs and frees."""
    address, size, block_bytes, stream, birth, _ = _table(lives.allocations, len(Allocation._fields))
    time_ns, own_size, born, op, stack = _table(list(_calls(lives, readings, texts)), 5)
    before = np.flatnonzero(birth == BEFORE)
    owner = np.concatenate([before, _column(lives.allocation)])
    forward = np.isin(before, list(found.from_forward))
    nothing = np.zeros_like(before)
    # A free counts with the size in its own event: only then is the sum an independent check.
    total = np.cumsum(np.concatenate([size[before], np.where(born, own_size, -own_size)]))
    return EventColumns(
        time_ns=np.concatenate([nothing + _start(lives) - 1, time_ns]),
        step=np.concatenate([np.where(forward, 0, NO_STEP), _column(course.step)]),
        phase=np.concatenate([np.where(forward, int(Phase.FORWARD), int(Phase.SETUP)), _column(course.phase)]),
        action=np.concatenate([nothing + Action.BASELINE, np.where(born, int(Action.ALLOC), int(Action.FREE))]),
        address=address[owner],
        bytes=size[owner],
        block_bytes=block_bytes[owner],
        stream=stream[owner],
        op=np.concatenate([nothing, op]),
        module=np.zeros_like(owner),
        stack=np.concatenate([nothing, stack]),
        allocated=total if lives.checked else np.full_like(total, UNKNOWN),
    )


def _calls(lives: TracedBlocks, readings: Sequence[StackReading], texts: _Texts) -> Iterator[tuple[int, ...]]:
    """(time, size, is alloc, op, stack) of each event."""
    asked = [(1, texts.id(reading.op), texts.id(reading.text)) for reading in readings]
    for action, _, size, _, time_ns, stack in lives.events:
        yield time_ns, size, *(asked[stack] if action == ALLOC else (0, 0, 0))


def _table(rows: Sequence[tuple[int, ...]], width: int) -> NDArray[np.int64]:
    return np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(len(rows), width).T)


def _column(values: Sequence[int]) -> Column:
    return np.array(values, dtype=np.int64)


def _facts(lives: TracedBlocks, found: Conclusions, texts: _Texts, typed: str) -> FactColumns:
    """Each fact at the birth of its block; inferred ones are marked so. ``typed`` is the parameters' dtype."""
    rows: list[tuple[int, ...]] = []
    dtype = texts.id(typed)
    for claim in found.claims:
        allocation = lives.allocations[claim.allocation]
        when = _start(lives) - 1 if allocation.born == BEFORE else lives.events[allocation.born].time_ns
        if claim.at_death:
            when = max(when, lives.events[allocation.died].time_ns - 1)
        kind = dtype if claim.fact == Fact.PARAMETER else 0
        rows.append((when, allocation.address, claim.fact, texts.id(claim.name), 0, kind, 0))
        if not claim.seen:
            rows.append((when, allocation.address, Fact.INFERRED, 0, 0, 0, 0))
    return FactColumns.of_rows(rows)


def _ooms(snapshot: DeviceSnapshot, lives: TracedBlocks, course: Course) -> tuple[OomRecord, ...]:
    """The out-of-memory error at the end of the trace, if its phase is known; the notes have all others."""
    failed = next((each for each in snapshot.failed if each.device == snapshot.device), None)
    if failed is None or failed.free is None or not failed.at_end or not lives.checked:
        return ()
    if course.steps[-1].update or course.stretches[-1].phase not in _WORK:
        return ()
    reading = read_stack(failed.stack)
    return (
        OomRecord(
            time_ns=course.steps[-1].end_ns,
            step=course.steps[-1].index,
            device=snapshot.device,
            stream=failed.stream,
            pool=",".join(map(str, DEFAULT_POOL)),
            asked=failed.asked,
            segment=get_allocation_size(failed.asked, snapshot.settings or Settings()),
            total=None,
            free=failed.free,
            op=reading.op,
            module="",
            stack=reading.text,
            segments=pack_segments(snapshot.segments),
        ),
    )


def _allocator(snapshot: DeviceSnapshot) -> AllocatorRecord:
    settings, default = snapshot.settings or Settings(), Settings()
    changed = [each.name for each in fields(Settings) if getattr(settings, each.name) != getattr(default, each.name)]
    listed = ",".join(f"{name}:{getattr(settings, name)}" for name in changed)
    return AllocatorRecord(
        variable="",
        settings=NOT_KNOWN if snapshot.settings is None else listed,
        expandable_segments=any(segment.expandable for segment in snapshot.segments),
        streams=len({segment.stream for segment in snapshot.segments}),
        private_pools=len({segment.pool_id for segment in snapshot.segments} - {DEFAULT_POOL}),
        device=snapshot.device,
        peaks=(),
    )


def _precision(
    lives: TracedBlocks, readings: Sequence[StackReading], found: Conclusions
) -> tuple[PrecisionRecord, Literal["float32", "bfloat16", "float16"]]:
    """The precision, and the dtype of the parameters.

    It is autocast if that cast something, and FP32 if there are C++ frames without a cast and matrix products in
    float32 only, in a backward or with a bias: a model in bfloat16 may have other float32 products, such as for rotary
    positions. With products of 16-bit matrices and no cast, the parameters have 16 bits.
    """
    asked = [readings[event.stack] for event in lives.events if event.action == ALLOC]
    scaler = any(reading.scaling for reading in asked)
    types = {reading.multiplies for reading in asked} - {""}
    low = sorted(types & {"bfloat16", "float16"})
    left = any(readings[event.stack].leaving_autocast for event in lives.events)
    if left or found.half or any(reading.purpose in (Purpose.CAST, Purpose.PROMOTION) for reading in asked):
        # Sizes cannot distinguish bfloat16 from float16.
        dtype = low[0] if len(low) == 1 else "16-bit"
        return PrecisionRecord(name=Precision.AMP, dtype=dtype, cache=None, scaler=scaler), "float32"
    of_weights = any(each.multiplies and (each.place is CallSite.BACKWARD or each.op == _WITH_BIAS) for each in asked)
    name = Precision.FP32 if types == {"float32"} and of_weights else Precision.AS_IS
    precision = PrecisionRecord(name=name, dtype=None, cache=None, scaler=scaler)
    if types == {"bfloat16"}:
        return precision, "bfloat16"
    return precision, "float16" if types == {"float16"} else "float32"


def _updates(course: Course) -> bool:
    return any(step.update for step in course.steps)


def _optimizers(course: Course, lives: TracedBlocks, readings: Sequence[StackReading]) -> tuple[OptimizerRecord, ...]:
    """The optimizers, by the names that the profiler gave their updates, or by their frames alone."""
    if not _updates(course):
        return ()
    ways = (readings[event.stack].implementation for event in lives.events)
    implementation = next((way for way in ways if way), "for-loop")
    names = course.optimizer_names or (NOT_KNOWN,)
    return tuple(OptimizerRecord(class_name=name, implementation=implementation) for name in names)
