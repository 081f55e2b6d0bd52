"""What a linear layer adds to its product in place, and would add out of place because of a dispatch mode of ampmem's.

``at::linear`` adds the bias into the product of an input that is not contiguous, and attention its mask into the
scores, but not where an argument ``isTensorSubclassLike``, which every tensor is while any dispatch mode is active. Out
of place the result is there twice for a moment. So the op is replaced by the one that runs without the mode. The
recorder's mode and the simulated device's both do that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules import linear, rnn

from ampmem.own_code import RECORDING_CODE, script_line

aten = torch.ops.aten

ADD = aten.add.Tensor
_CALLERS = tuple(str(module.__file__) for module in (functional, linear, rnn))
"""Torch's own modules, in which no line of Python adds something to such a product: the addition is one of C++."""
_NAMES = frozenset({"linear", "scaled_dot_product_attention"})
_INSIDE = (*RECORDING_CODE, *(f"{torch.__path__[0]}{folder}/_" for folder in ("", "/utils")))
"""What the files begin with of ampmem's code, and of what torch runs between an op and a mode."""


class InPlaceAdditions:
    """Chooses between an addition and its in-place twin.

    The op is replaced only where nobody can need the product any longer, as is known of torch's own modules. Of others
    that call these functions ``remark`` is told, since a result may be there twice.
    """

    def __init__(self, last: Any, remark: Callable[[str], None]) -> None:
        self._products = (last, aten.matmul.default)
        """The ``last`` of the ops that a matrix product of more than two dimensions is made of; in inference mode it is
        a single op."""
        self._remark = remark
        self._sure = False
        self._product = 0
        """``id`` of what the newest op has returned, where that is such a product."""

    @contextmanager
    def of_a_product(self) -> Iterator[None]:
        """Whatever is added to a product in here is added in place, as nobody else has the product."""
        former, self._sure = self._sure, True
        try:
            yield
        finally:
            self._sure = former

    def choose(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """``func``, or what would run in its place without a mode."""
        if func is not ADD or not self._product or len(args) != 2 or kwargs or id(args[0]) != self._product:
            return func
        if not _fits(*args):
            return func
        if self._sure:
            return aten.add_.Tensor
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
            frame = frame.f_back
        if frame is None:
            return func
        if frame.f_code.co_filename in _CALLERS:
            return aten.add_.Tensor
        if _NAMES & set(frame.f_code.co_names):
            self._remark(
                f"linear or scaled_dot_product_attention, called as a function at {script_line()}, may add a bias or a "
                "mask out of place while ampmem watches: its result is there twice for a moment"
            )
        return func

    def after(self, func: Any, result: Any) -> None:
        """``func`` has returned ``result``."""
        self._product = id(result) if func in self._products else 0


def _fits(product: Any, added: Any) -> bool:
    """Whether ``added`` can be added to ``product`` in place."""
    if not isinstance(added, torch.Tensor) or added.dim() > product.dim():
        return False
    if not torch.can_cast(added.dtype, product.dtype):
        return False
    sizes = zip(reversed(added.shape), reversed(product.shape), strict=False)
    return all(mine in (1, whole) for mine, whole in sizes)
