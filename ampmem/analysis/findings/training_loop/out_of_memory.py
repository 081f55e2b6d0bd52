"""The device ran out of memory, in one sentence; the summary has the rest."""

from __future__ import annotations

from ampmem.analysis.allocator.out_of_memory import FailedRequest
from ampmem.analysis.findings.base import Finding, Section, TrainingRun, own_frame
from ampmem.units import format_bytes


def check(run: TrainingRun) -> Finding | None:
    """A request failed; of several the last one counts, since it is the one that a script dies of."""
    oom = run.analysis.failed_request
    if oom is None:
        return None
    times = f" ({oom.failures} requests failed; this is the last)" if oom.failures > 1 else ""
    end = "" if oom.ended_the_run else " The script went on."
    device = "the device" if oom.recorded else f"cuda:{oom.device}, which is not the device that was recorded,"
    return Finding(
        code="out-of-memory",
        severity="warning",
        section=Section.OUT_OF_MEMORY,
        message=f"{device} ran out of memory in {oom.where}, where {format_bytes(oom.asked)} were needed{times}: "
        f"{oom.explanation}.{end}",
        bytes=oom.asked,
        change=oom.changes[0],
        evidence=(f"asked by {_asked_by(oom)}",),
    )


def _asked_by(oom: FailedRequest) -> str:
    words = [oom.op or "an op that is not known"]
    if oom.module:
        words.append(f"in {oom.module}")
    if oom.stack:
        words.append("at " + own_frame("\n".join(oom.stack)))
    return " ".join(words)
