"""The ops with which a script reads values from the device: known ones, likely ones, or a guess with a note."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ampmem.own_code import is_running
from ampmem.simulator.branches import answer_that_goes_on
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.likely import Likely
from ampmem.simulator.private.general import FakeTensor
from ampmem.simulator.values import Guesses, Known, MadeUpTensors, Number, guess

aten = torch.ops.aten

LARGE = 1 << 18
"""Number of elements from which on a copy on the CPU is fake: the script hardly reads each."""
_ALLS = (aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default)
_ANYS = (aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default)


class Runs(Protocol):
    """The part of the dispatch mode that :class:`ValueReads` uses."""

    device_model: SimulatedDevice
    known: Known
    likely: Likely
    guesses: Guesses
    made_up: MadeUpTensors

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op on fake tensors."""

    def faked(self, value: Any) -> Any:
        """``value`` with a fake tensor for each real one in it."""


class ValueReads:
    """Runs the ops of ``mode`` that read values."""

    def __init__(self, mode: Runs) -> None:
        self._mode = mode
        self.answers: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._item,
            aten._to_copy.default: self._to_copy,
            aten.copy_.default: self._copy,
            aten._foreach_copy_.default: self._copy_each,
            aten.equal.default: self._equal,
            aten.allclose.default: self._equal,
            **dict.fromkeys((*_ALLS, *_ANYS), self._all_or_any),
        }

    def _item(self, func: Any, args: Any, kwargs: Any) -> Number:
        mode = self._mode
        tensor = mode.faked(args[0])  # with a simulated CPU, writes to a real tensor would be lost
        mode.device_model.synchronize_current()
        known = mode.guesses.assumed(tensor.dtype)
        if known is None:
            known = mode.known.number(tensor)
        if known is not None:
            return known
        likely = mode.likely.number(tensor)
        even = mode.likely.are_even(tensor)
        if even:
            mode.guesses.note_choice(routes=tensor.dtype == torch.bool or _routes(tensor))
            return guess(tensor.dtype) if likely is None else likely
        if tensor.dtype == torch.bool and (answer := answer_that_goes_on(likely)) is not None:
            likely = answer
        return mode.guesses.read(tensor, likely)

    def _all_or_any(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``all`` or ``any``; true if unknown: scripts ask whether all is as expected, or whether work is left."""
        mode = self._mode
        result = mode.run(func, args, kwargs)
        if mode.likely.values_of(result) is None:
            mode.likely.fill(result, True)
        return result

    def _equal(self, func: Any, args: Any, kwargs: Any) -> bool:
        mode = self._mode
        if func is aten.equal.default and args[0].shape != args[1].shape:
            return False
        torch.broadcast_shapes(args[0].shape, args[1].shape)  # raises for incompatible shapes, as on a GPU
        mode.device_model.synchronize_current()
        known = mode.known.computed(func, args, kwargs)
        if known:
            return bool(known[0])
        mode.guesses.note("two tensors on the device were taken as equal")
        return True

    def _to_copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``_to_copy``: small copies on the CPU are real, because the script will look at them."""
        mode = self._mode
        source = mode.faked(args[0])
        target = kwargs.get("device")
        to_cpu = target is not None and torch.device(target).type == "cpu"
        if to_cpu and source is args[0] and source.fake_device.type == "cuda":
            self._wait(source, kwargs.get("non_blocking"))
            if source.numel() < LARGE:
                return self._read(source, kwargs.get("dtype") or source.dtype)
        result = mode.run(func, (source,), kwargs)
        if source is not args[0] and (real := mode.known.values_of(args[0])) is not None:
            mode.known.note(result, real.to(result.dtype))
        return result

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``copy_``: values are written into a real tensor on the CPU."""
        target, given, *how = args  # a number may be given, too
        source: Any = given if isinstance(given, torch.Tensor) else torch.tensor(given, device="cpu")
        if not _arrives(target, source):
            result = self._mode.run(func, (target, source, *how), kwargs)
            if isinstance(target, FakeTensor) and (real := self._mode.known.values_of(source)) is not None:
                self._mode.known.note(target, real.to(target.dtype).expand(target.shape))
            return result
        self._wait(source, how[0] if how else kwargs.get("non_blocking"))
        self._note_made_up(source, target)
        return func(target, self._values(source))

    def _copy_each(self, func: Any, args: Any, kwargs: Any) -> None:
        targets, sources, *how = args
        if not any(map(_arrives, targets, sources)):
            self._mode.run(func, args, kwargs)
            return
        for target, source in zip(targets, sources, strict=True):
            self._copy(aten.copy_.default, (target, source, *how), kwargs)

    def _wait(self, source: FakeTensor, non_blocking: object) -> None:
        if source.fake_device.type == "cuda" and not non_blocking:
            self._mode.device_model.synchronize_current()

    def _read(self, source: FakeTensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of ``source`` as the script reads them."""
        values = self._values(source)
        if values.shape == source.shape:
            read = values.to(dtype, copy=True)
        else:
            read = torch.full(source.shape, values.item(), dtype=dtype, device="cpu", requires_grad=False)
        self._note_made_up(source, read)
        return read

    def _note_made_up(self, source: torch.Tensor, read: torch.Tensor) -> None:
        if self._mode.known.values_of(source) is None:
            self._mode.made_up.add(read)

    def _values(self, source: FakeTensor) -> torch.Tensor:
        """The values of ``source``; a single number if all elements are guessed alike."""
        mode = self._mode
        number = mode.guesses.assumed(source.dtype)
        if number is None and (real := mode.known.values_of(source)) is not None:
            return real
        if number is None and (likely := mode.likely.values_of(source)) is not None:
            if mode.likely.are_even(source):
                mode.guesses.note_choice(routes=_routes(source))
            else:
                mode.guesses.copied(source.dtype, likely.flatten()[0].item() if likely.numel() else None)
            return likely
        if number is None:
            number = mode.guesses.copied(source.dtype)
        return torch.full((), number, dtype=source.dtype, device="cpu")


def _routes(choices: FakeTensor) -> bool:
    """Whether ``choices`` decide what runs: a module of the script reads them. Other readers only count them."""
    return not choices.is_floating_point() and is_running(_MODULES)


_MODULES = str(torch.nn.modules.module.__file__)


def _arrives(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy writes data from the device, or from a tensor without values, into a real tensor."""
    return isinstance(source, FakeTensor) and not isinstance(target, FakeTensor)
