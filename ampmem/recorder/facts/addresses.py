"""Where tensors lie: facts are about addresses, and the device whose memory is recorded says which is whose.

Most tensors have memory of their own; wrappers and sparse tensors have that of others (:func:`parts_of`).
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
"""What a 4-bit parameter of bitsandbytes has: the scales of its blocks, and the shape that it stands for."""


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in whose storages ``tensor``'s elements lie: itself, or what it wraps.

    DTensor and torchao's tensors wrap others (``__tensor_flatten__``), which may be wrappers again; a sparse tensor
    has indices and values.
    """
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return (tensor,)
    try:
        return tuple(_parts(tensor)) or (tensor,)
    except Exception:  # code of the script's or of its libraries, which must not fail on our account
        return (tensor,)


def elements_of(tensor: torch.Tensor) -> int:
    """How many numbers ``tensor`` stands for in this process: of a shard its own, of a quantized tensor all."""
    state = getattr(tensor, _FOUR_BIT, None)
    if state is not None and isinstance(getattr(state, "shape", None), torch.Size):
        return int(state.shape.numel())
    inner = _only_inner(tensor)
    if inner is not None and inner.dtype == tensor.dtype:
        return elements_of(inner)  # of a quantized tensor's shard that is the shard's
    return tensor.numel()


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the elements of all parts of ``tensor``."""
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """The type of the largest part of ``tensor``."""
    return max(parts_of(tensor), key=lambda part: part.numel() * part.element_size()).dtype


def _only_inner(tensor: torch.Tensor) -> torch.Tensor | None:
    """The one tensor that ``tensor`` wraps; ``None`` where it wraps none or several."""
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
    """The tensors of a ``quant_state``, and of the one that it may have in turn."""
    for value in getattr(state, "__dict__", {}).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif hasattr(value, "absmax"):
            yield from _scales(value)


_storage_of, _first_of = torch.Tensor.untyped_storage, torch.Tensor.data_ptr
"""Torch's own, whatever the class of a tensor makes of them."""


class AliveBlocks(NamedTuple):
    """What a source knows to be alive: address and bytes of the blocks that no hook has seen, and the bytes of all."""

    unseen: dict[int, int]
    total: int


class Addresses(Protocol):
    """What can be asked of the recorded device."""

    def storage_address(self, tensor: torch.Tensor) -> int:
        """The address of the first byte of ``tensor``'s storage; 0 when it has none that can be read."""

    def data_address(self, tensor: torch.Tensor) -> int:
        """The address of ``tensor``'s first element; 0 when it has none that can be read."""


class RealAddresses:
    """Those of tensors in memory. Meta, fake and functorch tensors have no storage of their own.

    A lazy module's parameter has none yet, and says so with a ``ValueError``.
    """

    @staticmethod
    def storage_address(tensor: torch.Tensor) -> int:
        """The address of the first byte of ``tensor``'s storage; 0 when it has none that can be read."""
        try:
            storage = _storage_of(tensor)
            if type(tensor) in PLAIN:
                return storage.data_ptr()
            # A fake tensor's pointer is one that torch warns of.
            return storage.data_ptr() if storage.device.type != "meta" else 0
        except (RuntimeError, NotImplementedError, ValueError):
            return 0

    @staticmethod
    def data_address(tensor: torch.Tensor) -> int:
        """The address of ``tensor``'s first element; 0 when it has none that can be read."""
        try:
            return _first_of(tensor) if RealAddresses.storage_address(tensor) else 0
        except (RuntimeError, NotImplementedError, ValueError):
            return 0
