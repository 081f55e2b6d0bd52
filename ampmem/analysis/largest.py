"""The largest allocations alive at an instant, and the holders of allocations that are not otherwise known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.analysis.timeline.lifetimes import Mask, Tensors
from ampmem.analysis.timeline.timeline import MemoryHistory
from ampmem.events import OTHER_THREADS, Fact
from ampmem.names import shape_of

LARGEST = 50
"""A summary lists this many of the largest allocations, and further ones that are about as large as the last.

Tables count equal layers in one row, so a row must not miss some of its layers."""
MOST = 1000
"""The limit of a summary's list: there may be more allocations like its last one."""
_ALIKE = 0.98
"""Allocations of at least this share of the last one's size are about as large: tables may count them in its row."""
HELD_BY = "held by "
"""The beginning of the name of an activation that no op saved and a variable holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeAllocation:
    """One allocation; ``None`` means unknown. ``stack`` is ``file:line function``, outermost first.

    ``name`` is the parameter's or the like; for an activation that no op saved, the variable that holds it and where it
    was assigned: ``held by h of train.py:12 (in forward)``.

    ``shape`` is known only for a tensor that fills the allocation to the byte.
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
    """Allocations of which only the ``holder`` is known: the class of an object, or a variable of a script.

    ``holder`` is ``None`` if unknown too, as for memory that only a local variable holds.
    """

    holder: str | None
    bytes: int
    tensors: int


def held(history: MemoryHistory, position: int) -> tuple[Held, ...]:
    """The allocations in ``other`` alive at ``position``, by holder, the one with the most bytes first."""
    lifetimes, classes, texts = history.lifetimes, history.classes, history.recording.texts
    mine = lifetimes.alive_at(position) & classes.of(Category.OTHER) & (lifetimes.address != OTHER_THREADS)
    sizes: dict[str, list[int]] = {}
    for index in np.flatnonzero(mine).tolist():
        holder = re.split(r"[.\[]", texts[classes.name[index]], maxsplit=1)[0]
        sizes.setdefault(holder, []).append(int(lifetimes.bytes[index]))
    found = [Held(holder=name or None, bytes=sum(each), tensors=len(each)) for name, each in sizes.items()]
    return tuple(sorted(found, key=lambda entry: -entry.bytes))


def largest(
    history: MemoryHistory, tensors: Tensors, position: int, *, among: Mask | None = None
) -> tuple[LargeAllocation, ...]:
    """The largest allocations alive at ``position``, or of ``among``; of equal ones the oldest first."""
    alive = np.flatnonzero(history.lifetimes.alive_at(position) if among is None else among)
    alive = alive[np.argsort(-history.lifetimes.bytes[alive], kind="stable")]
    sizes = history.lifetimes.bytes[alive]
    if len(sizes) > LARGEST:
        alive = alive[: min(np.count_nonzero(sizes >= sizes[LARGEST - 1] * _ALIKE), MOST)]
    holders = _holders(history)
    return tuple(_describe(history, tensors, int(index), holders) for index in alive)


def _holders(history: MemoryHistory) -> dict[int, str]:
    """The variable that holds each activation that no op saved: ``held by h of train.py:12 (in forward)``."""
    facts, texts = history.facts, history.recording.texts
    saved = np.isin(facts.fact, (Fact.SAVED, Fact.RECOMPUTED))
    unsaved = history.classes.of(Category.ACTIVATIONS)
    unsaved[facts.allocation[saved]] = False
    found: dict[int, str] = {}
    of_variables = (facts.fact == Fact.VARIABLE) & unsaved[facts.allocation]
    for row in np.flatnonzero(of_variables).tolist():  # the latest look at the script's variables counts
        place, _, function = texts[facts.module[row]].rpartition(" ")
        inside = function.rpartition("<locals>.")[2]
        where = place.replace("\\", "/").rpartition("/")[2].removesuffix(":0")
        found[int(facts.allocation[row])] = f"{HELD_BY}{texts[facts.name[row]]} of {where}" + (
            "" if inside.startswith("<") else f" (in {inside})"
        )
    return found


def _describe(history: MemoryHistory, tensors: Tensors, index: int, holders: Mapping[int, str]) -> LargeAllocation:
    lifetimes, classes, texts = history.lifetimes, history.classes, history.recording.texts
    module = texts[lifetimes.module[index]] or texts[classes.module[index]]
    return LargeAllocation(
        bytes=int(lifetimes.bytes[index]),
        category=CATEGORIES[classes.category[index]],
        name=holders.get(index) or texts[classes.name[index]] or None,
        module=module or None,
        op=texts[lifetimes.op[index]] or None,
        stack=tuple(line for line in texts[lifetimes.stack[index]].split("\n") if line),
        dtype=texts[tensors.dtype[index]] or None,
        shape=shape_of(texts[tensors.shape[index]]),
    )
