"""Whether autocast pays at the end of forward, estimated from the autocast run alone."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Case, Finding
from ampmem.analysis.fit.break_even import break_even, first_saving
from ampmem.analysis.timeline.categories import CODES, Category
from ampmem.analysis.timeline.lifetimes import ALIVE, Mask
from ampmem.events import Fact
from ampmem.units import format_bytes

_GIVEN = (Category.INPUTS, Category.BUFFERS)
_MADE = (Category.ACTIVATIONS, Category.TEMPORARIES)
_KNOWN_SHARE = 0.5
"""Of the activations' bytes: with the type of fewer known, no estimate is made."""


def check(case: Case) -> Finding | None:
    """What the cast copies cost against what low-precision activations save."""
    position = case.last_after_forward
    if not case.autocast or position is None:
        return None
    saved = estimate_saved(case, position)
    copies = case.live(Category.CAST_COPIES, position)
    if saved is None or (copies == 0 and saved <= 0):
        return None
    return _pays(case, position, copies, saved) if saved > copies else _does_not_pay(case, position, copies, saved)


def estimate_saved(case: Case, position: int) -> int | None:
    """Bytes that the activations alive at ``position`` would take more in FP32; ``None`` when their types are unknown.

    A low-precision activation would be twice as large. The copies that autocast made of an activation would not
    be there: one FP32 tensor would serve instead of them all. It is there already when their original is alive.
    """
    size, low = case.analysis.lifetimes.bytes, case.low_precision[case.saved_as[1]]
    alive = case.analysis.lifetimes.alive_at(position)
    mine = case.analysis.classes.of(Category.ACTIVATIONS) & alive
    if size[mine & (case.saved_as[1] != 0)].sum() < _KNOWN_SHARE * size[mine].sum():
        return None
    copied = case.with_fact(Fact.OTHER_CAST) > 0
    saved = int(size[mine & low & ~copied].sum())
    served: set[int] = set()
    for copy in np.flatnonzero(mine & copied).tolist():
        original = _original(case, copy, low)
        if original is None or not (alive[original] or original in served):
            saved += int(size[copy]) * (2 if low[copy] else 1)  # what it would be in FP32
        if original is not None:
            served.add(original)
        saved -= int(size[copy])
    return saved


def _original(case: Case, copy: int, low: Mask) -> int | None:
    """What ``copy`` was made from, as far as sizes tell; no fact names it.

    It is taken to be the youngest tensor of the step, or input, of as many elements in the other precision that
    was alive when the copy was made, or else the youngest larger input, of which it would be a part.
    """
    lifetimes, dtype = case.analysis.lifetimes, case.saved_as[1][:copy]
    expected = int(lifetimes.bytes[copy]) * 2 if low[copy] else int(lifetimes.bytes[copy]) // 2
    category = case.analysis.classes.category[:copy]
    given = np.isin(category, [CODES[name] for name in _GIVEN])
    made = np.isin(category, [CODES[name] for name in _MADE]) & (lifetimes.step[:copy] == lifetimes.step[copy])
    there = (lifetimes.died[:copy] == ALIVE) | (lifetimes.died[:copy] > lifetimes.born[copy])
    there &= (dtype == 0) | (low[:copy] != low[copy])
    whole = there & (lifetimes.bytes[:copy] == expected) & (given | made)
    part = there & (lifetimes.bytes[:copy] > expected) & given
    found = np.flatnonzero(whole if whole.any() else part)
    return int(found[-1]) if len(found) else None


def _pays(case: Case, position: int, copies: int, saved: int) -> Finding:
    first = _first(case, copies, saved)
    even = "" if first is None else f"; by that it saves from batch size {first} on"
    return Finding(
        code="amp-saves",
        severity="info",
        message=f"AMP saves about {format_bytes(saved - copies)} at the end of forward{even} "
        "(an estimate from this run alone).",
        bytes=saved - copies,
        change="ampmem compare measures it against FP32",
        evidence=_numbers(case, position, copies, saved),
    )


def _does_not_pay(case: Case, position: int, copies: int, saved: int) -> Finding:
    first = _first(case, copies, saved)
    even = "" if first is None else f"; by that it saves from batch size {first} on"
    gain = f"save about {format_bytes(saved)}" if saved > 0 else "save nothing"
    return Finding(
        code="amp-saves-nothing",
        severity="warning",
        message=f"AMP saves no memory at the end of forward: the cast copies take {format_bytes(copies)} and "
        f"low-precision activations {gain}{even} (an estimate from this run alone).",
        bytes=copies - saved or None,
        change="train on larger batches or longer sequences, or keep FP32 if memory is the reason for AMP"
        if first is None
        else f"batch_size >= {first}, or keep FP32 if memory is the reason for AMP",
        evidence=_numbers(case, position, copies, saved),
    )


def _batch_size(case: Case) -> int:
    """Of the last step with a forward; 0 when it is not known."""
    steps = zip(case.recording.steps, case.after_forward, strict=True)
    return [step.batch_size or 0 for step, position in steps if position is not None][-1]


def _first(case: Case, copies: int, saved: int) -> int | None:
    return first_saving(_batch_size(case), copies, saved)


def _numbers(case: Case, position: int, copies: int, saved: int) -> tuple[str, ...]:
    batch = _batch_size(case)
    even = break_even(batch, copies, saved)
    lines = [
        f"cast copies at the end of forward: {format_bytes(copies)}",
        f"activations at the end of forward: {format_bytes(case.live(Category.ACTIVATIONS, position))}, "
        f"in FP32 about {format_bytes(case.live(Category.ACTIVATIONS, position) + saved)}",
    ]
    if even is not None:
        lines.append(f"break-even at batch size {even:.2f}: {batch} * {copies} / {saved}")
    return tuple(lines)
