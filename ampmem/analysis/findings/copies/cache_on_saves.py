"""Weights cast more than once because autocast's cache is off."""

from __future__ import annotations

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.findings.copies.weight_cache import per_allocation, saved_by_cache
from ampmem.units import format_bytes


def check(run: TrainingRun) -> Finding | None:
    """The cache is off, and several copies of one parameter are alive at the end of forward."""
    if not run.autocast or run.recording.arm.cache is not False:
        return None
    extra = saved_by_cache(run)
    size = int(extra.sum())
    if not run.notable(size):
        return None
    return Finding(
        code="cache-on-saves",
        severity="advice",
        section=Section.CASTS,
        message=f"weights are used more than once before backward and each use keeps a cast copy of its own: "
        f"autocast's cache would save {format_bytes(size)} at the end of forward.",
        bytes=size,
        change="torch.autocast(..., cache_enabled=True), with all the uses in one region",
        evidence=run.copied_parameters(extra),
        off_peak=run.off_peak(per_allocation(run, extra)),
    )
