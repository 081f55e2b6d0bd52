"""The largest allocations alive at an instant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.analysis.timeline.history import MemoryHistory

LARGEST = 50
"""How many a summary lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeAllocation:
    """One allocation; ``None`` where nothing is known. ``stack`` is ``file:line function``, outermost first."""

    bytes: int
    category: Category
    name: str | None
    module: str | None
    op: str | None
    stack: tuple[str, ...]


def largest(history: MemoryHistory, position: int, limit: int = LARGEST) -> tuple[LargeAllocation, ...]:
    """The ``limit`` largest allocations alive at ``position``; of equal ones the oldest first."""
    alive = np.flatnonzero(history.lifetimes.alive_at(position))
    order = np.argsort(-history.lifetimes.bytes[alive], kind="stable")
    return tuple(_describe(history, int(index)) for index in alive[order[:limit]])


def _describe(history: MemoryHistory, index: int) -> LargeAllocation:
    lifetimes, classes, texts = history.lifetimes, history.classes, history.recording.texts
    module = texts[lifetimes.module[index]] or texts[classes.module[index]]
    return LargeAllocation(
        bytes=int(lifetimes.bytes[index]),
        category=CATEGORIES[classes.category[index]],
        name=texts[classes.name[index]] or None,
        module=module or None,
        op=texts[lifetimes.op[index]] or None,
        stack=tuple(line for line in texts[lifetimes.stack[index]].split("\n") if line),
    )
