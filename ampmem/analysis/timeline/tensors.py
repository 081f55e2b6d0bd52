"""Of what tensor an allocation is: its type and its shape, as far as facts say them and its bytes agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.timeline.lifetimes import JoinedFacts, Lifetimes
from ampmem.events import Column, Fact
from ampmem.names import shape_of

_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "bits8", "float4_e2m1fn_x2"), 1),
    **{f"float8_{kind}": 1 for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}

_BEST: tuple[Fact, ...] = (
    Fact.PARAMETER,
    Fact.MASTER_COPY,
    Fact.GRADIENT,
    Fact.OPTIMIZER_STATE,
    Fact.PARAMETER_COPY,
    Fact.BUFFER,
    Fact.CAST_COPY,
    Fact.OUTPUT,
    Fact.INPUT,
    Fact.SAVED,
    Fact.HELD,
)
"""Whose word counts first: what a tensor is for, then what it was born as, then what somebody made of it, which may
be a transposed view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """For each allocation the type and the shape of its tensor (text ids); 0 where that is not known.

    A shape is that of a tensor that fills the allocation to the byte: that of a slice, or of one parameter of many in
    a flat buffer, would be another's. Where there is none such, the type is the one that all facts agree on.
    """

    dtype: Column
    shape: Column


def dtype_bytes(dtype: str) -> int | None:
    """Bytes per element of that type; ``None`` where it is not known."""
    return _BYTES.get(dtype)


def tensors_of(lifetimes: Lifetimes, facts: JoinedFacts, texts: Sequence[str]) -> Tensors:
    """Of each allocation the type and the shape."""
    dtype, shape = np.zeros((2, len(lifetimes)), dtype=np.int64)
    rows = np.flatnonzero(facts.dtype)
    if not len(rows):
        return Tensors(dtype=dtype, shape=shape)
    about, said = facts.allocation[rows], facts.dtype[rows]
    fills = tensor_sizes(said, facts.shape[rows], texts) == lifetimes.bytes[about]
    order = np.lexsort((np.arange(len(rows)), _ranks()[facts.fact[rows]], ~fills, about))
    mine, start = np.unique(about[order], return_index=True)
    best = order[start]
    agreed = np.minimum.reduceat(said[order], start) == np.maximum.reduceat(said[order], start)
    dtype[mine] = np.where(fills[best] | agreed, said[best], 0)
    shape[mine] = np.where(fills[best], facts.shape[rows][best], 0)
    return Tensors(dtype=dtype, shape=shape)


def _ranks() -> Column:
    """The place of each fact in what counts first; what is not there comes last."""
    ranks = np.full(max(Fact) + 1, len(_BEST), dtype=np.int64)
    ranks[list(_BEST)] = np.arange(len(_BEST))
    return ranks


def tensor_sizes(dtype: Column, shape: Column, texts: Sequence[str]) -> Column:
    """Bytes of a tensor of each type and shape (text ids), -1 where they are not known or beyond 64 bits."""
    if not len(dtype):
        return dtype
    pairs, place = np.unique(np.stack([dtype, shape]), axis=1, return_inverse=True)
    sizes = [_size(dtype_bytes(texts[kind]), shape_of(texts[form])) for kind, form in pairs.T.tolist()]
    found: Column = np.array(sizes, dtype=np.int64)[place.reshape(-1)]
    return found


def _size(itemsize: int | None, shape: tuple[int, ...] | None) -> int:
    if itemsize is None or shape is None:
        return -1
    size = itemsize
    for length in shape:
        size *= length
    return size if size < 1 << 63 else -1
