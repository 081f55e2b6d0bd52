"""Memory that every step allocates and no step frees."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import NOTABLE_BYTES, Finding, Section, TrainingRun, own_frame
from ampmem.analysis.timeline.categories import CODES, Category
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.events import Action
from ampmem.units import format_bytes, format_count

_STEPS = 3
_MEANT_TO_STAY = (
    Category.PARAMETERS,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.MASTER_COPIES,
    Category.CAST_COPIES,  # copies-grow tells of those
)


def check(run: TrainingRun) -> Finding | None:
    """Allocations of one place (op, module and stack) that every step from the second on makes and never frees.

    The last step's own results are alive at its end too; they count only where the steps before it left some
    behind as well. Told from 1 KiB per step on, however large the peak is: it grows.
    """
    if len(run.steps) < _STEPS:
        return None
    steps = [step.index for step in run.steps[1:]]
    places = {
        place: by_step
        for place, by_step in _left_behind(run).items()
        if all(by_step.get(step, 0) > 0 for step in steps)
    }
    each = [sum(by_step[step] for by_step in places.values()) for step in steps]
    if not each or min(each) < NOTABLE_BYTES:
        return None
    ordered = sorted(places, key=lambda place: -places[place][steps[-1]])
    return Finding(
        code="steady-growth",
        severity="warning",
        section=Section.TIMELINE,
        message=f"every step leaves memory behind, the last one {format_bytes(each[-1])}: nothing frees it.",
        bytes=each[-1],
        change="append numbers, not tensors: losses.append(loss.item()), or loss.detach().cpu(); "
        "clear what collects from step to step",
        evidence=(
            f"left behind by the steps {steps[0]} to {steps[-1]}: {', '.join(map(format_bytes, each))}",
            *(_words(run, place, places[place][steps[-1]]) for place in ordered[:3]),
        ),
    )


def _left_behind(run: TrainingRun) -> dict[tuple[int, int, int], dict[int, int]]:
    """Bytes that were never freed, by op, module and stack (text ids), and by step."""
    lifetimes, events = run.analysis.lifetimes, run.recording.events
    meant = np.isin(run.analysis.classes.category, [CODES[name] for name in _MEANT_TO_STAY])
    mine = (lifetimes.died == ALIVE) & ~meant & (events.action[lifetimes.born] == Action.ALLOC)
    found: dict[tuple[int, int, int], dict[int, int]] = {}
    for allocation in np.flatnonzero(mine).tolist():
        place = (
            int(lifetimes.op[allocation]),
            int(lifetimes.module[allocation]),
            int(lifetimes.stack[allocation]),
        )
        by_step = found.setdefault(place, {})
        step = int(lifetimes.step[allocation])
        by_step[step] = by_step.get(step, 0) + int(lifetimes.bytes[allocation])
    return found


def _words(run: TrainingRun, place: tuple[int, int, int], size: int) -> str:
    op, module, stack = (run.text(index) for index in place)
    words = [op or "unknown op", f"in {module}" if module else "", f"at {own_frame(stack)}" if stack else ""]
    return f"{' '.join(word for word in words if word)}: {format_bytes(size)} ({format_count(size)} bytes) per step"
