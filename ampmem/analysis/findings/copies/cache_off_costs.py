"""Weights used more than once under autocast's cache."""

from __future__ import annotations

from ampmem.analysis.findings.base import Case, Finding
from ampmem.analysis.findings.copies.weight_cache import cost_of_no_cache
from ampmem.units import format_bytes


def check(case: Case) -> Finding | None:
    """The cache is on, and saves copies that autograd would hold without it."""
    if not case.autocast or not case.recording.arm.cache:
        return None
    extra = cost_of_no_cache(case)
    cost = int(extra.sum())
    if cost == 0:
        return None
    return Finding(
        code="cache-off-costs",
        severity="info",
        message=f"weights are used more than once per forward: with cache_enabled=False their cast copies would take "
        f"{format_bytes(cost)} more at the end of forward.",
        bytes=cost,
        change="leave torch.autocast(..., cache_enabled=True), the default, as it is",
        evidence=case.copied_parameters(extra),
    )
