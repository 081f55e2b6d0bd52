"""Weights used more than once under autocast's cache."""

from __future__ import annotations

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.findings.copies.weight_cache import cost_of_no_cache
from ampmem.units import format_bytes


def check(run: TrainingRun) -> Finding | None:
    """The cache is on, and saves copies that autograd would hold without it."""
    if not run.autocast or not run.recording.arm.cache:
        return None
    extra = cost_of_no_cache(run)
    cost = int(extra.sum())
    if cost == 0:
        return None
    return Finding(
        code="cache-off-costs",
        severity="info",
        section=Section.CASTS,
        message=f"weights are used more than once before backward: with cache_enabled=False their cast copies would "
        f"take {format_bytes(cost)} more at the end of forward.",
        bytes=cost,
        change="leave torch.autocast(..., cache_enabled=True), the default, as it is",
        evidence=run.copied_parameters(extra),
    )
