"""``torch.cuda.FloatTensor`` and the like, which programs from before torch 0.4 use.

CPU builds have them in name only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from ampmem.patching import Undo, added, in_place_of, patch, replace_all, undone_together
from ampmem.simulator.private.general import DEFAULT_TYPE, FakeTensor

_PREFIX = "torch.cuda."
_TYPES = {
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class _Type(type):
    """The metaclass of the tensor types: calling one makes a tensor, and tensors of its dtype are instances."""

    dtype: torch.dtype

    def __call__(cls, *given: Any, **how: Any) -> Any:
        # As the type on the CPU: sizes, a list, an array or another tensor.
        return torch.as_tensor(getattr(torch, cls.__name__)(*given), device="cuda", dtype=cls.dtype)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype


@undone_together
def install() -> Iterator[Undo]:
    """Install the types, and the functions that take one; returns the undo."""
    types = {name: _Type(name, (), {"dtype": dtype, "__module__": "torch.cuda"}) for name, dtype in _TYPES.items()}
    yield replace_all((torch.cuda,), types)
    # Closed at each call, so that only the last type stays the default.
    chosen = ExitStack()
    yield chosen.close
    yield patch(*DEFAULT_TYPE, functools.partial(_set_default, chosen))
    yield replace_all((torch.Tensor,), {"type": in_place_of(torch.Tensor.type, _type)})


def _dtype_of(kind: Any) -> torch.dtype | None:
    """The dtype of a tensor type on the device, by name or class; ``None`` for anything else."""
    if isinstance(kind, _Type):
        return kind.dtype
    return _TYPES.get(kind.removeprefix(_PREFIX)) if isinstance(kind, str) and kind.startswith(_PREFIX) else None


def _set_default(chosen: ExitStack, original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``torch.set_default_tensor_type``: a type on the device sets the default dtype and the default device.

    ``chosen`` puts the default device back.
    """

    @functools.wraps(original)
    def set_default_tensor_type(t: Any) -> None:
        chosen.close()
        dtype = _dtype_of(t)
        if dtype is None:
            original(t)
            return
        torch.set_default_dtype(dtype)
        torch.set_default_device("cuda")
        chosen.callback(added("torch", "default device", lambda: torch.set_default_device(None)))

    return set_default_tensor_type


def _type(original: Any, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **how: Any) -> Any:
    """``Tensor.type``: the name of the tensor's type, or the tensor as another type."""
    wanted = _dtype_of(dtype)
    if wanted is not None:
        return tensor.to("cuda", wanted, non_blocking=non_blocking)
    if dtype is None and isinstance(tensor, FakeTensor):
        place = _PREFIX if tensor.fake_device.type == "cuda" else "torch."
        return place + next((name for name, kind in _TYPES.items() if kind is tensor.dtype), "Tensor")
    return original(tensor, dtype, non_blocking, **how)
