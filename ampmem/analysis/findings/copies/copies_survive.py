"""Cast copies of weights that have been updated since."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Case, Finding
from ampmem.events import Fact, Phase
from ampmem.units import format_bytes


def check(case: Case) -> Finding | None:
    """Copies made in one step that are still alive when the forward of a later one starts."""
    forward = _last_forward_of_a_later_step(case)
    if forward is None:
        return None
    step, start = forward
    book = case.ledger
    surviving = book.alive_at(case.analysis, case.analysis.timeline.position(start)) & (book.step <= step)
    count = book.count(surviving)
    if count.bytes == 0:
        return None
    cleared = case.with_fact(Fact.CACHED, before_ns=start)[book.allocation] > 0
    cached = bool((surviving & book.cached & ~cleared).any())
    why = ": autocast stays open across the update, and its cache serves the weights from before it" if cached else ""
    return Finding(
        code="copies-survive",
        severity="warning",
        message=f"{format_bytes(count.bytes)} of cast copies outlive the step that made them{why}.",
        bytes=count.bytes,
        change="with torch.autocast(...): only around forward and loss, opened anew in every step"
        if cached
        else "keep neither the graph (loss, outputs) nor a cast of the weights from one step to the next",
        evidence=(f"copies: {count.copies}", *case.copied_parameters(book.bytes * surviving)),
    )


def _last_forward_of_a_later_step(case: Case) -> tuple[int, int] | None:
    """The last step that another's forward followed, and when that forward began.

    The end of the step itself is too early to ask: a region around the whole step closes right after it.
    """
    forwards = np.array(case.starts(Phase.FORWARD), dtype=np.int64)
    for step in reversed(case.recording.steps):
        later = forwards[forwards >= step.end_ns]
        if len(later):
            return step.index, int(later[0])
    return None
