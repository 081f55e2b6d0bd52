"""Counts FLOPs, by torch's own formulas, and bytes that are copied; apart from the mode, as it changes no memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.flop_counter import flop_registry

from ampmem.own_code import is_running
from ampmem.simulator.private.general import in_backward

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


aten = torch.ops.aten


class Work:
    """What all ops so far have computed and moved.

    Operations are floating-point ones of ops that ``torch.utils.flop_counter`` has a formula for: matrix products,
    convolutions and attention. Other ops, such as cuDNN's recurrent layers, count nothing.
    """

    def __init__(self) -> None:
        self.flops = 0
        self.recomputed_flops = 0
        """The part of :attr:`flops` that ``torch.utils.checkpoint`` ran again in backward."""
        self.moved_bytes = 0
        """Bytes that were copied from the device to the CPU, or from there."""
        self.where: Callable[[], str] = lambda: ""
        """Says which module runs."""
        self.forward_flops: Counter[str] = Counter()
        """By module, what its own code computed in forwards with gradients on."""

    def move(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count what ``func``, which is about to run, copies between the device and the CPU."""
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            source, target = args[0], torch.device(kwargs["device"])
        elif func is aten.copy_.default:
            source, target = args[1], args[0].device
        else:
            return
        if source.device.type != target.type:
            self.moved_bytes += source.nbytes

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count ``func``, which made ``result``."""
        formula = flop_registry.get(getattr(func, "overloadpacket", func))
        if formula is None:
            return
        try:
            count = int(formula(*args, **kwargs, out_val=result))
        except Exception:  # torch's formula does not fit what the op was given: it counts nothing
            return
        self.flops += count
        if not torch.is_grad_enabled():
            return
        if not in_backward():
            self.forward_flops[self.where()] += count
        elif is_running(_CHECKPOINT_FILE):
            self.recomputed_flops += count
