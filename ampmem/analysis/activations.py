"""What the activations are, and in which type: why AMP does not simply halve them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.events import Column, Fact

LOW_PRECISION = ("bfloat16", "float16")
_KINDS = (("norm", "norms"), ("softmax", "softmax"), ("loss", "loss"), ("cross_entropy", "loss"))
_MASKED = ("dropout", "mask", "where")
"""In the names of ops whose saved bytes are a mask."""
_LIBRARIES = ("mkldnn_rnn", "cudnn_rnn", "miopen_rnn", "batch_norm")
"""In the names of ops whose saved bytes are what a library's forward keeps for its backward, in a layout of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationGroup:
    """Activations of one kind and type.

    ``kind`` is what they are for: ``norms``, ``softmax``, ``loss``, ``masks``, ``indices``, ``workspace of`` an op
    whose library keeps it for backward, or else the op that saved them; where none was seen to, ``unsaved`` with the
    op that made them. ``dtype`` is ``None`` where no hook saw it; of a workspace it says nothing of the precision.
    """

    kind: str
    dtype: str | None
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """For each allocation the op that saved it first and its type (text ids); the type alone where none did.

    ``workspace`` says which are a library's own, in bytes: how large one would be in another precision is not known.
    """

    op: Column
    dtype: Column
    workspace: Mask


def activation_groups(history: MemoryHistory, saved: Saved, position: int) -> tuple[ActivationGroup, ...]:
    """The activations alive once ``position`` events have happened, largest group first."""
    mine = np.flatnonzero(history.classes.of(Category.ACTIVATIONS) & history.lifetimes.alive_at(position))
    texts = history.recording.texts
    sums: dict[tuple[str, str | None], tuple[int, int]] = {}
    for allocation in mine.tolist():
        name, kept = texts[saved.op[allocation]], texts[saved.dtype[allocation]] or None
        made = texts[history.lifetimes.op[allocation]]
        group = (_kind(name, kept) if name else f"unsaved {made}".strip(), kept)
        tensors, size = sums.get(group, (0, 0))
        sums[group] = (tensors + 1, size + int(history.lifetimes.bytes[allocation]))
    groups = [
        ActivationGroup(kind=kind, dtype=kept, tensors=tensors, bytes=size)
        for (kind, kept), (tensors, size) in sums.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.bytes, group.kind)))


def saved_as(history: MemoryHistory) -> Saved:
    """Of every allocation who saved it, and its type."""
    facts, count = history.facts, len(history.lifetimes)
    op = np.zeros(count, dtype=np.int64)
    dtype = np.zeros(count, dtype=np.int64)
    for fact in (Fact.OUTPUT, Fact.SAVED):  # what a later one says counts
        rows = np.flatnonzero(facts.fact == fact)[::-1]
        dtype[facts.allocation[rows]] = facts.dtype[rows]
        if fact == Fact.SAVED:
            op[facts.allocation[rows]] = facts.name[rows]
    texts = history.recording.texts
    ours = np.array([_is_library(text) for text in texts], dtype=np.bool_)
    in_bytes = np.array([text == "uint8" for text in texts], dtype=np.bool_)
    return Saved(op=op, dtype=dtype, workspace=ours[op] & in_bytes[dtype])


def _is_library(op: str) -> bool:
    return any(word in op for word in _LIBRARIES)


def _kind(op: str, dtype: str | None) -> str:
    if dtype == "bool":
        return "masks"
    if dtype == "uint8":  # bytes may be anything: who saved them decides
        if _is_library(op):
            return f"workspace of {op.removeprefix('aten::')}"
        return "masks" if any(word in op for word in _MASKED) else op or "other"
    if dtype is not None and "int" in dtype:
        return "indices"
    return next((kind for word, kind in _KINDS if word in op), op or "other")
