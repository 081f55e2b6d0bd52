"""Every private part of torch that the simulated device stands on: why it is needed, and since when it is so.

Checked on torch 2.13. :func:`ampmem.simulator.selftest.check` tries all of it before a run.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

from ampmem.patching import added, patch, replace_all

_CUDA = 1
"""``c10::DeviceType``; the number has never changed."""
_DEVICE_TYPES = 24
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
_CUDA_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_NO_NUMBER = 1 << 62
"""From here on a node's sequence number is none: ``AccumulateGrad`` has the largest there is."""
_VIRTUALS = 128
"""How many entries a table of virtual functions is given. Of the hooks' table so many are copied, which has had 50 from
2.11 to 2.13 (the size of its symbol); reading past its end stays inside the library."""
_YES = "_ZN2at7Context9hasLAPACKEv"
"""A function in C++ that answers yes to whatever it is asked, in every build that people install."""
_SLOTS = 6
"""Among how many of its first functions, after the destructors, the two are looked for: they are the first and the
third in 2.13."""


def install_cuda_device() -> None:
    """Let the autograd engine find a CUDA device where there is none, in CPU builds of torch and in CUDA builds.

    It cannot be undone.
    """
    libraries = Path(torch.__file__).parent / "lib"
    if not torch.backends.cuda.is_built():
        _install_guard(ctypes.CDLL(str(libraries / "libc10.so")))
    if torch._C._accelerator_getAccelerator() is None or not _backward_runs():
        _answer_yes(ctypes.CDLL(str(libraries / "libtorch_cpu.so")))


def _install_guard(c10: ctypes.CDLL) -> None:
    """Put an inert guard for CUDA in place, all of it C++.

    ``_ensureCUDADeviceGuardSet`` (since 2.1) does so, but only where it replaces a CUDA guard that counts no
    devices, as that of a CUDA build without a GPU. Here there is none to replace, so one is put there that
    answers 0 to every question; nobody else ever asks it.
    """
    registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(c10, _REGISTRY)
    if registry[_CUDA] is not None:
        return
    put_in_place = torch._C._ensureCUDADeviceGuardSet
    zero = ctypes.CFUNCTYPE(ctypes.c_long)(lambda: 0)
    answers = (ctypes.c_void_p * _VIRTUALS)(*[ctypes.cast(zero, ctypes.c_void_p).value] * _VIRTUALS)
    guard = ctypes.c_void_p(ctypes.addressof(answers))
    register = c10[_REGISTER]
    register.argtypes, register.restype = (ctypes.c_int8, ctypes.c_void_p), None
    register(_CUDA, ctypes.addressof(guard))
    put_in_place()
    if registry[_CUDA] == ctypes.addressof(guard):
        register(_CUDA, None)
        raise RuntimeError("torch did not put its inert device guard in place")


def _answer_yes(library: ctypes.CDLL) -> None:
    """Make two questions of ``CUDAHooksInterface`` answer yes: ``isBuilt`` and ``hasPrimaryContext``.

    The engine sums gradients on the accelerator that is built, and asks for the streams of those that have a
    context. Both are virtual functions and are found by trying: the table of virtual functions is replaced by a
    copy in which one entry at a time says yes, until torch names CUDA as its accelerator, and until a backward runs.
    """
    hooks = library[_CUDA_HOOKS]
    hooks.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(hooks())
    original = table.value
    assert original is not None
    header = 2 * ctypes.sizeof(ctypes.c_void_p)
    entries = (ctypes.c_void_p * _VIRTUALS).from_address(original - header)
    copy = (ctypes.c_void_p * _VIRTUALS)(*entries)
    # For as long as the process lives: what is freed after the interpreter's end is freed through this table.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(copy))
    yes = library[_YES]
    yes.restype = ctypes.c_bool
    if not yes():
        raise RuntimeError("torch was built without LAPACK")
    table.value = ctypes.addressof(copy) + header

    def answer(name: str, works: Callable[[], bool]) -> None:
        if works():
            return
        for slot in range(4, 4 + _SLOTS):  # after the header and the destructors
            if copy[slot] != entries[slot]:
                continue
            copy[slot] = ctypes.cast(yes, ctypes.c_void_p).value
            if works():
                return
            copy[slot] = entries[slot]
        table.value = original
        raise RuntimeError(f"CUDAHooksInterface::{name} was not found")

    answer("isBuilt", lambda: torch._C._accelerator_getAccelerator() == torch.device("cuda"))
    answer("hasPrimaryContext", _backward_runs)


def _backward_runs() -> bool:
    """Whether the engine runs on a fake CUDA tensor; there is nothing to see of it on the CPU."""
    try:
        with FakeTensorMode():
            torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


def accept_foreach() -> Callable[[], None]:
    """Let optimizers use foreach on fake tensors, as on CUDA tensors; returns what undoes it.

    Both lists exist since 2.1 (the DTensor of torch itself is added the same way). Without this they fall back
    to a loop without a word.
    """
    lists: tuple[list[Any], ...] = (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    with ExitStack() as undo:
        for types in lists:
            types.append(FakeTensor)
            undo.callback(added("types for foreach", "FakeTensor", functools.partial(types.remove, FakeTensor)))
        return undo.pop_all().close


def without_device_context() -> Callable[[], None]:
    """Let fake tensors claim a device that cannot be initialised; returns what undoes it.

    Where ``torch.cuda.is_available()`` is true, as it is made to be here, torch allocates on the device before the
    first fake tensor on it, since 1.13.
    """
    return patch(fake_tensor, "init_gpu_context", lambda original: lambda device: None)


def recurrent_without_cudnn() -> Callable[[], None]:
    """Let recurrent layers run step by step in CUDA builds too; returns what undoes it.

    cuDNN's path asks the driver, from C++, and there is none. ``torch._VF`` is where modules call them, since 1.0.
    """

    def stepwise(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.backends.cudnn.flags(enabled=False):
                return original(*args, **kwargs)

        return run

    names = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    return replace_all((torch._VF,), {name: stepwise(getattr(torch._VF, name)) for name in names})


def run_backward_here() -> Callable[[], None]:
    """Let backward run on the thread that asks for it; returns what undoes it.

    On a GPU the engine's thread for the device does all of it; here the CPU's part would get a thread of its own.
    What it was can be asked since 1.12.
    """
    former = torch._C._is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    restore = functools.partial(torch.autograd.set_multithreading_enabled, former)
    return added("torch.autograd", "set_multithreading_enabled", restore)


def swap_on_conversion() -> Callable[[], None]:
    """Let parameters keep their identity when a module moves, as between real devices; returns what undoes it.

    The setting is experimental, and there since 2.3.
    """
    former = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    restore = functools.partial(torch.__future__.set_swap_module_params_on_conversion, former)
    return added("torch.__future__", "set_swap_module_params_on_conversion", restore)


def below_modes() -> Any:
    """A region in which ops run without any dispatch mode or subclass, so that a meta tensor is one. Since 1.13."""
    return torch._C._DisableTorchDispatch()


def without_modes() -> Any:
    """A region without any dispatch mode, in which torch reads files as it does without a simulation. Since 2.0."""
    return _disable_current_modes()


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether ``func`` is run as several ops on a GPU too. The question can be asked since 1.10."""
    return isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells ``storage`` from every other that is alive: the address of its C++ object. Since 0.4."""
    key: int = storage._cdata
    return key


def writes(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to, as autograd counts it. Since 0.4."""
    return tensor._version


def running_node() -> tuple[str, int]:
    """The name and the sequence number of the autograd node that runs on this thread; ``("", -1)`` where none does.

    The number is -1 too for a node that has none, such as ``AccumulateGrad``. Both since 2.1.
    """
    node = torch._C._current_autograd_node() if in_backward() else None
    if node is None:
        return "", -1
    number = node._sequence_nr()
    return node.name(), number if 0 <= number < _NO_NUMBER else -1


def in_backward() -> bool:
    """Whether the autograd engine runs on this thread. Since 2.0."""
    return torch._C._current_graph_task_id() != -1


def holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How many hold ``tensor`` in C++, how many its storage, and how many the Python object.

    The absolute numbers mean nothing; they are compared with those of the self-test. ``_use_count`` and
    ``_storage_Use_Count`` are there since 2.1.
    """
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return uses, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), sys.getrefcount(tensor)


ENGINE_CALLER = torch.autograd.graph._engine_run_backward.__code__
"""The Python function that calls the engine, since 2.4: the nearest frame to what the engine itself does."""
