"""Allocations put together by all that the page says of them: a *kind* is everything but when it lived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.jsonable import Json
from ampmem.analysis.ops import result_of
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.events import Column
from ampmem.reporters.html.safety import distinct, visible

_LARGEST = 1 << 62
"""Keys below this stay within an ``int64``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """One entry per kind; names, stacks, types and shapes are text ids, ``phase`` is that of the birth."""

    category: Column
    bytes: Column
    block_bytes: Column
    name: Column
    module: Column
    op: Column
    stack: Column
    phase: Column
    dtype: Column
    shape: Column

    def __len__(self) -> int:
        return len(self.category)

    def take(self, rows: NDArray[np.intp]) -> Kinds:
        """Only the kinds in ``rows``, in that order."""
        return Kinds(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The texts of kinds as the page has them: columns of indices, and what they stand for.

    ``stacks`` are indices into ``frames``, outermost first. The first text, stack and shape are the empty ones.
    """

    texts: list[str]
    frames: list[str]
    stacks: list[list[int]]
    shapes: list[str]
    name: Column
    module: Column
    op: Column
    dtype: Column
    stack: Column
    shape: Column


def kinds_of(analysis: Analysis) -> tuple[Kinds, Column]:
    """The kinds of a run in the order of their first birth, and the kind of each allocation."""
    lifetimes, classes, tensors = analysis.lifetimes, analysis.classes, analysis.tensors
    every = Kinds(
        category=classes.category,
        bytes=lifetimes.bytes,
        block_bytes=lifetimes.block_bytes,
        name=classes.name,
        module=np.where(lifetimes.module != 0, lifetimes.module, classes.module),
        op=lifetimes.op,
        stack=lifetimes.stack,
        phase=lifetimes.phase,
        dtype=tensors.dtype,
        shape=tensors.shape,
    )
    _, first, kind = np.unique(_key(every), return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return every.take(first[order]), place[kind]


def _key(columns: Kinds) -> Column:
    """One number per row, equal for equal rows and for no others."""
    key = np.zeros(len(columns), dtype=np.int64)
    span = 1
    for column in fields(columns):
        code, width = _dense(getattr(columns, column.name))
        if span > _LARGEST // width:
            key, span = _dense(key)
        key = key * width + code
        span *= width
    return key


def _dense(column: Column) -> tuple[Column, int]:
    """``column`` as small numbers, and how many there may be."""
    if not len(column):
        return column, 1
    low, high = int(column.min()), int(column.max())
    if high - low < 4096:
        return column - low, high - low + 1
    values, code = np.unique(column, return_inverse=True)
    return code, len(values)


def tables_of(kinds: Kinds, texts: Sequence[str]) -> Tables:
    """What the page needs of ``texts``, visible, bounded, and with those that differ still different."""
    used, (name, module, op, dtype) = _used(kinds.name, kinds.module, kinds.op, kinds.dtype)
    stacks, (stack,) = _used(kinds.stack)
    shapes, (shape,) = _used(kinds.shape)
    frames: dict[str, int] = {}
    lines = [[line for line in texts[index].split("\n") if line] for index in stacks]
    indices = [[frames.setdefault(line, len(frames)) for line in lines_of_one] for lines_of_one in lines]
    return Tables(
        texts=distinct(texts[index] for index in used),
        frames=distinct(frames),
        stacks=indices,
        shapes=[texts[index] for index in shapes],
        name=name,
        module=module,
        op=op,
        dtype=dtype,
        stack=stack,
        shape=shape,
    )


def kinds_header(kinds: Kinds, texts: Sequence[str]) -> dict[str, Json]:
    """The kinds and their texts as both modes of the stream have them."""
    tables = tables_of(kinds, texts)
    words, what = _what(kinds, texts, len(tables.texts))
    columns = {
        "category": kinds.category,
        "bytes": kinds.bytes,
        "name": tables.name,
        "module": tables.module,
        "op": tables.op,
        "what": what,
        "stack": tables.stack,
        "phase": kinds.phase - 1,  # phases count from 1
        "dtype": tables.dtype,
        "shape": tables.shape,
    }
    return {
        "texts": [*tables.texts, *words],
        "frames": [*tables.frames],
        "stacks": [[*stack] for stack in tables.stacks],
        "shapes": [*tables.shapes],
        "kinds": {name: column.tolist() for name, column in columns.items()},
    }


def _what(kinds: Kinds, texts: Sequence[str], first: int) -> tuple[list[str], Column]:
    """What the tensors without a name of their own are, as texts from number ``first`` on, and by kind; 0 of others."""
    found: dict[str, int] = {}
    column = np.zeros(len(kinds), dtype=np.int64)
    unnamed = [CATEGORIES.index(category) for category in (Category.ACTIVATIONS, Category.TEMPORARIES)]
    for kind in np.flatnonzero(np.isin(kinds.category, unnamed) & (kinds.op != 0)).tolist():
        words = result_of(texts[kinds.op[kind]], mask=texts[kinds.dtype[kind]] == "bool")
        column[kind] = found.setdefault(visible(words), first + len(found))
    return [*found], column


def _used(*columns: Column) -> tuple[list[int], list[Column]]:
    """The ids that occur in ``columns``, 0 first, and the columns as indices into them."""
    ids = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *columns]))
    return ids.tolist(), [np.searchsorted(ids, column).astype(np.int64) for column in columns]
