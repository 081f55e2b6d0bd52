"""Every private torch API that the simulated device uses: why it is needed, and since when it exists.

:func:`ampmem.simulator.start.self_test` tries all of it before a run; if any is missing, nothing is simulated.
Recording on the CPU or on a GPU never uses this module. :func:`_answer_yes` is the part to be careful with.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.autograd import forward_ad
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

from ampmem.patching import Undo, added, patch, put_in, replace_all, replaced, undone_together

FAKE_TENSOR_MODULES = (torch._subclasses, fake_tensor)
"""Modules from which libraries import the class of fake tensors."""
COMPILED_AT_RUN_TIME = torch.cuda.jiterator._JittedFunction
"""The return type of ``torch.cuda.jiterator``: a function whose CUDA kernel is compiled when called."""
THREAD_STARTS = (threading.Thread, "_bootstrap_inner")
"""Python's own method that runs first on a new thread, since 2.5."""
_CUDA = 1
"""``c10::DeviceType``; the number has never changed."""
_DEVICE_TYPES = 24
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
_CUDA_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_NO_NUMBER = 1 << 62
"""Sequence numbers from here on mean none: ``AccumulateGrad`` has the largest possible."""
_VIRTUALS = 128
"""Number of entries copied from a table of virtual functions.

The hooks' table has had 50 from 2.11 to 2.13 (the size of its symbol); reading past its end stays inside the library.
"""
_YES = "_ZN2at7Context9hasLAPACKEv"
"""A C++ function that returns true for any arguments, in every common build."""
_SLOTS = 6
"""Number of virtual functions, after the destructors, that are tried.

The two that are searched for are the first and the third in 2.13.
"""


class _Stack:
    """A descriptor that gives each thread its own list; torch assigns an empty list at the start."""

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> list[Any]:
        if self._name not in vars(owner):
            raise AttributeError(self._name)  # torch asks for it
        found: list[Any] = vars(vars(owner)[self._name]).setdefault("list", [])
        return found

    def __set__(self, owner: Any, empty: Any) -> None:
        vars(owner)[self._name] = threading.local()


class SharedFakeTensorMode(FakeTensorMode):
    """A fake mode for several threads: a fake tensor is on ``meta`` only for the thread that runs its kernel.

    On entering, the mode remembers settings of the thread (such as ``_only_lift_cpu_tensors``), and restores them on
    leaving. In one list for all threads, a thread would restore another's: so each has its own.
    """

    enter_stack = _Stack()  # since 2.0
    old_dispatch_mode_flags = _Stack()  # type: ignore[assignment]  # since 2.3
    old_non_infra_dispatch_mode_flags = _Stack()  # type: ignore[assignment]  # since 2.5
    old_without_ignore_compile_internals_dispatch_mode_flags = _Stack()  # type: ignore[assignment]  # since 2.8

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether this thread is running a kernel; torch sets it before and after. Since 1.12."""
        return self._in_kernel == threading.get_ident()

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._in_kernel = threading.get_ident() if value else 0


def install_cuda_device() -> Callable[[], None]:
    """Make the autograd engine see a CUDA device without a GPU, in CPU and CUDA builds of torch.

    The returned undo removes it, except for the guard. The engine counts devices at the first backward of a process,
    and would start a thread for this one: after that no forked child could run backward. So a backward is run before,
    and all others run on the calling thread (:func:`run_backward_here`).
    """
    torch.ones(1, device="cpu", requires_grad=True).sum().backward()
    libraries = Path(torch.__file__).parent / "lib"
    if not torch.backends.cuda.is_built():
        _install_guard(ctypes.CDLL(str(libraries / "libc10.so")))
    if torch._C._accelerator_getAccelerator() is None or not _backward_runs():
        return _answer_yes(ctypes.CDLL(str(libraries / "libtorch_cpu.so")))
    return lambda: None


def _install_guard(c10: ctypes.CDLL) -> None:
    """Install an inert device guard for CUDA, written in C++; it stays until the process ends.

    Only tensors that claim the device use it; without it, tensors that outlive the simulation would end the process:
    ``torch::autograd::InputMetadata`` does not expect a tensor's device without a guard.

    ``_ensureCUDADeviceGuardSet`` (since 2.1) does so, but only to replace a CUDA guard that counts no devices, as that
    of a CUDA build without a GPU does. Here there is none to replace, so one is installed that returns 0 to every call;
    no other code ever calls it.
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


def _answer_yes(library: ctypes.CDLL) -> Callable[[], None]:
    """Make two functions of ``CUDAHooksInterface`` return true; returns the undo.

    This swaps the table of virtual functions of a C++ object inside torch. It is not a documented interface, but torch
    has no other way to say "there is a CUDA device" without a driver. The engine sums gradients on the accelerator that
    is built (``isBuilt``), and asks for the streams of those that have a context (``hasPrimaryContext``).

    Both are found by trying: the object gets a copy of its table in which one entry at a time returns true, until torch
    names CUDA as its accelerator, and until a backward runs. What can go wrong: a torch with another order of functions
    may get "true" where it expects a pointer, and crash. So the object, its table and the functions that are tried must
    be in memory of torch's libraries, only the first few are tried, and all of it happens before the script's first
    line, in a process that is to simulate. On any doubt the object gets its own table back, and nothing is simulated.
    """
    hooks = library[_CUDA_HOOKS]
    hooks.restype = ctypes.c_void_p
    yes = library[_YES]
    yes.restype = ctypes.c_bool
    if not yes():
        raise RuntimeError("torch was built without LAPACK")
    place = hooks()
    if not place or not _lies_in((place,), "rw"):
        raise RuntimeError("CUDAHooksInterface is not where it was")
    table = ctypes.c_void_p.from_address(place)
    original = table.value
    header = 2 * ctypes.sizeof(ctypes.c_void_p)
    if not original or not _lies_in((original - header,), "r", of_torch=True):
        raise RuntimeError("CUDAHooksInterface has no table of virtual functions")
    entries = (ctypes.c_void_p * _VIRTUALS).from_address(original - header)
    tried = range(4, 4 + _SLOTS)  # after the header and the destructors
    if not _lies_in([entries[slot] or 0 for slot in tried], "x", of_torch=True):
        raise RuntimeError("CUDAHooksInterface is not laid out as it was")
    copy = (ctypes.c_void_p * _VIRTUALS)(*entries)
    # Kept until the process ends: objects freed after the interpreter's end are freed through this table.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(copy))

    def answer(name: str, works: Callable[[], bool]) -> None:
        if works():
            return
        for slot in tried:
            if copy[slot] != entries[slot]:
                continue
            copy[slot] = ctypes.cast(yes, ctypes.c_void_p).value
            if works():
                return
            copy[slot] = entries[slot]
        raise RuntimeError(f"CUDAHooksInterface::{name} was not found")

    def undo() -> None:
        table.value = original

    table.value = ctypes.addressof(copy) + header
    try:
        answer("isBuilt", lambda: torch._C._accelerator_getAccelerator() == torch.device("cuda"))
        answer("hasPrimaryContext", _backward_runs)
    except BaseException:
        undo()
        raise
    return undo


def _lies_in(addresses: Sequence[int], access: str, *, of_torch: bool = False) -> bool:
    """Whether all ``addresses`` are in memory with this ``access``; ``of_torch``: mapped from its libraries."""
    libraries = str(Path(torch.__file__).resolve().parent / "lib")
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, flags, _, _, _, *file = line.split(maxsplit=5)
        if set(access) <= set(flags) and (not of_torch or "".join(file).startswith(libraries)):
            start, end = place.split("-")
            ranges.append(range(int(start, 16), int(end, 16)))
    return all(any(address in each for each in ranges) for address in addresses)


def _backward_runs() -> bool:
    """Whether the engine runs on a fake CUDA tensor."""
    try:
        with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
            torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


@undone_together
def accept_foreach() -> Iterator[Undo]:
    """Make optimizers use foreach on fake tensors, as on CUDA tensors; returns the undo.

    Both lists exist since 2.1 (torch's own DTensor is added the same way). Without it optimizers silently use a loop.
    """
    lists: tuple[list[Any], ...] = (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    for types in lists:
        types.append(FakeTensor)
        yield added("types for foreach", "FakeTensor", functools.partial(types.remove, FakeTensor))


def without_device_context() -> Callable[[], None]:
    """Let fake tensors claim a device that cannot be initialized; returns the undo.

    If ``torch.cuda.is_available()`` is true, as here, torch allocates on the device before the first fake tensor on it,
    since 1.13.
    """
    return patch(fake_tensor, "init_gpu_context", lambda original: lambda device: None)


def nothing_runs_on_the_device() -> Callable[[], None]:
    """Prevent torch from running an op on the device to learn its result; returns the undo.

    It does so for ops without a meta kernel, since 1.12. CPU builds report that they cannot, CUDA builds that there is
    no driver.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run_fallback_kernel(mode: Any, func: Any, flat_args: Sequence[Any], *rest: Any) -> Any:
            if any(_is_on_cuda(argument) for argument in flat_args):
                raise UnsupportedOperatorException(func)
            return original(mode, func, flat_args, *rest)

        return run_fallback_kernel

    return patch(fake_tensor, "run_fallback_kernel", wrap)


def _is_on_cuda(argument: Any) -> bool:
    device = argument.fake_device if isinstance(argument, FakeTensor) else argument
    return isinstance(device, torch.device) and device.type == "cuda"


def convolutions_in_format(format_of: Callable[[Any, Any], torch.memory_format]) -> Callable[[], None]:
    """Make convolutions on the device return tensors in the memory format of ``format_of(input, weight)``.

    Returns the undo. Fake tensors call C++ for it, since 2.0, which always returns "contiguous" if torch has no cuDNN.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def determine(source: Any, weight: Any, backend: Any) -> Any:
            if isinstance(source, FakeTensor) and source.fake_device.type == "cuda":
                return format_of(source, weight)
            return original(source, weight, backend)

        return determine

    return patch(torch._C, "_conv_determine_backend_memory_format", wrap)


def run_backward_here() -> Callable[[], None]:
    """Run backward on the calling thread; returns the undo.

    On a GPU the engine's thread for the device does all of it; here the CPU's part would get a separate thread. The
    former setting can be read since 1.12.
    """
    former = torch._C._is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    restore = functools.partial(torch.autograd.set_multithreading_enabled, former)
    return added("torch.autograd", "set_multithreading_enabled", restore)


@undone_together
def swap_on_conversion(cannot: Callable[[], Exception]) -> Iterator[Undo]:
    """Make parameters keep their identity when a module moves, as between real devices; returns the undo.

    On a GPU torch moves a parameter by ``parameter.data = ...``. A fake tensor needs the setting that swaps the two
    tensors instead, which is experimental, and exists since 2.3. A swap loses what ``.data`` keeps, so three things are
    added: parameters with weak references are swapped, too, since those are to the Python object, which stays; hooks on
    a parameter are moved with it; and a parameter that C++ holds moves, too: a view of it, or a graph that used it,
    keeps the former tensor. ``cannot`` makes the error for a parameter of a scripted module, which would stay behind.
    """
    scripted: list[weakref.ref[nn.Module]] = []

    def note_scripted(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(module: Any, *args: Any) -> None:
            original(module, *args)
            scripted.append(weakref.ref(module))

        return init

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def swap_tensors(t1: Any, t2: Any) -> None:
            fake = isinstance(t1, FakeTensor) or isinstance(t2, FakeTensor)
            if not fake or t1._use_count() == t2._use_count() == 1:
                original(t1, t2)
            elif _is_in(t1, scripted) or not _counts_are_known():
                raise cannot()
            else:
                with _only_python_holds(t1, t2), _only_python_holds(t2, t1):
                    original(t1, t2)
            for name in _HOOKS if fake else ():
                for tensor in (t1, t2):
                    if (hooks := getattr(tensor, name)) is not None:
                        setattr(tensor, name, hooks)  # registers them with the C++ tensor that it has now

        return swap_tensors

    former = torch.__future__.get_swap_module_params_on_conversion()
    restore = functools.partial(torch.__future__.set_swap_module_params_on_conversion, former)
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield added("torch.__future__", "set_swap_module_params_on_conversion", restore)
    yield replace_all((torch.utils,), {"weakref": SimpleNamespace(getweakrefs=lambda tensor: [])})
    yield patch(torch.utils, "swap_tensors", wrap)
    yield patch(torch.jit._script.RecursiveScriptModule, "__init__", note_scripted)


def subclasses_by(make: Callable[[type, FakeTensor, bool], torch.Tensor]) -> Undo:
    """Let ``make`` give a tensor of a library's class the data of a fake tensor, which C++ refuses; returns the undo.

    Classes of parameters call ``Tensor._make_subclass``, such as those of bitsandbytes for 4-bit and 8-bit weights.
    """
    original = torch.Tensor._make_subclass  # since 0.4

    def make_subclass(kind: type, data: torch.Tensor, require_grad: bool = False, **how: Any) -> Any:
        if isinstance(data, FakeTensor) and kind is not torch.nn.Parameter:
            return make(kind, data, require_grad)
        return original(kind, data, require_grad, **how)

    return put_in(torch.Tensor, "_make_subclass", staticmethod(make_subclass))


def _is_in(tensor: torch.Tensor, modules: Sequence[weakref.ref[nn.Module]]) -> bool:
    """Whether ``tensor`` is a parameter or buffer of one of ``modules``."""
    alive = [module for reference in modules if (module := reference()) is not None]
    return any(tensor is each for module in alive for each in (*module.parameters(), *module.buffers()))


@contextmanager
def _only_python_holds(tensor: torch.Tensor, successor: torch.Tensor) -> Iterator[None]:
    """Let ``tensor`` be swapped with ``successor`` although C++ holds it: inside, its count of references is 1.

    The references stay with the C++ tensor, which ``successor`` has afterwards. While there are several of them, the
    C++ tensor holds its Python object, too (since 2.10 or before), so that reference goes to ``successor``.
    :func:`_counts_are_known` has tested all of this.
    """
    count = _count_of(tensor)
    others = count.value - 1
    count.value = 1
    try:
        yield
    finally:
        count.value += others
    if others:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(successor))
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(tensor))


def _count_of(tensor: torch.Tensor) -> ctypes.c_uint32:
    """The number of references to the C++ object of ``tensor``: it follows the pointer to the virtual functions."""
    return ctypes.c_uint32.from_address(tensor._cdata + ctypes.sizeof(ctypes.c_void_p))


@functools.cache
def _counts_are_known() -> bool:
    """Whether a tensor's references are counted as :func:`_only_python_holds` expects, in this torch."""
    tried = torch.ones(1, device="cpu", requires_grad=True)
    seen = []
    for held in (False, True):
        with torch.inference_mode(False), torch.enable_grad():  # without gradients there is no graph
            graph = tried * tried if held else None
        seen.append((tried._use_count(), _count_of(tried).value, sys.getrefcount(tried)))  # type: ignore[attr-defined]
        del graph
    (uses, count, references), (more_uses, more, more_references) = seen
    return uses == count == 1 < more_uses == more and more_references == references + 1


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The dicts of a tensor's hooks, which belong to the Python object. The second exists since 2.1."""


def keep_names_in_torchscript() -> Callable[[], None]:
    """Make TorchScript treat a replacement of a torch function as that function; returns the undo.

    TorchScript knows torch's own functions by their identity, in a table that it makes when it first compiles something
    (since 1.0). So :func:`load_compilers` makes it before anything is replaced, and here the replacements are added.
    """
    table = torch.jit._builtins._get_builtin_table()
    names = {id(new): table[id(former)] for former, new in replaced() if id(former) in table and id(new) not in table}
    table.update(names)
    return added("torch.jit", "builtins", lambda: [table.pop(name) for name in names])


def keep_rules_of_dynamo() -> Callable[[], None]:
    """Make dynamo keep its table of torch's own functions, as it is before they are replaced; returns the undo.

    Dynamo makes the table by name (since 2.1), again whenever a library adds a function to it, as DTensor and einops do
    when imported, and refuses a table in which one replacement stands for two names.
    """
    from torch._dynamo import trace_rules

    rules = trace_rules.get_torch_obj_rule_map()

    def wrap(original: Any) -> Any:
        def get_torch_obj_rule_map() -> dict[Any, Any]:
            return rules

        get_torch_obj_rule_map.cache_clear = original.cache_clear  # type: ignore[attr-defined]
        return get_torch_obj_rule_map

    return patch(trace_rules, "get_torch_obj_rule_map", wrap)


def read_in_lists(read: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
    """Make ``torch.tensor([x])`` with a fake device tensor ``x`` use the number ``read(x)``; returns the undo.

    All functions that make a tensor from a list (``torch.tensor``, ``torch.as_tensor``, ``Tensor.new_tensor``) read the
    tensors in it in C++, below every mode, so by the CUDA kernel of ``_local_scalar_dense``. CPU builds have no such
    kernel, and that of CUDA builds needs a GPU: this is one in Python. The functions themselves stay as they are,
    because TorchScript and ``with torch.device(...)`` know them by their identity. ``Library`` exists since 1.8,
    ``_destroy`` since 2.1.
    """
    return _kernel("_local_scalar_dense", read, "CUDA")


def body_of(func: Any, device_type: str) -> Callable[..., Any] | None:
    """The Python function of an op that others than torch made by ``torch.library.custom_op``; since 2.4."""
    defined = OPDEFS.get(func.name())
    if defined is None or defined._init_fn.__module__.startswith("torch."):
        return None
    bodies = defined._backend_fns
    found: Callable[..., Any] | None = bodies.get(device_type, bodies.get(None))
    return found


def _kernel(op: str, function: Callable[..., Any], key: str, **how: bool) -> Callable[[], None]:
    """Run ``op`` of ATen by ``function`` for the dispatch key ``key``; returns the undo."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where there is a kernel that is replaced
        library.impl(op, function, key, **how)
    return added("torch.library", op, library._destroy)


def pinned_in_lists(pin: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Call ``pin`` with the memory of ``torch.tensor([x], pin_memory=True)``, ordinary memory; returns the undo.

    That memory comes from ``empty`` below every mode, where a CPU build has none that is pinned, and a CUDA build asks
    the driver. ``torch.tensor`` stays as it is, as above. Keys of kernels exist since 2.6.
    """
    redispatch = torch.ops.aten.empty.memory_format.redispatch
    layouts = {None: "", torch.strided: "", torch.sparse_coo: "Sparse"}

    @functools.cache
    def keys_for(device: torch.device | None, layout: torch.layout | None) -> Any:
        kind = device.type if device else "cpu"
        key: Any = torch._C._parse_dispatch_key(
            layouts.get(layout, "SparseCsr") + ("Meta" if kind == "meta" else kind.upper())
        )
        return torch._C.DispatchKeySet(key)

    def empty(_: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        keys = keys_for(kwargs.get("device"), kwargs.get("layout"))
        pinned = kwargs.pop("pin_memory", None)
        made: torch.Tensor = redispatch(keys, *args, **kwargs)
        if pinned and made.device.type == "cpu":
            pin(made)
        return made

    return _kernel("empty.memory_format", empty, "BackendSelect", with_keyset=True, allow_override=True)


def below_modes() -> Any:
    """A region in which ops run without any dispatch mode or subclass, so a meta tensor is plain. Since 1.13."""
    return torch._C._DisableTorchDispatch()


def without_autocast() -> Any:
    """A region in which autocast casts nothing, and keeps its cache. Since 2.0."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA))


def without_modes() -> Any:
    """A region without any dispatch mode, in which torch reads files as without a simulation. Since 2.0."""
    return _disable_current_modes()


OLD_FORMAT = "_use_new_zipfile_serialization"
"""The argument by which ``torch.save`` writes the format from before 1.6, which cannot leave values out."""
SAFETENSORS_ARRAYS = ("_to_ndarray", "_tobytes")
"""The function of ``safetensors.torch`` that each of its writers calls for a tensor: since 0.8, and before."""


def names_of_safetensors(module: Any) -> dict[torch.dtype, str]:
    """The name of each dtype in safetensors' files."""
    return {dtype: name for name, dtype in module._TYPES.items()}


DEFAULT_TYPE = (torch, "set_default_tensor_type")
"""A function that torch deprecates."""


def launches_of_triton() -> list[tuple[Any, str]]:
    """Triton's methods that launch kernels: the class and the method's name. Empty without Triton.

    ``torch._dynamo``, which is loaded by now, imports Triton if it is there. Triton has had these classes since 2.0.
    """
    jit, tuner = (sys.modules.get(f"triton.runtime.{name}") for name in ("jit", "autotuner"))
    kinds = ((jit, "JITFunction"), (tuner, "Autotuner"), (tuner, "Heuristics"))
    return [(getattr(owner, kind), "run") for owner, kind in kinds if owner is not None]


def driver_of_triton() -> tuple[Any, Any]:
    """Triton's holder of its active driver, and that driver if one was made; ``None`` twice without Triton."""
    driver = getattr(sys.modules.get("triton.runtime"), "driver", None)
    return (driver, vars(driver).get("_active")) if hasattr(driver, "set_active") else (None, None)


@contextmanager
def saving_without_values() -> Iterator[None]:
    """A block in which ``torch.save`` leaves room for the values of fake tensors, and writes those of real ones.

    torch can leave out the values of all tensors (``skip_data``, since 2.8) or of none: so it is told to while it
    pickles, when it would refuse fake tensors, and writes each storage by its device. ``_save`` exists since 1.6.
    """
    save: Any = torch.serialization._save
    without_data: Any = torch.serialization.skip_data
    cpu: Any = torch.UntypedStorage.cpu

    class Holes:
        """A zip file in which storages without memory are holes."""

        def __init__(self, zip_file: Any) -> None:
            self._file = zip_file

        def write_record(self, name: str, data: Any, size: int) -> None:
            if isinstance(data, torch.UntypedStorage) and data.device.type == "meta":
                self._file.write_record_metadata(name, size)
            else:
                self._file.write_record(name, data, size)

    def with_holes(obj: Any, zip_file: Any, pickle_module: Any, *rest: Any) -> None:
        class Pickler(pickle_module.Pickler):  # type: ignore[misc]
            def dump(self, obj: Any) -> None:
                with without_data(materialize_fake_tensors=True):
                    super().dump(obj)

        save(obj, Holes(zip_file), SimpleNamespace(Pickler=Pickler), *rest)

    def to_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return storage if storage.device.type == "meta" else cpu(storage)

    with ExitStack() as undo:
        undo.callback(replace_all((torch.serialization,), {"_save": with_holes}))
        undo.callback(replace_all((torch.UntypedStorage,), {"cpu": to_cpu}))
        yield


def running_node() -> tuple[str, int]:
    """Name and sequence number of the autograd node running on this thread; ``("", -1)`` without one.

    The number is also -1 for a node without one, such as ``AccumulateGrad``. Both exist since 2.1.
    """
    node = torch._C._current_autograd_node() if in_backward() else None
    if node is None:
        return "", -1
    number = node._sequence_nr()
    return node.name(), number if 0 <= number < _NO_NUMBER else -1


def in_backward() -> bool:
    """Whether the autograd engine runs on this thread. Since 2.0."""
    return graph_task() != -1


def graph_task() -> int:
    """The number of the backward running on this thread, -1 without one. Since 2.0."""
    return torch._C._current_graph_task_id()


def next_sequence_number() -> int:
    """The sequence number of the next autograd node of this thread. Since 1.13."""
    return torch._C._autograd._get_sequence_nr()


def holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Reference counts of ``tensor`` in C++, of its storage, and of the Python object.

    They are only compared with those of the self-test. ``_use_count`` and ``_storage_Use_Count`` exist since 2.1.
    """
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return uses, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), sys.getrefcount(tensor)


ENGINE_CALLER = torch.autograd.graph._engine_run_backward.__code__
"""The Python function that calls the engine, since 2.4: the innermost frame if the engine itself runs an op."""

LAZY_INIT, LAZY_CALL = "_lazy_init", "_lazy_call"
"""The functions in ``torch.cuda`` that initialize the device, and that queue a call until then.

Since 2.11 or before, as all below.
"""
RAW_STREAM = (torch._C, "_cuda_getCurrentRawStream")
"""The stream's handle in CUDA builds, for libraries with their own kernels."""
DEVICE_GUARD, SLEEP = "_DeviceGuard", "_sleep"
"""A region on a device, and a kernel that only waits, in ``torch.cuda``."""
SET_SETTINGS = "_set_allocator_settings"
"""Changes the allocator's settings, in ``torch.cuda.memory``. If it is missing, it is not patched."""
ACCELERATOR_SETTINGS = (torch._C, "_accelerator_setAllocatorSettings", "_accelerator_getAllocatorSettings")
"""The replacement of :data:`SET_SETTINGS` since 2.10, and the function that returns the settings in force."""
RECORD_HISTORY, SNAPSHOT, DUMP_SNAPSHOT = "_record_memory_history", "_snapshot", "_dump_snapshot"
"""Memory snapshots, as scripts write them, in ``torch.cuda.memory``.

If a name is missing, it is not patched.
"""


PRODUCT = torch.ops.aten._unsafe_view.default
"""The last op of a matrix product of more than two dimensions. Since 0.4."""


KERNELS_OF_CUDA = ("aten::_fused_rms_norm", "aten::silu_backward", "aten::mish_backward")
"""Composite ops for which CUDA has its own kernel: from 2.11 to 2.15."""


@functools.cache
def is_composite(func: Any, device: str = "cuda") -> bool:
    """Whether ``func`` runs as several ops on this device type. Torch can be asked since 1.10."""
    if not isinstance(func, torch._ops.OpOverload) or not _has_kernel(func.name(), "CompositeImplicitAutograd"):
        return False
    return func.name() not in KERNELS_OF_CUDA if device == "cuda" else not _has_kernel(func.name(), device.upper())


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def kernels_of_cuda() -> Callable[[], None]:
    """Make autograd see that CUDA has kernels for :data:`KERNELS_OF_CUDA`, in builds without; returns the undo.

    Without a kernel autograd differentiates the parts of an op, and saves tensors for each of them. The kernels
    registered here never run: the mode is above them. ``Library`` exists since 1.8, ``_destroy`` since 2.1.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in KERNELS_OF_CUDA:
        if not _has_kernel(name, "CUDA"):
            library.impl(name.removeprefix("aten::"), _never, "CUDA")
    return added("torch.library", "kernels of CUDA", library._destroy)


def _never(*_: Any) -> Any:
    raise RuntimeError("unreachable")


@functools.cache
def is_higher_order(func: Any) -> bool:
    """Whether ``func`` takes functions, as flex attention does. Since 2.0."""
    return isinstance(func, torch._ops.HigherOrderOperator)


@functools.cache
def unwraps_itself(kind: type) -> bool:
    """Whether tensors of class ``kind`` wrap others and run ops on them: DTensor and the like.

    The protocol by which they name those exists since 2.1.
    """
    return hasattr(kind, "__tensor_flatten__")


def op_schema(func: Any) -> Any:
    """The schema of an op. Since 2.11 or before."""
    return func._schema


def give_back(library: torch.library.Library) -> Callable[[], None]:
    """An undo that removes the kernels registered by ``library``. Since 2.11 or before."""
    return library._destroy


def name_nodes(function: type[torch.autograd.Function], name: str) -> None:
    """Set the name of the autograd nodes that ``function`` makes. Since 2.11 or before."""
    function._backward_cls.__name__ = name


def has_forward_gradients() -> bool:
    """Whether forward-mode gradients are active now. Since 2.11 or before."""
    return forward_ad._current_level >= 0


storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of a storage's C++ object, unique while it lives. Since 2.11 or before."""


@functools.cache
def arguments_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the op ``func`` writes to. Aliases in schemas since 1.10.

    All arguments for ops that are not torch's own, whose schemas may be incomplete; also the statistics of batch norm,
    which the schemas of some of torch's own ops omit.
    """
    if is_higher_order(func):
        return ()
    own = func.namespace in _OWN
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if not own or _is_written(argument) or argument.name.startswith("running_")
    )


_OWN = ("aten", "prims", "prim")


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


@functools.cache
def is_computed(func: Any) -> bool:
    """Whether torch's op ``func`` computes its result from its arguments alone. Tags since 2.0."""
    name = str(func.overloadpacket.__name__)
    return (
        func.namespace == "aten"
        and not arguments_written(func)
        and torch.Tag.nondeterministic_seeded not in func.tags
        and not name.removeprefix("new_").startswith(("empty", "resize"))
    )


@functools.cache
def is_pointwise(func: Any) -> bool:
    """Whether each element of the result of torch's op ``func`` depends on one of each argument. Tags since 2.0."""
    return torch.Tag.pointwise in func.tags


@functools.cache
def has_size_of_data(func: Any) -> bool:
    """Whether the result's size of the op ``func`` depends on values. Tags since 2.0."""
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())  # ops that take functions have none


CALL = "_call_impl"
"""The method that runs a module including hooks; ``torch.compile`` compiles it for classes. Since 2.2."""


def load_compilers() -> None:
    """Import the modules that keep torch's functions by their identity, before they are replaced.

    That is dynamo, which optimizers import too, the functions that make tensors under ``with torch.device(...)`` (since
    2.0), and TorchScript's table of functions that it need not compile (since 1.0).
    """
    import_module("torch._dynamo")
    _keep_tables_of_dynamo()
    torch.utils._device._device_constructors()
    torch.jit._builtins._get_builtin_table()


def _keep_tables_of_dynamo() -> None:
    """Have dynamo make its tables of torch's functions and classes, before those are replaced: it keeps the objects."""
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    TorchInGraphFunctionVariable._get_handlers()  # since 2.3
    tables = vars(VariableBuilder)  # one table until 2.12, two since
    if "_type_dispatch_impl" in tables:
        for traces_subclasses in (True, False):
            VariableBuilder._type_dispatch_impl(traces_subclasses)
    else:
        VariableBuilder._type_dispatch()


@undone_together
def run_uncompiled(called: Callable[[], object]) -> Iterator[Undo]:
    """Run compiled code uncompiled, and call ``called`` each time; returns the undo.

    Dynamo calls a function of its own, since 2.6, to decide what to do with compiled code: here the answer is
    "nothing". The stance is torch's own "force_eager", since 2.6: with any other, code that must be compiled whole and
    is not raises an error. So a script cannot set another stance.
    """
    former: Any = torch._dynamo.set_stance

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def callback_from_stance(callback: Any) -> Any:
            if callback in (None, False):  # nothing would be compiled
                return original(callback)
            called()
            return None

        return callback_from_stance

    class set_stance(former):  # type: ignore[misc]
        def __init__(self, stance: str = "default", **_: Any) -> None:
            super().__init__("force_eager")

    yield patch(torch._dynamo.eval_frame, "_callback_from_stance", wrap)
    eager = former("force_eager")
    yield added("torch.compiler", "set_stance", functools.partial(eager.__exit__, None, None, None))
    yield replace_all((torch._dynamo, torch._dynamo.decorators), {"set_stance": set_stance})


FLATTEN = (nn.RNNBase, "flatten_parameters")
"""The method that packs the parameters into one buffer. Since 0.1."""
COPIED = (nn.RNNBase, "__setstate__")
"""The method called on a copied module. Since 0.1."""


def flat_weights(module: nn.RNNBase) -> tuple[list[Any], int]:
    """The parameters in cuDNN's order, and their expected number. Since 1.4."""
    return module._flat_weights, len(module._flat_weights_names)


def replace_layers(names: tuple[str, ...], stands_in: Callable[[str, Any], Any]) -> Callable[[], None]:
    """Replace the layers' functions by ``stands_in(name, original)``; returns the undo.

    They are in ``torch._VF``, since 1.0: ``names`` are its functions.
    """
    return replace_all((torch._VF,), {name: stands_in(name, getattr(torch._VF, name)) for name in names})
