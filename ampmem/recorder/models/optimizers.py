"""The optimizers of a script: which there are, whose parameters they hold, and whether those train."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import nn
from torch.optim import Optimizer


class Optimizers:
    """Those that exist, each by its ``id``. ``died`` is called with the ``id`` of one that no longer does."""

    def __init__(self, died: Callable[[int], None]) -> None:
        self._died = died
        self._living: dict[int, weakref.ref[Optimizer]] = {}
        self._held: dict[int, tuple[weakref.ref[nn.Module], frozenset[int]]] = {}
        """Of each module that ran, by ``id``, the optimizers that hold parameters of it."""

    def __iter__(self) -> Iterator[Optimizer]:
        """Every optimizer that exists."""
        for reference in list(self._living.values()):
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    def add(self, optimizer: Optimizer) -> None:
        """``optimizer`` exists."""
        key = id(optimizer)
        self._living[key] = weakref.ref(optimizer, lambda _: self._forget(key))
        self._held.clear()

    def holding(self, module: nn.Module) -> frozenset[int]:
        """Those that hold parameters of ``module``."""
        known = self._held.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        parameters = set(map(id, module.parameters()))
        holders = frozenset(
            key
            for key, reference in self._living.items()
            if (optimizer := reference()) is not None
            and any(id(parameter) in parameters for parameter in _parameters(optimizer))
        )
        self._held[id(module)] = (weakref.ref(module), holders)
        return holders

    def trains(self, optimizer: int) -> bool:
        """Whether any parameter of it takes a gradient now: a script may freeze a model while another is trained."""
        return any(parameter.requires_grad for parameter in self._parameters(optimizer))

    def has_gradients(self, optimizer: int) -> bool:
        """Whether any parameter of it has a gradient now."""
        return any(parameter.grad is not None for parameter in self._parameters(optimizer))

    def _parameters(self, optimizer: int) -> Iterator[torch.Tensor]:
        reference = self._living.get(optimizer)
        living = None if reference is None else reference()
        return iter(()) if living is None else _parameters(living)

    def _forget(self, optimizer: int) -> None:
        self._living.pop(optimizer, None)
        self._held.clear()
        self._died(optimizer)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """None where its class does not let them be asked for: a wrapper need not be set up as torch's are."""
    with suppress(Exception):
        for group in optimizer.param_groups:
            yield from group["params"]
