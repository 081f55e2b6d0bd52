"""The optimizers of a script: which there are, whose parameters they hold, and which of their tensors are copies.

:class:`Twins` says which parameters an optimizer's own tensor is a copy of, in another precision: one, a row of them,
or a slice.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.recorder.facts.addresses import PLAIN


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


PADDING = 4096
"""A flat copy may be so many elements longer than the parameters in it: engines round it up for their ranks."""
_LOOKED_AT = 4
"""Elements at the start of each parameter that are compared."""
_TOLERANCE = 2**-7
"""Of a value that went through bfloat16, which has 8 bits."""


def twins_of(copy: torch.Tensor, parameters: Sequence[torch.Tensor]) -> range:
    """Where in ``parameters`` those are, one after the other, that ``copy`` has in another precision; empty for none.

    Numbers of elements must agree, and on the CPU the values too, before an update has made them differ. On a device
    values are not looked at: that would wait for it.
    """
    for place, parameter in enumerate(parameters):
        if parameter.shape == copy.shape and _is_copy(copy, 0, parameter):
            return range(place, place + 1)
    if copy.dim() == 1:
        for first in range(len(parameters)):
            row = _row_from(first, copy, parameters)
            if row:
                return row
    return range(0)


def _row_from(first: int, copy: torch.Tensor, parameters: Sequence[torch.Tensor]) -> range:
    """The longest row from ``first`` on that ``copy`` consists of, but for its padding."""
    reached, last = 0, first
    for parameter in parameters[first:]:
        if reached + parameter.numel() > copy.numel() or not _is_copy(copy, reached, parameter):
            break
        reached, last = reached + parameter.numel(), last + 1
    return range(first, last) if reached and copy.numel() - reached < min(PADDING, reached) else range(0)


_WAYS = 64
"""So many choices of parameters are followed at the most: those that begin with equal values can be mistaken."""


def chosen_from(copy: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[int]:
    """Which of ``parameters`` a flat ``copy`` in another precision has, in their order but with others in between.

    Such are the copies of a group of parameters: the weights without the biases, some of the layers. Their values must
    say so. On a device, where those are not looked at, only the matrices, or all else, are tried.
    """
    total = copy.numel()
    if copy.dim() != 1 or not copy.is_floating_point():
        return []
    others = [(place, each) for place, each in enumerate(parameters) if each.dtype != copy.dtype]
    if _values(copy, 0) is None:
        for matrices in (True, False):
            mine = [(place, each) for place, each in others if (each.dim() > 1) is matrices]
            if sum(each.numel() for _, each in mine) == total:
                return [place for place, _ in mine]
        return []
    ways: dict[int, tuple[int, ...]] = {0: ()}
    for place, parameter in others:
        for reached, places in list(ways.items()):
            further = reached + parameter.numel()
            if further <= total and further not in ways and len(ways) < _WAYS and _is_copy(copy, reached, parameter):
                ways[further] = (*places, place)
    reached = max(ways)
    fits = reached and total - reached < min(PADDING, reached)
    found = list(ways[reached]) if fits else []
    return found if any(any(_values(parameters[place], 0) or ()) for place in found) else []


def partition_of(copy: torch.Tensor, parameters: Sequence[torch.Tensor]) -> range:
    """Where those are of which ``copy`` has all or, of the first and the last, a part, in another precision.

    It is one of several equal slices of all ``parameters`` laid side by side, the last one padded, as engines divide
    them between ranks. Which slice it is, its values must say, so on a device none is found; and a slice that could be
    two is none.
    """
    total = sum(parameter.numel() for parameter in parameters)
    size = copy.numel()
    if copy.dim() != 1 or not 0 < size < total or -total % size >= min(PADDING, size // 2):
        return range(0)
    found = [row for start in range(0, total, size) if (row := _slice_from(start, copy, parameters))]
    return found[0] if len(found) == 1 else range(0)


def _slice_from(start: int, copy: torch.Tensor, parameters: Sequence[torch.Tensor]) -> range:
    """Those that ``copy`` can have from the element ``start`` of all on; none where one is not in it."""
    offset, places = 0, []
    for place, parameter in enumerate(parameters):
        first, last = max(offset, start), min(offset + parameter.numel(), start + copy.numel())
        offset += parameter.numel()
        if first < last:
            mine, theirs = _values(copy, first - start), _values(parameter, first - offset + parameter.numel())
            if parameter.dtype == copy.dtype or not mine or not theirs or not all(map(_close, mine, theirs)):
                return range(0)
            places.append(place)
    return range(places[0], places[-1] + 1)


def _is_copy(copy: torch.Tensor, offset: int, parameter: torch.Tensor) -> bool:
    """Whether ``copy`` can have ``parameter`` from its element ``offset`` on."""
    if parameter.dtype == copy.dtype or not (parameter.is_floating_point() and copy.is_floating_point()):
        return False
    mine, theirs = _values(copy, offset), _values(parameter, 0)
    if mine is None or theirs is None:
        return True
    return all(map(_close, mine, theirs))


def is_master(key: str, state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a tensor of optimizer state, called ``key``, is its ``parameter`` in another precision.

    Either its name says so, as ``master_param`` of Apex and TransformerEngine does, or, on the CPU, its values: after
    an update the parameter is what the master copy rounds to.
    """
    if type(state) not in PLAIN or type(parameter) not in PLAIN:  # asking others runs code of the script's
        return False
    if state.dtype == parameter.dtype or state.numel() != parameter.numel():
        return False
    if not (state.is_floating_point() and parameter.is_floating_point()):
        return False
    if "master" in key:
        return True
    mine, theirs = _values(state, 0), _values(parameter, 0)
    if not mine or not theirs or not any(mine):
        return False
    return all(math.isclose(one, other, rel_tol=_TOLERANCE) for one, other in zip(mine, theirs, strict=True))


def _values(tensor: torch.Tensor, offset: int) -> list[float] | None:
    """Some elements in a row; ``None`` where they cannot be had without waiting, or without memory."""
    if type(tensor) not in PLAIN or tensor.device.type != "cpu":
        return None
    if not tensor.is_contiguous():
        return None
    values: list[float] = tensor.detach().view(-1)[offset : offset + _LOOKED_AT].tolist()
    return values


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-6)
