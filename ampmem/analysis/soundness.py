"""Whether a recording may be trusted: its sums are the allocator's, and every byte of the static model is explained."""

from __future__ import annotations

from ampmem.analysis.static_model.verdict import TOTAL
from ampmem.analysis.summary import Summary
from ampmem.units import format_count


def faults(summary: Summary) -> tuple[str, ...]:
    """What speaks against trusting this recording, a sentence each; empty where nothing does."""
    found = [*wrong_sums(summary)]
    if summary.static_problem not in (None, summary.conservation.breach):
        found.append(f"no verdict on the static model: {summary.static_problem}")
    broken = [row for row in summary.static_model if not row.explained and row.component != TOTAL]
    found += [
        f"the static model does not explain {row.component} {str(row.mark).replace('_', ' ')}"
        + (f": {format_count(row.residual_bytes)} bytes" if row.residual_bytes else "")
        for row in broken
    ]
    return tuple(found)


def wrong_sums(summary: Summary) -> tuple[str, ...]:
    """What speaks against its sums: that they are not the allocator's own, or that there is nothing to compare with."""
    conservation = summary.conservation
    found = []
    if conservation.residual_bytes is None:
        found.append("the recording has no total of the allocator to check the sums against")
    if conservation.breach is not None:
        found.append(conservation.breach)
    return tuple(found)


def soundness(summary: Summary) -> str:
    """What was checked of a recording without :func:`faults`."""
    events = f"{format_count(summary.conservation.events)} events, residual 0 B"
    return f"{events}, the static model holds" if summary.static_model else f"{events}, no static model"
