"""Findings about copies in another precision: their number, how long they live, and the effect of autocast's cache."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import ALIVE, Mask
from ampmem.events import Column, Fact, Phase
from ampmem.units import format_bytes


def cost_of_no_cache(run: TrainingRun) -> Column:
    """For each cast copy the bytes that it would cost without the cache, at the instant with the largest sum.

    That instant is the start of a backward in the step of the peak.

    Each use that autograd saved would hold a copy of its own: ``(saves - 1) * bytes``.
    """

    ledger = run.analysis.ledger
    return _largest(run, lambda alive, saves: np.maximum(saves - 1, 0) * ledger.bytes * (alive & ledger.cached))


def saved_by_cache(run: TrainingRun) -> Column:
    """For each cast copy the bytes that the cache would save, at the instant with the largest sum.

    That instant is the start of a backward in the step of the peak.

    One copy of each parameter stays. The cache takes neither views nor untrained parameters.
    """
    ledger = run.analysis.ledger
    trained = {record.name for record in run.recording.parameters if record.trainable}
    cacheable = ~ledger.view & np.array(
        [run.text(name) in trained for name in ledger.parameter.tolist()], dtype=np.bool_
    )

    def further(alive: Mask, saves: Column) -> Column:
        mine = alive & cacheable
        extra = ledger.bytes * mine
        for parameter in np.unique(ledger.parameter[mine]):
            copies = np.flatnonzero(mine & (ledger.parameter == parameter))
            extra[copies[np.argmax(ledger.bytes[copies])]] = 0
        return extra

    return _largest(run, further)


def per_allocation(run: TrainingRun, sizes: Column) -> Column:
    """``sizes`` (bytes, one per cast copy) as one entry per allocation."""
    found = np.zeros(len(run.analysis.lifetimes), dtype=np.int64)
    np.add.at(found, run.analysis.ledger.allocation, sizes)
    return found


def _largest(run: TrainingRun, sizes: Callable[[Mask, Column], Column]) -> Column:
    found = [sizes(alive, saves) for alive, saves in _forwards(run)]
    return max(found, key=lambda column: int(column.sum()), default=np.zeros_like(run.analysis.ledger.bytes))


def _forwards(run: TrainingRun) -> Iterator[tuple[Mask, Column]]:
    """For each backward in the step of the peak: which copies are alive, and how often each was saved for it."""
    starts = run.starts(Phase.BACKWARD)
    for start in run.starts_in(run.peak_index, Phase.BACKWARD):
        place = bisect_left(starts, start)
        before = starts[place - 1] if place else None
        alive = run.analysis.ledger.alive_at(run.analysis, run.analysis.timeline.position(start))
        yield alive, run.with_fact(Fact.SAVED, before, start)[run.analysis.ledger.allocation]


_CHANGE = "with torch.autocast(...): loss = ...  # and outside of it: loss.backward()"
_CHANGE_OF_PIPELINE = "enter torch.autocast(...) in the forward of the stages' modules: a schedule runs backward, too"


def autocast_in_backward(run: TrainingRun) -> Finding | None:
    """Autocast was on when a backward started, so the cache's copies live through it."""
    found = [casts for step, casts in zip(run.steps, run.casts, strict=True) if step.autocast_in_backward]
    if not found:
        return None
    holders = found[-1].after_forward
    held = 0 if holders is None or holders.cache is None else holders.cache.bytes
    cost = f" Only its cache keeps {format_bytes(held)} of cast copies alive through backward." if held else ""
    evidence = [f"steps: {', '.join(str(step.index) for step in found)}"]
    evidence += [f"cast copies are those of step {found[-1].index}"] if held else []
    return Finding(
        section=Section.CASTS,
        message=f"backward runs inside the autocast region.{cost}",
        bytes=held or None,
        change=_CHANGE_OF_PIPELINE if run.pipelined else _CHANGE,
        off_peak=run.off_peak(*_idle(run)) if held else None,
        evidence=tuple(evidence),
    )


def _idle(run: TrainingRun) -> tuple[Column, Column]:
    """The bytes of the copies that only the cache holds when the last backward starts, and their first position."""
    start = run.analysis.marks[run.peak_step].after_forward
    nothing = np.zeros(len(run.analysis.lifetimes), dtype=np.int64)
    if start is None:
        return nothing, nothing
    ledger, position = run.analysis.ledger, run.analysis.timeline.position(start)
    mine = ledger.alive_at(run.analysis, position) & ledger.in_cache(run.analysis, start) & (ledger.saves == 0)
    # At the end of forward they are still there.
    return per_allocation(run, ledger.bytes * mine), nothing + position + 1


def cache_off_costs(run: TrainingRun) -> Finding | None:
    """The cache is on, and saves copies that autograd would hold without it."""
    if not run.autocast or not run.recording.precision.cache:
        return None
    extra = cost_of_no_cache(run)
    cost = int(extra.sum())
    if cost == 0:
        return None
    return Finding(
        severity="info",
        section=Section.CASTS,
        message=f"weights are used more than once before backward: with cache_enabled=False their cast copies would "
        f"take {format_bytes(cost)} more at the end of forward.",
        bytes=cost,
        change="keep the default, torch.autocast(..., cache_enabled=True)",
        evidence=run.copied_parameters(extra),
    )


def cache_on_saves(run: TrainingRun) -> Finding | None:
    """The cache is off, and several copies of one parameter are alive at the end of forward."""
    if not run.autocast or run.recording.precision.cache is not False:
        return None
    extra = saved_by_cache(run)
    size = int(extra.sum())
    if not run.notable(size):
        return None
    return Finding(
        section=Section.CASTS,
        message=f"weights are used more than once before backward and each use keeps its own cast copy: "
        f"autocast's cache would save {format_bytes(size)} at the end of forward.",
        bytes=size,
        change="torch.autocast(..., cache_enabled=True), with all the uses in one region",
        evidence=run.copied_parameters(extra),
        off_peak=run.off_peak(per_allocation(run, extra)),
    )


def cache_off_saves(run: TrainingRun) -> Finding | None:
    """The cache holds copies at the peak that no backward needs, as under ``no_grad``.

    Without the cache each of them would live for one use only, so all but the largest would be missing at the peak.
    Copies that autograd saved several times would multiply, which is subtracted.
    """
    ledger = run.analysis.ledger
    if not run.autocast or not run.recording.precision.cache or len(ledger.bytes) == 0:
        return None
    series = run.analysis.timeline.series(Category.CAST_COPIES)
    position = int(np.argmax(series))
    # Under checkpointing no hook sees what a recomputation saves, so the holders of those copies are unknown.
    idle = ledger.cached & (ledger.saves == 0) & (ledger.phase != Phase.BACKWARD)
    alive = ledger.alive_at(run.analysis, position)
    held = ledger.bytes * (idle & alive)
    further = np.maximum(ledger.saves - 1, 0) * ledger.bytes * ledger.cached
    without = int(series[position]) - int(held.sum()) + int(held.max()) + int(further[alive].sum())
    needed = np.zeros(len(run.analysis.lifetimes), dtype=np.int64)
    needed[ledger.allocation] = ledger.bytes * ~idle
    most_needed = int(needed[run.analysis.lifetimes.alive_at(run.most_alive(needed))].sum())
    saved = int(series[position]) - max(without, most_needed)
    if not run.notable(saved):
        return None
    # Without the cache idle copies live one at a time, so at each event all but the run's largest are gone.
    gone = ledger.bytes * idle
    return Finding(
        section=Section.CASTS,
        message=f"{format_bytes(int(held.sum()))} of cast copies stay alive only because autocast's cache holds them "
        f"until the region ends: without the cache the peak of the cast copies would be about {format_bytes(saved)} "
        "lower.",
        bytes=saved,
        change="torch.autocast(..., cache_enabled=False) for the forward that saves nothing for backward "
        "(evaluation, checkpointed blocks)",
        evidence=run.copied_parameters(held),
        off_peak=run.off_peak(per_allocation(run, gone - further), but=int(gone.max(initial=0))),
    )


_STEPS = 3


def copies_grow(run: TrainingRun) -> Finding | None:
    """At the end of every step more cast copies are alive than at the end of the step before."""
    ends = [step.surviving.bytes for step in run.casts]
    if run.analysis.conservation.breach is not None:  # allocations that seem alive may be dead
        return None
    if len(ends) < _STEPS or any(later <= earlier for earlier, later in pairwise(ends)):
        return None
    growth = ends[-1] - ends[0]
    alive = run.analysis.ledger.alive_at(run.analysis, run.analysis.timeline.position(run.steps[-1].end_ns))
    return Finding(
        severity="warning",
        section=Section.CASTS,
        message=f"the cast copies alive at the end of a step grew by {format_bytes(growth)} in {len(ends)} steps.",
        bytes=growth,
        change="do not keep the graph from step to step: total += loss.item() or loss.detach(); "
        "and close the autocast region in every step",
        evidence=(
            "at the ends of the steps: " + ", ".join(format_bytes(size) for size in ends),
            *run.copied_parameters(run.analysis.ledger.bytes * alive),
        ),
    )


def copies_survive(run: TrainingRun) -> Finding | None:
    """Copies made in one step that are still alive when the forward of a later one starts."""
    forward = _last_forward_of_a_later_step(run)
    if forward is None or run.analysis.conservation.breach is not None:  # what seems alive may be dead
        return None
    step, start = forward
    ledger = run.analysis.ledger
    surviving = ledger.alive_at(run.analysis, run.analysis.timeline.position(start)) & (ledger.step <= step)
    count = ledger.count(surviving)
    if count.bytes == 0:
        return None
    cleared = run.with_fact(Fact.CACHED, before_ns=start)[ledger.allocation] > 0
    cached = bool((surviving & ledger.cached & ~cleared).any())
    why = ": autocast stays open across the update, and its cache returns the weights from before the update"
    return Finding(
        severity="warning",
        section=Section.CASTS,
        message=f"{format_bytes(count.bytes)} of cast copies outlive the step that made them{why if cached else ''}.",
        bytes=count.bytes,
        change="with torch.autocast(...): only around forward and loss, opened anew in every step"
        if cached
        else "keep neither the graph (loss, outputs) nor a cast of the weights from one step to the next",
        evidence=(f"copies: {count.copies}", *run.copied_parameters(ledger.bytes * surviving)),
        off_peak=_off_peak_from_backward_on(run, step, ledger.bytes * surviving, start, again=cached),
    )


def _off_peak_from_backward_on(run: TrainingRun, step: int, sizes: Column, forward: int, *, again: bool) -> int | None:
    """The bytes off the peak without the copies, from the backward of ``step`` to the next ``forward``.

    If that would not make them ``again``, as it does where a cache held them, they are also missing in a later peak.
    """
    timeline, lifetimes = run.analysis.timeline, run.analysis.lifetimes
    place = next(place for place, each in enumerate(run.steps) if each.index == step)
    ended = run.analysis.marks[place].after_backward
    if ended is None:
        return None
    found = per_allocation(run, sizes)
    mine = found != 0
    first = np.maximum(lifetimes.born + 1, timeline.position(ended))
    until = np.full(len(found), timeline.position(forward))
    saved = run.off_peak_of_spans(first[mine], until[mine], found[mine], place=place)
    return saved if again or saved is not None else run.off_peak(found, since=first)


def _last_forward_of_a_later_step(run: TrainingRun) -> tuple[int, int] | None:
    """The last step that is followed by another step's forward, and when that forward began.

    The end of the step would be too early: an autocast region around the whole step closes right after it.
    """
    forwards = np.array(run.starts(Phase.FORWARD), dtype=np.int64)
    for step in reversed(run.steps):
        later = forwards[forwards >= step.end_ns]
        if len(later):
            return step.index, int(later[0])
    return None


def recompute_recasts(run: TrainingRun) -> Finding | None:
    """Cast copies are made again in backward, where forward is recomputed; the last step with such copies counts."""
    found = [step for step in run.casts if step.recomputed.bytes]
    if not found:
        return None
    ledger, last = run.analysis.ledger, found[-1]
    mine = (ledger.step == last.index) & (ledger.phase == Phase.BACKWARD)
    return Finding(
        severity="info",
        section=Section.CASTS,
        message=f"recomputation in backward casts weights again: {last.recomputed.copies} copies, "
        f"{format_bytes(last.recomputed.bytes)} per step.",
        bytes=last.recomputed.bytes,
        change="nothing to fix: autocast's cache is empty by then; fewer checkpointed blocks cast less",
        evidence=run.copied_parameters(ledger.bytes * mine),
    )


_AT_ONCE = 2
"""How many copies are there at once where compiled code makes each when it is needed."""


def compiled_casts(run: TrainingRun) -> Finding | None:
    """Copies that compiled code makes in forward and keeps for backward, which it can make again instead."""
    ledger, steps = run.analysis.ledger, run.analysis.marks
    start = steps[run.peak_step].after_forward if steps else None
    if start is None:
        return None
    mine = (run.with_fact(Fact.COMPILED)[ledger.allocation] > 0) & (ledger.saves > 0) & ~ledger.overwritten
    kept = ledger.count(mine & ledger.alive_at(run.analysis, run.analysis.timeline.position(start)))
    if not run.notable(kept.bytes):
        return None
    sizes = ledger.bytes * mine
    recent = sizes * (ledger.step == run.peak_index)
    off_peak = run.off_peak(per_allocation(run, sizes), but=int(np.sort(recent)[-_AT_ONCE:].sum()))
    return Finding(
        section=Section.CASTS,
        message=f"compiled code keeps {kept.copies} 16-bit copies of weights, {format_bytes(kept.bytes)}, from forward "
        "until backward has read them.",
        bytes=kept.bytes,
        change="torch._functorch.config.ban_recompute_materialized_backward = False, before anything is compiled: "
        "backward then casts each weight again"
        if off_peak
        else "nothing to fix: the peak would not be lower without them",
        evidence=run.copied_parameters(recent),
        off_peak=off_peak,
        least=True,
    )


_EXPANDED = 2
"""A buffer counts as expanded if its cast has at least this many times its elements."""
_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def expanded_buffer_cast(run: TrainingRun) -> Finding | None:
    """Casts of buffers have more elements than the buffers, in the step of the peak, when they cost most."""
    excess = _excess(run)
    alive = run.analysis.lifetimes.alive_at(run.most_alive(excess))
    size = int(excess[alive].sum())
    if not run.notable(size):
        return None
    return Finding(
        section=Section.ALLOCATIONS,
        message=f"buffers are cast after they were expanded: the copies take {format_bytes(size)} more than "
        "copies of the buffers themselves would.",
        bytes=size,
        change="cast first, then expand: self.mask.to(x.dtype).expand(...)",
        evidence=run.largest(alive & (excess > 0)),
        off_peak=run.off_peak(excess),
    )


def _excess(run: TrainingRun) -> Column:
    """For each allocation that is a cast of a buffer: its bytes beyond those of a cast of the buffer itself."""
    facts, sizes = run.analysis.facts, run.analysis.lifetimes.bytes
    excess = np.zeros(len(sizes), dtype=np.int64)
    recent = run.analysis.lifetimes.step[facts.allocation] == run.peak_index
    for row in np.flatnonzero(recent & (facts.fact == Fact.OTHER_CAST) & (facts.name != 0)).tolist():
        copy, itemsize = facts.allocation[row], _ITEMSIZES.get(run.text(facts.dtype[row]))
        elements = _elements(run, int(facts.name[row]), int(copy))
        if itemsize is None or elements is None:
            continue
        if sizes[copy] >= _EXPANDED * elements * itemsize:
            excess[copy] = sizes[copy] - elements * itemsize
    return excess


def _elements(run: TrainingRun, name: int, copy: int) -> int | None:
    """The elements of the buffer ``name`` when ``copy`` was made; a buffer of unknown type counts as float32."""
    facts, lifetimes = run.analysis.facts, run.analysis.lifetimes
    rows = np.flatnonzero((facts.fact == Fact.BUFFER) & (facts.name == name))
    buffers = facts.allocation[rows]
    there = (lifetimes.born[buffers] < lifetimes.born[copy]) & (
        (lifetimes.died[buffers] == ALIVE) | (lifetimes.died[buffers] > lifetimes.born[copy])
    )
    if not there.any():
        return None
    row = rows[there][-1]
    return int(lifetimes.bytes[facts.allocation[row]]) // _ITEMSIZES.get(run.text(facts.dtype[row]), 4)
