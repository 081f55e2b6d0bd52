"""The instants of a step at which its memory is worth a look."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ampmem.events import Column, Phase, PhaseColumns, Recording, StepRecord
from ampmem.vocabulary import StepOn


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """Nanoseconds; the state at an instant is that after all events before it. ``None`` where it never came."""

    after_forward: int | None
    """Just before the last backward starts; in a step of inference, which has none, when the last forward ended."""
    after_backward: int | None
    """Just after the last backward ended."""
    after_optimizer: int | None
    """Just after the last optimizer update."""


def failure_ns(recording: Recording) -> int | None:
    """When memory ran out in the last step, if that ended the recording."""
    if recording.ooms and recording.steps and not recording.steps[-1].finished:
        return recording.ooms[-1].time_ns
    return None


def marks_of(recording: Recording) -> tuple[Instants, ...]:
    """Where the marks of each step are; in one in which memory ran out, those that came before that."""
    failed = failure_ns(recording)
    return tuple(
        _instants(recording, step) if failed is None or step.finished else _before(recording, step, failed)
        for step in recording.steps
    )


def trains(recording: Recording) -> bool:
    """Whether each step has to have a backward; inference is recorded by steps of another kind."""
    return recording.run.step_on in ("", StepOn.BACKWARD, StepOn.OPTIMIZER)


def _instants(recording: Recording, step: StepRecord) -> Instants:
    found, phases = instants(recording.phases, step), recording.phases
    forward = None if trains(recording) or found.after_backward is not None else _last_row(phases, step, Phase.FORWARD)
    return (
        found
        if forward is None
        else replace(found, after_forward=min(_end(phases.time_ns, forward, step), step.end_ns))
    )


def instants(phases: PhaseColumns, step: StepRecord) -> Instants:
    """Where the marks are of a ``step`` that trains."""
    backward = _last_row(phases, step, Phase.BACKWARD)
    optimizer = _last_row(phases, step, Phase.OPTIMIZER)
    return Instants(
        after_forward=None if backward is None else _backward_start(phases, backward),
        after_backward=None if backward is None else _end(phases.time_ns, backward, step),
        after_optimizer=None if optimizer is None else _end(phases.time_ns, optimizer, step),
    )


def phase_at(phases: PhaseColumns, instant_ns: int) -> Phase:
    """The phase that the script was in at ``instant_ns``; before the first row it is ``SETUP``."""
    row = int(np.searchsorted(phases.time_ns, instant_ns, side="right")) - 1
    return Phase.SETUP if row < 0 else Phase(int(phases.phase[row]))


def _before(recording: Recording, step: StepRecord, failed: int) -> Instants:
    found = instants(recording.phases, step)
    reached = (found.after_forward, found.after_backward, found.after_optimizer)
    forward, backward, optimizer = (None if at is None or at > failed else at for at in reached)
    return Instants(after_forward=forward, after_backward=backward, after_optimizer=optimizer)


def _last_row(phases: PhaseColumns, step: StepRecord, phase: Phase) -> int | None:
    rows = np.flatnonzero((phases.step == step.index) & (phases.phase == phase))
    return int(rows[-1]) if len(rows) else None


def _backward_start(phases: PhaseColumns, row: int) -> int:
    """When the backward that ``row`` ends began; updates inside it, which follow it directly, do not end it."""
    inside = (Phase.BACKWARD, Phase.OPTIMIZER)
    while row >= 2 and (phases.phase[row - 2], phases.phase[row - 1]) == inside:
        row -= 2
    return int(phases.time_ns[row])


def _end(times: Column, row: int, step: StepRecord) -> int:
    """When the phase of ``row`` ended: when the next one began, or else with the step."""
    return int(times[row + 1]) if row + 1 < len(times) else step.end_ns
