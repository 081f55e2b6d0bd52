"""Every private part of torch that the simulated device stands on: why it is needed, and since when it is so.

Checked on torch 2.13. :func:`ampmem.recorder.simulated.selftest.check` tries all of it before a run.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C import _acc
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as in_kernel_invocation_manager
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

_CUDA, _PRIVATE_USE = 1, 20
"""``c10::DeviceType``; the numbers have not changed since 1.12."""
_DEVICE_TYPES = 24
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
_CUDA_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_VIRTUALS = 40
"""How many entries of the hooks' table of virtual functions are copied: more than it has had in any version would
do, but reading past its end must stay inside the library."""
_SLOTS = 6
"""Among how many of its first functions, after the destructors, the two are looked for: they are the first and the
third in 2.13."""

_kept: list[Any] = []
"""What C++ points to from now on, for as long as the process lives."""


class _Guard(_acc.DeviceGuard):
    """Inert: one device, one stream, nothing to do. Python guards exist since 2.9."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.CUDA


def install_cuda_guard() -> None:
    """Let the autograd engine find a CUDA device, although this build of torch has none.

    ``FakeTensorMode`` does so by itself, but only in CUDA builds (``_ensureCUDADeviceGuardSet``, since 2.1). The
    guard comes from torch's own class for devices written in Python; it is registered for that device first,
    since only that is exported, and then moved to CUDA. It cannot be undone.
    """
    if torch.backends.cuda.is_built():
        return
    libraries = Path(torch.__file__).parent / "lib"
    c10 = ctypes.CDLL(str(libraries / "libc10.so"))
    registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(c10, _REGISTRY)
    if registry[_CUDA] is None:
        if registry[_PRIVATE_USE] is not None:
            raise RuntimeError("another device written in Python is registered already")
        guard = _Guard()
        _kept.append(guard)
        _acc.register_python_privateuseone_device_guard(guard)
        register = c10[_REGISTER]
        register.argtypes, register.restype = (ctypes.c_int8, ctypes.c_void_p), None
        register(_CUDA, registry[_PRIVATE_USE])
        register(_PRIVATE_USE, None)
    if torch._C._accelerator_getAccelerator() is None:
        _claim_that_cuda_is_built(ctypes.CDLL(str(libraries / "libtorch_cpu.so")))


def _claim_that_cuda_is_built(library: ctypes.CDLL) -> None:
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
    yes = ctypes.PYFUNCTYPE(ctypes.c_bool)(lambda: True)
    _kept.extend((yes, copy))
    table.value = ctypes.addressof(copy) + header

    def answer(names: str, works: Callable[[], bool]) -> None:
        for slot in range(4, 4 + _SLOTS):  # after the header and the destructors
            if copy[slot] != entries[slot]:
                continue
            copy[slot] = ctypes.cast(yes, ctypes.c_void_p).value
            if works():
                return
            copy[slot] = entries[slot]
        table.value = original
        raise RuntimeError(f"CUDAHooksInterface::{names} was not found")

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
    for types in lists:
        types.append(FakeTensor)

    def undo() -> None:
        for types in lists:
            types.remove(FakeTensor)

    return undo


def backward_node() -> Any:
    """The autograd node that runs; ``None`` between nodes. Since 2.1."""
    return torch._C._current_autograd_node()


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
