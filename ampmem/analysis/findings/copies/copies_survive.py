"""Cast copies of weights that have been updated since."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.findings.copies.weight_cache import per_allocation
from ampmem.events import Column, Fact, Phase
from ampmem.units import format_bytes


def check(run: TrainingRun) -> Finding | None:
    """Copies made in one step that are still alive when the forward of a later one starts."""
    forward = _last_forward_of_a_later_step(run)
    if forward is None or run.analysis.conservation.breach is not None:  # then what seems alive may be dead
        return None
    step, start = forward
    ledger = run.analysis.ledger
    surviving = ledger.alive_at(run.analysis, run.analysis.timeline.position(start)) & (ledger.step <= step)
    count = ledger.count(surviving)
    if count.bytes == 0:
        return None
    cleared = run.with_fact(Fact.CACHED, before_ns=start)[ledger.allocation] > 0
    cached = bool((surviving & ledger.cached & ~cleared).any())
    why = ": autocast stays open across the update, and its cache serves the weights from before it" if cached else ""
    return Finding(
        code="copies-survive",
        severity="warning",
        section=Section.CASTS,
        message=f"{format_bytes(count.bytes)} of cast copies outlive the step that made them{why}.",
        bytes=count.bytes,
        change="with torch.autocast(...): only around forward and loss, opened anew in every step"
        if cached
        else "keep neither the graph (loss, outputs) nor a cast of the weights from one step to the next",
        evidence=(f"copies: {count.copies}", *run.copied_parameters(ledger.bytes * surviving)),
        off_peak=_off_peak(run, step, ledger.bytes * surviving, start),
    )


def _off_peak(run: TrainingRun, step: int, sizes: Column, forward: int) -> int | None:
    """Without them from the end of the backward of ``step`` to the next ``forward``, which would make new ones."""
    timeline, lifetimes = run.analysis.timeline, run.analysis.lifetimes
    place = next(place for place, each in enumerate(run.steps) if each.index == step)
    ended = run.marks[place].after_backward
    if ended is None:
        return None
    found = per_allocation(run, sizes)
    mine = found != 0
    first = np.maximum(lifetimes.born + 1, timeline.position(ended))[mine]
    return run.off_peak_of_spans(first, np.full(len(first), timeline.position(forward)), found[mine], place=place)


def _last_forward_of_a_later_step(run: TrainingRun) -> tuple[int, int] | None:
    """The last step that another's forward followed, and when that forward began.

    The end of the step itself is too early to ask: a region around the whole step closes right after it.
    """
    forwards = np.array(run.starts(Phase.FORWARD), dtype=np.int64)
    for step in reversed(run.steps):
        later = forwards[forwards >= step.end_ns]
        if len(later):
            return step.index, int(later[0])
    return None
