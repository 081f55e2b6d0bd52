"""Weights cast more than once because autocast's cache is off."""

from __future__ import annotations

from ampmem.analysis.findings.base import Case, Finding
from ampmem.analysis.findings.copies.weight_cache import saved_by_cache
from ampmem.units import format_bytes


def check(case: Case) -> Finding | None:
    """The cache is off, and several copies of one parameter are alive at the end of forward."""
    if not case.autocast or case.recording.arm.cache is not False:
        return None
    extra = saved_by_cache(case)
    size = int(extra.sum())
    if not case.notable(size):
        return None
    return Finding(
        code="cache-on-saves",
        severity="advice",
        message=f"weights are used more than once per forward and each use keeps a cast copy of its own: autocast's "
        f"cache would save {format_bytes(size)} at the end of forward.",
        bytes=size,
        change="torch.autocast(..., cache_enabled=True), with all the uses in one region",
        evidence=case.copied_parameters(extra),
    )
