"""The instants of a step at which its memory is worth a look."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ampmem.events import Phase, PhaseColumns, Recording, StepRecord
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
    failed, rows = failure_ns(recording), PhaseRows(recording.phases)
    return tuple(
        _instants(recording, rows, step) if failed is None or step.finished else _before(rows, step, failed)
        for step in recording.steps
    )


class PhaseRows:
    """Where each step entered its phases; made once for all steps, of which there may be very many."""

    def __init__(self, phases: PhaseColumns) -> None:
        self._times, self._phases = phases.time_ns.tolist(), phases.phase.tolist()
        self._last = {pair: row for row, pair in enumerate(zip(phases.step.tolist(), self._phases, strict=True))}
        self._start = list(range(len(self._phases)))
        """Of each row, the row at which the backward that it ends began."""
        for row in range(2, len(self._phases)):
            # Updates inside a backward, which follow it directly, do not end it.
            if self._phases[row - 2 : row] == [Phase.BACKWARD, Phase.OPTIMIZER]:
                self._start[row] = self._start[row - 2]

    def last(self, step: StepRecord, phase: Phase) -> int | None:
        """The last row at which ``step`` entered ``phase``."""
        return self._last.get((step.index, phase))

    def backward_start(self, row: int) -> int:
        """When the backward that ``row`` ends began."""
        return int(self._times[self._start[row]])

    def end(self, row: int, step: StepRecord) -> int:
        """When the phase of ``row`` ended: when the next one began, or else with the step."""
        return int(self._times[row + 1]) if row + 1 < len(self._times) else step.end_ns


def trains(recording: Recording) -> bool:
    """Whether each step has to have a backward; inference is recorded by steps of another kind."""
    return recording.run.step_on in ("", StepOn.BACKWARD, StepOn.OPTIMIZER)


def _instants(recording: Recording, rows: PhaseRows, step: StepRecord) -> Instants:
    found = instants(rows, step)
    if trains(recording) or found.after_backward is not None:
        return found
    forward = rows.last(step, Phase.FORWARD)
    return found if forward is None else replace(found, after_forward=min(rows.end(forward, step), step.end_ns))


def instants(rows: PhaseRows, step: StepRecord) -> Instants:
    """Where the marks are of a ``step`` that trains."""
    backward, optimizer = rows.last(step, Phase.BACKWARD), rows.last(step, Phase.OPTIMIZER)
    return Instants(
        after_forward=None if backward is None else rows.backward_start(backward),
        after_backward=None if backward is None else rows.end(backward, step),
        after_optimizer=None if optimizer is None else rows.end(optimizer, step),
    )


def phase_at(phases: PhaseColumns, instant_ns: int) -> Phase:
    """The phase that the script was in at ``instant_ns``; before the first row it is ``SETUP``."""
    row = int(np.searchsorted(phases.time_ns, instant_ns, side="right")) - 1
    return Phase.SETUP if row < 0 else Phase(int(phases.phase[row]))


def _before(rows: PhaseRows, step: StepRecord, failed: int) -> Instants:
    found = instants(rows, step)
    reached = (found.after_forward, found.after_backward, found.after_optimizer)
    forward, backward, optimizer = (None if at is None or at > failed else at for at in reached)
    return Instants(after_forward=forward, after_backward=backward, after_optimizer=optimizer)
