"""Ops by which the script learns what the simulated device holds: what is known, or a guess with a note."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private.general import FakeTensor
from ampmem.simulator.values import Guesses, Known, Number

aten = torch.ops.aten

LARGE = 1 << 18
"""From so many elements on a copy on the CPU is fake, as the script hardly looks at each."""
_ALLS = (aten.all.default, aten.all.dim, aten.all.dims)


class Runs(Protocol):
    """What is asked of the dispatch mode."""

    device_model: SimulatedDevice
    known: Known
    likely: Known
    guesses: Guesses

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op on fake tensors."""

    def faked(self, value: Any) -> Any:
        """``value`` with a fake tensor for each real one in it."""


class Reading:
    """Answers such ops of ``mode``."""

    def __init__(self, mode: Runs) -> None:
        self._mode = mode
        self.answers: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._item,
            aten._to_copy.default: self._to_copy,
            aten.copy_.default: self._copy,
            aten._foreach_copy_.default: self._copy_each,
            aten.equal.default: self._equal,
            aten.allclose.default: self._equal,
            **dict.fromkeys(_ALLS, self._all),
        }

    def _item(self, func: Any, args: Any, kwargs: Any) -> Number:
        mode = self._mode
        tensor = mode.faked(args[0])  # where the CPU is simulated, what is written to a real one does not arrive
        mode.device_model.synchronize_current()
        known = mode.guesses.assumed(tensor.dtype)
        if known is None:
            known = mode.known.number(tensor)
        if known is not None:
            return known
        return mode.guesses.read(tensor, mode.likely.number(tensor))

    def _all(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Scripts ask so whether everything is as it should be, such as finite."""
        result = self._mode.run(func, args, kwargs)
        self._mode.likely.fill(result, True)
        return result

    def _equal(self, func: Any, args: Any, kwargs: Any) -> bool:
        mode = self._mode
        if func is aten.equal.default and args[0].shape != args[1].shape:
            return False
        torch.broadcast_shapes(args[0].shape, args[1].shape)  # an error where they do not fit, as on a GPU
        mode.device_model.synchronize_current()
        known = mode.known.computed(func, args, kwargs)
        if known:
            return bool(known[0])
        mode.guesses.note("two tensors on the device were taken as equal")
        return True

    def _to_copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies to the CPU are real where they are small: the script is about to look at them."""
        mode = self._mode
        source = mode.faked(args[0])
        target = kwargs.get("device")
        to_cpu = target is not None and torch.device(target).type == "cpu"
        if to_cpu and source is args[0] and source.fake_device.type == "cuda":
            self._wait(source, kwargs.get("non_blocking"))
            if source.numel() < LARGE:
                return self._read(source, kwargs.get("dtype") or source.dtype)
        result = mode.run(func, (source,), kwargs)
        if source is not args[0] and (real := mode.known.of(args[0])) is not None:
            mode.known.note(result, real.to(result.dtype))
        return result

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Into a real tensor on the CPU the values are written."""
        target, source, *how = args
        if not _arrives(target, source):
            return self._given(target, source, self._mode.run(func, args, kwargs))
        self._wait(source, how[0] if how else kwargs.get("non_blocking"))
        return func(target, self._values(source))

    def _given(self, target: torch.Tensor, source: torch.Tensor, result: Any) -> Any:
        """What was copied to ``target`` is known there where it is in ``source``."""
        real = self._mode.known.of(source) if isinstance(target, FakeTensor) else None
        if real is not None:
            self._mode.known.note(target, real.to(target.dtype).expand(target.shape))
        return result

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
        """What the script is told that ``source`` holds."""
        values = self._values(source)
        if values.shape == source.shape:
            return values.to(dtype, copy=True)
        return torch.full(source.shape, values.item(), dtype=dtype, device="cpu", requires_grad=False)

    def _values(self, source: FakeTensor) -> torch.Tensor:
        """The same; a single number where all of it is taken as that."""
        mode = self._mode
        number = mode.guesses.assumed(source.dtype)
        if number is None and (real := mode.known.of(source)) is not None:
            return real
        if number is None:
            likely = mode.likely.of(source)
            number = mode.guesses.copied(source.dtype, None if likely is None else bool(likely.all()))
        return torch.full((), number, dtype=source.dtype, device="cpu")


def _arrives(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy brings something from the device, or from a tensor without values, to a real tensor."""
    return isinstance(source, FakeTensor) and not isinstance(target, FakeTensor)
