"""A peak that only the foreach update of the optimizer makes."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.events import OptimizerRecord, Phase
from ampmem.units import format_bytes


def check(run: TrainingRun) -> Finding | None:
    """The run's peak is in a foreach update and has temporaries of it.

    What goes is the difference to the most that is alive outside of all updates. Without temporaries
    (``fused``) an update needs no more than what it leaves behind.
    """
    timeline = run.analysis.timeline
    temporaries = timeline.temporaries_by_phase(run.peak)["optimizer"]
    foreach = [record for record in run.recording.optimizers if record.implementation == "foreach"]
    inside = _inside_updates(run)
    if not foreach or not temporaries or not inside[run.peak]:
        return None
    start = timeline.position(run.steps[0].start_ns)
    end = timeline.position((run.unfinished or run.steps[-1]).end_ns)
    outside = int(timeline.total[start : end + 1][~inside[start : end + 1]].max(initial=0))
    saved = int(timeline.total[run.peak]) - outside
    if not run.notable(saved):
        return None
    return Finding(
        code="foreach-temporaries",
        severity="advice",
        section=Section.TIMELINE,
        message=f"at the peak {format_bytes(temporaries)} are temporaries of the foreach optimizer update: without "
        f"them the run needs {format_bytes(saved)} less.",
        bytes=saved,
        change=f"{foreach[0].class_name}({_instead(foreach[0])}, which takes one parameter at a time",
        evidence=(
            f"peak, in the update: {format_bytes(int(timeline.total[run.peak]))}",
            f"largest total outside of updates: {format_bytes(outside)}",
            f"optimizers with foreach: {', '.join(record.class_name for record in foreach)}",
        ),
        off_peak=saved,
    )


def _instead(optimizer: OptimizerRecord) -> str:
    return "..., fused=True), or foreach=False" if optimizer.takes_fused else "..., foreach=False)"


def _inside_updates(run: TrainingRun) -> Mask:
    """For each position whether it is between two events of an update: its end, when it is clean again, is not."""
    updating = run.recording.events.phase == Phase.OPTIMIZER
    inside = np.zeros(len(updating) + 1, dtype=np.bool_)
    inside[1:-1] = updating[:-1] & updating[1:]
    return inside
