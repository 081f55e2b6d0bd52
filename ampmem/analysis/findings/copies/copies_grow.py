"""Cast copies that become more with every step."""

from __future__ import annotations

from itertools import pairwise

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.units import format_bytes

_STEPS = 3


def check(run: TrainingRun) -> Finding | None:
    """The cast copies alive at the end of a step are more than at the end of the one before, every time."""
    ends = [step.surviving.bytes for step in run.casts]
    if run.analysis.conservation.breach is not None:  # what seems alive may be dead
        return None
    if len(ends) < _STEPS or any(later <= earlier for earlier, later in pairwise(ends)):
        return None
    growth = ends[-1] - ends[0]
    alive = run.analysis.ledger.alive_at(run.analysis, run.analysis.timeline.position(run.steps[-1].end_ns))
    return Finding(
        code="copies-grow",
        severity="warning",
        section=Section.CASTS,
        message=f"the cast copies alive at the end of a step grew by {format_bytes(growth)} in {len(ends)} steps.",
        bytes=growth,
        change="keep no graph from step to step: total += loss.item() or loss.detach(); "
        "and close the autocast region in every step",
        evidence=(
            "at the ends of the steps: " + ", ".join(format_bytes(size) for size in ends),
            *run.copied_parameters(run.analysis.ledger.bytes * alive),
        ),
    )
