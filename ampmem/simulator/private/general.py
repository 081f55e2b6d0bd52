"""Every private part of torch that the simulated device stands on: why it is needed, and since when it is so.

:func:`ampmem.simulator.start.self_test` tries all of it before a run; without any of it nothing is simulated.
Recording on the CPU or on a GPU never comes here. :func:`_answer_yes` is the part to be careful with.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
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

from ampmem.patching import added, patch, replace_all, replaced

FAKE_TENSOR_MODULES = (torch._subclasses, fake_tensor)
"""Where libraries look for the class of fake tensors."""
COMPILED_AT_RUN_TIME = torch.cuda.jiterator._JittedFunction
"""What ``torch.cuda.jiterator`` returns: a function with a CUDA kernel that is compiled when it is called."""
THREAD_STARTS = (threading.Thread, "_bootstrap_inner")
"""Python's own: the method that runs first on a new thread, since 2.5."""
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


class SharedFakeTensorMode(FakeTensorMode):
    """One for several threads: a fake tensor says that it is on ``meta`` to the thread alone that runs its kernel."""

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether this thread runs one, which torch sets before and after. Since 1.12."""
        return self._in_kernel == threading.get_ident()

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._in_kernel = threading.get_ident() if value else 0


def install_cuda_device() -> Callable[[], None]:
    """Let the autograd engine find a CUDA device where there is none, in CPU builds of torch and in CUDA builds.

    Returns what takes it back, but for the guard. The engine counts devices at the first backward of a process, and
    would start a thread for this one: after that no forked child could run backward. So there is a backward before,
    and all others run on the thread that asks for them (:func:`run_backward_here`).
    """
    torch.ones(1, device="cpu", requires_grad=True).sum().backward()
    libraries = Path(torch.__file__).parent / "lib"
    if not torch.backends.cuda.is_built():
        _install_guard(ctypes.CDLL(str(libraries / "libc10.so")))
    if torch._C._accelerator_getAccelerator() is None or not _backward_runs():
        return _answer_yes(ctypes.CDLL(str(libraries / "libtorch_cpu.so")))
    return lambda: None


def _install_guard(c10: ctypes.CDLL) -> None:
    """Put an inert guard for CUDA in place, all of it C++; it stays.

    Nobody asks it but for tensors that claim the device, and without it those that outlive the simulation would end
    the process: ``torch::autograd::InputMetadata`` does not expect that a tensor's device has no guard.

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


def _answer_yes(library: ctypes.CDLL) -> Callable[[], None]:
    """Make two questions of ``CUDAHooksInterface`` answer yes; returns what makes them answer as before.

    This swaps the table of virtual functions of a C++ object inside torch. It is no interface of anybody's: torch
    has no other way to say "there is a CUDA device" without a driver. The engine sums gradients on the accelerator
    that is built (``isBuilt``), and asks for the streams of those that have a context (``hasPrimaryContext``).

    Both are found by trying: the object is given a copy of its table, in which one entry at a time says yes, until
    torch names CUDA as its accelerator, and until a backward runs. What can go wrong: a torch that orders the
    functions otherwise may be answered "yes" where it expects a pointer, and crash. So the object, its table and the
    functions that are tried must lie where torch's libraries are, only the first few are tried, and all of it
    is before the script's first line, in a process that is to simulate. On any doubt the object gets
    its own table back, and nothing is simulated.
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
    # For as long as the process lives: what is freed after the interpreter's end is freed through this table.
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
    """Whether all ``addresses`` lie in memory with this ``access``; ``of_torch``: mapped from its libraries."""
    libraries = str(Path(torch.__file__).resolve().parent / "lib")
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, flags, _, _, _, *file = line.split(maxsplit=5)
        if set(access) <= set(flags) and (not of_torch or "".join(file).startswith(libraries)):
            start, end = place.split("-")
            ranges.append(range(int(start, 16), int(end, 16)))
    return all(any(address in each for each in ranges) for address in addresses)


def _backward_runs() -> bool:
    """Whether the engine runs on a fake CUDA tensor; there is nothing to see of it on the CPU."""
    try:
        with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
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


def nothing_runs_on_the_device() -> Callable[[], None]:
    """Let torch try no op on the device to see what it returns; returns what undoes it.

    It does so where an op has no meta kernel, since 1.12. CPU builds say that they cannot, CUDA builds that there is
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
    """Let convolutions on the device return tensors in the memory format that ``format_of`` says, given the input and
    the weight; returns what undoes it.

    Fake tensors ask C++ for it, since 2.0, and that says "contiguous" to everything where torch has no cuDNN.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def determine(source: Any, weight: Any, backend: Any) -> Any:
            if isinstance(source, FakeTensor) and source.fake_device.type == "cuda":
                return format_of(source, weight)
            return original(source, weight, backend)

        return determine

    return patch(torch._C, "_conv_determine_backend_memory_format", wrap)


def run_backward_here() -> Callable[[], None]:
    """Let backward run on the thread that asks for it; returns what undoes it.

    On a GPU the engine's thread for the device does all of it; here the CPU's part would get a thread of its own.
    What it was can be asked since 1.12.
    """
    former = torch._C._is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    restore = functools.partial(torch.autograd.set_multithreading_enabled, former)
    return added("torch.autograd", "set_multithreading_enabled", restore)


def swap_on_conversion(cannot: Callable[[], Exception]) -> Callable[[], None]:
    """Let parameters keep their identity when a module moves, as between real devices; returns what undoes it.

    On a GPU torch moves a parameter by ``parameter.data = ...``. A fake tensor needs the setting that swaps the two
    tensors instead, which is experimental, and there since 2.3. A swap loses what ``.data`` keeps, so two things are
    added: parameters with weak references are swapped, too, since those are to the Python object, which stays; and
    hooks on a parameter go with it. ``cannot`` makes the error for a parameter that somebody holds in C++, such as a
    view of it or a scripted module.
    """

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def swap_tensors(t1: Any, t2: Any) -> None:
            fake = isinstance(t1, FakeTensor) or isinstance(t2, FakeTensor)
            try:
                original(t1, t2)
            except RuntimeError as error:
                if not fake or "use_count" not in str(error):
                    raise
                raise cannot() from error
            for name in _HOOKS if fake else ():
                for tensor in (t1, t2):
                    if (hooks := getattr(tensor, name)) is not None:
                        setattr(tensor, name, hooks)  # to be registered with the tensor in C++ that it has now

        return swap_tensors

    former = torch.__future__.get_swap_module_params_on_conversion()
    restore = functools.partial(torch.__future__.set_swap_module_params_on_conversion, former)
    with ExitStack() as undo:
        torch.__future__.set_swap_module_params_on_conversion(True)
        undo.callback(added("torch.__future__", "set_swap_module_params_on_conversion", restore))
        undo.callback(replace_all((torch.utils,), {"weakref": SimpleNamespace(getweakrefs=lambda tensor: [])}))
        undo.callback(patch(torch.utils, "swap_tensors", wrap))
        return undo.pop_all().close


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The dicts of a tensor's hooks, which belong to the Python object. The second since 2.1."""


def keep_names_in_torchscript() -> Callable[[], None]:
    """Let TorchScript take what stands in for a function of torch for that function; returns what undoes it.

    TorchScript knows torch's own functions by their identity, in a table that it makes when it first compiles something
    (since 1.0). So :func:`load_compilers` has it made before anything is replaced, and here the replacements are added.
    """
    table = torch.jit._builtins._get_builtin_table()
    names = {id(new): table[id(former)] for former, new in replaced() if id(former) in table and id(new) not in table}
    table.update(names)
    return added("torch.jit", "builtins", lambda: [table.pop(name) for name in names])


def read_in_lists(read: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
    """Let ``torch.tensor([x])``, where ``x`` is a fake tensor on the device, take the number that ``read`` returns for
    ``x``; returns what undoes it.

    All functions that make a tensor of a list (``torch.tensor``, ``torch.as_tensor``, ``Tensor.new_tensor``) read the
    tensors in it in C++, below every mode, and so end in the CUDA kernel of ``_local_scalar_dense``. CPU builds have no
    such kernel, and that of CUDA builds needs a GPU: here is one in Python. The functions themselves stay as they are,
    since TorchScript and ``with torch.device(...)`` know them by their identity. ``Library`` is there since 1.8,
    ``_destroy`` since 2.1.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CUDA builds have a kernel, and warn that another takes its place
        library.impl("_local_scalar_dense", read, "CUDA")
    return added("torch.library", "_local_scalar_dense", library._destroy)


def below_modes() -> Any:
    """A region in which ops run without any dispatch mode or subclass, so that a meta tensor is one. Since 1.13."""
    return torch._C._DisableTorchDispatch()


def without_autocast() -> Any:
    """A region in which autocast casts nothing, and keeps what it has cast. Since 2.0."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA))


def without_modes() -> Any:
    """A region without any dispatch mode, in which torch reads files as it does without a simulation. Since 2.0."""
    return _disable_current_modes()


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
    return graph_task() != -1


def graph_task() -> int:
    """The number of the backward that runs on this thread, -1 where none does. Since 2.0."""
    return torch._C._current_graph_task_id()


def next_sequence_number() -> int:
    """The sequence number of the node of autograd that this thread makes next. Since 1.13."""
    return torch._C._autograd._get_sequence_nr()


def holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How many hold ``tensor`` in C++, how many its storage, and how many the Python object.

    The absolute numbers mean nothing; they are compared with those of the self-test. ``_use_count`` and
    ``_storage_Use_Count`` are there since 2.1.
    """
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return uses, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), sys.getrefcount(tensor)


ENGINE_CALLER = torch.autograd.graph._engine_run_backward.__code__
"""The Python function that calls the engine, since 2.4: the nearest frame to what the engine itself does."""

LAZY_INIT, LAZY_CALL = "_lazy_init", "_lazy_call"
"""What initializes the device in ``torch.cuda``, and what waits for that. Since 2.11 or before, as all below."""
RAW_STREAM = (torch._C, "_cuda_getCurrentRawStream")
"""In CUDA builds: libraries with kernels of their own take the stream's handle from there."""
DEVICE_GUARD, SLEEP = "_DeviceGuard", "_sleep"
"""A region on a device, and a kernel that only takes time, in ``torch.cuda``."""
SET_SETTINGS = "_set_allocator_settings"
"""Changes the allocator's settings, in ``torch.cuda.memory``. A name that is missing is left alone, here too."""
ACCELERATOR_SETTINGS = (torch._C, "_accelerator_setAllocatorSettings", "_accelerator_getAllocatorSettings")
"""What takes the place of that one since 2.10, and what says which settings are in force."""
RECORD_HISTORY, SNAPSHOT, DUMP_SNAPSHOT = "_record_memory_history", "_snapshot", "_dump_snapshot"
"""Memory snapshots, as scripts write them, in ``torch.cuda.memory``. A name that is missing is left alone."""


PRODUCT = torch.ops.aten._unsafe_view.default
"""The last op of a matrix product of more than two dimensions. Since 0.4."""


KERNELS_OF_CUDA = ("aten::_fused_rms_norm", "aten::silu_backward", "aten::mish_backward")
"""The ops that CUDA has a kernel of its own for, although they could be run as several ops: from 2.11 to 2.15."""


@functools.cache
def is_composite(func: Any, device: str = "cuda") -> bool:
    """Whether ``func`` is run as several ops on a device of that type too. The question can be asked since 1.10."""
    if not isinstance(func, torch._ops.OpOverload) or not _has_kernel(func.name(), "CompositeImplicitAutograd"):
        return False
    return func.name() not in KERNELS_OF_CUDA if device == "cuda" else not _has_kernel(func.name(), device.upper())


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def kernels_of_cuda() -> Callable[[], None]:
    """Let autograd see that CUDA has kernels for :data:`KERNELS_OF_CUDA`, in builds without; returns what undoes it.

    Without a kernel autograd differentiates the parts of an op, and keeps what each of them needs. The kernels that
    are put in place never run: the mode is above them. ``Library`` is there since 1.8, ``_destroy`` since 2.1.
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
    """Whether tensors of class ``kind`` stand for others, on which they run ops: DTensor and the like.

    The protocol by which they name those is there since 2.1.
    """
    return hasattr(kind, "__tensor_flatten__")


def schema_of(func: Any) -> Any:
    """The schema of an op. Since 2.11 or before."""
    return func._schema


def give_back(library: torch.library.Library) -> Callable[[], None]:
    """What takes out of torch what ``library`` has put in place of its kernels. Since 2.11 or before."""
    return library._destroy


def name_nodes(function: type[torch.autograd.Function], name: str) -> None:
    """Let the nodes of autograd that ``function`` makes be called ``name``. Since 2.11 or before."""
    function._backward_cls.__name__ = name


def has_forward_gradients() -> bool:
    """Whether tensors may carry forward gradients now. Since 2.11 or before."""
    return forward_ad._current_level >= 0


storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of a storage's C++ object, which no other has while it lives. Since 2.11 or before."""


@functools.cache
def arguments_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that the op ``func`` writes to. Aliases in schemas since 1.10.

    All of ops that are not torch's own, whose schemas may not tell; the statistics of batch norm, of which some of
    torch's own do not.
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
    """Whether the op ``func``, one of torch's own, makes its result of its arguments alone. Tags since 2.0."""
    name = str(func.overloadpacket.__name__)
    return (
        func.namespace == "aten"
        and not arguments_written(func)
        and torch.Tag.nondeterministic_seeded not in func.tags
        and not name.removeprefix("new_").startswith(("empty", "resize"))
    )


@functools.cache
def has_size_of_data(func: Any) -> bool:
    """Whether the size of what the op ``func`` returns depends on the values that it is given. Tags since 2.0."""
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())  # ops that take functions have none


CALL = "_call_impl"
"""What runs a module, hooks included; of classes ``torch.compile`` compiles it. Since 2.2."""


def load_compilers() -> None:
    """Import what keeps torch's functions by their identity: later it would keep what stands in for them.

    That is dynamo, which optimizers import too, the functions that make tensors under ``with torch.device(...)``
    (since 2.0), and TorchScript's table of what it need not compile (since 1.0).
    """
    import_module("torch._dynamo")
    torch.utils._device._device_constructors()
    torch.jit._builtins._get_builtin_table()


def on_call(called: Callable[[str], object]) -> Callable[[], None]:
    """Let ``called`` be called where code would be compiled, which then runs as it is; returns what undoes it.

    It is given the name of the backend that would compile it, empty where that is not known.

    Dynamo asks a function of its own, since 2.6, what to do whenever compiled code is called: here the answer is
    "nothing".
    """
    from torch._dynamo import eval_frame

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def callback_from_stance(callback: Any) -> Any:
            if callback in (None, False):  # nothing was to be compiled
                return original(callback)
            backend = eval_frame.innermost_backend(callback)
            called(str(getattr(backend, "compiler_name", getattr(backend, "__name__", "of dynamo"))))
            return None

        return callback_from_stance

    return patch(eval_frame, "_callback_from_stance", wrap)


def run_uncompiled(called: Callable[[str], object]) -> Callable[[], None]:
    """Let code that is compiled run as it is, and ``called`` be called each time; returns what undoes it.

    The stance "force_eager" is torch's own word for it, since 2.6: with any other, code that is to be compiled whole
    and is not is an error. So a script can set no other.
    """
    former: Any = torch._dynamo.set_stance

    class set_stance(former):  # type: ignore[misc]
        def __init__(self, stance: str = "default", **_: Any) -> None:
            super().__init__("force_eager")

    with ExitStack() as undo:
        undo.callback(on_call(called))
        eager = former("force_eager")
        undo.callback(added("torch.compiler", "set_stance", functools.partial(eager.__exit__, None, None, None)))
        undo.callback(replace_all((torch._dynamo, torch._dynamo.decorators), {"set_stance": set_stance}))
        return undo.pop_all().close


FLATTEN = (nn.RNNBase, "flatten_parameters")
"""The method that packs the parameters into one buffer. Since 0.1."""
COPIED = (nn.RNNBase, "__setstate__")
"""What runs when a module is copied. Since 0.1."""


def flat_weights(module: nn.RNNBase) -> tuple[list[Any], int]:
    """The parameters that cuDNN is given, in its order, and how many there are to be. Since 1.4."""
    return module._flat_weights, len(module._flat_weights_names)


def replace_layers(names: tuple[str, ...], stands_in: Callable[[str, Any], Any]) -> Callable[[], None]:
    """Put ``stands_in(name, original)`` where modules call the layers; returns what undoes it.

    That is ``torch._VF``, since 1.0: ``names`` are those of its functions.
    """
    return replace_all((torch._VF,), {name: stands_in(name, getattr(torch._VF, name)) for name in names})
