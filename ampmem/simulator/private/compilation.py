"""Every private part of dynamo and Inductor that compiled code needs on the simulated device, and why.

Dynamo traces as ever, and Inductor makes the code that a GPU would run, down to the texts of its Triton kernels: only
the kernels do nothing, and what would ask the driver is answered. So compiled code allocates what it would on a GPU.
Nothing here is in place before a script compiles something: Inductor takes a second to import. All of it has been
tried with torch 2.12 to 2.14.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_map

from ampmem.own_code import untraced_code
from ampmem.patching import Undo, added, patch, put_in, replace_all, suspended, undone_together
from ampmem.simulator.private.general import without_modes

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that names the folder of Inductor's caches."""
_RUNS = "compile_wrapper"
"""Dynamo's function that runs compiled code."""
_NOTHING = (None, False)
"""Callbacks with which dynamo compiles nothing."""
_FAILURES = ("BackendCompilerFailed", "InternalTorchDynamoError")
_UNCOMPILED = ("non-infra torch dispatch mode", "error was suppressed", "custom frame execution strategy")
"""Parts of dynamo's reasons not to compile a frame that it should have compiled; 2.12 gives none."""
_RECURRENT = "Attempted to wrap RNN, GRU, or LSTM"
"""Begins dynamo's reason not to compile a recurrent layer."""
DECIDING = ("triton.cudagraphs", "max_autotune", "max_autotune_gemm", "cpp_wrapper")
"""Inductor's options by which compiled code allocates what cannot be known without a GPU."""
_ALIGNMENT = 16
"""Bytes to which Inductor's kernels expect their inputs to be aligned."""


class Compiling(Protocol):
    """What the simulation does about compiled code."""

    waits: bool
    """Whether it wants to know when the outermost compiled code has returned."""
    breaks: Counter[str]
    """By place: how many graphs end there."""

    def begins(self, backend: str, options: dict[str, Any]) -> None:
        """Code is about to be compiled, or runs compiled, by ``backend`` with these options of Inductor's."""

    def made(self, *, again: bool) -> None:
        """Inductor has made a graph; ``again`` says that dynamo had compiled this code for other inputs."""

    def broke(self, places: Sequence[tuple[str, int]]) -> None:
        """A graph ends, because dynamo cannot go on: files and lines of the stack there, the innermost last."""

    def skipped(self, code: CodeType, reason: str) -> None:
        """Dynamo runs the function with this ``code`` uncompiled."""

    def left(self) -> None:
        """The outermost compiled code has returned."""

    def failed(self, error: Exception) -> Exception:
        """The error for the script, when compiling raised ``error``."""

    def launched(self, kernel: Kernel, arguments: Sequence[Any]) -> None:
        """Compiled code has launched ``kernel``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """Stands for a Triton kernel, by the name under which compiled code launches it; a launch computes nothing."""

    source: str
    configurations: int
    """Number of launch configurations that Inductor tries at the first launch; it tries none if there is only one."""
    mutated: tuple[int, ...]
    """The arguments that the kernel changes in place, which each trial gets as copies."""
    watcher: Compiling

    def run(self, *arguments: Any, **_: Any) -> None:
        """Launch it."""
        self.watcher.launched(self, arguments)


def load() -> None:
    """Import Inductor, which takes a second, as it is without the simulation."""
    with suspended(), without_modes():  # modules keep what they find when they are imported
        import torch._inductor.async_compile
        import torch._inductor.compile_fx
        import torch._inductor.fx_passes.joint_graph
        import torch._inductor.fx_passes.pad_mm
        import torch._inductor.runtime.triton_heuristics
        import torch._inductor.select_algorithm  # noqa: F401


@undone_together
def prepare(ready: Callable[[], None], watcher: Compiling) -> Iterator[Undo]:
    """Call ``ready`` before any code is compiled, and tell ``watcher`` of compiled code; returns the undo.

    Dynamo calls a function of its own to learn what to do with compiled code (since 2.6), and one before and after it.
    """
    from torch._dynamo import eval_frame

    def chosen(original: Callable[..., Any]) -> Callable[..., Any]:
        def callback_from_stance(callback: Any) -> Any:
            found = original(callback)
            if callback not in _NOTHING and found not in _NOTHING:
                backend = eval_frame.innermost_backend(callback)
                name = getattr(backend, "compiler_name", getattr(backend, "__name__", "of dynamo"))
                watcher.begins(str(name), _options_of(backend))
                ready()
            return found

        return callback_from_stance

    def left(original: Callable[..., Any]) -> Callable[..., Any]:
        def maybe_set_eval_frame(callback: Any) -> Any:
            found = original(callback)
            # Only then: torch calls this around other functions, too, and frames looked at would hold their tensors.
            if watcher.waits and callback in _NOTHING and sys.exception() is None:
                callers = sys._getframe(0), sys._getframe(1)  # patches may have no frame
                if _RUNS in [frame.f_code.co_name for frame in callers]:
                    watcher.left()
            return found

        return maybe_set_eval_frame

    yield patch(eval_frame, "_callback_from_stance", chosen)
    yield patch(eval_frame, "_maybe_set_eval_frame", left)


def _options_of(backend: Any) -> dict[str, Any]:
    """Inductor's options in force for ``backend``: the script's own, over those of the process."""
    from torch._inductor import config

    given = getattr(backend, "config", None) or {}
    return {name: given.get(name, functools.reduce(getattr, name.split("."), config)) for name in DECIDING}


@undone_together
def install(mode: Any, watcher: Compiling, stream: Callable[[], int]) -> Iterator[Undo]:
    """Make Inductor compile for the device of ``mode``; returns the undo. ``stream`` returns the current stream."""
    yield _forget_answers
    _forget_answers()
    yield _trace(mode, watcher)
    yield _answer(stream)
    yield _without_kernels(watcher)
    yield _allocate_above_modes()
    yield _keep_random_states(mode)
    yield put_in(torch._inductor.fx_passes.pad_mm, "should_pad", _pads)
    if not torch.utils._triton.has_triton_package():
        yield _without_triton()


_REMEMBERS = type(functools.cache(len))
_ONCE = ("init", "register")
"""Parts of the names of functions that remember only that they have added patterns; added twice, these are an error."""


def _forget_answers() -> None:
    """Forget compiled code, and what functions of Inductor's remember of the device: another one has other answers."""
    torch._dynamo.reset()
    owners: list[Any] = [module for name, module in sys.modules.items() if name.startswith("torch._inductor")]
    owners += [torch.utils._triton, torch._inductor.codecache.CacheBase, torch._inductor.runtime.hints.DeviceProperties]
    for owner in owners:
        for value in list(vars(owner).values()):
            function = getattr(value, "__func__", value) if isinstance(value, classmethod | staticmethod) else value
            if isinstance(function, _REMEMBERS) and not any(word in function.__name__ for word in _ONCE):
                function.cache_clear()
    torch._dynamo.device_interface.caching_worker_device_properties.clear()


# -- dynamo --------------------------------------------------------------------------------------------------


@undone_together
def _trace(mode: Any, watcher: Compiling) -> Iterator[Undo]:
    """Let dynamo trace tensors of the device, and see what it does."""
    from torch._dynamo import convert_frame, output_graph, trace_rules
    from torch._dynamo.variables.optimizer import OptimizerVariable
    from torch._inductor import compile_fx
    from torch.fx.experimental import proxy_tensor

    former = list(trace_rules.SKIP_DIRS)
    trace_rules.SKIP_DIRS.extend(untraced_code())
    trace_rules._recompile_re()
    _run_as_it_is(type(mode).__torch_dispatch__)

    def restore() -> None:
        trace_rules.SKIP_DIRS[:] = former
        trace_rules._recompile_re()

    yield added("torch._dynamo.trace_rules", "SKIP_DIRS", restore)
    yield put_in(FakeTensorMode, "avoid_device_init", property(lambda tracing: True))
    suppressed: list[None] = []
    yield patch(convert_frame, "format_error_msg", functools.partial(_watched_errors, suppressed))
    watched_frames = functools.partial(_watched_frames, watcher, suppressed)
    yield patch(convert_frame.CatchErrorsWrapper, "__call__", watched_frames)
    yield patch(output_graph.OutputGraph, "compile_subgraph", functools.partial(_watched_breaks, watcher))
    yield patch(compile_fx, "compile_fx", functools.partial(_watched_graphs, watcher))
    yield patch(proxy_tensor, "unset_fake_temporarily", functools.partial(_constants_on_device, mode))
    yield patch(OptimizerVariable, "call_method", functools.partial(_making_state, mode))


def _run_as_it_is(function: Any) -> None:
    """Have dynamo leave ``function`` alone, and all that it calls: parts of a graph that break run ops on the device.

    Since 2.6; it stays, as nothing of it is ever to be compiled.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def _watched_errors(suppressed: list[None], original: Callable[..., str]) -> Callable[..., str]:
    """``suppressed`` grows with each error whose text dynamo makes: it raises those that it does not suppress."""

    @functools.wraps(original)
    def format_error_msg(*args: Any, **how: Any) -> str:
        suppressed.append(None)
        return original(*args, **how)

    return format_error_msg


def _watched_frames(watcher: Compiling, suppressed: list[None], original: Callable[..., Any]) -> Callable[..., Any]:
    def convert(wrapper: Any, frame: Any, *rest: Any) -> Any:
        recurrent, breaks, errors = _recurrent(), watcher.breaks.total(), len(suppressed)
        try:
            # Dynamo itself traces without modes, except inside of DistributedDataParallel.
            inside = torch.distributed.is_available() and DistributedDataParallel._get_active_ddp_module() is not None
            with without_modes() if inside else nullcontext():
                found = original(wrapper, frame, *rest)
        except Exception as error:
            raise _cause_of(error, watcher) from None
        reason = _skip_reason(found, failed=len(suppressed) > errors)
        if recurrent != _recurrent():
            if breaks == watcher.breaks.total():
                watcher.broke([(frame.f_code.co_filename, frame.f_code.co_firstlineno)])
        elif found.guarded_code is None and any(part in reason for part in _UNCOMPILED):
            watcher.skipped(frame.f_code, reason)
        return found

    return convert


def _skip_reason(found: Any, *, failed: bool) -> str:
    """Why dynamo leaves a frame uncompiled, in its words; that of torch 2.12 does not say so."""
    if hasattr(found, "skip_reason"):
        return found.skip_reason or ""
    if failed:
        return "an error was suppressed during compilation"
    return "non-infra torch dispatch mode present" if is_in_torch_dispatch_mode(include_infra_modes=False) else ""


def _recurrent() -> int:
    """How much code dynamo has left uncompiled because it calls a recurrent layer, as it does on every device."""
    reasons = torch._dynamo.utils.counters["unimplemented"]
    return sum(times for reason, times in reasons.items() if reason.startswith(_RECURRENT))


def _cause_of(error: Exception, watcher: Compiling) -> Exception:
    """What the script gets for an ``error`` while it is compiled: one of the simulation's, or out of memory, if any."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError) or type(cause).__module__.startswith("ampmem."):
            assert isinstance(cause, Exception)
            return cause
        cause = cause.__cause__ or cause.__context__
    if type(error).__name__ in _FAILURES:
        inner = getattr(error, "inner_exception", None) or error.__cause__
        return watcher.failed(inner if isinstance(inner, Exception) else error)
    return error


def _watched_breaks(watcher: Compiling, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_subgraph(graph: Any, tx: Any, reason: Any, *rest: Any, **how: Any) -> Any:
        if reason.graph_break:
            watcher.broke([(place.filename, place.lineno or 0) for place in reason.user_stack])
        return original(graph, tx, reason, *rest, **how)

    return compile_subgraph


def _watched_graphs(watcher: Compiling, original: Callable[..., Any]) -> Callable[..., Any]:
    inside: list[None] = []  # it calls itself

    @functools.wraps(original)
    def compile_fx(*args: Any, **how: Any) -> Any:
        inside.append(None)
        try:
            found = original(*args, **how)
        finally:
            inside.pop()
        if not inside:
            number = torch._guards.CompileContext.current_compile_id()
            watcher.made(again=bool(getattr(number, "frame_compile_id", 0)))
        return found

    return compile_fx


def compile_within(turn: Callable[[], AbstractContextManager[None]]) -> Undo:
    """Compile each graph, or find it in Inductor's cache, within ``turn()``."""
    from torch._inductor import compile_fx

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile_graph(*args: Any, **how: Any) -> Any:
            with turn():
                return original(*args, **how)

        return compile_graph

    return patch(compile_fx, "_compile_fx_inner", wrap)


def _constants_on_device(mode: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Tracing computes with constants for real, where the script makes one on the device: as its mode does."""

    def put(func: Any, args: Any, kwargs: Any) -> Any:
        """``prims.device_put``, which does not name the device as factories do."""
        if isinstance(args[0], FakeTensor):
            return mode.unanswered(func, (FakeTensor,), args, kwargs)
        return mode.dispatch(torch.ops.aten._to_copy.default, (torch.Tensor,), args[:1], {"device": args[1]})

    mode.answers[torch.ops.prims.device_put.default] = put

    @contextmanager
    def unset_fake_temporarily() -> Iterator[Any]:
        with original() as former, mode:
            yield former

    return unset_fake_temporarily


def _making_state(mode: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo makes the state of an optimizer for real, and without modes: with the device's mode it gets memory."""

    @functools.wraps(original)
    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "_init_group" or not hasattr(variable.value, name):
            return original(variable, tx, name, args, kwargs)
        make = variable.value._init_group

        def init_group(*given: Any, **how: Any) -> Any:
            with mode:
                return make(*given, **how)

        undo = put_in(variable.value, name, init_group)
        try:
            return original(variable, tx, name, args, kwargs)
        finally:
            undo()

    return call_method


# -- Inductor ------------------------------------------------------------------------------------------------


class _OnCpu(TorchDispatchMode):
    """Runs ops that name the device on the CPU: Inductor computes constants of one element."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        return func(*tree_map(moved, args), **tree_map(moved, kwargs or {}))


def _within(block: Callable[[], AbstractContextManager[object]], original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, each call of which is in a ``block`` of its own."""

    @functools.wraps(original)
    def run(*args: Any, **how: Any) -> Any:
        with block():
            return original(*args, **how)

    return run


_ASKED = (
    "current_device",
    "current_stream",
    "device_count",
    "get_device_properties",
    "is_bf16_supported",
    "memory_allocated",
    "set_device",
    "set_stream",
    "stream",
    "synchronize",
)
"""Functions of ``torch.cuda`` that dynamo has taken for its own interface when it was imported."""


@undone_together
def _answer(stream: Callable[[], int]) -> Iterator[Undo]:
    """Answer what Inductor asks the device and its driver."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    asked = {name: staticmethod(getattr(torch.cuda, name)) for name in _ASKED}
    here = {
        "get_raw_stream": staticmethod(lambda device=0: stream()),
        **dict.fromkeys(("exchange_device", "maybe_exchange_device"), staticmethod(lambda device: device)),
    }
    yield replace_all((CudaInterface,), asked | here)
    for name in ("__init__", "run"):
        on_cpu = _within(_OnCpu, getattr(UniformValueConstantFolder, name))
        yield put_in(UniformValueConstantFolder, name, on_cpu)
    owners = tuple(_having("triton_hash_with_backend"))
    yield replace_all(owners, {"triton_hash_with_backend": lambda: "simulated"})
    one = torch._inductor.config.patch(compile_threads=1)  # no processes: kernels are not compiled
    one.__enter__()
    yield added("torch._inductor", "config", functools.partial(one.__exit__, None, None, None))


def _having(function: str) -> Iterator[ModuleType]:
    """Modules of Inductor's, and torch's own for Triton, that have a ``function`` of this name."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("torch._inductor", "torch.utils._triton")) and function in vars(module):
            yield module


def _pads(match: Any, mat1: Any, mat2: Any, op: Any, input: Any = None) -> bool:
    """Whether a matrix product gets padded inputs, which Inductor measures; as in its deterministic mode."""
    return bool(torch._inductor.config.force_shape_pad)


@undone_together
def _allocate_above_modes() -> Iterator[Undo]:
    """Let modes see the memory that compiled code asks for: its functions are in C++, below every mode."""
    guards = torch._C._dynamo.guards
    reinterpret_real = vars(guards)["_reinterpret_tensor"]

    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    def reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Any:
        if not isinstance(tensor, FakeTensor):
            return reinterpret_real(tensor, size, stride, offset)
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    def copy_if_misaligned(tensor: torch.Tensor) -> Any:
        fake = isinstance(tensor, FakeTensor)
        place = tensor.storage_offset() * tensor.element_size() if fake else tensor.data_ptr()
        return torch._inductor.utils.clone_preserve_strides(tensor) if place % _ALIGNMENT else tensor

    def copy_misaligned_inputs(inputs: list[Any], checked: Sequence[int], returned: Any = None) -> Any:
        """What calls the compiled code of torch 2.12, in place of that code's own calls of the one above."""
        former = [inputs[index] for index in checked]
        for index in checked:
            inputs[index] = copy_if_misaligned(inputs[index])
        pairs = zip(checked, former, strict=True)
        changed = [
            (old, inputs[index]) for index, old in pairs if index in (returned or ()) and inputs[index] is not old
        ]
        return [old for old, _ in changed], [new for _, new in changed]

    replacements = {"_empty_strided_cuda": empty, "_reinterpret_tensor": reinterpret}
    replacements |= {"copy_if_misaligned": copy_if_misaligned, "assert_alignment": lambda *_: None}
    yield replace_all((guards,), replacements)
    yield replace_all(tuple(_having("copy_misaligned_inputs")), {"copy_misaligned_inputs": copy_misaligned_inputs})


def _keep_random_states(mode: Any) -> Undo:
    """Let checkpoints in compiled code keep the state of the random generator, of which the device has none."""
    from torch._prims import rng_prims

    def save(func: Any, args: Any, kwargs: Any) -> Any:
        return torch.zeros(16, dtype=torch.uint8, device="cpu"), mode.dispatch(
            args[0], (torch.Tensor,), args[1:], kwargs
        )

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        return mode.dispatch(args[1], (torch.Tensor,), args[2:], kwargs)

    mode.answers |= {rng_prims.run_and_save_rng_state: save, rng_prims.run_with_rng_state: run}
    plain = torch._functorch.config.patch(graphsafe_rng_functionalization=False)  # else CUDA's own generators
    plain.__enter__()
    return added("torch._functorch", "config", functools.partial(plain.__exit__, None, None, None))


# -- Triton's kernels ----------------------------------------------------------------------------------------


@undone_together
def _without_kernels(watcher: Compiling) -> Iterator[Undo]:
    """Take the texts of kernels, and compile none."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_heuristics

    @functools.cache
    def kernel_of(name: str, source: str) -> Kernel:
        try:
            configurations, mutated = _tuning(name, source)
        except Exception:  # a text of another form: it may be tuned
            configurations, mutated = 2, ()
        return Kernel(source=source, configurations=configurations, mutated=mutated, watcher=watcher)

    def triton(_: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Kernel:
        return kernel_of(kernel_name, source_code)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cached_autotune(*args: Any, inductor_meta: Any = None, **how: Any) -> Any:
            meta = {**(inductor_meta or {}), "force_disable_caches": True, "profile_bandwidth": False}
            return original(*args, inductor_meta=meta, **how | {"caching_autotuner_cls": _Tuned})

        return cached_autotune

    yield put_in(AsyncCompile, "triton", triton)
    yield patch(triton_heuristics, "cached_autotune", wrap)


class _Config(SimpleNamespace):
    """A launch configuration, where the package triton is not there."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 2, **more: Any) -> None:
        super().__init__(kwargs=kwargs, num_warps=num_warps, num_stages=num_stages, **more)


class _Tuned:
    """Takes the place of Inductor's tuner, and remembers what it would try."""

    def __init__(self, fn: Any, *, configs: Sequence[Any], mutated_arg_names: Sequence[str], **_: Any) -> None:
        names = list(fn.fn.__code__.co_varnames)
        self.found = len(configs), tuple(names.index(name) for name in mutated_arg_names if name in names)


def _tuning(name: str, source: str) -> tuple[int, tuple[int, ...]]:
    """How many configurations Inductor tries for the kernel ``name``, and which arguments it copies for it.

    Run are the kernel's imports of torch, and its decorator by Inductor, over a function without a body.
    """
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.")]
    (kernel,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    (tuner,) = (node for node in kernel.decorator_list if "triton_heuristics" in ast.unparse(node))
    text = f"{chr(10).join(map(ast.unparse, imports))}\n_tuner = {ast.unparse(tuner)}\n"
    text += f"def kernel({', '.join(each.arg for each in kernel.args.args)}): pass\n"
    found: dict[str, Any] = {"__file__": "kernel.py"}
    exec(text, found)  # text that Inductor made
    tuned = found["_tuner"](SimpleNamespace(fn=found["kernel"], arg_names=[each.arg for each in kernel.args.args]))
    assert isinstance(tuned, _Tuned)
    return tuned.found


@undone_together
def _without_triton() -> Iterator[Undo]:
    """Let Inductor write kernels without the package triton, of which their texts need nothing."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import codecache
    from torch._inductor.codegen.triton_split_scan import TritonSplitScanKernel
    from torch._inductor.runtime import triton_compat, triton_helpers, triton_heuristics

    inductors = tuple(module for module in _having("has_triton") if module.__name__.startswith("torch._inductor"))
    yield replace_all(inductors, {"has_triton": lambda *_, **__: True})
    owners = tuple(_having("AttrsDescriptorWrapper"))
    yield replace_all(owners, {"AttrsDescriptorWrapper": _properties_of_arguments})
    yield replace_all((CudaInterface,), {"raise_if_triton_unavailable": staticmethod(lambda *_: None)})
    yield replace_all((triton_helpers,), {"set_driver_to_gpu": lambda: None})
    yield replace_all((triton_heuristics,), {"Config": _Config})
    yield put_in(triton_compat.triton, "Config", _Config)
    yield patch(codecache, "_reload_python_module", functools.partial(_within, _stubs))
    # It asks Triton for the sizes of types, of which its workspace is made.
    yield patch(TritonSplitScanKernel, "scan", functools.partial(_within, _stubs))


def _properties_of_arguments(divisible_by_16: Sequence[int] = (), *_: Any) -> Any:
    """What the text of a kernel says of its arguments, as with the package since its version 3.3."""
    return {(place,): [["tt.divisibility", 16]] for place in divisible_by_16}


class _Jit:
    """A kernel that nobody launches, as ``triton.jit`` would return it."""

    def __init__(self, fn: Any = None, **_: Any) -> None:
        self.fn = fn


class _Stub(ModuleType):
    """A module with everything, of which only the sizes of types can be used."""

    jit = _Jit

    @property
    def primitive_bitwidth(self) -> int:
        """Bits of the type with this name, such as ``bfloat16``."""
        return int("".join(filter(str.isdigit, self.__name__)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub(name)


@contextmanager
def _stubs() -> Iterator[None]:
    """A block in which ``import triton`` works: compiled code imports it, and uses it in the texts of kernels only."""
    stubs = {name: _Stub(name) for name in ("triton", "triton.language")}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            sys.modules.pop(name, None)
