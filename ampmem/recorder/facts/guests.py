"""Looks at the script's objects without running their own code, which may fail or have side effects."""

from __future__ import annotations

from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor; unlike ``isinstance``, it does not read ``value.__class__``."""
    return issubclass(type(value), torch.Tensor)


def is_nn_parameter(value: object) -> bool:
    """Whether ``value`` is an ``nn.Parameter``, or of a subclass."""
    return nn.Parameter in type(value).__mro__


def attributes_of(value: object) -> dict[str, Any]:
    """The instance dictionary of ``value``, even if its class overrides ``__dict__``; empty if it has none."""
    for base in type(value).__mro__:
        found: Any = base.__dict__.get("__dict__")
        if type(found) in (GetSetDescriptorType, MemberDescriptorType):  # a module's is the latter
            attributes: dict[str, Any] = found.__get__(value)
            return attributes
    return {}


def states_of(optimizer: Optimizer) -> list[tuple[torch.Tensor, Any]]:
    """The parameters of ``optimizer``, each with its state. A custom class may keep anything there, or raise."""
    return list(optimizer.state.items())


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor.grad``; ``None`` for a tensor for which torch would warn."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
