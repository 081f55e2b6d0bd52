"""From places to phases and steps: what the script was doing at every event."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ampmem.allocator.snapshot import ALLOC, Span
from ampmem.events import Phase
from ampmem.importer.frames import CallSite, Reading
from ampmem.importer.replay import TracedBlocks

_STEP: Final = "Optimizer.step#"
_MAX_NAME: Final = 100
_AFTER: Final = {Phase.BACKWARD: Phase.BETWEEN, Phase.OPTIMIZER: Phase.BETWEEN, Phase.DATA: Phase.BETWEEN}
"""What a script that is in none of the places does after it was in one; a loss is computed after forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """From ``start_ns`` until the next one the script was in ``phase`` of ``step``."""

    start_ns: int
    phase: Phase
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """A step; the last one of a trace may have ended without an ``update``."""

    index: int
    start_ns: int
    end_ns: int
    update: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """``phase`` and ``step`` have one entry per event of the replay."""

    phase: tuple[Phase, ...]
    step: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    steps: tuple[StepSpan, ...]
    optimizer_names: tuple[str, ...]


def course_of(replay: TracedBlocks, readings: Sequence[Reading], spans: Sequence[Span]) -> Course:
    """Follow the script through the trace."""
    updates = [span for span in spans if span.name.startswith(_STEP)]
    phases = _phases(replay, readings, updates)
    stretches = _with_updates(_stretches(replay, phases), updates, replay)
    start = replay.events[0].time_ns if replay.events else 0
    end = replay.events[-1].time_ns + 1 if replay.events else 1
    steps = _steps(stretches, start, end)
    ends = [step.end_ns for step in steps]
    return Course(
        phase=tuple(phases),
        step=tuple(_step_at(ends, event.time_ns) for event in replay.events),
        stretches=tuple(Stretch(start_ns=at, phase=phase, step=_step_at(ends, at)) for at, phase in stretches),
        steps=steps,
        optimizer_names=tuple(dict.fromkeys(_class_of(span) for span in updates)),
    )


def _class_of(span: Span) -> str:
    """``AdamW`` for ``Optimizer.step#AdamW.step``."""
    return span.name.removeprefix(_STEP).removesuffix(".step")[:_MAX_NAME]


def _phases(replay: TracedBlocks, readings: Sequence[Reading], updates: Sequence[Span]) -> list[Phase]:
    """One phase per event. Frees often have no stack, and then go with what is before them.

    The engine's thread has no Python frames: where other events have them, an alloc without any is its.
    """
    traced = any(readings[event.stack].text for event in replay.events)
    now = Phase.BETWEEN
    found: list[Phase] = []
    pending = iter(updates)
    update = next(pending, None)
    for event in replay.events:
        reading = readings[event.stack]
        while update is not None and update.end_ns < event.time_ns:
            update = next(pending, None)
        if reading.place is CallSite.BACKWARD:
            now = Phase.BACKWARD
        elif update is not None and update.start_ns <= event.time_ns:
            now = Phase.OPTIMIZER
        elif reading.place is not None:
            now = reading.place.phase
        elif reading.known and (reading.text or not traced):
            now = _AFTER.get(now, now)
        elif event.action == ALLOC and traced:
            now = Phase.BACKWARD
        found.append(now)
    return found


def _stretches(replay: TracedBlocks, phases: Sequence[Phase]) -> list[tuple[int, Phase]]:
    stretches: list[tuple[int, Phase]] = []
    before = 0
    for event, phase in zip(replay.events, phases, strict=True):
        if not stretches or stretches[-1][1] != phase:
            # An update is over right after what it did last, before anything else is freed.
            updated = bool(stretches) and stretches[-1][1] == Phase.OPTIMIZER
            stretches.append((min(before + 1, event.time_ns) if updated else event.time_ns, phase))
        before = event.time_ns
    return stretches


def _with_updates(
    stretches: list[tuple[int, Phase]], updates: Sequence[Span], replay: TracedBlocks
) -> list[tuple[int, Phase]]:
    """An update that allocates nothing has left no event, but the profiler has named its time."""
    if not replay.events:
        return stretches
    last = replay.events[-1].time_ns
    first = replay.events[0].time_ns
    for span in updates:
        if not first <= span.start_ns <= last or any(
            phase == Phase.OPTIMIZER and span.start_ns <= at <= span.end_ns for at, phase in stretches
        ):
            continue
        before = [phase for at, phase in stretches if at <= span.start_ns]
        inside = [(at, phase) for at, phase in stretches if span.start_ns < at <= span.end_ns]
        if not inside:
            after = _AFTER.get(before[-1], before[-1]) if before else Phase.BETWEEN
            stretches = sorted([*stretches, (span.start_ns, Phase.OPTIMIZER), (span.end_ns + 1, after)])
    return stretches


def _steps(stretches: Sequence[tuple[int, Phase]], start: int, end: int) -> tuple[StepSpan, ...]:
    """A step ends with the last update before work starts anew; what follows the last update is one more."""
    ends: list[int] = []
    updated = False
    for index, (_, phase) in enumerate(stretches):
        if phase in (Phase.FORWARD, Phase.DATA, Phase.BACKWARD):
            updated = False
        elif phase == Phase.OPTIMIZER:
            after = stretches[index + 1][0] if index + 1 < len(stretches) else end
            if updated:
                ends[-1] = after
            else:
                ends.append(after)
            updated = True
    bounds = [start, *ends]
    steps = [
        StepSpan(index=index, start_ns=bounds[index], end_ns=bounds[index + 1], update=True)
        for index in range(len(ends))
    ]
    working = (Phase.FORWARD, Phase.BACKWARD)
    if not steps or any(at >= bounds[-1] and phase in working for at, phase in stretches):
        steps.append(StepSpan(index=len(steps), start_ns=bounds[-1], end_ns=max(end, bounds[-1] + 1), update=False))
    return tuple(steps)


def _step_at(ends: Sequence[int], instant_ns: int) -> int:
    """The step that ``instant_ns`` is in; what follows the last step belongs to one that is not there."""
    return bisect_right(ends, instant_ns)
