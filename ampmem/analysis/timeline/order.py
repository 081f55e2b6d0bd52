"""A recording's times in order: a clock that is set while a run goes on may read less than it did before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ampmem.events import Column, PhaseColumns, Recording, StepRecord


def in_order(recording: Recording) -> Recording:
    """``recording`` with phases that follow each other, and steps that end after they start and do not overlap.

    What is in order is left as it is. The events have a clock of their own, which never goes back.
    """
    phases = recording.phases
    times = {**{name: getattr(phases, name) for name in phases.names()}, "time_ns": _growing(phases.time_ns)}
    return replace(recording, phases=PhaseColumns(**times), steps=_apart(recording.steps))


def _growing(times: Column) -> Column:
    return np.maximum.accumulate(times)


def _apart(steps: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
    found: list[StepRecord] = []
    for step in steps:
        start = max(step.start_ns, found[-1].end_ns) if found else step.start_ns
        end = max(start, step.end_ns)
        apart = (start, end) == (step.start_ns, step.end_ns)
        found.append(step if apart else replace(step, start_ns=start, end_ns=end))
    return tuple(found)
