"""What the autograd engine does in place, and on fake tensors would not.

It adds gradients into a buffer that nobody else holds, but never for subclasses or under a mode; some backward
formulas write into a fresh tensor of zeros, but not for subclasses either. Out of place, each costs memory that
no GPU would use. So the op is replaced by the one that a GPU would run.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ampmem.simulator.private.general import ENGINE_CALLER, FakeTensor, holders, running_node

aten = torch.ops.aten

_OWN = str(Path(__file__).parent)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_IN_PLACE = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
}
_MASKED = {aten.masked_fill.Scalar: aten.masked_fill_.Scalar}
_LOGICAL = {
    aten.logical_and.default: aten.logical_and_.default,
    aten.logical_or.default: aten.logical_or_.default,
}
_CHAINED = {
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
}
_CLAMPED = _MASKED if TorchVersion(torch.__version__) >= "2.14" else _MASKED | _LOGICAL
_IN_FORMULA: dict[str, dict[Any, Any]] = {
    **dict.fromkeys((f"{name}Backward0" for name in ("Maximum", "Minimum", "Fmax", "Fmin", "Amax", "Amin")), _MASKED),
    **dict.fromkeys(("ClampBackward0", "ClampBackward1", "ClampMinBackward1", "ClampMaxBackward1"), _CLAMPED),
    **dict.fromkeys(("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), _LOGICAL),
    "BinaryCrossEntropyWithLogitsBackward0": _CHAINED,
    "Atan2Backward0": _MASKED,
    "VarMeanBackward0": {},
    "StdMeanBackward0": {},
}
"""Nodes whose formulas write to what they have made themselves, with the ops that are in place there
(``FunctionsManual.cpp``, ``derivatives.yaml``); or that do not, where a sum looks like one of the engine's."""


class Accumulation:
    """Chooses between an op and its in-place twin in backward."""

    def __init__(self) -> None:
        self.alone = (0, 0, 0)
        """How many hold a gradient, and its storage, when only the engine's buffer does; found by the self-test."""
        self.seen: list[tuple[int, int, int]] | None = None
        """The same of every sum, in order, while the self-test listens."""
        self._zeros: weakref.ref[torch.UntypedStorage] | None = None
        self._node = ("", -1)
        self._made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """What the running node has made, if it is one of those of :data:`_IN_FORMULA`."""

    def choose(self, func: Any, args: Sequence[Any]) -> Any:
        """``func``, or what a GPU would run in its place."""
        if torch.is_grad_enabled():
            return func
        node = running_node()
        if node[0] in _IN_FORMULA:
            if node != self._node:
                self._node = node
                self._made.clear()
            made = self._made_here(args[0]) if args else False
            if made and func is aten.add.Tensor and self._made_here(args[1]):
                return func
            if made and func in _IN_FORMULA[node[0]] and _same(args):
                return _IN_FORMULA[node[0]][func]
        if func is aten.add.Tensor:
            return aten.add_.Tensor if self._sums_in_place(args) else func
        if func in _IN_PLACE and self._zeros is not None and self._zeros() is args[0].untyped_storage():
            return _IN_PLACE[func]
        return func

    def after(self, func: Any, result: Any) -> None:
        """``func`` gave ``result``: fresh zeros may be written to."""
        if self._node[0] and isinstance(result, FakeTensor) and running_node() == self._node:
            self._made.add(result.untyped_storage())
        if func in _ZEROS and isinstance(result, FakeTensor):
            self._zeros = weakref.ref(result.untyped_storage())

    def _made_here(self, value: Any) -> bool:
        return isinstance(value, FakeTensor) and value.untyped_storage() in self._made

    def _sums_in_place(self, args: Sequence[Any]) -> bool:
        """As ``can_accumulate_inplace`` in torch's ``input_buffer.cpp`` decides for plain tensors."""
        if not _called_by_engine() or len(args) != 2:
            return False
        old, new = args
        if not (isinstance(old, FakeTensor) and isinstance(new, FakeTensor)):
            return False
        found = holders(old)
        if self.seen is not None:
            self.seen.append(found)
        if old.shape != new.shape or old.dtype != new.dtype or not _dense(old):
            return False
        return all(now <= alone for now, alone in zip(found, self.alone, strict=True))


def _same(args: Sequence[Any]) -> bool:
    """Whether an op of these arguments has a result like the first of them."""
    first, *rest = args
    tensors = [other for other in rest if isinstance(other, torch.Tensor)]
    return all(
        torch.broadcast_shapes(first.shape, other.shape) == first.shape
        and torch.promote_types(first.dtype, other.dtype) == first.dtype
        for other in tensors
    )


def _called_by_engine() -> bool:
    """Whether no Python code between here and the engine asked for the op: a Function's own backward, a hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return frame is not None and frame.f_code is ENGINE_CALLER


def _dense(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` fills its memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
