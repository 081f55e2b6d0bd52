"""Every private torch API that recording uses: what for, and what ampmem does without it.

APIs for CUDA devices are in ``cuda.py``, for torch.distributed in ``distributed.py``; nothing else in
``ampmem/recorder`` uses private APIs (the simulated device's are in ``simulator/private/``). Public functions that are
patched are here, too, since a patch depends on where a name is; and so are functions that register hooks. Each is
looked up when this module is imported, which never fails; :func:`~ampmem.recorder.torch_private.entries.probe` says
before a recording what is missing. Without a ``needed`` name ampmem does not record; ``optional`` ones say what is
lost. To bring ampmem to a new torch: read this folder, run the probe, run the tests.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ampmem.own_code import is_only_thread, with_callers
from ampmem.patching import unseen
from ampmem.recorder.torch_private.entries import ENTRIES, NOTHING, attribute, needed, optional, patched
from ampmem.recorder.torch_private.entries import Place as Place
from ampmem.recorder.torch_private.entries import Use as Use
from ampmem.recorder.torch_private.entries import probe as probe

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])

# -- ops ------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = needed("torch.utils._python_dispatch", "TorchDispatchMode", "to log every op")
current_mode: Callable[[], Any] = needed(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode", "to push and pop only ampmem's own mode"
)
without_dispatch: Callable[[], Any] = needed(
    "torch._C", "_DisableTorchDispatch", "to hide ampmem's own ops from the script's dispatch modes"
)
TO_COPY = needed("torch.ops.aten._to_copy", "default", "to recognize the copies made by autocast and `to`")
DEVICE = needed("torch.ops.prim.device", "default", "to ignore an op that only fake tensors run")
DETACH = needed("torch.ops.aten.detach", "default", "to ignore the detach that autograd runs for each saved result")
without_functions: Callable[[], Any] = needed(
    "torch._C", "DisableTorchFunction", "to hide ampmem's reads of tensors from the script's function modes"
)
_SCHEMA = attribute(
    "torch._ops.OpOverload",
    "_schema",
    "to know an op's name, and whether it returns a view",
    example=lambda: torch.ops.aten.add.Tensor,
)


def op_schema(op: Any) -> Any:
    """The schema of ``op``; ``None`` for a higher-order operator, which has none."""
    return getattr(op, _SCHEMA, None)


tree_leaves: Callable[[Any], list[Any]] = needed(
    "torch.utils._pytree", "tree_leaves", "to find the tensors among a model's inputs"
)

# -- autograd -------------------------------------------------------------------------------------

graph_task: Callable[[], int] = needed(
    "torch._C", "_current_graph_task_id", "to know whether backward runs on this thread (-1: it does not)"
)
next_node: Callable[[], int] = needed(
    "torch._C._autograd", "_get_sequence_nr", "to match a node's allocations to the op that made the node"
)


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return graph_task() != -1


FIRST_GRADIENTS: Place = patched(
    "torch.autograd", "_make_grads", "to see when backward starts: it makes the gradient of the loss"
)
ENGINE: Place = patched("torch.autograd", "_engine_run_backward", "to see when backward ends")
LOSSES: Place = patched("torch.autograd", "backward", "to compare the losses of runs")
attribute(
    "torch.Tensor",
    "register_post_accumulate_grad_hook",
    "to see each gradient as soon as backward has accumulated it",
)
_is_grad_tracking, _get_unwrapped, _is_batched = (
    optional(
        "torch._C._functorch",
        name,
        "to read the loss inside torch.func",
        without="the loss is not recorded",
        otherwise=None,
    )
    for name in ("is_gradtrackingtensor", "get_unwrapped", "is_batchedtensor")
)


def below_functorch(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor`` without torch.func's wrappers; ``None`` if it is batched, or unknown."""
    if None in (_is_grad_tracking, _get_unwrapped, _is_batched):
        return None
    # Each level of torch.func.grad wraps once more.
    while _is_grad_tracking(tensor):
        tensor = _get_unwrapped(tensor)
    return None if _is_batched(tensor) else tensor


def of_functorch(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a wrapper of torch.func for gradients."""
    return _is_grad_tracking is not None and bool(_is_grad_tracking(tensor))


def tracked_below(tensor: torch.Tensor) -> bool:
    """Whether the tensor inside torch.func's wrapper is part of a graph itself: an outer gradient, or the loss."""
    if _get_unwrapped is None or _is_batched is None:
        return True
    inner = _get_unwrapped(tensor)
    while _is_batched(inner):
        inner = _get_unwrapped(inner)
    return bool(inner.requires_grad)


# -- modules, data ----------------------------------------------------------------------

PARAMETERS, BUFFERS, CHILDREN = (
    attribute("torch.nn.Module", name, "to read a module's own attribute without its __getattr__", example=nn.Module)
    for name in ("_parameters", "_buffers", "_modules")
)
is_tracing: Callable[[], bool] = optional(
    "torch.jit",
    "is_tracing",
    "to ignore a module that is being traced, which is not part of a step",
    without="torch.jit.trace may fail while a model is recorded",
    otherwise=lambda: False,
)
TRACED = "_actual_script_module"
"""The attribute that replaces them in a module made by torch.jit.trace; torch may rename it."""
on_module_before, on_module_after, on_new_parameter, on_new_buffer, on_new_module = (
    needed("torch.nn.modules.module", f"register_module_{name}_hook", why)
    for name, why in (
        ("forward_pre", "to see when a module starts"),
        ("forward", "to see when a module ends"),
        ("parameter_registration", "to see what becomes part of a model"),
        ("buffer_registration", "to see what becomes part of a model"),
        ("module_registration", "to see what becomes part of a model"),
    )
)
hooks_with_kwargs: dict[int, Any] = optional(
    "torch.nn.modules.module",
    "_global_forward_hooks_with_kwargs",
    "to remove an entry of a global hook that its handle leaves behind",
    without="an empty entry of a hook may stay in torch after the recording",
    otherwise={},
)
HAS_HOOKS: Place = patched(
    "torch.nn.modules.module",
    "_has_any_global_hook",
    "to keep compiled modules from warning about global hooks",
    without="torch may warn about global hooks, which are ampmem's",
)
_HOOKS = tuple(
    optional(
        "torch.nn.modules.module", f"_global_{name}_hooks", "to find the script's own hooks", without="", otherwise={}
    )
    for name in ("backward_pre", "backward", "forward_pre", "forward")
)


_ALWAYS_CALLED: dict[int, Any] = optional(
    "torch.nn.modules.module",
    "_global_forward_hooks_always_called",
    "to know which global hooks are called after an error, too",
    without="",
    otherwise={},
)


def module_hooks() -> list[Any]:
    """All global module hooks."""
    return [hook for hooks in _HOOKS for hook in hooks.values()]


def taken_out(is_meant: Callable[[Any], bool]) -> Callable[[], None]:
    """Remove the global module hooks for which ``is_meant``; the returned undo restores their order, too."""
    taken = []
    for hooks in _HOOKS:
        for key in [key for key, hook in hooks.items() if is_meant(hook)]:
            taken += [(each, key, each.pop(key)) for each in (hooks, hooks_with_kwargs, _ALWAYS_CALLED) if key in each]

    def put_back() -> None:
        for hooks, key, value in taken:
            # A dictionary keeps the order of insertion, and torch calls hooks in that order: those with higher keys go
            # last.
            later = [(other, hooks.pop(other)) for other in list(hooks) if other > key]
            hooks[key] = value
            hooks.update(later)

    return put_back


_compile_context: Any = optional(
    "torch._guards",
    "CompileContext",
    "to know whether torch.compile is tracing on this thread",
    without="a backward that torch.compile traces may be taken for the script's",
    otherwise=None,
)


WRAPPER = "OptimizedModule"
"""The class of what ``torch.compile`` returns for a module."""
_COMPILED_CALL, _ORIGINAL = "_compiled_call_impl", "_orig_mod"


def below_compiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile`` wrapped, or ``module`` itself."""
    found: torch.nn.Module = vars(module)[CHILDREN][_ORIGINAL] if type(module).__name__ == WRAPPER else module
    return found


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returned, or was compiled in place."""
    return type(module).__name__ == WRAPPER or is_compiled_in_place(module)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called; ``False`` if this torch has no such attribute."""
    return vars(module).get(_COMPILED_CALL) is not None


def run_uncompiled(module: torch.nn.Module) -> None:
    """Undo ``module.compile()``."""
    vars(module).pop(_COMPILED_CALL, None)


def makes_graph() -> bool:
    """Whether torch.compile is tracing on this thread: code that runs meanwhile is not part of a step."""
    return _compile_context is not None and _compile_context.try_get() is not None


COMPILE: Place = patched(
    "torch", "compile", "to know that dynamo is loaded", without="torch.compile may compile once more"
)
_EVAL_FRAME, _SET_EVAL_FRAME, RUNS_COMPILED = "torch._dynamo.eval_frame", "_maybe_set_eval_frame", "compile_wrapper"
"""``RUNS_COMPILED`` is the function in which compiled code runs."""
CALLS_MODULE = "_call_impl"
"""The method that ``module.compile()`` compiles: the variable ``fn`` in that function's frame."""


def compiled_code() -> Place | None:
    """The function that dynamo calls before and after compiled code; ``None`` if it is not imported, or has none.

    It exists since 2.11. The probe leaves it out, because importing dynamo takes seconds.
    """
    module = sys.modules.get(_EVAL_FRAME)
    return None if module is None or _SET_EVAL_FRAME not in vars(module) else (module, _SET_EVAL_FRAME)


_BACKENDS = "cached_backends"
"""Dynamo's dictionary of the backends given to torch.compile; ``None`` and ``False`` stand for uncompiled code."""


def compiles() -> bool:
    """Whether the script has called torch.compile."""
    # Asked only if dynamo is loaded: importing it here would take the script seconds.
    module = sys.modules.get(_EVAL_FRAME)
    return module is not None and any(getattr(module, _BACKENDS, {None: True}).values())


_COMPILED_AUTOGRAD, _ENABLED = "torch._dynamo.compiled_autograd", "compiled_autograd_enabled"


def compiles_backward() -> bool:
    """Whether compiled autograd is on: the engine gives backward to torch.compile, hooks included."""
    return bool(getattr(sys.modules.get(_COMPILED_AUTOGRAD), _ENABLED, False))


NEXT_BATCH: Place = patched(
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "__next__",
    "to see what is allocated while a DataLoader makes a batch",
    without="memory allocated by a DataLoader is not in the phase data",
)
SAMPLER = attribute(
    "torch.utils.data.dataloader._BaseDataLoaderIter.__init__",
    "_index_sampler",
    "to know the number of samples in a DataLoader's batch",
    without="the batch dimension is unknown, so batch sizes are not shown",
    example=lambda: SimpleNamespace(**dict.fromkeys(NEXT_BATCH[0].__init__.__code__.co_names)),
)

# -- the CPU profiler -------------------------------------------------------------------------------

enable_profiler: Callable[..., None] = needed(
    "torch._C._autograd", "_enable_profiler", "to start a window of the profiler"
)
disable_profiler: Callable[[], Any] = needed(
    "torch._C._autograd", "_disable_profiler", "to end a window of the profiler"
)
prepare_profiler: Callable[..., None] = needed("torch._C._autograd", "_prepare_profiler", "to set kineto up")
profiler_enabled: Callable[[], bool] = needed(
    "torch._C._autograd", "_profiler_enabled", "to know whether another profiler runs: a process has only one"
)
# pybind11 writes the names of a function's parameters into its docstring: there is no other way to ask.
FILTERS = "activity_filter" in str(prepare_profiler.__doc__)
"""Whether torch can filter an activity (since 2.12). If not, "CPU" includes each call of CUDA's runtime."""
enable_record_function: Callable[[bool], None] = needed(
    "torch._C._autograd", "_enable_record_function", "to keep the script's record_function out of the profile"
)
enter_scope: Callable[[str], Any] = needed(
    "torch._C._autograd", "_record_function_with_args_enter", "to make markers that set the profiler's clock"
)
exit_scope: Callable[[Any], None] = needed(
    "torch._C._autograd", "_record_function_with_args_exit", "to make markers that set the profiler's clock"
)
USER_SCOPE = needed("torch._C._profiler.RecordScope", "USER_SCOPE", "to recognize ampmem's markers")
BACKWARD_SCOPE = needed("torch._C._profiler.RecordScope", "BACKWARD_FUNCTION", "to recognize autograd nodes")
OP_FIELDS: Any = needed(
    "torch._C._profiler", "_ExtraFields_TorchOp", "to distinguish nodes and markers from CUDA runtime calls"
)
ALLOCATION: Any = needed(
    "torch._C._profiler", "_ExtraFields_Allocation", "to distinguish allocations and frees from nodes"
)
for _owner, _names in {
    "torch._C._autograd._ProfilerResult": ("experimental_event_tree",),
    "torch._C._profiler._ProfilerEvent": ("name", "tag", "children", "start_time_ns", "end_time_ns", "extra_fields"),
    "torch._C._profiler._ExtraFields_Allocation": ("ptr", "alloc_size", "total_allocated", "device"),
    "torch._C._profiler._ExtraFields_TorchOp": ("sequence_number",),
    "torch.autograd.profiler.profile": ("config",),
}.items():
    for _name in _names:
        attribute(_owner, _name, "to configure the profiler and to read its events")
ENTER_SCOPE: Place = patched(
    "torch.autograd.profiler.record_function", "__enter__", "to keep the script's record_function out of the profile"
)
# Mangled names of C++ (Itanium ABI): `_ZN`, each part with its length, `E`, and the types of the arguments.
CONFIG_LOADER, STOP_THREAD = (f"_ZN9libkineto12ConfigLoader{name}Ev" for name in ("8instance", "10stopThread"))
"""Symbols of libtorch_cpu that end kineto's thread; without them a forked child hangs at its end."""
KINETO, REGISTER_CLIENT = (
    "_ZN9libkineto3apiEv",
    "_ZN9libkineto12LibkinetoApi14registerClientEPNS_15ClientInterfaceE",
)
"""Symbols of libtorch_cpu for kineto's client; without them its start on a thread prints a line."""
LOG_LEVEL = "FLAGS_caffe2_log_level"
"""Symbol of libc10: the minimum severity that torch's C++ prints. Without it windows take longer to close."""
CPU_REPORTER = "_ZN3c1025profiledCPUMemoryReporterEv"
"""Symbol of libc10: torch's counter of CPU memory. Without it CPU memory cannot be watched."""
PREPARE: Place = patched(
    "torch.autograd.profiler.profile",
    "_prepare_trace",
    "to stop recording when the script starts its own profiler: a process has only one",
    without="if the script starts torch.profiler itself, the recording ends with an error",
)

# -- precision ------------------------------------------------------------------------------------

CLEAR_CACHE: Place = patched("torch", "clear_autocast_cache", "to know which copies autocast's cache held")
SCALER_STEP: Place = patched("torch.amp.GradScaler", "step", "to read the loss scale and to see skipped updates")
_FOUND_INF = attribute(
    "torch.amp.GradScaler.step",
    "found_inf",
    "to see updates skipped by the optimizer itself, which has this attribute only while it steps",
    without="an update that a fused optimizer skipped counts as made",
    example=lambda: SimpleNamespace(**dict.fromkeys(inspect.unwrap(GradScaler.step).__code__.co_names)),
)


def found_inf(optimizer: torch_optimizer.Optimizer) -> torch.Tensor | None:
    """Above 0 if ``optimizer``, run by a GradScaler, must skip its update; ``None`` without a scaler's answer."""
    found = getattr(optimizer, _FOUND_INF, None)
    return found if isinstance(found, torch.Tensor) else None


def scale_of(scaler: GradScaler) -> torch.Tensor | None:
    """The scale of ``scaler`` on its device; ``None`` before its first use, or if unknown."""
    return getattr(scaler, _SCALE, None)


_SCALE = attribute(
    "torch.amp.GradScaler",
    "_scale",
    "to read the loss scale without synchronizing, as `get_scale` would",
    without="reading the loss scale synchronizes the device",
    example=lambda: GradScaler("cpu"),
)
_SCALER_ENABLED, _SCALER_DEVICE, _SCALER_STATES = (
    attribute("torch.amp.GradScaler", name, why, use=Use.PRECISION, example=lambda: GradScaler("cpu"))
    for name, why in (
        ("_enabled", "to switch a scaler on or off"),
        ("_device", "to know a scaler's device"),
        ("_per_optimizer_states", "to know whether a scaler is initialized"),
    )
)


ENTER_REGION, EXIT_REGION = (
    patched("torch.autocast", name, "to see the script's autocast regions", use=Use.PRECISION)
    for name in ("__enter__", "__exit__")
)
SCALER_INIT, SCALER_SCALE = (
    patched("torch.amp.GradScaler", name, "to see the script's scalers", use=Use.PRECISION)
    for name in ("__init__", "scale")
)


def scaler_enabled(scaler: GradScaler) -> bool:
    """Whether ``scaler``, of whatever class, is enabled."""
    return bool(getattr(scaler, _SCALER_ENABLED))


def enable_scaler(scaler: GradScaler, enabled: bool) -> None:
    """Switch ``scaler`` on or off."""
    setattr(scaler, _SCALER_ENABLED, enabled)


def scaler_device(scaler: GradScaler) -> str:
    """The device type of ``scaler``."""
    return str(getattr(scaler, _SCALER_DEVICE)).split(":")[0]


def is_set_up(scaler: GradScaler) -> bool:
    """Whether ``scaler`` has all attributes of one made as enabled."""
    return hasattr(scaler, _SCALER_STATES)


def _left_region() -> Any:
    with autocast("cpu", enabled=False) as region:
        pass
    return region


_SAYS = tuple(
    attribute(
        "torch.autocast",
        name,
        "to read and set the values of an autocast region",
        use=Use.PRECISION,
        example=_left_region,
    )
    for name in ("_enabled", "fast_dtype", "_cache_enabled")
)
for _name in ("device", "prev_cache_enabled"):
    attribute(
        "torch.autocast",
        _name,
        "to know the device of autocast regions and the state that they restore",
        use=Use.PRECISION,
        example=_left_region,
    )
region_says: Callable[[Any], tuple[bool, torch.dtype, bool]] = attrgetter(*_SAYS)
"""Whether an autocast region is enabled, its dtype, and whether it caches weights."""


def say_region(region: Any, values: tuple[bool, torch.dtype, bool]) -> None:
    """Set the ``values`` of ``region``, as :func:`region_says` returns them."""
    for name, value in zip(_SAYS, values, strict=True):
        setattr(region, name, value)


CHECKPOINT: Place = patched(
    "torch.utils.checkpoint",
    "_get_autocast_kwargs",
    "to see the autocast state that checkpoint keeps for recomputation, before any module has started",
    use=Use.PRECISION,
)
ENTER_AUTOCAST = attribute(
    "torch.amp.autocast_mode",
    "_enter_autocast",
    "to recognize autocast regions in compiled code",
    without="autocast in compiled code is taken for the script's own",
    use=Use.PRECISION,
)
DECORATED = attribute(
    "torch.autocast",
    "__script_unsupported",
    "to recognize a function decorated with autocast",
    without="a forward decorated with autocast may run under ampmem's autocast, too",
    use=Use.PRECISION,
    example=lambda: autocast("cpu")(_left_region),
)
_exec_strategy, _exec_strategies, _actions = (
    optional(
        "torch._C._dynamo.eval_frame",
        name,
        "to keep torch.compile from compiling ampmem's patches",
        without="torch.compile may compile ampmem's patches",
        otherwise=None,
    )
    for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
)


_UNTRACED = "_torchdynamo_disable"


def untraced(function: _FunctionT) -> _FunctionT:
    """``function``, marked so that dynamo breaks its graph at a call and runs it as it is."""
    setattr(function, _UNTRACED, True)
    return function


_CONSTANT = "_dynamo_marked_constant"


def called_when_traced(function: _FunctionT) -> _FunctionT:
    """``function``, marked so that dynamo calls it while it traces, with constants only, and compiles its result."""
    setattr(function, _CONSTANT, True)
    return function


def never_compiled(function: _FunctionT) -> _FunctionT:
    """``function``, marked so that dynamo runs it uncompiled: it would compile calls made at a graph break."""
    return _skipped(function, inside="SKIP")


def passed_on_uncompiled(function: _FunctionT) -> _FunctionT:
    """``function``, marked as by :func:`never_compiled`; what it calls of the script may be compiled."""
    return _skipped(unseen(function), inside="DEFAULT")


def _skipped(function: _FunctionT, inside: str) -> _FunctionT:
    if None not in (_exec_strategy, _exec_strategies, _actions):
        _exec_strategy(function.__code__, _exec_strategies(_actions.SKIP, getattr(_actions, inside)))
    return function


OPTIMIZER_INIT: Place = patched("torch.optim.Optimizer", "__init__", "to see when an optimizer is created")
FUSED_INITS: tuple[Place, ...] = tuple(
    (kind, "__init__") for kind in (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
)
"""The ``__init__`` of each optimizer that supports fused updates."""
ZERO_GRADS: tuple[Place, ...] = ((Optimizer, "zero_grad"), (nn.Module, "zero_grad"))
"""The methods that zero gradients."""
EVAL: Place = (nn.Module, "eval")
GRADIENT_MODES: tuple[Place, ...] = (
    *((torch.set_grad_enabled, name) for name in ("__init__", "__exit__")),
    *((torch.inference_mode, name) for name in ("__enter__", "__exit__")),
)
"""The methods that turn gradients off and on; ``no_grad`` calls the first."""
on_step_before, on_step_after = (
    needed("torch.optim.optimizer", f"register_optimizer_step_{when}_hook", "to see when an optimizer makes an update")
    for when in ("pre", "post")
)


def _by_device(parameters: list[torch.Tensor], differentiable: bool, use_fused: bool) -> tuple[bool, bool]:
    """Torch's documented rule: foreach if all parameters are plain tensors on a GPU."""
    plain = (torch.Tensor, nn.Parameter)
    return False, not differentiable and all(type(each) in plain and each.is_cuda for each in parameters)


fused_or_foreach: Callable[..., tuple[bool, bool]] = optional(
    "torch.optim.optimizer",
    "_default_to_fused_or_foreach",
    "to know an optimizer's default implementation",
    without="whether an optimizer uses foreach is inferred from the device of its parameters",
    otherwise=_by_device,
)


def running_steps() -> Counter[int]:
    """``id`` of each optimizer whose ``step`` is on the Python stack, and how many times.

    Reads a local variable of torch's own: the function ``wrapper`` in ``torch/optim/optimizer.py``, which runs every
    optimizer's ``step`` and its hooks, has the optimizer as ``self`` (2.11 and newer). Nothing else shows that a step
    raised. If torch renames it, an optimizer whose step raised is considered to be still running.
    """
    running: Counter[int] = Counter()
    for frame in with_callers(sys._getframe()):
        if frame.f_code.co_filename == torch_optimizer.__file__ and frame.f_code.co_name == "wrapper":
            running[id(frame.f_locals.get("self"))] += 1
    return running


_HOOKED = attribute(
    "torch.optim.Optimizer._patch_step_function",
    "hooked",
    "to know which of torch's optimizer classes have instances, so that ampmem searches only for these",
    without="a recording takes a little longer to start",
    example=lambda: SimpleNamespace(**dict.fromkeys(Optimizer._patch_step_function.__code__.co_names)),
)


def never_made(kind: type[Optimizer]) -> bool:
    """Whether ``kind``, a class of torch's own, has no instance yet; ``False`` if unknown.

    At the first instance torch wraps the ``step`` of the class, and marks the wrapper. A ``step`` that other code put
    there since has no mark, and shows nothing.
    """
    step = kind.step
    return _MARKS and _is_of_torch(step) and not hasattr(step, _HOOKED)


def _is_of_torch(function: object) -> bool:
    """Whether the code of ``function`` and of all that it wraps is torch's: a replacement may copy the name."""
    while type(function) is FunctionType and function.__code__.co_filename.startswith(_FOLDER):
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


_FOLDER = str(Path(torch.__file__).parent) + os.sep
_MARKS = not any(entry.name == _HOOKED and entry.find() is NOTHING for entry in ENTRIES)


_WRAPPED = "tensors that wrap others, such as DTensor, are in no category"
is_wrapper: Callable[[torch.Tensor], bool] = optional(
    "torch.utils._python_dispatch",
    "is_traceable_wrapper_subclass",
    "to recognize tensors that wrap others, such as DTensor",
    without=_WRAPPED,
    otherwise=lambda _: False,
)
COPY = needed("torch.ops.aten.copy_", "default", "to see parameters being copied into a flat buffer")
PRODUCT = needed("torch.ops.aten._unsafe_view", "default", "to recognize the last op of a batched matrix product")
_LAYOUT: Any = torch.Tensor.layout
layout_of: Callable[[torch.Tensor], torch.layout] = _LAYOUT.__get__
"""Torch's own property: a subclass may override it."""


def wrapped_names(tensor: torch.Tensor) -> Sequence[str]:
    """The attributes of the wrapper ``tensor`` that hold its inner tensors."""
    names: Sequence[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return names


_SPARSE = "indices and values of sparse tensors are in no category"
_INDICES, _VALUES = (
    attribute("torch.Tensor", name, "to find the memory of a sparse tensor that is not coalesced", without=_SPARSE)
    for name in ("_indices", "_values")
)
_COMPRESSED = {
    torch.sparse_coo: (_INDICES, _VALUES),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The indices and values of a sparse tensor; none for layouts that expose none."""
    with without_dispatch(), torch.no_grad():  # the script's own dispatch modes must see only the script's ops
        return [getattr(tensor, name)() for name in _COMPRESSED.get(tensor.layout, ())]


# -- one tensor --------------------------------------------------------------------------------------

version_of: Callable[[torch.Tensor], int] = attrgetter(
    attribute("torch.Tensor", "_version", "to know whether a saved tensor was overwritten")
)
is_view: Callable[[torch.Tensor], bool] = methodcaller(
    attribute("torch.Tensor", "_is_view", "to recognize casts of views, which autocast does not cache")
)
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter(
    attribute("torch.Tensor", "_base", "to know which tensors are views of a parameter")
)
use_count: Callable[[torch.Tensor], int] = methodcaller(
    attribute("torch.Tensor", "_use_count", "to know whether autocast's cache holds a copy")
)

_IMPLEMENTATION = attribute(
    "torch.Tensor",
    "_cdata",
    "to know how Python's tensors are laid out, for the C++ extension",
    without="recording with the C++ extension takes longer",
)


def implementation_of(tensor: torch.Tensor) -> int:
    """The address of torch's C++ object behind ``tensor``; 0 if unknown."""
    found: int = getattr(tensor, _IMPLEMENTATION, 0)
    return found


SWAP: Place = patched(
    "torch.utils",
    "swap_tensors",
    "to drop ampmem's references while two tensors are swapped",
    without="a script that swaps tensors may fail",
)

_GRADIENT_HOOKS = attribute(
    "torch.Tensor",
    "_post_accumulate_grad_hooks",
    "to restore a parameter's hooks after ampmem's were removed",
    without="parameters may keep an empty list of hooks after the recording",
)


def gradient_hooks(parameter: torch.Tensor) -> Any:
    """The hooks on ``parameter``'s gradient; ``None`` if it never had any."""
    return getattr(parameter, _GRADIENT_HOOKS, None)


def forget_gradient_hooks(parameter: torch.Tensor) -> None:
    """Reset ``parameter``, which has no hooks any more, to the state of never having had any.

    Its empty list of hooks stays while there are other threads: torch would free it at the next hook, and another
    thread's backward may wait for the GIL to call its hooks.
    """
    if gradient_hooks(parameter) is not None and is_only_thread():
        setattr(parameter, _GRADIENT_HOOKS, None)


# -- what autograd saves ----------------------------------------------------------------------------


def _made_node() -> Any:
    return torch.ones((), device="cpu", requires_grad=True).exp().grad_fn


node_number: Callable[[Any], int] = methodcaller(
    attribute("torch.autograd.graph.Node", "_sequence_nr", "to know which op made a node", example=_made_node)
)
attribute("torch.autograd.graph.Node", "_raw_saved_result", "to know which tensors a node saves", example=_made_node)


def saved_names(kind: type) -> tuple[str, ...]:
    """Names of the attributes of this class of nodes that are saved tensors, or tuples of them."""
    # A node has two attributes for each saved tensor: `_saved_NAME` unpacks it, and `_raw_saved_NAME` does not.
    names = (name.removeprefix("_raw") for name in dir(kind) if name.startswith("_raw"))
    return tuple(name for name in names if hasattr(kind, name))


push_saved_hooks: Callable[..., None] = needed(
    "torch._C._autograd", "_push_saved_tensors_default_hooks", "to see every tensor that autograd saves"
)
pop_saved_hooks: Callable[[], None] = needed(
    "torch._C._autograd", "_pop_saved_tensors_default_hooks", "to remove these hooks again"
)
top_saved_hooks: Callable[[bool], tuple[Any, Any] | None] = needed(
    "torch._C._autograd", "_top_saved_tensors_default_hooks", "to pop only ampmem's own hooks"
)
saved_hooks_refused: Callable[[], str | None] = needed(
    "torch._C._autograd",
    "_saved_tensors_hooks_get_disabled_error_message",
    "to know whether torch.func forbids saved-tensor hooks",
)
DISABLE_SAVED_HOOKS: Place = patched(
    "torch._C._autograd",
    "_saved_tensors_hooks_disable",
    "to remove ampmem's hooks before torch.func, compiled or not, forbids hooks",
)
ENABLE_SAVED_HOOKS: Place = patched(
    "torch._C._autograd", "_saved_tensors_hooks_enable", "to see when saved-tensor hooks are allowed again"
)
_UNNAMED = "tensors saved by an autograd.Function are recorded only if ops saved them, too"
SAVES: Place = patched(
    "torch.autograd.function.FunctionCtx",
    "save_for_backward",
    "to see the tensors that an autograd.Function saves",
    without=_UNNAMED,
)
HOOKS_ON_SAVED: Place = patched(
    "torch._C._autograd.SavedTensor",
    "register_hooks",
    "to see the script's hooks on a node's saved tensor",
    without="the script's hooks on a node's saved tensor may be called once more",
)
_FUNCTION = "torch._C._FunctionBase"
_TO_SAVE = attribute(
    _FUNCTION, "to_save", "to know whether the forward of an autograd.Function still runs", without=_UNNAMED
)
_SAVED = attribute(_FUNCTION, "saved_tensors", "to know what an autograd.Function has saved", without=_UNNAMED)


def to_save(function: Any) -> Any:
    """The tensors that ``function`` will save when its forward ends; ``None`` afterwards."""
    return _own(_TO_SAVE).__get__(function)


def saved_by(function: Any) -> tuple[torch.Tensor | None, ...]:
    """The tensors that ``function`` has saved, without calling overrides of its class."""
    saved: tuple[torch.Tensor | None, ...] = _own(_SAVED).__get__(function)
    return saved


def _own(name: str) -> Any:
    return getattr(torch.autograd.Function, name)
