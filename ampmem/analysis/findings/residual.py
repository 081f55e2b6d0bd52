"""Sums that are not the allocator's: then nothing that is said of the run is proven."""

from __future__ import annotations

from ampmem.analysis.findings.base import Finding, Section, TrainingRun


def check(run: TrainingRun) -> Finding | None:
    """What the categories or the segments add up to is not what the allocator itself says."""
    conservation = run.analysis.conservation
    if conservation.breach is None:
        return None
    return Finding(
        code="residual",
        severity="warning",
        section=Section.PEAK,
        message=f"{conservation.breach}: memory was allocated or freed where ampmem did not see it, so some of the "
        "bytes shown have a wrong name or none.",
        bytes=max(conservation.residual_bytes or 0, conservation.reserved_residual_bytes or 0),
        change="do not trust this run's numbers; please report the script, or what it uses besides torch",
        evidence=(f"events compared: {conservation.events}",),
    )
