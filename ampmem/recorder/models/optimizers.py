"""The script's optimizers, the parameters that they hold, and which of their tensors are copies of parameters.

A copy in another precision may be of one parameter, of several in a row, of some of them, or a slice of all.
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
    """The live optimizers, by ``id``. ``died`` is called with the ``id`` of one that was freed."""

    def __init__(self, died: Callable[[int], None]) -> None:
        self._died = died
        self._living: dict[int, weakref.ref[Optimizer]] = {}
        self._held: dict[int, tuple[weakref.ref[nn.Module], frozenset[int]]] = {}
        """The optimizers that hold parameters of each module that ran, by the module's ``id``."""

    def __iter__(self) -> Iterator[Optimizer]:
        """Every live optimizer."""
        for reference in list(self._living.values()):
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    def __contains__(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` was added."""
        reference = self._living.get(id(optimizer))
        return reference is not None and reference() is optimizer

    def add(self, optimizer: Optimizer) -> None:
        """Add ``optimizer``."""
        # By id: an optimizer of the script may define equality, or be not hashable.
        key = id(optimizer)
        self._living[key] = weakref.ref(optimizer, lambda _: self._forget(key))
        self._held.clear()

    def holding(self, module: nn.Module) -> frozenset[int]:
        """``id`` of each optimizer that holds parameters of ``module``."""
        known = self._held.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        parameters = set(map(id, module.parameters()))
        # An optimizer may die meanwhile: any allocation may start a garbage collection.
        holders = frozenset(
            id(optimizer)
            for optimizer in self
            if any(id(parameter) in parameters for parameter in parameters_of(optimizer))
        )
        self._held[id(module)] = (weakref.ref(module), holders)
        return holders

    def trains(self, optimizer: int) -> bool:
        """Whether the optimizer with this ``id`` has a parameter that requires a gradient."""
        return any(parameter.requires_grad for parameter in self._parameters(optimizer))

    def has_gradients(self, optimizer: int) -> bool:
        """Whether a parameter of the optimizer with this ``id`` has a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters(optimizer))

    def _parameters(self, optimizer: int) -> Iterator[torch.Tensor]:
        reference = self._living.get(optimizer)
        living = None if reference is None else reference()
        return iter(()) if living is None else parameters_of(living)

    def _forget(self, optimizer: int) -> None:
        self._living.pop(optimizer, None)
        self._held.clear()
        self._died(optimizer)


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of ``optimizer``; none if its class raises, as a wrapper that is not set up may."""
    with suppress(Exception):
        for group in optimizer.param_groups:
            yield from group["params"]


PADDING = 4096
"""Maximum number of padding elements in a flat copy: engines round its size up for their ranks."""
_LOOKED_AT = 4
"""Number of elements compared at the start of each parameter."""
_TOLERANCE = 2**-7
"""Relative tolerance for a value rounded to bfloat16, which has 8 bits of precision."""


def twins_of(copy: torch.Tensor, parameters: Sequence[torch.Tensor]) -> range:
    """Indices of the consecutive ``parameters`` that ``copy`` has in another precision; empty if there are none.

    Numbers of elements must agree, and on the CPU the values too, before an update has changed them. On a device values
    are not compared: that would synchronize.
    """
    for place, parameter in enumerate(parameters):
        if parameter.shape == copy.shape and parameter.dtype != copy.dtype and _is_copy(copy, 0, parameter):
            return range(place, place + 1)
    for first in range(len(parameters)):
        row = _row_from(first, copy, parameters)
        if row:
            return row
    return range(0)


def _row_from(first: int, copy: torch.Tensor, parameters: Sequence[torch.Tensor]) -> range:
    """The longest row of parameters from ``first`` on that ``copy`` consists of, apart from padding."""
    reached, last = 0, first
    for parameter in parameters[first:]:
        if reached + parameter.numel() > copy.numel() or not _is_copy(copy, reached, parameter):
            break
        reached, last = reached + parameter.numel(), last + 1
    return range(first, last) if _is_whole(copy, reached, parameters[first:last]) else range(0)


def _is_whole(copy: torch.Tensor, reached: int, row: Sequence[torch.Tensor]) -> bool:
    """Whether ``copy`` is the parameters ``row``, of ``reached`` elements, in another precision, and padding."""
    padding = copy.numel() - reached
    if not reached or all(parameter.dtype == copy.dtype for parameter in row):
        return False
    # Only flat tensors are padded; on a device, where no values are compared, a mixed row must fit exactly.
    flat = copy.numel() == max(copy.shape, default=0)
    told = _values(copy, 0) is not None or all(parameter.dtype != copy.dtype for parameter in row)
    return padding < min(PADDING, reached) if flat and told else padding == 0


_WAYS = 64
"""Maximum number of alternatives that are followed: parameters that begin with equal values can be mistaken."""


def chosen_from(copy: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[int]:
    """Indices of the ``parameters`` in a flat ``copy`` in another precision, in order but with gaps.

    Parameter groups are copied so: the weights without the biases, or some of the layers; some may have the copy's own
    precision, as norms do. The values must agree. On a device, where values are not compared, only all matrices, or all
    others, are tried, first of those in another precision.
    """
    total = copy.numel()
    if not copy.is_floating_point():
        return []
    every = list(enumerate(parameters))
    others = [(place, each) for place, each in every if each.dtype != copy.dtype]
    # On a device: reading values would make the host wait for it.
    if _values(copy, 0) is None:
        for pool in (others, every if others else []):
            for matrices in (True, False):
                mine = [(place, each) for place, each in pool if (each.dim() > 1) is matrices]
                if sum(each.numel() for _, each in mine) == total:
                    return [place for place, _ in mine]
        return []
    ways: dict[int, tuple[int, ...]] = {0: ()}
    for place, parameter in every:
        for reached, places in list(ways.items()):
            further = reached + parameter.numel()
            if further <= total and further not in ways and len(ways) < _WAYS and _is_copy(copy, reached, parameter):
                ways[further] = (*places, place)
    reached = max(ways)
    found = list(ways[reached])
    whole = _is_whole(copy, reached, [parameters[place] for place in found])
    return found if whole and any(any(_values(parameters[place], 0) or ()) for place in found) else []


def partition_of(copy: torch.Tensor, parameters: Sequence[torch.Tensor]) -> range:
    """Indices of the parameters in ``copy``, one rank's slice of all parameters in another precision.

    It is one of several equal slices of all ``parameters`` laid end to end, the last one padded, as engines divide them
    between ranks; the first and the last parameter may be cut. The values decide which slice it is: so none is found on
    a device, nor if two slices fit.
    """
    total = sum(parameter.numel() for parameter in parameters)
    size = copy.numel()
    if copy.dim() != 1 or not 0 < size < total or -total % size >= min(PADDING, size // 2):
        return range(0)
    found = [row for start in range(0, total, size) if (row := _slice_from(start, copy, parameters))]
    return found[0] if len(found) == 1 else range(0)


def _slice_from(start: int, copy: torch.Tensor, parameters: Sequence[torch.Tensor]) -> range:
    """The parameters that ``copy`` can hold from element ``start`` of all on; empty if one does not match."""
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
    """Whether ``copy`` can hold ``parameter`` from its element ``offset`` on."""
    if not (parameter.is_floating_point() and copy.is_floating_point()):
        return False
    mine, theirs = _values(copy, offset), _values(parameter, 0)
    if mine is None or theirs is None:
        return True
    return mine == theirs if parameter.dtype == copy.dtype else all(map(_close, mine, theirs))


def is_master(key: str, state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether the optimizer state tensor called ``key`` is a copy of its ``parameter`` in another precision.

    Its name may say so, as ``master_param`` of Apex and TransformerEngine does; or, on the CPU, its values: after an
    update the parameter is the rounded master copy.
    """
    if type(state) not in PLAIN or type(parameter) not in PLAIN:  # other classes may run code of the script
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
    """Some consecutive elements; ``None`` if reading them would synchronize, or they have no memory."""
    if type(tensor) not in PLAIN or tensor.device.type != "cpu":
        return None
    if not tensor.is_contiguous():
        return None
    values: list[float] = tensor.detach().view(-1)[offset : offset + _LOOKED_AT].tolist()
    return values


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-6)
