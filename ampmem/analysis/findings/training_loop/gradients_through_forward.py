"""Gradients that the optimizer has used already and that are there for the next forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import ALIVE, FOREVER, Mask
from ampmem.events import Action, Column, Fact, Phase
from ampmem.units import format_bytes

_DROP = "drop the gradients before the next forward: "
_AUTOMATIC = (
    "/lightning/pytorch/loops/optimization/automatic.py",
    "/pytorch_lightning/loops/optimization/automatic.py",
)
"""Where Lightning calls the optimizer by itself, so that the script has no line after it."""


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
        change=_DROP + _after_the_update(run, mine),
        evidence=_names(run, mine),
        off_peak=run.off_peak_of_spans(*_spans(run, gradients)),
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
        change=f"{_whose(run, mine)}.zero_grad(set_to_none=True) before forward",
        evidence=_names(run, mine),
        off_peak=run.off_peak_of_spans(*_spans(run, gradients)),
    )


def _whose(run: TrainingRun, mine: Column) -> str:
    """Whose ``zero_grad`` drops them all: an optimizer leaves out what it does not update."""
    facts, texts, parameters = run.analysis.facts, run.recording.texts, run.recording.parameters
    if all(each.optimizer is None for each in parameters):
        return "optimizer"  # the recording does not say who updates what
    rows = (facts.fact == Fact.GRADIENT) & np.isin(facts.allocation, mine)
    names = {texts[name] for name in np.unique(facts.name[rows])}
    of_none = {each.name for each in parameters if each.optimizer is None and each.shares is None}
    return "model" if names & of_none else "optimizer"


def _after_the_update(run: TrainingRun, mine: Column) -> str:
    texts = (text.replace("\\", "/") for text in run.recording.texts)
    if any(file in text for text in texts for file in _AUTOMATIC):
        return "optimizer.zero_grad() in the LightningModule's optimizer_step, after super().optimizer_step(...)"
    if len(run.recording.optimizers) > 1:
        return "zero_grad() of every optimizer at the end of the step, after the last update"
    return f"{_whose(run, mine)}.zero_grad() right after optimizer.step()"


def _spans(run: TrainingRun, gradients: _Gradients) -> tuple[Column, Column, Column]:
    """The first and the last position of every span in which a gradient is idle, and its bytes.

    One is idle from the end of the first update after a backward wrote into it, until the next backward has written or
    it is freed; with several optimizers from the end of the step's last update, which is where all are dropped.
    Where the next backward would make it anew, it makes it of what it adds to it otherwise.
    """
    lifetimes, timeline = run.analysis.lifetimes, run.analysis.timeline
    mine = np.isin(gradients.touched[0], gradients.allocation)
    allocation = np.concatenate([gradients.allocation, gradients.touched[0][mine]])
    since = np.concatenate([lifetimes.born_ns[gradients.allocation], gradients.touched[1][mine]])
    order = np.lexsort((since, allocation))
    allocation, since = allocation[order], since[order]
    last = np.where(lifetimes.died == ALIVE, len(run.recording.events), lifetimes.died)[allocation]
    again = np.append(allocation[1:] == allocation[:-1], False)
    last[again] = timeline.time_ns.searchsorted(since[1:][again[:-1]], side="left")
    starts, ends = _updates(run)
    update = _dropped_after(run, starts)[np.searchsorted(starts, since, side="right")]
    first = timeline.time_ns.searchsorted(np.append(ends, FOREVER)[update], side="left") + 1
    # What was there before the recording and goes before an update reads it was used before.
    there = run.recording.events.action[lifetimes.born[allocation]] == Action.BASELINE
    there[1:] &= allocation[1:] != allocation[:-1]
    used = there & (first > last) & (~again | _one_backward_per_step(run))
    first[used] = lifetimes.born[allocation[used]] + 1
    some = first <= last
    if len(run.recording.optimizers) > 1 and not _one_backward_per_step(run):
        some &= ~again  # a backward for another optimizer wrote there before the end of the step
    return first[some], last[some], lifetimes.bytes[allocation[some]]


def _dropped_after(run: TrainingRun, starts: Column) -> Column:
    """For each update the one after which the change drops its gradients; one number more stands for no update."""
    updates = np.arange(len(starts))
    if len(run.recording.optimizers) > 1:
        ends = np.array([step.end_ns for step in run.recording.steps])
        step = ends.searchsorted(starts, side="left")
        updates = step.searchsorted(step, side="right") - 1
    return np.append(updates, len(starts))


def _updates(run: TrainingRun) -> tuple[Column, Column]:
    """When each update started and ended. Where a step calls a closure first, only what comes after that is one."""
    phases = run.recording.phases
    follows = np.append(phases.phase[1:], Phase.BETWEEN)
    update = (phases.phase == Phase.OPTIMIZER) & (follows != Phase.FORWARD) & (follows != Phase.BACKWARD)
    return phases.time_ns[update], np.append(phases.time_ns[1:], FOREVER)[update]


def _gradients(run: TrainingRun) -> _Gradients:
    """All of them, but for memory that several share and that stays, as buckets do: what else has it, nobody says."""
    facts = run.analysis.facts
    rows = np.flatnonzero(facts.fact == Fact.GRADIENT)
    named = rows[facts.name[rows] != 0]  # the first facts come before a parameter's name is known
    pairs = np.unique(np.stack([facts.allocation[named], facts.name[named]]), axis=1)
    owners = np.bincount(pairs[0], minlength=len(run.analysis.lifetimes))
    phases = run.recording.phases
    # What comes before the first phase is in none.
    phase = np.append(phases.phase, -1)[np.searchsorted(phases.time_ns, facts.time_ns[rows], side="right") - 1]
    written = rows[phase == Phase.BACKWARD]
    freed = run.analysis.lifetimes.died != ALIVE
    mine = np.flatnonzero(run.analysis.classes.of(Category.GRADIENTS) & ((owners <= 1) | freed))
    return _Gradients(allocation=mine, touched=(facts.allocation[written], facts.time_ns[written]))


def _forwards_after_an_update(run: TrainingRun) -> list[int]:
    """When each forward of the last step began that an update of the recording came before."""
    updates, _ = _updates(run)
    return [start for start in run.last_starts(Phase.FORWARD) if len(updates) and start > updates[0]]


def _idle(run: TrainingRun, gradients: _Gradients, forward: int) -> Mask:
    """Which gradients are alive at ``forward`` with an update since the last backward that wrote into them."""
    lifetimes = run.analysis.lifetimes
    alive = lifetimes.alive_at(run.analysis.timeline.position(forward))[gradients.allocation]
    last = lifetimes.born_ns.copy()
    allocation, time_ns = gradients.touched
    before = time_ns < forward
    np.maximum.at(last, allocation[before], time_ns[before])
    updates, _ = _updates(run)
    update = updates[np.searchsorted(updates, forward) - 1]
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
