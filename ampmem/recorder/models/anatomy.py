"""Modules, parameters and buffers, read past classes that override ``parameters`` or ``__getattr__``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ampmem.recorder.facts.addresses import PLAIN
from ampmem.recorder.torch_private.general import CHILDREN, PARAMETERS, TRACED

_attributes_of: Callable[[nn.Module], dict[str, Any]] = vars(nn.Module)["__dict__"].__get__
"""A module's own dictionary, even if its class overrides ``__dict__``."""


def named_tensors(module: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """The parameters or buffers of ``module`` itself, by name; lazy ones may not be initialized yet."""
    return {key: tensor for key, tensor in _own(module, kind).items() if tensor is not None}


def held_tensors(module: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """The initialized parameters or buffers of ``module`` itself: others have neither shape nor memory."""
    return {key: tensor for key, tensor in named_tensors(module, kind).items() if not is_lazy(tensor)}


def held_as(module: nn.Module, kind: str, key: str) -> torch.Tensor | None:
    """The parameter or buffer named ``key``; ``None`` if there is none, or it is not initialized yet."""
    own = _attributes_of(module).get(kind)
    tensor: torch.Tensor | None = (own if type(own) is dict else _own(module, kind)).get(key)
    return tensor if type(tensor) in PLAIN or not (tensor is None or is_lazy(tensor)) else None


def children(module: nn.Module) -> dict[str, nn.Module]:
    """The direct submodules of ``module``, by name."""
    return {key: child for key, child in _own(module, CHILDREN).items() if issubclass(type(child), nn.Module)}


def tree(root: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """``root`` and all modules below it, each once, with their paths, as ``named_modules`` yields them."""
    seen: set[int] = set()
    waiting = [(prefix, root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        below = [(f"{path}.{name}" if path else name, child) for name, child in children(module).items()]
        waiting += reversed(below)


def named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The initialized parameters below ``root``, each once; lazy ones come with their first forward."""
    seen: set[int] = set()
    for path, module in tree(root, ""):
        for key, parameter in held_tensors(module, PARAMETERS).items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{key}" if path else key, parameter  # type: ignore[misc]


def has_parameters(root: nn.Module) -> bool:
    """Whether ``root`` or a module below it has a parameter; an uninitialized one counts."""
    return any(own is not None for _, module in tree(root, "") for own in _own(module, PARAMETERS).values())


def _own(module: nn.Module, kind: str) -> Mapping[str, Any]:
    """A dictionary of the module, such as ``_parameters``; empty if it was never made, or was deleted."""
    attributes = _attributes_of(module)
    if kind not in attributes and TRACED in attributes:
        attributes = _attributes_of(attributes[TRACED])
    own: Mapping[str, Any] = attributes.get(kind, {})
    return own if isinstance(own, dict) else dict(own.items())  # a scripted module's is not a dict
