"""Replaces an out-of-place addition by its in-place twin where torch adds in place without ampmem's dispatch mode.

``at::linear`` adds the bias to the product of a non-contiguous input in place, and attention its mask to the scores,
unless an argument ``isTensorSubclassLike``. While a dispatch mode is active, every tensor is: torch adds out of place,
and for a moment product and sum both exist. The recorder's mode and the simulated device's use this module.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules import linear, rnn

from ampmem.own_code import RECORDING_CODE, script_line, with_callers

aten = torch.ops.aten

ADD = aten.add.Tensor
_CALLERS = tuple(str(module.__file__) for module in (functional, linear, rnn))
"""Files of torch whose Python code never adds to a matrix product, so an addition under them is made by C++."""
_NAMES = frozenset({"linear", "scaled_dot_product_attention"})
_INSIDE = (*RECORDING_CODE, *(f"{torch.__path__[0]}{folder}/_" for folder in ("", "/utils")))
"""The beginnings of the file names of ampmem's code, and of torch's code between an op and a mode."""


class InPlaceAdditions:
    """Chooses between an addition and its in-place twin.

    The addition is replaced only where the product is certainly not needed any more: in torch's own modules, and where
    the script's running line calls ``linear`` or ``scaled_dot_product_attention`` by name, so that the addition is not
    the line's own. For other code that may call these functions there is a ``remark``: product and sum may both exist.
    """

    def __init__(self, last: Any, remark: Callable[[str], None]) -> None:
        self._products = (last, aten.matmul.default)
        """The ops that return a matrix product of more than two dimensions; in inference mode ``matmul`` is one op."""
        self._remark = remark
        self._sure = False
        self._product = 0
        """The ``id`` of the newest op's result if that is a matrix product, else 0."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which every addition to a matrix product is in place, since nothing else holds the product."""
        former, self._sure = self._sure, True
        try:
            yield
        finally:
            self._sure = former

    def choose(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """The op that would run without a mode: ``func`` or its in-place twin."""
        if func is not ADD or not self._product or len(args) != 2 or kwargs or id(args[0]) != self._product:
            return func
        if not _fits(*args):
            return func
        if self._sure:
            return aten.add_.Tensor
        outside = (each for each in with_callers(sys._getframe(1)) if not each.f_code.co_filename.startswith(_INSIDE))
        frame = next(outside, None)
        if frame is None:
            return func
        if frame.f_code.co_filename in _CALLERS or _called(frame.f_code, frame.f_lasti) in _NAMES:
            return aten.add_.Tensor
        if _NAMES & set(frame.f_code.co_names):
            self._remark(
                f"linear or scaled_dot_product_attention, called by another name at {script_line()}, may add a bias "
                "or a mask out of place while ampmem records: its result exists twice for a moment; call it by its "
                "name"
            )
        return func

    def note_result(self, func: Any, result: Any) -> None:
        """Note that ``func`` has returned ``result``."""
        self._product = id(result) if func in self._products else 0


@functools.lru_cache(maxsize=1024)
def _called(code: CodeType, instruction: int) -> str:
    """The last name of the callee at ``instruction``; empty if it is not a call, or positions are not kept.

    The callee's expression begins where the call begins, and ends before it.
    """
    # The offset may be that of an inline cache.
    found = [each for each in dis.get_instructions(code) if each.offset <= instruction]
    call = found[-1].positions if found and "CALL" in found[-1].opname else None
    if call is None or None in call:
        return ""
    best, name = (0, 0), ""
    for each in found:
        at = each.positions
        if at is None or None in at or at[::2] != call[::2] or not each.opname.startswith("LOAD_"):
            continue
        end = (at.end_lineno or 0, at.end_col_offset or 0)
        if best < end < (call.end_lineno or 0, call.end_col_offset or 0):
            best, name = end, str(each.argval)
    return name


def _fits(product: Any, added: Any) -> bool:
    """Whether ``added`` can be added to ``product`` in place: its type and shape fit."""
    if not isinstance(added, torch.Tensor) or added.dim() > product.dim():
        return False
    if not torch.can_cast(added.dtype, product.dtype):
        return False
    sizes = zip(reversed(added.shape), reversed(product.shape), strict=False)
    return all(mine in (1, whole) for mine, whole in sizes)
