"""The dispatch mode of the simulated device: runs every op that involves it on fake tensors, and allocates for them.

Tensors on the CPU stay real, so the script's own data and decisions are unchanged; only large ones that a module makes
are fake too, because a model of billions of parameters must fit into this machine's memory.

:class:`Accumulation` makes ops in place that the autograd engine runs in place on a GPU, but not on fake tensors. The
engine adds gradients into a buffer that nobody else holds, but never for subclasses or under a mode; some backward
formulas write into a new tensor of zeros, but not for subclasses either. Out of place, each costs memory that no GPU
would use. So the op is replaced by the one that a GPU would run. :class:`Work` counts FLOPs, by torch's own formulas,
and copied bytes.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import enable_reentrant_dispatch
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import flop_registry

from ampmem.additions import ADD, InPlaceAdditions
from ampmem.own_code import is_running, script_line, with_callers
from ampmem.simulator.assumed import NOTHING, Assumed
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.extras import Extras
from ampmem.simulator.likely import Likely
from ampmem.simulator.ops import DISTINCT, KERNELS, REMEDIES, WITHOUT, Found, no_layout
from ampmem.simulator.private import general
from ampmem.simulator.private.general import FakeTensor, SharedFakeTensorMode, below_modes, in_backward, running_node
from ampmem.simulator.reads import LARGE, ValueReads
from ampmem.simulator.scratch.scratch import made_by, whole_result
from ampmem.simulator.values import Guesses, Known, MadeUpTensors, written
from ampmem.simulator.where import NotSimulated, stop
from ampmem.simulator.world import check_index

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


aten = torch.ops.aten


class Work:
    """The computation and copies of all ops so far.

    FLOPs are floating-point operations of ops that ``torch.utils.flop_counter`` has a formula for: matrix products,
    convolutions and attention. Other ops, such as cuDNN's recurrent layers, count nothing.
    """

    def __init__(self) -> None:
        self.flops = 0
        self.recomputed_flops = 0
        """The part of :attr:`flops` that ``torch.utils.checkpoint`` or compiled code recomputed in backward."""
        self.moved_bytes = 0
        """Bytes copied between the device and the CPU."""
        self.where: Callable[[], str] = lambda: ""
        """Returns the running module."""
        self.computes_again: Callable[[], bool] = lambda: False
        """Returns whether compiled code runs an op of forward again in backward."""
        self.forward_flops: Counter[str] = Counter()
        """FLOPs of each module's own code in forwards with gradients on."""

    def move(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count the bytes that ``func``, which is about to run, copies between the device and the CPU."""
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            source, target = args[0], torch.device(kwargs["device"])
        elif func is aten.copy_.default:
            source, target = args[1], args[0].device
        else:
            return
        if isinstance(source, torch.Tensor) and source.device.type != target.type:  # ``copy_`` takes numbers, too
            self.moved_bytes += source.nbytes

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count the FLOPs of ``func``, which returned ``result``."""
        formula = flop_registry.get(getattr(func, "overloadpacket", func))
        if formula is None:
            return
        try:
            count = int(formula(*args, **kwargs, out_val=result))
        except Exception:  # torch's formula does not support these arguments: it counts nothing
            return
        self.flops += count
        if in_backward():
            again = is_running(_CHECKPOINT_FILE) if torch.is_grad_enabled() else self.computes_again()
            self.recomputed_flops += count if again else 0
        elif torch.is_grad_enabled():
            self.forward_flops[self.where()] += count


_OWN = str(Path(__file__).parent)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_IN_PLACE = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
}
_MASKED = {aten.masked_fill.Scalar: aten.masked_fill_.Scalar}
_LOGICAL = {aten.logical_and.default: aten.logical_and_.default, aten.logical_or.default: aten.logical_or_.default}
_CHAINED = {
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
}
_CLAMPED = _MASKED if TorchVersion(torch.__version__) >= "2.14" else _MASKED | _LOGICAL
_IN_FORMULA: dict[str, dict[Any, Any]] = {
    **dict.fromkeys((f"{name}Backward0" for name in ("Maximum", "Minimum", "Fmax", "Fmin", "Amax", "Amin")), _MASKED),
    **dict.fromkeys(("ClampBackward0", "ClampBackward1", "ClampMinBackward1", "ClampMaxBackward1"), _CLAMPED),
    **dict.fromkeys(("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), _LOGICAL),
    "BinaryCrossEntropyWithLogitsBackward0": _CHAINED,
    "Atan2Backward0": _MASKED,
    "VarMeanBackward0": {},
    "StdMeanBackward0": {},
}
"""Autograd nodes whose formulas write into their own new tensors, with the ops that are in place there.

A node has no such ops if only its sums have to be told from those of the engine. Sources: ``FunctionsManual.cpp``,
``derivatives.yaml``.
"""


class Accumulation:
    """Chooses between an op and its in-place twin in backward."""

    def __init__(self) -> None:
        self.alone = (0, 0, 0)
        """Reference counts of a gradient and its storage that only the engine's buffer holds; set by the self-test."""
        self.seen: list[tuple[int, int, int]] | None = None
        """The reference counts at each sum, in order, during the self-test; otherwise ``None``."""
        self._zeros: weakref.ref[torch.UntypedStorage] | None = None
        self._node = ("", -1)
        self._made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """Storages made by the running node, if it is one of :data:`_IN_FORMULA`."""

    def choose(self, func: Any, args: Sequence[Any]) -> Any:
        """``func``, or the op that a GPU would run instead."""
        if torch.is_grad_enabled():
            return func
        node = running_node()
        if node[0] in _IN_FORMULA:
            if node != self._node:
                self._node = node
                self._made.clear()
            made = self._made_here(args[0]) if args else False
            if made and func is aten.add.Tensor and self._made_here(args[1]):
                return func
            if made and func in _IN_FORMULA[node[0]] and _like_first(args):
                return _IN_FORMULA[node[0]][func]
        if func is aten.add.Tensor:
            return aten.add_.Tensor if self._sums_in_place(args) else func
        if func in _IN_PLACE and self._zeros is not None and self._zeros() is args[0].untyped_storage():
            return _IN_PLACE[func]
        return func

    def note_result(self, func: Any, result: Any) -> None:
        """Note the ``result`` of ``func``: new zeros may be written to."""
        if self._node[0] and isinstance(result, FakeTensor) and running_node() == self._node:
            self._made.add(result.untyped_storage())
        if func in _ZEROS and isinstance(result, FakeTensor):
            self._zeros = weakref.ref(result.untyped_storage())

    def _made_here(self, value: Any) -> bool:
        return isinstance(value, FakeTensor) and value.untyped_storage() in self._made

    def _sums_in_place(self, args: Sequence[Any]) -> bool:
        """Whether the engine would sum in place: ``can_accumulate_inplace`` in torch's ``input_buffer.cpp``."""
        if not _called_by_engine() or len(args) != 2:
            return False
        old, new = args
        if not (isinstance(old, FakeTensor) and isinstance(new, FakeTensor)):
            return False
        found = general.holders(old)
        if self.seen is not None:
            self.seen.append(found)
        if old.shape != new.shape or old.dtype != new.dtype or not _dense(old):
            return False
        return all(now <= alone for now, alone in zip(found, self.alone, strict=True))


def _like_first(args: Sequence[Any]) -> bool:
    """Whether the result of an op with these arguments is like the first of them."""
    first, *rest = args
    tensors = [other for other in rest if isinstance(other, torch.Tensor)]
    return all(
        torch.broadcast_shapes(first.shape, other.shape) == first.shape
        and torch.promote_types(first.dtype, other.dtype) == first.dtype
        for other in tensors
    )


def _called_by_engine() -> bool:
    """Whether the engine called the op directly, not Python code such as a Function's backward or a hook."""
    codes = (frame.f_code for frame in with_callers(sys._getframe(1)))
    caller = next((code for code in codes if not code.co_filename.startswith(_OWN)), None)
    return caller is general.ENGINE_CALLER


def _dense(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``'s elements fill their memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_DENSE = (None, torch.strided)
_FAKES = (FakeTensor,)
_FLEX = "flex_attention"
_FLEX_ASSUMED = (
    f"assumed: {_FLEX} runs as the kernel that torch.compile makes; if the script does not compile it, it also keeps "
    "all scores"
)

LARGE_RANDOM = 1 << 24
"""Number of elements from which on a random tensor made on the CPU is fake.

Other tensors without data are fake from LARGE on; a script may look at random values.
"""
_EMPTY = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
)
_RANDOM = (aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low, aten.normal.float_float)


class SimulatedMode(SharedFakeTensorMode):
    """The mode is active while the script runs, below every mode of the script and of the recorder."""

    supports_higher_order_operators = True
    """Ops that take functions: for flex attention, torch knows what its compiled kernel returns."""

    def __init__(self, device: SimulatedDevice, assumed: Assumed = NOTHING, *, saves: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device_model = device
        self.assumed = assumed
        self.saves = saves
        """Whether files can be written, as the user's are protected."""
        self.known = Known()
        self.likely = Likely(self.known)
        self.guesses = Guesses(device, assumed)
        self.made_up = MadeUpTensors()
        self.accumulation = Accumulation()
        self.additions = InPlaceAdditions(general.PRODUCT, device.assume)
        self.extras = Extras(device)
        self.work = Work()
        self._finds = Found(self._number_found, device.gpu)
        self.everything = device.label == "cpu"
        """Whether tensors on the CPU are simulated, too."""
        self.real: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """Storages that are real although the CPU is simulated."""
        self.pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """CPU storages that claim to be pinned memory, which here is ordinary memory."""
        self.ended = False
        """Whether the device has been removed: tensors on it have neither memory nor values."""
        self.shared = False
        """Whether other threads may use the device."""
        self._process = os.getpid()
        self._inside = 0
        """Number of enclosing ops that a GPU runs as one kernel: ops inside them allocate nothing there."""
        self._remembers = self.cache_enabled
        # The memo of fake tensors for real ones is not needed, and its weak references would prevent a module from
        # swapping its parameters in Module.to().
        self.fake_tensor_converter.set_tensor_memo = lambda t, v: None  # type: ignore[method-assign]
        self.answers: dict[Any, Callable[..., Any]] = {}
        """Functions that replace an op, whatever its arguments."""
        self.special: dict[Any, Callable[..., Any]] = {
            **ValueReads(self).answers,
            aten._amp_foreach_non_finite_check_and_unscale_.default: self._check_finite,
            aten._amp_update_scale_.default: self._update_scale,
            aten.is_pinned.default: lambda func, args, kwargs: False,
            aten._pin_memory.default: lambda func, args, kwargs: args[0],
            **dict.fromkeys(KERNELS, self._own_kernel),
        }
        """Functions that replace an op on the device."""

    @property
    def avoid_device_init(self) -> bool:
        """``True``: there is nothing to initialize, whatever ``torch.cuda.is_available`` returns."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """``True``: dynamo compiles code under this mode; without it, dynamo would silently run the code uncompiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the method in torch._dynamo.disable, whose first call imports all of dynamo.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.shared:
            try:
                with self.device_model.lock:
                    return self._dispatch(func, types, args, kwargs)
            finally:
                self.device_model.bury()
        return self._dispatch(func, types, args, kwargs)

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # more than half of all calls
            # Also for a tensor of an earlier block: C++ calls this, and an error would end the process.
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        if self.ended:
            if FakeTensor not in types:  # another thread, which started before the mode
                return func(*args, **(kwargs or {}))
            raise NotSimulated(f"{script_line()}: {_GONE}")
        if types != _FAKES and any(map(general.unwraps_itself, types)):
            return NotImplemented  # the op is called again with the inner tensors
        return self.dispatch(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedMode:
        return self

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one op for real if all its tensors are real CPU tensors, else on fake tensors."""
        kwargs = kwargs or {}
        answer = self.answers.get(func)
        if answer is not None:
            return answer(func, args, kwargs)
        if func in _SCALER:
            return self.unanswered(func, types, args, kwargs)
        left = self.likely.written_by(func, args, kwargs)
        self._forget_written(func, args, kwargs)
        result = self.unanswered(func, types, args, kwargs)
        if left is not None:
            self.likely.write(left)
        return result

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Note a write to ``storage``: its values are unknown now."""
        self.known.forget(storage)
        self.likely.forget(storage)

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for storage in written(func, args, kwargs):
            self.forget(storage)

    def unanswered(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one op without its entry in :attr:`answers`."""
        if kwargs.get("pin_memory"):  # pinned memory needs a driver
            made = self.unanswered(func, types, args, {**kwargs, "pin_memory": False})
            self.pinned.add(made.untyped_storage())
            return made
        if not self._concerns(func, types, args, kwargs):
            result = func(*args, **kwargs)
            self.made_up.note_result(args, result)
            return result
        if kwargs.get("layout") not in _DENSE:
            raise stop(no_layout(kwargs["layout"]))
        self.work.move(func, args, kwargs)
        special = self.special.get(func)
        if special is not None:
            return special(func, args, kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``func`` on fake tensors, and allocate memory for its results."""
        if func not in KERNELS and (result := self._of_known_size(func, args, kwargs)) is not None:
            return result
        body = general.body_of(func, self.device_model.label)
        if body is not None and (result := self._run_body(body, func, args, kwargs)) is not NotImplemented:
            return result
        if in_backward():
            self.guesses.backward_seen = True
            asked, func = func, self.accumulation.choose(func, args)
            if func is not asked:
                self._forget_written(func, args, kwargs)
        if func is ADD:
            func = self.additions.choose(func, args, kwargs)
            if func is not ADD:
                self._forget_written(func, args, kwargs)
        given = args, kwargs
        args, kwargs = self.faked(args), self.faked(kwargs)
        functions = general.is_higher_order(func)
        if functions and not str(func).startswith(_FLEX):
            raise stop(f"{func} takes functions, and what it does with them is not simulated; avoid this op")
        if functions:
            self.device_model.assume(_FLEX_ASSUMED)
        whole = not (functions or general.is_composite(func, self.device_model.label))
        self._inside += whole
        # The fake tensors' cache keeps an op's result: the parts of a composite one (inference mode lets them
        # through) must run each time, or their allocations would be made only the first time.
        remembers = whole and func is not _PART_OF_MORE
        remembered, self.cache_enabled = self.cache_enabled, self._remembers and remembers
        try:
            result = super().dispatch(func, (), args, kwargs)
        except (general.DynamicOutputShapeException, general.DataDependentOutputException):
            raise stop(
                f"the size of the result of {func} depends on the data, which a simulated device does not have; "
                + REMEDIES.get(func, "compute it on the CPU, or avoid this op")
            ) from None
        except (general.UnsupportedOperatorException, NotImplementedError):
            raise stop(
                f"{func} has no meta kernel (torch does not know its result without running it), so it cannot be "
                "simulated; " + REMEDIES.get(func, "use another op, or a machine with a GPU")
            ) from None
        finally:
            self._inside -= whole
            self.cache_enabled = remembered
        if not (self._inside or functions):
            self._give_memory(func, args, kwargs, result)
            self.work.add(func, args, kwargs, result)
            self.additions.note_result(func, result)
            self._note_values(func, *given, result)
        return result

    def _run_body(self, body: Callable[..., Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The results of the script's own op ``func``, whose temporaries get memory, too.

        ``NotImplemented`` where its Python function ``body`` fails: its fake kernel knows the results.
        """
        try:
            with enable_reentrant_dispatch(), torch.no_grad(), self:
                return body(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            self.device_model.assume(f"{func} cannot run here, so only its results are counted: {why[:200]}")
            return NotImplemented

    def _note_values(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.known.note_result(func, args, kwargs, result)
        self.likely.note_result(func, args, kwargs, result)

    def _of_known_size(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op whose size depends on values that are known or likely; otherwise ``None``."""
        if not general.has_size_of_data(func):
            return None
        result = self.known.sized_result(func, args, kwargs)
        if result is None and not (func in DISTINCT and _DISTINCT in self.assumed.fractions):
            result = self.likely.sized_result(func, args, kwargs)
            if result is not None and not _has_least(func, args, kwargs, result):
                self.guesses.note_choice(routes=True)
        if result is not None:
            self.device_model.synchronize_current()  # the host reads the size, as on a GPU
        return result

    def _concerns(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether ``func`` runs on fake tensors: it involves the device, or makes a large tensor."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            check_index(torch.device(device).index)
            return True
        if FakeTensor in types or any(issubclass(kind, FakeTensor) for kind in types):
            return True
        if general.is_higher_order(func):  # it does not get the types in its arguments
            return any(isinstance(leaf, FakeTensor) for leaf in general.tree_leaves((args, kwargs)))
        if self.everything:
            if args and type(args[0]) is torch.Tensor and args[0].untyped_storage() in self.real:
                return False
            return not any(issubclass(kind, torch.Tensor) for kind in types) and func not in _REAL
        if func in _EMPTY or func in _RANDOM:
            least = LARGE if func in _EMPTY else LARGE_RANDOM
            return _elements(args) >= least and os.getpid() == self._process
        return False

    def faked(self, value: Any) -> Any:
        """``value`` with a fake CPU tensor for each real one in it."""
        if isinstance(value, FakeTensor):
            if value.fake_mode is not self and isinstance(value.fake_mode, SimulatedMode):
                raise stop(_GONE)  # its memory belongs to an earlier block's device
            return value
        if isinstance(value, torch.Tensor):
            return self.fake_of(value, value.device)
        if isinstance(value, (list, tuple)):
            if not any(isinstance(item, (torch.Tensor, list, tuple)) for item in value):
                return value
            return type(value)(map(self.faked, value))
        if isinstance(value, dict):
            return {key: self.faked(item) for key, item in value.items()}
        return value

    def fake_of(self, real: torch.Tensor, device: torch.device) -> Any:
        """A fake tensor with the shape, strides and dtype of ``real``, without memory on the device."""
        if type(real) not in (torch.Tensor, torch.nn.Parameter):
            raise stop(f"tensors of class {type(real).__name__} cannot be simulated")
        if real.layout not in _DENSE:
            raise stop(no_layout(real.layout))
        if real.is_nested or real.is_quantized:
            raise stop(f"{'nested' if real.is_nested else 'quantized'} tensors cannot be simulated; use plain ones")
        with below_modes():
            meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        return FakeTensor(self, meta, device)

    def _give_memory(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Allocate memory for every new storage that ``func`` returned."""
        device = self.device_model
        if (size := whole_result(func, args, result)) is not None:
            with below_modes():
                result.untyped_storage().resize_(size)
        if course := self.extras.course(func, args, result):
            steps = (each.untyped_storage() if isinstance(each, torch.Tensor) else each for each in course)
            with device.scratch_during(str(func), [step for step in steps if step]):
                self._give_results(func, args, kwargs, result)
        else:
            self._give_results(func, args, kwargs, result)

    def _give_results(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        device = self.device_model
        for tensor in made_by(func, args, result):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == device.label:
                device.born(tensor.untyped_storage())
        if func in _RESIZING and isinstance(args[0], FakeTensor):
            device.resized(args[0].untyped_storage())
        self.accumulation.note_result(func, result)
        self.extras.note_result(func, args, kwargs, result)

    # -- ops that need the values -------------------------------------------------------------------

    def _own_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run ``func`` by ampmem's replacement in :data:`KERNELS`."""
        if func in DISTINCT and (result := self._of_known_size(func, args, kwargs)) is not None:
            return result
        with general.without_autocast():  # autocast has cast the arguments, and must not cast inside
            result = KERNELS[func](self._finds, *args, **kwargs)
        if result is NotImplemented:
            return self.run(func, args, kwargs)
        self.extras.note_result(func, args, kwargs, result)
        self._note_values(func, args, kwargs, result)
        return result

    def _number_found(self, op: str, tensor: torch.Tensor, elements: int) -> int:
        """Number of the ``elements`` of ``tensor`` that an op finds."""
        known = self.known.values_of(tensor)
        if known is not None and op == "nonzero":
            self.device_model.synchronize_current()
            return int(known.count_nonzero())
        fraction = self.assumed.fractions.get(op)
        likely = self.likely.values_of(tensor) if fraction is None and op == "nonzero" else None
        if likely is not None:
            self.device_model.synchronize_current()
            if self.likely.are_even(tensor):
                self.guesses.note_choice(routes=True)
            else:
                self.guesses.note("a mask by a check was taken as that of a healthy run, whose numbers are finite,")
            return int(likely.count_nonzero())
        if fraction is None:
            raise stop(
                f"the number of elements that aten.{op} finds depends on the data, which a simulated device does not "
                f"have; give their fraction with {self.assumed.advice(f'{op}=FRACTION')}, or {WITHOUT[op]}"
            )
        self.device_model.synchronize_current()
        self.guesses.note(f"assumed: {op} finds {fraction:g} of the elements, as {self.assumed.named} says,")
        return round(fraction * elements)

    def _check_finite(self, func: Any, args: Any, kwargs: Any) -> None:
        """GradScaler's check for infinities: none are found, or the optimizer would never step."""
        self.device_model.assume("every gradient was taken as finite, so a GradScaler never skips an update")
        found = args[1]
        known = self.known.number(found)
        self.run(func, args, kwargs)
        self.known.fill(found, known or 0.0)

    def _update_scale(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Update the scale, which grows with finite gradients; unchecked gradients are taken as finite."""
        scale, growth, found, *how = args
        known = [self.known.values_of(tensor) for tensor in (scale, growth)]
        copies = [each.clone() for each in known if each is not None]
        infinite = self.known.number(found) or 0.0
        result = self.run(func, args, kwargs)
        if len(copies) == len(known):
            with below_modes():
                func(*copies, torch.full((), infinite, device="cpu"), *how, **kwargs)
            self.known.note(scale, copies[0])
            self.known.note(growth, copies[1])
        else:
            self.forget(growth.untyped_storage())
            self.device_model.assume("a GradScaler's scale was kept constant, because it is unknown when it last grew")
        return result


_SCALER = (aten._amp_foreach_non_finite_check_and_unscale_.default, aten._amp_update_scale_.default)
"""Ops that write to numbers which stay known."""
_DISTINCT = "unique"
"""The name by which a user assumes the size of the result of the ops in :data:`DISTINCT`."""
_GONE = (
    "a tensor of a simulated device was used after the block in which the device was simulated; the tensor has no "
    "values: create tensors for later use outside of the block"
)
_REAL = (aten.randperm.default, aten.randperm.generator, aten.lift_fresh.default)
"""Ops that stay real even if everything else is simulated: a DataLoader reads their results."""
_PART_OF_MORE = aten._scaled_dot_product_efficient_attention_backward.default
"""An op whose gradient of a mask is part of larger memory, whose end the fake tensors' cache does not keep."""
_RESIZING = (aten.resize_.default, aten.resize_as_.default, aten.set_.source_Storage_storage_offset)


def _has_least(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether ``result`` is a ``bincount`` of the least size that the script asked for."""
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    return func is aten.bincount.default and len(result) == least


def _elements(args: Sequence[Any]) -> int:
    """Number of elements of a tensor made with these arguments; the size is the first list among them."""
    count = 1
    for size in next((argument for argument in args if isinstance(argument, (list, tuple))), ()):
        count *= int(size)
    return count
