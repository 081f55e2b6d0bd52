"""Gradients that the optimizer has used already and that are there for the next forward."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import ALIVE, Mask
from ampmem.events import Column, Fact, Phase
from ampmem.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """One entry per gradient; ``touched`` has (allocation, time) of every backward that wrote into one."""

    allocation: Column
    touched: tuple[Column, Column]


def check(run: TrainingRun) -> Finding | None:
    """Gradients alive in forward that no backward has written into since the last update: nobody needs them.

    Two ways lead there. ``zero_grad`` comes after forward: then they are freed with nothing written into
    them. Or they are zeroed in place: then the next backward writes into the same memory. The latter looks
    like accumulation over several backwards, where the memory is needed, so it is a finding only when every step
    has one backward.
    """
    gradients = _gradients(run)
    late, kept = gradients.allocation[:0], gradients.allocation[:0]
    sizes = run.analysis.lifetimes.bytes
    for forward in _forwards_after_an_update(run):
        idle = gradients.allocation[_idle(run, gradients, forward)]
        again = np.isin(idle, gradients.touched[0][gradients.touched[1] > forward])
        freed = run.analysis.lifetimes.died[idle] != ALIVE
        if sizes[idle[~again & freed]].sum() > sizes[late].sum():
            late = idle[~again & freed]
        if _one_backward_per_step(run) and sizes[idle[again]].sum() > sizes[kept].sum():
            kept = idle[again]
    if len(late) == 0 and len(kept) == 0:
        return None
    return _late(run, gradients, late) if sizes[late].sum() >= sizes[kept].sum() else _kept(run, gradients, kept)


def _late(run: TrainingRun, gradients: _Gradients, mine: Column) -> Finding:
    size = int(run.analysis.lifetimes.bytes[mine].sum())
    return Finding(
        code="gradients-through-forward",
        severity="advice",
        section=Section.TIMELINE,
        message=f"{format_bytes(size)} of gradients that the optimizer has used already are alive when forward starts "
        "and are freed only later.",
        bytes=size,
        change="drop them before the next forward: optimizer.zero_grad() right after optimizer.step()",
        evidence=_names(run, mine),
        off_peak=_idle_at_the_peak(run, gradients),
    )


def _kept(run: TrainingRun, gradients: _Gradients, mine: Column) -> Finding:
    size = int(run.analysis.lifetimes.bytes[mine].sum())
    return Finding(
        code="gradients-through-forward",
        severity="advice",
        section=Section.TIMELINE,
        message=f"{format_bytes(size)} of gradients stay alive from step to step, through forward: they are zeroed in "
        "place, or not at all.",
        bytes=size,
        change="optimizer.zero_grad(set_to_none=True) before forward",
        evidence=_names(run, mine),
        off_peak=_idle_at_the_peak(run, gradients),
    )


def _idle_at_the_peak(run: TrainingRun, gradients: _Gradients) -> int | None:
    """Bytes of the gradients that nobody needs at the run's peak; ``None`` for none: an update reads them all."""
    if run.peak == 0 or run.peak_in_update:
        return None
    instant = int(run.recording.events.time_ns[run.peak - 1])
    if instant <= run.starts(Phase.OPTIMIZER)[0]:
        return None
    idle = gradients.allocation[_idle(run, gradients, instant)]
    return int(run.analysis.lifetimes.bytes[idle].sum()) or None


def _gradients(run: TrainingRun) -> _Gradients:
    """All of them, but for the memory that several share, which a single ``.grad = None`` does not free."""
    facts = run.analysis.facts
    rows = np.flatnonzero(facts.fact == Fact.GRADIENT)
    pairs = np.unique(np.stack([facts.allocation[rows], facts.name[rows]]), axis=1)
    owners = np.bincount(pairs[0], minlength=len(run.analysis.lifetimes))
    phases = run.recording.phases
    # What comes before the first phase is in none.
    phase = np.append(phases.phase, -1)[np.searchsorted(phases.time_ns, facts.time_ns[rows], side="right") - 1]
    written = rows[phase == Phase.BACKWARD]
    mine = np.flatnonzero(run.analysis.classes.of(Category.GRADIENTS) & (owners <= 1))
    return _Gradients(allocation=mine, touched=(facts.allocation[written], facts.time_ns[written]))


def _forwards_after_an_update(run: TrainingRun) -> list[int]:
    """When each forward of the last step began that an update of the recording came before."""
    updates = run.starts(Phase.OPTIMIZER)
    return [start for start in run.last_starts(Phase.FORWARD) if updates and start > updates[0]]


def _idle(run: TrainingRun, gradients: _Gradients, forward: int) -> Mask:
    """Which gradients are alive at ``forward`` with an update since the last backward that wrote into them."""
    lifetimes = run.analysis.lifetimes
    alive = lifetimes.alive_at(run.analysis.timeline.position(forward))[gradients.allocation]
    last = lifetimes.born_ns.copy()
    allocation, time_ns = gradients.touched
    before = time_ns < forward
    np.maximum.at(last, allocation[before], time_ns[before])
    updates = run.starts(Phase.OPTIMIZER)
    update = updates[bisect_left(updates, forward) - 1]
    idle: Mask = alive & (last[gradients.allocation] < update)
    return idle


def _one_backward_per_step(run: TrainingRun) -> bool:
    phases = run.recording.phases
    steps = phases.step[phases.phase == Phase.BACKWARD]
    index, count = np.unique(steps, return_counts=True)
    once = set(index[count == 1].tolist())
    return all(step.index in once for step in run.steps)


def _names(run: TrainingRun, mine: Column) -> tuple[str, ...]:
    mask = np.zeros(len(run.analysis.lifetimes), dtype=np.bool_)
    mask[mine] = True
    return (f"gradients: {len(mine)}", *run.largest(mask))
