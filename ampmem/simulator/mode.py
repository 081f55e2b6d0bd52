"""The dispatch mode of the simulated device: runs every op that touches it on fake tensors, and gives them memory.

Tensors on the CPU stay real, so that the script's own data and decisions are what they are; only large ones that
a module makes for itself are fake too, since a model of billions of parameters is to fit in this machine's memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ampmem.simulator.assumed import NOTHING, Assumed
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.engine import Accumulation
from ampmem.simulator.extras import Extras
from ampmem.simulator.ops import KERNELS, no_layout
from ampmem.simulator.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    below_modes,
    in_backward,
    is_composite,
    unwraps_itself,
)
from ampmem.simulator.values import Guesses, KnownNumbers, Number, guess
from ampmem.simulator.where import stop
from ampmem.simulator.world import here

aten = torch.ops.aten

_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_DENSE = (None, torch.strided)
_FAKES = (FakeTensor,)

LARGE = 1 << 18
"""From so many elements on a tensor made on the CPU without data is fake."""
LARGE_RANDOM = 1 << 24
"""The same for random ones, whose values a script might want to look at."""
_EMPTY = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
)
_RANDOM = (aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low, aten.normal.float_float)
_FILLS = {aten.zeros.default: 0, aten.ones.default: 1, aten.zeros_like.default: 0, aten.ones_like.default: 1}


class SimulatedMode(FakeTensorMode):
    """Active for as long as the script runs; below every mode of the script's own and of the recorder's."""

    def __init__(self, device: SimulatedDevice, assumed: Assumed = NOTHING) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device_model = device
        self._fractions = assumed.fractions
        self.values = KnownNumbers()
        self.likely = KnownNumbers()
        """Answers that are not known, but likely."""
        self.guesses = Guesses(device, assumed)
        self.accumulation = Accumulation()
        self.extras = Extras(device)
        self.everything = device.label == "cpu"
        """Whether tensors on the CPU are simulated too."""
        self.real: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """Those that are not, even so."""
        self._process = os.getpid()
        self._inside = 0
        """In how many ops that a GPU runs as one kernel: what torch makes of them here allocates nothing there."""
        self._remembers = self.cache_enabled
        # Nothing here asks twice what became of a real tensor, and the weak references would keep a module from
        # swapping its parameters in Module.to().
        self.fake_tensor_converter.set_tensor_memo = lambda t, v: None  # type: ignore[method-assign]
        self.answers: dict[Any, Callable[..., Any]] = {}
        """By op: what runs in its place, whatever it is given."""
        self._special: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._item,
            aten._to_copy.default: self._to_copy,
            aten._amp_foreach_non_finite_check_and_unscale_.default: self._check_finite,
            aten._amp_update_scale_.default: self._update_scale,
            aten.is_pinned.default: lambda func, args, kwargs: False,
            aten._pin_memory.default: lambda func, args, kwargs: args[0],
            aten.all.default: self._all,
            aten.equal.default: self._equal,
            aten.allclose.default: self._equal,
            **dict.fromkeys(KERNELS, self._own_kernel),
        }

    @property
    def avoid_device_init(self) -> bool:
        """There is nothing to initialise, whatever ``torch.cuda.is_available`` says."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the method in torch._dynamo.disable, whose first call imports all of dynamo.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and self.is_our_fake(args[0]):  # more than half of all calls
            return _META if self.in_kernel_invocation else args[0].fake_device
        if types != _FAKES and any(map(unwraps_itself, types)):
            return NotImplemented  # it comes back with the tensors inside
        return self.dispatch(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedMode:
        return self

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one op: for real when only real tensors on the CPU are in it, else on fake ones."""
        kwargs = kwargs or {}
        answer = self.answers.get(func)
        if answer is not None:
            return answer(func, args, kwargs)
        return self.unanswered(func, types, args, kwargs)

    def unanswered(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one op, whatever :attr:`answers` has for it."""
        if not self._concerns(func, types, args, kwargs):
            return func(*args, **kwargs)
        if kwargs.get("layout") not in _DENSE:
            raise stop(no_layout(kwargs["layout"]))
        special = self._special.get(func)
        if special is not None:
            return special(func, args, kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``func`` on fake tensors and give what it makes its memory."""
        if in_backward():
            self.guesses.backward_seen = True
            func = self.accumulation.choose(func, args)
        args, kwargs = self._faked(args), self._faked(kwargs)
        whole = not is_composite(func)
        self._inside += whole
        # What fake tensors remember of an op is its result: the parts of a composite one (inference mode lets them
        # through) have to run each time, or what they allocate would get memory the first time only.
        remembered, self.cache_enabled = self.cache_enabled, self._remembers and whole
        try:
            result = super().dispatch(func, (), args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise stop(
                f"the size of what {func} returns depends on the data, and a simulated device has none; "
                + _REMEDIES.get(func, "compute it on the CPU, or write it without")
            ) from None
        except (UnsupportedOperatorException, NotImplementedError):
            raise stop(
                f"torch does not say what {func} returns without running it (it has no meta kernel), so it cannot be "
                "simulated; " + _REMEDIES.get(func, "use another op, or a machine with a GPU")
            ) from None
        finally:
            self._inside -= whole
            self.cache_enabled = remembered
        if not self._inside:
            self._give_memory(func, args, result)
        return result

    def _concerns(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            check_index(torch.device(device).index)
            return True
        if FakeTensor in types:
            return True
        if self.everything:
            if args and type(args[0]) is torch.Tensor and args[0].untyped_storage() in self.real:
                return False
            return not any(issubclass(kind, torch.Tensor) for kind in types) and func not in _REAL
        if func in _EMPTY or func in _RANDOM:
            least = LARGE if func in _EMPTY else LARGE_RANDOM
            return _elements(args) >= least and os.getpid() == self._process
        return False

    def _faked(self, value: Any) -> Any:
        """``value`` with a fake tensor on the CPU for each real one in it."""
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, FakeTensor) else self.fake_of(value, value.device)
        if isinstance(value, (list, tuple)):
            if not any(isinstance(item, (torch.Tensor, list, tuple)) for item in value):
                return value
            return type(value)(map(self._faked, value))
        if isinstance(value, dict):
            return {key: self._faked(item) for key, item in value.items()}
        return value

    def fake_of(self, real: torch.Tensor, device: torch.device) -> Any:
        """A fake tensor of the same shape, strides and dtype as ``real``; it gets no memory of the device's."""
        if type(real) not in (torch.Tensor, torch.nn.Parameter):
            raise stop(f"tensors of class {type(real).__name__} cannot be simulated")
        if real.layout not in _DENSE:
            raise stop(no_layout(real.layout))
        if real.is_nested or real.is_quantized:
            raise stop(f"{'nested' if real.is_nested else 'quantized'} tensors cannot be simulated; use plain ones")
        with below_modes():
            meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        return FakeTensor(self, meta, device)

    def _give_memory(self, func: Any, args: Any, result: Any) -> None:
        """Give every storage that ``func`` returned for the first time its memory."""
        device = self.device_model
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == device.label:
                device.born(tensor.untyped_storage())
        if func in _RESIZING and isinstance(args[0], FakeTensor):
            device.resized(args[0].untyped_storage())
        number: Number | None = _FILLS.get(func)
        if number is None and func is aten.full.default and isinstance(args[1], (int, float)):
            number = args[1]
        if number is not None and isinstance(result, FakeTensor):
            self.values.note(result, number)
        self.accumulation.after(func, result)
        self.extras.after(func, args, result)

    # -- ops that need the values, or cross from one device to the other ----------------------------

    def _item(self, func: Any, args: Any, kwargs: Any) -> Number:
        tensor = args[0]
        self.device_model.synchronize_current()
        known = self.guesses.assumed(tensor.dtype)
        if known is None:
            known = self.values.get(tensor)
        if known is not None:
            return known
        likely = self.likely.get(tensor)
        number = guess(tensor.dtype) if likely is None else likely
        if tensor.dtype == torch.bool:
            where = "the device" if tensor.fake_device.type == "cuda" else "a large tensor without values"
            self.guesses.note(f"a yes-or-no question to {where} was answered {'yes' if number else 'no'}")
        elif isinstance(number, int):
            self.guesses.note_integer(f"an integer that the script read from the device was taken as {number}")
        else:
            self.guesses.note(f"a number that the script read from the device was taken as {number}")
        return number

    def _all(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Scripts ask so whether everything is as it should be, such as finite."""
        result = self.run(func, args, kwargs)
        self.likely.note(result, True)
        return result

    def _equal(self, func: Any, args: Any, kwargs: Any) -> bool:
        if args[0].shape != args[1].shape:
            return False
        self.device_model.synchronize_current()
        self.guesses.note("two tensors on the device were taken as equal")
        return True

    def _own_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = KERNELS[func](self._found, *args, **kwargs)
        if result is NotImplemented:
            return self.run(func, args, kwargs)
        self.extras.after(func, args, result)
        return result

    def _found(self, op: str, elements: int) -> int:
        """How many of ``elements`` an op finds."""
        fraction = self._fractions.get(op)
        if fraction is None:
            raise stop(
                f"how much aten.{op} finds depends on the data, and a simulated device has none; say which fraction "
                f"of the elements that is with --assume {op}=FRACTION, or {_WITHOUT[op]}"
            )
        self.device_model.synchronize_current()
        self.guesses.note(f"assumed: {op} finds {fraction:g} of the elements, as --assume says,")
        return round(fraction * elements)

    def _to_copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies to the CPU are real where they are small: the script is about to look at them."""
        source = args[0]
        target = kwargs.get("device")
        if not isinstance(source, FakeTensor):
            source = self.fake_of(source, source.device)
        elif target is not None and torch.device(target).type == "cpu" and source.fake_device.type == "cuda":
            if not kwargs.get("non_blocking"):
                self.device_model.synchronize_current()
            if source.numel() < LARGE:
                return self._read(source, kwargs.get("dtype") or source.dtype)
        result = self.run(func, (source,), kwargs)
        if source.numel() == 1 and (known := self.values.get(source)) is not None:
            self.values.note(result, known)
        return result

    def _read(self, source: Any, dtype: torch.dtype) -> torch.Tensor:
        """What the script is told that ``source`` holds."""
        known = self.guesses.assumed(source.dtype)
        if known is None:
            known = self.values.get(source)
        if known is None:
            known = guess(source.dtype)
            note = self.guesses.note_integer if type(known) is int else self.guesses.note
            note(f"the values that the script copied to the CPU were taken as {known}")
        return torch.full(source.shape, known, dtype=dtype, requires_grad=False)

    def _check_finite(self, func: Any, args: Any, kwargs: Any) -> None:
        """A GradScaler looks for infinities: there are none, or the optimizer would never step."""
        self.device_model.assume("every gradient was taken as finite, so a GradScaler never skips an update")
        found = args[1]
        known = self.values.get(found)
        self.run(func, args, kwargs)
        self.values.note(found, known or 0.0, written=True)

    def _update_scale(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The scale grows once in 2000 updates by default: it is taken as constant."""
        known = self.values.get(args[0])
        result = self.run(func, args, kwargs)
        if known is not None:
            self.values.note(args[0], known, written=True)
        return result


_REAL = (aten.randperm.default, aten.randperm.generator, aten.lift_fresh.default)
"""What stays real even where everything else is simulated: a DataLoader reads it."""
_RESIZING = (aten.resize_.default, aten.resize_as_.default, aten.set_.source_Storage_storage_offset)


_WITHOUT = {
    "nonzero": "write it without (masked_fill or torch.where in place of indexing with a mask)",
    "unique": "compute it on the CPU",
}
"""By what an op can be replaced whose result depends on the data."""
_REMEDIES = {
    aten.repeat_interleave.Tensor: "give repeat_interleave its output_size=",
    aten.bincount.default: "compute it on the CPU",
    aten.batch_norm_stats.default: "it is SyncBatchNorm's: leave convert_sync_batchnorm out",
}


def check_index(index: int | None) -> None:
    """Only one GPU is simulated: that of this rank."""
    world = here()
    if index is None or index == world.local_rank:
        return
    if world.size > 1:
        raise stop(
            f"rank {world.rank} is simulated, whose GPU is cuda:{world.local_rank}, and cuda:{index} is another; have "
            "the script take the device of LOCAL_RANK"
        )
    raise stop(f"one GPU is simulated, cuda:0, and cuda:{index} is another; run the script on one device")


def _elements(args: Sequence[Any]) -> int:
    """How many elements a tensor made with these arguments has; the size is the first list among them."""
    count = 1
    for size in next((argument for argument in args if isinstance(argument, (list, tuple))), ()):
        count *= int(size)
    return count
