"""Whether autocast pays at the end of forward, estimated from the autocast run alone."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.fit.break_even import break_even, first_saving
from ampmem.analysis.timeline.categories import CODES, Category
from ampmem.analysis.timeline.lifetimes import ALIVE, Mask
from ampmem.events import Fact
from ampmem.names import casts_compiled
from ampmem.units import format_bytes

_GIVEN = (Category.INPUTS, Category.BUFFERS)
_MADE = (Category.ACTIVATIONS, Category.TEMPORARIES)
_KNOWN_SHARE = 0.5
"""Of the activations' bytes: with the type of fewer known, no estimate is made."""
_UNSURE_SHARE = 0.1
"""Of what the estimate says: when a library's workspaces, of which no one knows what they were in FP32, could change it
by more, none is made."""

IN_EVALUATION = (
    "the peak is in evaluation, where nothing is kept for backward, so larger training batches do not make AMP pay "
    "there: ampmem compare measures what AMP changes at that peak"
)


def check(run: TrainingRun) -> Finding | None:
    """What the cast copies cost against what low-precision activations save."""
    position = run.last_after_forward
    if not run.autocast or position is None or casts_compiled(run.analysis.recording.notes):
        return None  # what compiled code casts is among the activations
    saved = estimate_saved(run, position)
    copies = run.live(Category.CAST_COPIES, position)
    if saved is None or (copies == 0 and saved <= 0) or _unsure(run, position) > _UNSURE_SHARE * abs(saved - copies):
        return None
    if not run.notable(max(copies, saved)):
        return None  # the difference of the two may be 0 where each of them is worth knowing
    return _pays(run, position, copies, saved) if saved > copies else _does_not_pay(run, position, copies, saved)


def estimate_saved(run: TrainingRun, position: int) -> int | None:
    """Bytes that the activations alive at ``position`` would take more in FP32; ``None`` when their types are unknown.

    A low-precision activation would be twice as large. The copies that autocast made of an activation would not
    be there: one FP32 tensor would serve instead of them all. It is there already when their original is alive.
    """
    size, low = run.analysis.lifetimes.bytes, run.low_precision[run.analysis.saved_as.dtype]
    alive = run.analysis.lifetimes.alive_at(position)
    mine = run.analysis.classes.of(Category.ACTIVATIONS) & alive
    if size[mine & (run.analysis.saved_as.dtype != 0)].sum() < _KNOWN_SHARE * size[mine].sum():
        return None
    copied = run.with_fact(Fact.OTHER_CAST) > 0
    saved = int(size[mine & low & ~copied].sum())
    served: set[int] = set()
    sources = _sources(run)
    for copy in np.flatnonzero(mine & copied).tolist():
        original = sources[copy] if copy in sources else _original(run, copy, low)
        if original is None or not (alive[original] or original in served):
            saved += int(size[copy]) * (2 if low[copy] else 1)  # what it would be in FP32
        if original is not None:
            served.add(original)
        saved -= int(size[copy])
    return saved


def _unsure(run: TrainingRun, position: int) -> int:
    """Bytes that workspaces alive at ``position`` would at most take more in FP32: as much again."""
    mine = run.analysis.classes.of(Category.ACTIVATIONS) & run.analysis.lifetimes.alive_at(position)
    return int(run.analysis.lifetimes.bytes[mine & run.analysis.saved_as.workspace].sum())


def _sources(run: TrainingRun) -> dict[int, int]:
    """What each copy of an activation was made from, where the recording has it; the facts of a pair have one time."""
    facts = run.analysis.facts
    copies, originals = facts.fact == Fact.OTHER_CAST, facts.fact == Fact.CAST_SOURCE
    made_at = dict(zip(facts.time_ns[originals].tolist(), facts.allocation[originals].tolist(), strict=True))
    pairs = zip(facts.allocation[copies].tolist(), facts.time_ns[copies].tolist(), strict=True)
    return {copy: made_at[instant] for copy, instant in pairs if instant in made_at}


def _original(run: TrainingRun, copy: int, low: Mask) -> int | None:
    """What ``copy`` was made from, as far as sizes tell, in a snapshot or an older recording.

    It is taken to be the youngest tensor of the step, or input, of as many elements in the other precision that
    was alive when the copy was made, or else the youngest larger input, of which it would be a part.
    """
    lifetimes, dtype = run.analysis.lifetimes, run.analysis.saved_as.dtype[:copy]
    expected = int(lifetimes.bytes[copy]) * 2 if low[copy] else int(lifetimes.bytes[copy]) // 2
    category = run.analysis.classes.category[:copy]
    given = np.isin(category, [CODES[name] for name in _GIVEN])
    made = np.isin(category, [CODES[name] for name in _MADE]) & (lifetimes.step[:copy] == lifetimes.step[copy])
    there = (lifetimes.died[:copy] == ALIVE) | (lifetimes.died[:copy] > lifetimes.born[copy])
    there &= (dtype == 0) | (low[:copy] != low[copy])
    whole = there & (lifetimes.bytes[:copy] == expected) & (given | made)
    part = there & (lifetimes.bytes[:copy] > expected) & given
    found = np.flatnonzero(whole if whole.any() else part)
    return int(found[-1]) if len(found) else None


def _pays(run: TrainingRun, position: int, copies: int, saved: int) -> Finding:
    return Finding(
        code="amp-saves",
        severity="info",
        section=Section.ACTIVATIONS,
        message=f"AMP saves about {format_bytes(saved - copies)} at the end of forward{_from(run, copies, saved)} "
        "(an estimate from this run alone).",
        bytes=saved - copies,
        change="ampmem compare measures it against FP32",
        evidence=_numbers(run, position, copies, saved),
    )


def _does_not_pay(run: TrainingRun, position: int, copies: int, saved: int) -> Finding:
    gain = f"save about {format_bytes(saved)}" if saved > 0 else "save nothing"
    return Finding(
        code="amp-saves-nothing",
        severity="info" if run.peak_in_backward or run.peak_in_evaluation else "warning",
        section=Section.ACTIVATIONS,
        message=f"AMP saves no memory at the end of forward: the cast copies take {format_bytes(copies)} and "
        f"low-precision activations {gain}{_from(run, copies, saved)} (an estimate from this run alone).",
        bytes=copies - saved or None,
        change=_change(run, copies, saved),
        evidence=_numbers(run, position, copies, saved),
    )


def _change(run: TrainingRun, copies: int, saved: int) -> str:
    if run.peak_in_update:
        return (
            "the peak is in the optimizer's update, which AMP does not touch: only activations larger than what that "
            "takes would move it; keep FP32 if memory is the reason for AMP"
        )
    if run.peak_in_evaluation:
        return IN_EVALUATION
    if saved <= 0:
        return f"larger batches change nothing while activations save nothing; {_at_the_peak(run)}"
    first = first_saving(_batch_size(run), copies, saved)
    larger = "train on larger batches or longer sequences" if first is None else f"batch_size >= {first}"
    return f"{larger}; {_at_the_peak(run)}"


def _at_the_peak(run: TrainingRun) -> str:
    """The end of forward says nothing of a peak in backward, where copies die and gradients may be halves."""
    if run.peak_in_backward:
        return "the peak is in backward, and may be lower with AMP even so: ampmem compare measures that"
    return "or keep FP32 if memory is the reason for AMP"


def _from(run: TrainingRun, copies: int, saved: int) -> str:
    """From where on it pays: a batch size where one is known, or else how large the activations have to be."""
    first = first_saving(_batch_size(run), copies, saved)
    if run.peak_in_update or run.peak_in_evaluation:
        return ""  # no batch size is the one from which on the peak falls
    if first is not None and copies:
        return f"; by that it saves from batch size {first} on"
    if saved <= 0 or saved > copies:
        return ""
    times = copies / saved
    factor = f"{times:.2g}" if times < 10 else f"{times:,.0f}"
    return f"; by that it saves once the activations are more than {factor} times as large as here"


def _batch_size(run: TrainingRun) -> int:
    """Of the last step with a forward; 0 where no DataLoader made the batch: then no dimension is known to be it."""
    steps = [step for step, position in zip(run.steps, run.after_forward, strict=True) if position is not None]
    return (steps[-1].batch_size or 0) if steps[-1].batch_loaded else 0


def _numbers(run: TrainingRun, position: int, copies: int, saved: int) -> tuple[str, ...]:
    batch = _batch_size(run)
    even = break_even(batch, copies, saved)
    low = run.low_precision[run.analysis.saved_as.dtype] & run.analysis.lifetimes.alive_at(position)
    kept = run.bytes_of(run.kept_by_autograd(position) | (low & run.analysis.classes.of(Category.ACTIVATIONS)))
    lines = [
        f"cast copies at the end of forward: {format_bytes(copies)}",
        f"activations then: {format_bytes(kept)}, in FP32 about {format_bytes(kept + saved)}",
    ]
    if even is not None and copies:
        lines.append(f"break-even at batch size {even:.2f}: {batch} * {copies} / {saved}")
    return tuple(lines)
