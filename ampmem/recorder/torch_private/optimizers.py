"""The private names of torch that tell of optimizers: when they are made, when they update, and how."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, FunctionType, SimpleNamespace

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ampmem.recorder.torch_private.entries import ENTRIES, NOTHING, Place, attribute, needed, optional, patched

OPTIMIZER_INIT: Place = patched("torch.optim.Optimizer", "__init__", "that an optimizer is made")
FUSED_INITS: tuple[Place, ...] = tuple(
    (kind, "__init__") for kind in (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
)
"""Where each optimizer that can run its update fused is made."""
ZERO_GRADS: tuple[Place, ...] = ((Optimizer, "zero_grad"), (nn.Module, "zero_grad"))
"""By what a script zeroes gradients."""
on_step_before, on_step_after = (
    needed("torch.optim.optimizer", f"register_optimizer_step_{when}_hook", "when an optimizer updates")
    for when in ("pre", "post")
)


def _by_device(parameters: list[torch.Tensor], differentiable: bool, use_fused: bool) -> tuple[bool, bool]:
    """torch's documented rule: foreach where all parameters are plain tensors on a GPU."""
    plain = (torch.Tensor, nn.Parameter)
    return False, not differentiable and all(type(each) in plain and each.is_cuda for each in parameters)


fused_or_foreach: Callable[..., tuple[bool, bool]] = optional(
    "torch.optim.optimizer",
    "_default_to_fused_or_foreach",
    "how an optimizer runs its update that was not told",
    without="whether an optimizer runs foreach is concluded from where its parameters are",
    otherwise=_by_device,
)


def running_steps() -> Counter[int]:
    """``id`` of each optimizer whose ``step`` is on the Python stack, and how often it is.

    Reads a local variable of torch's own: the function ``wrapper`` in ``torch/optim/optimizer.py``, which runs every
    optimizer's ``step`` and calls the hooks, has the optimizer as ``self`` (2.11 and newer). Nothing else knows of a
    step that raised. Where torch names it otherwise, an optimizer whose step raised is taken for one that runs on.
    """
    running: Counter[int] = Counter()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torch_optimizer.__file__ and frame.f_code.co_name == "wrapper":
            running[id(frame.f_locals.get("self"))] += 1
        frame = frame.f_back
    return running


def _patching() -> object:
    return SimpleNamespace(**dict.fromkeys(Optimizer._patch_step_function.__code__.co_names))


_HOOKED = attribute(
    "torch.optim.Optimizer._patch_step_function",
    "hooked",
    "which classes of torch's have made an optimizer, so that nobody looks for those of the others",
    without="a recording takes a little longer to start",
    example=_patching,
)


def never_made(kind: type[Optimizer]) -> bool:
    """Whether ``kind``, a class of torch's own, has made no optimizer yet; ``False`` where that cannot be told.

    With the first one torch wraps the ``step`` of its class, and marks what it puts there. A ``step`` that somebody
    else has put there since has no mark, and says nothing.
    """
    step = kind.step
    return _MARKS and _is_of_torch(step) and not hasattr(step, _HOOKED)


def _is_of_torch(function: object) -> bool:
    """Whether its code is torch's, and that of what it wraps: a name can be taken over from what was replaced."""
    while type(function) is FunctionType and function.__code__.co_filename.startswith(_FOLDER):
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


_FOLDER = str(Path(torch.__file__).parent) + os.sep
_MARKS = not any(entry.name == _HOOKED and entry.find() is NOTHING for entry in ENTRIES)
