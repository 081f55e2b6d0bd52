"""Counts floating-point operations by torch's own formulas; apart from the mode, since no count changes memory."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.flop_counter import flop_registry

from ampmem.simulator.private.general import in_backward

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


class Flops:
    """The floating-point operations of all ops so far that ``torch.utils.flop_counter`` has a formula for.

    Those are matrix products, convolutions and attention; other ops, such as cuDNN's recurrent layers, count nothing.
    """

    def __init__(self) -> None:
        self.total = 0
        self.recomputed = 0
        """The part of :attr:`total` that ``torch.utils.checkpoint`` ran again in backward."""

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count ``func``, which made ``result``."""
        formula = flop_registry.get(getattr(func, "overloadpacket", func))
        if formula is None:
            return
        try:
            count = int(formula(*args, **kwargs, out_val=result))
        except Exception:  # torch's formula does not fit what the op was given: it counts nothing
            return
        self.total += count
        if in_backward() and torch.is_grad_enabled() and _under_checkpoint():
            self.recomputed += count


def _under_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` is on the Python stack: gradients are on in a double backward, too."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False
