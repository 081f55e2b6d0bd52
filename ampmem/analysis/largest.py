"""The largest allocations alive at an instant, and the holders of allocations that are not otherwise known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

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
    """Allocations of one ``category`` and one ``holder``: a variable or an attribute, a class, a library.

    ``holder`` is ``None`` if unknown. ``place`` is the line that assigned the holder's variable, such as
    ``train.py:12 (in main)``; empty if unknown.
    """

    holder: str | None
    bytes: int
    tensors: int
    category: Category = Category.OTHER
    place: str = ""


_HELD = (Category.OTHER, Category.UNTRAINED, Category.BUFFERS, Category.WORKSPACE)
"""The categories whose memory something holds beside the training's own: :func:`held` looks for their holders."""
_WITHIN = 2
"""A name with more parts than this names an object inside of its variable, which holds the tensor."""
_PARTS_OF_NAME = re.compile(r"\['[^']*'\]|\[[^\]]*\]|\.?[^.\[]+")


def held(
    history: MemoryHistory, position: int, categories: Sequence[Category] = _HELD, *, depth: int | None = None
) -> tuple[Held, ...]:
    """The memory in ``categories`` alive at ``position``, by holder, the one with the most bytes first.

    The names of holders have at most ``depth`` parts, such as the two of ``ema.shadow``.
    """
    lifetimes, classes, texts = history.lifetimes, history.classes, history.recording.texts
    there = lifetimes.alive_at(position) & (lifetimes.address != OTHER_THREADS)
    known = _latest(history, Fact.VARIABLE, there & classes.of(Category.OTHER)) | _latest(history, Fact.HELD, there)
    found: dict[tuple[Category, str, str, int], list[tuple[int, list[str]]]] = {}
    for category in categories:
        for index in np.flatnonzero(there & classes.of(category)).tolist():
            name, place = known.get(index) or (int(classes.name[index]), 0)
            parts = _PARTS_OF_NAME.findall(texts[name])[:depth] or [""]
            within = parts[1] if len(parts) > _WITHIN and not parts[1].strip("[]").isdigit() else ""
            found.setdefault((category, parts[0], within, place), []).append((int(lifetimes.bytes[index]), parts))
    entries = [
        Held(
            holder=_common([parts for _, parts in each]) or None,
            bytes=sum(size for size, _ in each),
            tensors=len(each),
            category=category,
            place=_place(texts[place]),
        )
        for (category, _, _, place), each in found.items()
    ]
    beyond = _around_parameters(history, there) if depth is None else ()
    return tuple(sorted((*entries, *beyond), key=lambda entry: -entry.bytes))


def _around_parameters(history: MemoryHistory, there: Mask) -> Iterator[Held]:
    """The memory in which parameters are views and that no parameter uses, as the old flat weights of an RNN."""
    facts, sizes, texts = history.facts, history.lifetimes.bytes, history.recording.texts
    own = {record.name: record.bytes + record.padding for record in history.recording.parameters}
    inside: dict[int, set[str]] = {}
    for row in np.flatnonzero((facts.fact == Fact.PARAMETER) & there[facts.allocation]).tolist():
        inside.setdefault(int(facts.allocation[row]), set()).add(texts[facts.name[row]])
    for allocation, names in inside.items():
        rest = int(sizes[allocation]) - sum(own.get(name, 0) for name in names)
        if rest > 0 and names <= own.keys():
            yield Held(holder=min(names), bytes=rest, tensors=1, category=Category.PARAMETERS)


def _common(names: Sequence[Sequence[str]]) -> str:
    """The parts with which all ``names`` begin."""
    return "".join(part for part, *_ in takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False)))


def _latest(history: MemoryHistory, fact: Fact, among: Mask) -> dict[int, tuple[int, int]]:
    """The holder and its place (text ids) of each allocation in ``among``, as the latest ``fact`` has them."""
    facts = history.facts
    rows = np.flatnonzero((facts.fact == fact) & among[facts.allocation])
    columns = (each[rows].tolist() for each in (facts.allocation, facts.name, facts.module))
    return {allocation: (name, place) for allocation, name, place in zip(*columns, strict=True)}


def _place(text: str) -> str:
    """``FILE:LINE FUNCTION`` as ``train.py:12 (in main)``; a line 0 is unknown, and so is an empty text."""
    place, _, function = text.rpartition(" ")
    inside = function.rpartition("<locals>.")[2]
    where = place.replace("\\", "/").rpartition("/")[2].removesuffix(":0")
    return f"{where} (in {inside})" if inside and not inside.startswith("<") else where


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
    found = _latest(history, Fact.VARIABLE, unsaved)
    return {index: f"{HELD_BY}{texts[name]} of {_place(texts[place])}" for index, (name, place) in found.items()}


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
