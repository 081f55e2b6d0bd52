"""Looking at the script's objects past their own code, which may fail or do anything: what an object is and holds."""

from __future__ import annotations

from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor; unlike ``isinstance`` this asks neither it nor its ``__class__``."""
    return issubclass(type(value), torch.Tensor)


def is_parameter(value: object) -> bool:
    """Whether ``value`` is of the class ``nn.Parameter`` or below it."""
    return nn.Parameter in type(value).__mro__


def attributes_of(value: object) -> dict[str, Any]:
    """The dictionary of ``value`` itself, whatever its class makes of ``__dict__``; empty where it has none."""
    for base in type(value).__mro__:
        found: Any = base.__dict__.get("__dict__")
        if type(found) in (GetSetDescriptorType, MemberDescriptorType):  # a module's is the latter
            attributes: dict[str, Any] = found.__get__(value)
            return attributes
    return {}


def states_of(optimizer: Optimizer) -> list[tuple[torch.Tensor, Any]]:
    """What ``optimizer`` keeps of each parameter. That of a class of the script's may be anything, or raise."""
    return list(optimizer.state.items())


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor.grad`` where that is no question that torch warns of."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
