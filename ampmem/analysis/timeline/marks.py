"""The marks of a step: the ends of forward, backward and update, at which its live memory is compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ampmem.events import Phase, PhaseColumns, Recording, StepRecord
from ampmem.vocabulary import STEP_MARKS, StepOn


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """The marks of a step in ns; the state at a mark is that after all events before it. ``None`` if never reached."""

    after_forward: int | None
    """Just before the last backward starts.

    In a step without backward (inference) the end of the last forward; in a batch of an evaluation recorded alone the
    end of the model's forward, as what is computed from its outputs follows in the same phase.
    """
    after_backward: int | None
    """Just after the last backward ended."""
    after_optimizer: int | None
    """Just after the last optimizer update."""


def failure_ns(recording: Recording) -> int | None:
    """The instant in ns at which memory ran out in the last step, if that ended the recording; else ``None``."""
    return recording.ooms[-1].time_ns if recording.ooms and unfinished_step(recording) is not None else None


def unfinished_step(recording: Recording) -> StepRecord | None:
    """The step in which memory ran out, if that ended the recording."""
    return next((step for step in recording.steps[-1:] if not step.finished), None)


def marks_of(recording: Recording) -> tuple[Instants, ...]:
    """The marks of each step; a step in which memory ran out has the marks before that instant."""
    failed, rows = failure_ns(recording), PhaseRows(recording.phases)
    return tuple(
        _instants(recording, rows, step) if failed is None or step.finished else _marks_before(rows, step, failed)
        for step in recording.steps
    )


class PhaseRows:
    """The phases that each step entered; made once for all steps, as there may be very many."""

    def __init__(self, phases: PhaseColumns) -> None:
        self._times, self._phases = phases.time_ns.tolist(), phases.phase.tolist()
        pairs = list(enumerate(zip(phases.step.tolist(), self._phases, strict=True)))
        self._last = {pair: row for row, pair in pairs}
        self._first = {pair: row for row, pair in reversed(pairs)}
        self._start = list(range(len(self._phases)))
        """For each row the row at which the backward that it ends began."""
        for row in range(2, len(self._phases)):
            # An update inside a backward directly follows that backward's row, and does not end the backward.
            if self._phases[row - 2 : row] == [Phase.BACKWARD, Phase.OPTIMIZER]:
                self._start[row] = self._start[row - 2]

    def last(self, step: StepRecord, phase: Phase) -> int | None:
        """The last row at which ``step`` entered ``phase``."""
        return self._last.get((step.index, phase))

    def first(self, step: StepRecord, phase: Phase) -> int | None:
        """The first row at which ``step`` entered ``phase``."""
        return self._first.get((step.index, phase))

    def backward_start(self, row: int) -> int:
        """The start in ns of the backward that ``row`` ends."""
        return int(self._times[self._start[row]])

    def backwards(self) -> list[tuple[int, int]]:
        """The start and end in ns of every backward; the last may have no end yet, and is left out."""
        ends: dict[int, int] = {}
        for row, (phase, end) in enumerate(zip(self._phases, self._times[1:], strict=False)):
            if phase == Phase.BACKWARD:
                ends[self._start[row]] = end
        return [(self._times[start], end) for start, end in ends.items()]

    def end(self, row: int, step: StepRecord) -> int:
        """The end in ns of the phase of ``row``: the start of the next phase, or the end of the step."""
        return int(self._times[row + 1]) if row + 1 < len(self._times) else step.end_ns


def trains(recording: Recording) -> bool:
    """Whether each step must have a backward; steps of inference have none."""
    return recording.run.step_on in ("", StepOn.BACKWARD, StepOn.OPTIMIZER)


def _instants(recording: Recording, rows: PhaseRows, step: StepRecord) -> Instants:
    found = instants(rows, step)
    if trains(recording) or found.after_backward is not None:
        return found
    find = rows.first if recording.run.step_on == StepOn.EVALUATION else rows.last
    forward = find(step, Phase.FORWARD)
    return found if forward is None else replace(found, after_forward=min(rows.end(forward, step), step.end_ns))


def instants(rows: PhaseRows, step: StepRecord) -> Instants:
    """The marks of a ``step`` that trains."""
    backward, optimizer = rows.last(step, Phase.BACKWARD), rows.last(step, Phase.OPTIMIZER)
    return Instants(
        after_forward=None if backward is None else rows.backward_start(backward),
        after_backward=None if backward is None else rows.end(backward, step),
        after_optimizer=None if optimizer is None else rows.end(optimizer, step),
    )


def phase_at(phases: PhaseColumns, instant_ns: int) -> Phase:
    """The phase of the script at ``instant_ns``; before the first row ``SETUP``."""
    row = int(np.searchsorted(phases.time_ns, instant_ns, side="right")) - 1
    return Phase.SETUP if row < 0 else Phase(int(phases.phase[row]))


def _marks_before(rows: PhaseRows, step: StepRecord, failed: int) -> Instants:
    """The marks that ``step`` reached before memory ran out at ``failed`` ns."""
    found = instants(rows, step)
    reached = ((name, getattr(found, name)) for name in STEP_MARKS)
    return Instants(**{name: None if at is None or at > failed else at for name, at in reached})
