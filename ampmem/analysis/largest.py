"""The largest allocations alive at an instant, and who holds what nothing else is known of."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.analysis.timeline.tensors import Tensors
from ampmem.events import OTHER_THREADS
from ampmem.names import shape_of

LARGEST = 50
"""How many a summary lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeAllocation:
    """One allocation; ``None`` where nothing is known. ``stack`` is ``file:line function``, outermost first.

    ``shape`` is that of a tensor that fills the allocation to the byte.
    """

    bytes: int
    category: Category
    name: str | None
    module: str | None
    op: str | None
    stack: tuple[str, ...]
    dtype: str | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Allocations of which nothing is known but ``holder``: the class of an object, or a variable of a script.

    ``None`` where that is not known, as of what only a local variable holds.
    """

    holder: str | None
    bytes: int
    tensors: int


def held(history: MemoryHistory, position: int) -> tuple[Held, ...]:
    """What in ``other`` is alive at ``position``, by who holds it, that with the most bytes first."""
    lifetimes, classes, texts = history.lifetimes, history.classes, history.recording.texts
    mine = lifetimes.alive_at(position) & classes.of(Category.OTHER) & (lifetimes.address != OTHER_THREADS)
    sizes: dict[str, list[int]] = {}
    for index in np.flatnonzero(mine).tolist():
        holder = re.split(r"[.\[]", texts[classes.name[index]], maxsplit=1)[0]
        sizes.setdefault(holder, []).append(int(lifetimes.bytes[index]))
    found = [Held(holder=name or None, bytes=sum(each), tensors=len(each)) for name, each in sizes.items()]
    return tuple(sorted(found, key=lambda entry: -entry.bytes))


def largest(
    history: MemoryHistory, tensors: Tensors, position: int, limit: int = LARGEST, *, among: Mask | None = None
) -> tuple[LargeAllocation, ...]:
    """The ``limit`` largest allocations alive at ``position``, or ``among`` these; of equal ones the oldest first."""
    alive = np.flatnonzero(history.lifetimes.alive_at(position) if among is None else among)
    order = np.argsort(-history.lifetimes.bytes[alive], kind="stable")
    return tuple(_describe(history, tensors, int(index)) for index in alive[order[:limit]])


def _describe(history: MemoryHistory, tensors: Tensors, index: int) -> LargeAllocation:
    lifetimes, classes, texts = history.lifetimes, history.classes, history.recording.texts
    module = texts[lifetimes.module[index]] or texts[classes.module[index]]
    return LargeAllocation(
        bytes=int(lifetimes.bytes[index]),
        category=CATEGORIES[classes.category[index]],
        name=texts[classes.name[index]] or None,
        module=module or None,
        op=texts[lifetimes.op[index]] or None,
        stack=tuple(line for line in texts[lifetimes.stack[index]].split("\n") if line),
        dtype=texts[tensors.dtype[index]] or None,
        shape=shape_of(texts[tensors.shape[index]]),
    )
