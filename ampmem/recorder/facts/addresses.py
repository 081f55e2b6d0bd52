"""Addresses of tensors: each fact is about an address, and the recorded device knows which allocation has it.

Most tensors have a storage of their own; wrappers and sparse tensors consist of other tensors (:func:`parts_of`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ampmem.recorder.torch_private.general import is_wrapper, layout_of, sparse_parts, wrapped_names

PLAIN = (torch.Tensor, nn.Parameter)
"""The types of tensors that run no code of a subclass."""
_FOUR_BIT = "quant_state"
"""Attribute of bitsandbytes' 4-bit parameters: the scales of the blocks and the original shape."""


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors whose storages hold ``tensor``'s elements: itself, or the tensors that it wraps.

    DTensor and torchao's tensors wrap others (``__tensor_flatten__``), which may be wrappers again; a sparse tensor has
    indices and values.
    """
    # The usual case; the checks below call C++ several times.
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return (tensor,)
    try:
        return tuple(_parts(tensor)) or (tensor,)
    except Exception:  # a subclass's own code may raise anything, and the script must not fail because we asked
        return (tensor,)


def elements_of(tensor: torch.Tensor) -> int:
    """Number of elements in this process: a sharded tensor's are the shard's, a quantized one's the original number."""
    state = getattr(tensor, _FOUR_BIT, None)
    if state is not None and isinstance(getattr(state, "shape", None), torch.Size):
        return int(state.shape.numel())
    inner = _only_inner(tensor)
    if inner is not None and inner.dtype == tensor.dtype:
        return elements_of(inner)  # for the shard of a quantized tensor: of the shard
    return tensor.numel()


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the elements of ``tensor``, all its parts together."""
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of the largest part of ``tensor``."""
    return max(parts_of(tensor), key=lambda part: part.numel() * part.element_size()).dtype


def _only_inner(tensor: torch.Tensor) -> torch.Tensor | None:
    """The one tensor that ``tensor`` wraps; ``None`` if it wraps none or several."""
    try:
        inner = [getattr(tensor, name) for name in wrapped_names(tensor)] if is_wrapper(tensor) else []
    except Exception:  # as in parts_of
        return None
    tensors = [each for each in inner if isinstance(each, torch.Tensor)]
    return tensors[0] if len(tensors) == 1 else None


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if is_wrapper(tensor):
        for inner in wrapped_names(tensor):
            part = getattr(tensor, inner)
            if isinstance(part, torch.Tensor):
                yield from parts_of(part)
    elif layout_of(tensor) is not torch.strided:
        yield from sparse_parts(tensor)
    else:
        yield tensor
        yield from _scales(getattr(tensor, _FOUR_BIT, None))


def _scales(state: Any) -> Iterator[torch.Tensor]:
    """The tensors of a ``quant_state``, and of the nested ``quant_state`` of its own scales."""
    for value in getattr(state, "__dict__", {}).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif hasattr(value, "absmax"):
            yield from _scales(value)


_storage_of, _first_of = torch.Tensor.untyped_storage, torch.Tensor.data_ptr
_offset_of: Any = torch.Tensor.storage_offset
_width_of = torch.Tensor.element_size
"""Torch's own methods: a subclass may override them."""


class AliveBlocks(NamedTuple):
    """The live blocks of a source; ``total`` is the bytes of all.

    ``seen`` has the addresses of those that hooks or torch have told the source of, ``unseen`` address and bytes of
    the others.
    """

    unseen: dict[int, int]
    total: int
    seen: frozenset[int] = frozenset()


class Addresses(Protocol):
    """Addresses of tensors on the recorded device."""

    def storage_address(self, tensor: torch.Tensor) -> int:
        """The address of the first byte of ``tensor``'s storage; 0 if it cannot be read."""

    def data_address(self, tensor: torch.Tensor) -> int:
        """The address of ``tensor``'s first element; 0 if it cannot be read."""


class RealAddresses:
    """Addresses of tensors in real memory. Meta, fake and functorch tensors have no storage of their own.

    A lazy module's uninitialized parameter has none yet, and raises ``ValueError``.
    """

    @staticmethod
    def storage_address(tensor: torch.Tensor) -> int:
        try:
            if type(tensor) in PLAIN and (start := _first_of(tensor)):
                # Without an object of Python's for the storage: torch counts its references wrongly if such an object
                # is made while another thread, which needs no GIL for that, uses the storage.
                offset = _offset_of(tensor)
                return start - offset * _width_of(tensor) if offset else start
            storage = _storage_of(tensor)
            # Reading a fake tensor's data_ptr() makes torch warn.
            return storage.data_ptr() if storage.device.type != "meta" else 0
        except (RuntimeError, NotImplementedError, ValueError):
            return 0

    @staticmethod
    def data_address(tensor: torch.Tensor) -> int:
        try:
            return _first_of(tensor) if RealAddresses.storage_address(tensor) else 0
        except (RuntimeError, NotImplementedError, ValueError):
            return 0
