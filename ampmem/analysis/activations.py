"""The activations by purpose and type, which shows why mixed precision does not halve them all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ampmem.analysis.ops import plain_kind, plain_op
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.analysis.timeline.timeline import MemoryHistory
from ampmem.events import Column, Fact

FULL_PRECISION = ("float32", "float64")
MASKS, INDICES, WORKSPACE, UNSAVED = "masks", "indices", "workspace of", "unsaved"
"""The kinds of groups that are not named after an op."""
UNSAVED_IN_WORDS = "not saved by any op"
"""The plain kind of an activation that no op saved: a script's variable holds it (the logits), a checkpoint does (its
input), or no hook saw the save."""
_KINDS = (("norm", "norms"), ("softmax", "softmax"), ("loss", "loss"), ("cross_entropy", "loss"))
_MASKED = ("dropout", "mask", "where")
"""Words in the names of ops whose saved bytes are a mask."""
_LIBRARIES = ("mkldnn_rnn", "cudnn_rnn", "miopen_rnn", "batch_norm")
"""Words in the names of ops that save a library's buffer, which has a layout of its own."""

_Key = TypeVar("_Key")
_Sums = defaultdict[tuple[str, str | None], defaultdict[tuple[str, str, str], tuple[int, int]]]
"""For each kind and type, for each (op that saved, op that made, module): the number of tensors and their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPart:
    """The activations of a group that one op saved, another op made and one module owns; ``None`` where not seen.

    Ops are as torch names them (``aten::addmm``); :func:`ampmem.analysis.ops.plain_op` has their plain names.
    """

    saved_for: str | None
    made_by: str | None
    module: str | None
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationGroup:
    """Activations of one kind and type.

    ``kind`` is the purpose: ``norms``, ``softmax``, ``loss``, ``masks``, ``indices``, ``workspace of`` an op whose
    library keeps it for backward, or else the op that saved the activations; where no op was seen to save them,
    ``unsaved`` with the op that made them. ``dtype`` is ``None`` where no hook saw it; the type of a workspace says
    nothing about the precision.
    """

    kind: str
    dtype: str | None
    tensors: int
    bytes: int
    parts: tuple[ActivationPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainGroup:
    """The activations of one type and one plain kind: ``the loss``, ``norms``, ``matmuls``."""

    kind: str
    dtype: str | None
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The activations that one op saved and another made, in one type; ops have plain names, ``None`` if not seen."""

    saved_for: str | None
    made_by: str | None
    dtype: str | None
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """For each allocation the first op that saved it and its type (text ids); only the type where no op saved it.

    ``workspace`` has the bytes that are a library's own buffer: how large it would be in another precision is unknown.
    """

    op: Column
    dtype: Column
    workspace: Mask


def activation_groups(history: MemoryHistory, saved: Saved, position: int) -> tuple[ActivationGroup, ...]:
    """The activations alive once ``position`` events have happened, largest group first."""
    mine = np.flatnonzero(history.classes.of(Category.ACTIVATIONS) & history.lifetimes.alive_at(position))
    texts, lifetimes = history.recording.texts, history.lifetimes
    sums: _Sums = defaultdict(lambda: defaultdict(lambda: (0, 0)))
    for allocation in mine.tolist():
        name, kept = texts[saved.op[allocation]], texts[saved.dtype[allocation]] or None
        made, module = texts[lifetimes.op[allocation]], texts[lifetimes.module[allocation]]
        group = (_kind(name, kept) if name else f"{UNSAVED} {made}".strip(), kept)
        tensors, size = sums[group][name, made, module]
        sums[group][name, made, module] = (tensors + 1, size + int(lifetimes.bytes[allocation]))
    groups = [_group(kind, kept, parts) for (kind, kept), parts in sums.items()]
    return tuple(sorted(groups, key=lambda group: (-group.bytes, group.kind)))


def _group(kind: str, dtype: str | None, sums: dict[tuple[str, str, str], tuple[int, int]]) -> ActivationGroup:
    parts = [
        ActivationPart(
            saved_for=saved or None, made_by=made or None, module=module or None, tensors=tensors, bytes=size
        )
        for (saved, made, module), (tensors, size) in sums.items()
    ]
    return ActivationGroup(
        kind=kind,
        dtype=dtype,
        tensors=sum(part.tensors for part in parts),
        bytes=sum(part.bytes for part in parts),
        parts=tuple(sorted(parts, key=lambda part: -part.bytes)),
    )


def plain_groups(groups: Iterable[ActivationGroup]) -> tuple[PlainGroup, ...]:
    """``groups`` summed up by plain kind, largest first; a ``softmax`` of the loss counts as the loss."""
    sums = _summed(groups, lambda group, part: (kind_in_words(group, part), group.dtype))
    found = [
        PlainGroup(kind=kind, dtype=dtype, tensors=tensors, bytes=size)
        for (kind, dtype), (tensors, size) in sums.items()
    ]
    return tuple(sorted(found, key=lambda group: (-group.bytes, group.kind)))


def savings(groups: Iterable[ActivationGroup]) -> tuple[Saving, ...]:
    """``groups`` summed up by the op that saved, the op that made and the type, largest first."""
    sums = _summed(groups, lambda group, part: (_plain(part.saved_for), _plain(part.made_by), group.dtype))
    found = [
        Saving(saved_for=saved_for, made_by=made_by, dtype=dtype, tensors=tensors, bytes=size)
        for (saved_for, made_by, dtype), (tensors, size) in sums.items()
    ]
    return tuple(sorted(found, key=lambda saving: -saving.bytes))


def _summed(
    groups: Iterable[ActivationGroup], key: Callable[[ActivationGroup, ActivationPart], _Key]
) -> dict[_Key, tuple[int, int]]:
    """The number of tensors and their bytes by ``key``, in order of first appearance."""
    sums: dict[_Key, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for group in groups:
        for part in group.parts:
            tensors, size = sums[mine := key(group, part)]
            sums[mine] = (tensors + part.tensors, size + part.bytes)
    return sums


def _plain(op: str | None) -> str | None:
    return None if op is None else plain_op(op)


def kind_in_words(group: ActivationGroup, part: ActivationPart) -> str:
    """The plain kind of one part of a group, such as ``the loss``."""
    if group.kind in (MASKS, INDICES):
        return group.kind
    if group.kind.startswith(WORKSPACE):
        return "workspace of libraries"
    return UNSAVED_IN_WORDS if part.saved_for is None else plain_kind(part.saved_for)


def saved_as(history: MemoryHistory) -> Saved:
    """For each allocation the op that saved it, and its type."""
    facts, count = history.facts, len(history.lifetimes)
    op = np.zeros(count, dtype=np.int64)
    dtype = np.zeros(count, dtype=np.int64)
    for fact in (Fact.OUTPUT, Fact.SAVED):  # a later fact overrides an earlier one
        rows = np.flatnonzero(facts.fact == fact)[::-1]
        dtype[facts.allocation[rows]] = facts.dtype[rows]
        if fact == Fact.SAVED:
            op[facts.allocation[rows]] = facts.name[rows]
    texts = history.recording.texts
    ours = np.array([_is_library(text) for text in texts], dtype=np.bool_)
    in_bytes = history.recording.naming("uint8")
    return Saved(op=op, dtype=dtype, workspace=ours[op] & in_bytes[dtype])


def _is_library(op: str) -> bool:
    return any(word in op for word in _LIBRARIES)


def _kind(op: str, dtype: str | None) -> str:
    """The :attr:`ActivationGroup.kind` of activations in ``dtype`` that ``op`` saved."""
    if dtype == "bool":
        return MASKS
    if dtype == "uint8":  # uint8 bytes may be anything: the op that saved them decides
        if _is_library(op):
            return f"{WORKSPACE} {op.removeprefix('aten::')}"
        return MASKS if any(word in op for word in _MASKED) else op or "other"
    if dtype is not None and "int" in dtype:
        return INDICES
    return next((kind for word, kind in _KINDS if word in op), op or "other")
