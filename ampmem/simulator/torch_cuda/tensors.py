"""Operations on tensors without values: printing, converting, random initialization.

Libraries check whether a tensor is fake, to detect tracing: a tensor on the simulated device must not seem so.
"""

from __future__ import annotations

import dis
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch

from ampmem.own_code import OWN_FOLDERS, is_torch
from ampmem.patching import Undo, added, in_place_of, put_in, replace_all, undone_together
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import general
from ampmem.simulator.private.general import FAKE_TENSOR_MODULES, FakeTensor
from ampmem.simulator.torch_cuda.files import MadeUp
from ampmem.simulator.world import check_index, here

aten = torch.ops.aten
_READS = frozenset(dis.opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") if name in dis.opmap)
"""Instructions that read an attribute."""


@undone_together
def install(mode: SimulatedMode) -> Iterator[Undo]:
    """Install everything in this module; returns the undo."""

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        mode.device_model.record_stream(tensor.untyped_storage(), stream.stream_id)

    plain = _pinned(mode.pinned) | {"record_stream": record_stream, "data": _data()}
    yield replace_all((torch.Tensor,), plain)
    methods = {
        "__format__": _format,
        "data_ptr": lambda tensor: 0,  # torch would warn, and clones if it is 0
        "numpy": functools.partialmethod(_numpy, mode),
    }
    yield replace_all((FakeTensor,), methods)
    yield put_in(FakeTensor, "__copy__", _copy)
    yield general.subclasses_by(_of_class)
    yield general.read_in_lists(functools.partial(_read, mode))
    yield general.pinned_in_lists(lambda tensor: mode.pinned.add(tensor.untyped_storage()))
    for owner, own in _replacements(mode):
        made = {name: in_place_of(getattr(owner, name), function) for name, function in own.items()}
        yield replace_all((owner,), made)
    yield _generators()
    yield _hide_fakes()
    yield replace_all((torch.nn.parallel.comm,), {"scatter": _scatter})


def _pinned(pinned: weakref.WeakSet[torch.UntypedStorage]) -> dict[str, Any]:
    """``pin_memory`` and the like: pinned memory is ordinary memory here; as on a GPU, a pageable tensor is copied."""

    def can_be(tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.layout is torch.strided

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        return can_be(tensor) and tensor.untyped_storage() in pinned

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if not can_be(tensor) or is_pinned(tensor):
            return tensor
        copy = tensor.clone()
        pinned.add(copy.untyped_storage())
        return copy

    return {"pin_memory": pin_memory, "is_pinned": is_pinned}


def _replacements(mode: SimulatedMode) -> Iterator[tuple[Any, dict[str, Callable[..., Any]]]]:
    """The replacements of functions and methods, by owner and name; each gets the original first."""
    device = mode.device_model

    def data_ptr(original: Any, storage: torch.UntypedStorage) -> int:
        """An address also for memory without values: libraries tell shared tensors by it."""
        return original(storage) if storage.device.type != "meta" else device.address(storage)

    def write(original: Any, storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        mode.forget(storage)
        result = original(storage, *args, **kwargs)
        device.resized(storage)  # FSDP2 frees and allocates memory by ``resize_``
        return result

    def write_typed(original: Any, storage: torch.TypedStorage, *args: Any, **kwargs: Any) -> Any:
        result = original(storage, *args, **kwargs)  # it warns of its deprecation, as the next line would
        mode.forget(storage.untyped())
        return result

    # Methods of storages are not ops, so no dispatch mode sees that they write.
    written = dict.fromkeys(("resize_", "fill_", "copy_", "__setitem__"), write)
    yield torch.UntypedStorage, {"data_ptr": data_ptr, **written}
    yield torch.TypedStorage, dict.fromkeys(("fill_", "__setitem__"), write_typed)
    yield torch, {"ctc_loss": functools.partial(_ctc_loss, mode)}
    yield torch.nn.functional, {"one_hot": _one_hot}


def _ctc_loss(
    mode: SimulatedMode,
    original: Any,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    inputs: Any,
    lengths: Any,
    *how: Any,
    **named: Any,
) -> Any:
    """``torch.ctc_loss`` with the lengths as numbers, as the host reads them on a GPU.

    Unknown lengths are assumed to be the maximum.
    """
    if isinstance(log_probs, FakeTensor) and isinstance(lengths, torch.Tensor):
        batch = log_probs.shape[1] if log_probs.dim() > 2 else 1
        longest = targets.shape[1] if targets.dim() > 1 else -(-targets.numel() // batch)
        inputs = _lengths(mode, inputs, batch, log_probs.shape[0])
        lengths = _lengths(mode, lengths, batch, longest)
    return original(log_probs, targets, inputs, lengths, *how, **named)


def _one_hot(original: Any, tensor: torch.Tensor, num_classes: int = -1) -> Any:
    """``one_hot`` as for plain GPU tensors; for subclasses such as :class:`FakeTensor` torch compares instead."""
    known = num_classes > 0 and tensor.dtype == torch.int64 and tensor.numel()
    if not (known and isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"):
        return original(tensor, num_classes)
    return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)


def _lengths(mode: SimulatedMode, lengths: torch.Tensor, batch: int, most: int) -> list[int]:
    if not isinstance(lengths, FakeTensor):
        return [int(length) for length in lengths.reshape(-1).tolist()]
    known = mode.known.values_of(lengths)
    return [most] * batch if known is None else [int(length) for length in known.reshape(-1).tolist()]


def _read(mode: SimulatedMode, tensor: torch.Tensor) -> Any:
    """The number in ``tensor``, for ``torch.tensor([tensor])``."""
    return mode.__torch_dispatch__(aten._local_scalar_dense.default, (FakeTensor,), (tensor,))


def _copy(tensor: FakeTensor) -> torch.Tensor:
    """``copy.copy``: a separate tensor with the same memory."""
    data = tensor.detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(data, tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)


def _data() -> property:
    """The property ``data``, which can be set to a tensor on the other device: so FSDP moves tensors there and back."""
    original: Any = torch.Tensor.data

    def give(tensor: torch.Tensor, data: torch.Tensor) -> None:
        kinds = [_device_of(tensor), _device_of(data)]
        if kinds[0] == kinds[1]:
            original.__set__(tensor, data)
            return
        with torch.no_grad():
            if isinstance(tensor, torch.nn.Parameter):
                other: torch.Tensor = torch.nn.Parameter(data.detach(), tensor.requires_grad)
            else:
                other = data.detach().requires_grad_(tensor.requires_grad)
        gradient, tensor.grad = tensor.grad, None
        kind = type(tensor)
        torch.utils.swap_tensors(tensor, other)
        if kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
            _keep_class(tensor, kind, vars(other))
        if gradient is not None:  # a gradient on another device could not be assigned afterwards
            tensor.grad = gradient.to(data.device)

    return property(original.__get__, give)


def _keep_class(tensor: torch.Tensor, kind: type, attributes: dict[str, Any]) -> None:
    """Give ``tensor``, which has become fake, the methods and attributes of a library's parameter class ``kind``."""
    if issubclass(kind, torch.nn.Parameter):
        tensor.__class__ = kind if issubclass(kind, FakeTensor) else _fake_kind(kind)
        vars(tensor).update({name: value for name, value in attributes.items() if name not in vars(tensor)})


def _of_class(kind: type, data: FakeTensor, requires_grad: bool) -> torch.Tensor:
    """A parameter of a library's class ``kind`` that has ``data``."""
    made = torch.nn.Parameter(data.detach(), requires_grad)
    _keep_class(made, kind, {})
    return made


@functools.cache
def _fake_kind(kind: type) -> type:
    """A class of fake tensors that is also a ``kind``."""

    def detach(tensor: torch.Tensor) -> torch.Tensor:
        detached = torch.Tensor.detach(tensor)
        _keep_class(detached, type(tensor), vars(tensor))
        return detached

    return type(kind.__name__, (FakeTensor, kind), {"__module__": kind.__module__, "detach": detach})


def _device_of(tensor: torch.Tensor) -> torch.device | None:
    """The device of a fake tensor."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else None


def _format(tensor: FakeTensor, spec: str) -> str:
    """The text of a tensor, as for a plain tensor; torch's own omits subclasses."""
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)


def _numpy(tensor: FakeTensor, mode: SimulatedMode, *, force: bool = False) -> Any:
    """Zeros for a large CPU tensor, which has no values; torch's own errors for others."""
    if not force and tensor.fake_device.type == "cuda":
        raise TypeError(
            f"can't convert {tensor.fake_device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            "host memory first."
        )
    if not force and tensor.requires_grad:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    mode.guesses.note("a large tensor without values became a numpy array of zeros")
    zeros = np.zeros(tuple(tensor.shape), dtype=torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype)
    return zeros.view(MadeUp) if mode.made_up.follow else zeros


def _scatter(tensor: torch.Tensor, devices: Any = None, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """The inputs of ``DataParallel``; with one GPU they are not split."""
    for index in devices or ():
        check_index(torch.device("cuda", index).index if isinstance(index, int) else torch.device(index).index)
    return (tensor.to("cuda"),)


@undone_together
def _generators() -> Iterator[Undo]:
    """``torch.Generator("cuda")``: a CPU generator that claims the device, since it draws no numbers."""
    original = torch.Generator

    class Kind(type(original)):  # type: ignore[misc]
        """A metaclass by which torch's own generators are instances, too."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __call__(cls, device: Any = "cpu") -> Any:
            device = torch.device(device)
            if device.type != "cuda":
                return original(device)
            check_index(device.index)
            return super().__call__()

    class Generator(original, metaclass=Kind):  # type: ignore[misc, valid-type]
        """A generator on the simulated device."""

        @property
        def device(self) -> torch.device:
            """The device that it claims."""
            return torch.device("cuda", here().local_rank)

    yield replace_all((torch,), {"Generator": Generator})
    yield replace_all((torch.cuda,), {"default_generators": (Generator("cuda"),)})


class _TracedKind(type(FakeTensor)):  # type: ignore[misc]
    """A metaclass by which ``isinstance`` is false for tensors that are only simulated."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FakeTensor) and not isinstance(instance.fake_mode, SimulatedMode)


class _Traced(FakeTensor, metaclass=_TracedKind):
    """``FakeTensor`` for libraries: only tensors of a tracer are instances."""


class _TorchModule(ModuleType):
    """A module of torch that returns the class itself to torch and to ampmem."""

    @property
    def FakeTensor(self) -> Any:
        """The class, by caller: a library that gets the plain class skips value-dependent code, as under export.

        A guard of dynamo's needs the same class each time, and is read from C++ while any frame calls a function.
        """
        asking: FrameType = sys._getframe(1)
        if asking.f_code.co_filename == "<string>" and asking.f_back is not None:
            asking = asking.f_back  # dynamo evaluates the text of a guard
        file = asking.f_code.co_filename
        reads = asking.f_code.co_code[asking.f_lasti] in _READS
        return _Traced if reads and not is_torch(file) and not file.startswith(OWN_FOLDERS) else FakeTensor


@undone_together
def _hide_fakes() -> Iterator[Undo]:
    """Make libraries see what they would see on a GPU; returns the undo."""
    for module in FAKE_TENSOR_MODULES:
        put_back = functools.partial(setattr, module, "__class__", module.__class__)
        module.__class__ = _TorchModule
        yield added(module.__name__, "FakeTensor", put_back)
