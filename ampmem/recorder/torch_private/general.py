"""Every private name of torch that recording stands on: what for, since when, and what ampmem does without.

Those of a CUDA device are in ``cuda.py``, of torch.distributed in ``distributed.py``, of optimizers in
``optimizers.py``; nothing else in ``ampmem/recorder`` names one (the simulated device has its own room,
``simulator/private/``). What is public but patched is here too, since a patch takes it for granted where a name is; and
so is what registers hooks. Each is looked up when this module is imported, which never
fails; :func:`~ampmem.recorder.torch_private.entries.probe` says before a recording what is missing. ``needed`` names
are refused without, ``optional`` ones say what is lost. To bring ampmem to a new torch: read this folder, run the
probe, run the tests.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.optim import optimizer as torch_optimizer

from ampmem.patching import passed_over
from ampmem.recorder.torch_private.entries import Place as Place
from ampmem.recorder.torch_private.entries import Use as Use
from ampmem.recorder.torch_private.entries import attribute, needed, optional, patched
from ampmem.recorder.torch_private.entries import probe as probe

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])

# -- ops ------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = needed("torch.utils._python_dispatch", "TorchDispatchMode", "the mode that logs every op")
current_mode: Callable[[], Any] = needed(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode", "to push and pop no mode but our own"
)
without_dispatch: Callable[[], Any] = needed(
    "torch._C", "_DisableTorchDispatch", "ops of our own, which the script's modes must not see"
)
TO_COPY = needed("torch.ops.aten._to_copy", "default", "the op by which autocast and `to` make a copy")
DEVICE = needed("torch.ops.prim.device", "default", "a question that only fake tensors ask by an op")
DETACH = needed("torch.ops.aten.detach", "default", "which autograd calls for each result that it saves")
without_functions: Callable[[], Any] = needed(
    "torch._C", "DisableTorchFunction", "looking at tensors, which the script's function modes must not see"
)
_SCHEMA = attribute(
    "torch._ops.OpOverload",
    "_schema",
    "an op's name, and whether it returns a view",
    example=lambda: torch.ops.aten.add.Tensor,
)


def schema_of(op: Any) -> Any:
    """The schema of ``op``; ``None`` for a higher-order operator, which has none."""
    return getattr(op, _SCHEMA, None)


tree_leaves: Callable[[Any], list[Any]] = needed(
    "torch.utils._pytree", "tree_leaves", "the tensors that a model is fed"
)

# -- autograd -------------------------------------------------------------------------------------

graph_task: Callable[[], int] = needed(
    "torch._C", "_current_graph_task_id", "whether backward runs on this thread: -1 where it does not"
)
next_node: Callable[[], int] = needed(
    "torch._C._autograd", "_get_sequence_nr", "joins what a node allocates to the op that made the node"
)


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return graph_task() != -1


ENGINE: Place = patched(
    "torch.autograd",
    "_engine_run_backward",
    "a backward that the script has imported by its name before",
    without="a backward whose name was imported before ampmem started may not be seen",
)
BACKWARD: tuple[Place, ...] = (
    *(patched("torch.autograd", name, "when backward starts and ends") for name in ("backward", "grad")),
    ENGINE,
)
attribute("torch.Tensor", "register_post_accumulate_grad_hook", "each gradient, as soon as backward has left it")
_is_grad_tracking, _get_unwrapped, _is_batched = (
    optional("torch._C._functorch", name, "the loss inside torch.func", without="no loss is read", otherwise=None)
    for name in ("is_gradtrackingtensor", "get_unwrapped", "is_batchedtensor")
)


def below_functorch(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor`` without the wrappers of torch.func; ``None`` where it stands for many, or that cannot be known."""
    if None in (_is_grad_tracking, _get_unwrapped, _is_batched):
        return None
    while _is_grad_tracking(tensor):
        tensor = _get_unwrapped(tensor)
    return None if _is_batched(tensor) else tensor


def of_functorch(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is one of torch.func's, which a gradient is taken of."""
    return _is_grad_tracking is not None and bool(_is_grad_tracking(tensor))


def tracked_below(tensor: torch.Tensor) -> bool:
    """Whether what torch.func has wrapped into ``tensor`` belongs to a graph itself: of an outer gradient, a loss."""
    if _get_unwrapped is None or _is_batched is None:
        return True
    inner = _get_unwrapped(tensor)
    while _is_batched(inner):
        inner = _get_unwrapped(inner)
    return bool(inner.requires_grad)


# -- modules, data ----------------------------------------------------------------------

PARAMETERS = attribute("torch.nn.Module", "_parameters", "a module's own, past its __getattr__", example=nn.Module)
BUFFERS = attribute("torch.nn.Module", "_buffers", "a module's own, past its __getattr__", example=nn.Module)
CHILDREN = attribute("torch.nn.Module", "_modules", "a module's own, past its __getattr__", example=nn.Module)
is_tracing: Callable[[], bool] = optional(
    "torch.jit",
    "is_tracing",
    "a module that is traced computes nothing of a step",
    without="torch.jit.trace may fail while a model is recorded",
    otherwise=lambda: False,
)
TRACED = "_actual_script_module"
"""What a module that torch.jit.trace made has in place of these; where it is named otherwise, it has nothing."""
on_module_before, on_module_after, on_new_parameter, on_new_buffer, on_new_module = (
    needed("torch.nn.modules.module", f"register_module_{name}_hook", why)
    for name, why in (
        ("forward_pre", "when a module starts"),
        ("forward", "when a module ends"),
        ("parameter_registration", "what becomes a part of a model"),
        ("buffer_registration", "what becomes a part of a model"),
        ("module_registration", "what becomes a part of a model"),
    )
)
hooks_with_kwargs: dict[int, Any] = optional(
    "torch.nn.modules.module",
    "_global_forward_hooks_with_kwargs",
    "has an entry of a global hook that its handle forgets to remove",
    without="an empty entry of a hook may stay in torch after the recording",
    otherwise={},
)
HAS_HOOKS: Place = patched(
    "torch.nn.modules.module",
    "_has_any_global_hook",
    "a compiled module, which warns of hooks on all modules",
    without="torch may warn that there are global hooks, which are ampmem's",
)
_HOOKS = tuple(
    optional("torch.nn.modules.module", f"_global_{name}_hooks", "hooks of the script's", without="", otherwise={})
    for name in ("backward_pre", "backward", "forward_pre", "forward")
)


_ALWAYS_CALLED: dict[int, Any] = optional(
    "torch.nn.modules.module",
    "_global_forward_hooks_always_called",
    "which hooks on all modules are called after an error, too",
    without="",
    otherwise={},
)


def module_hooks() -> list[Any]:
    """All hooks that are on all modules."""
    return [hook for hooks in _HOOKS for hook in hooks.values()]


def taken_out(is_meant: Callable[[Any], bool]) -> Callable[[], None]:
    """Take the hooks that are meant off all modules; returns what puts them back in their places."""
    taken = []
    for hooks in _HOOKS:
        for key in [key for key, hook in hooks.items() if is_meant(hook)]:
            taken += [(each, key, each.pop(key)) for each in (hooks, hooks_with_kwargs, _ALWAYS_CALLED) if key in each]

    def put_back() -> None:
        for hooks, key, value in taken:
            later = [(other, hooks.pop(other)) for other in list(hooks) if other > key]
            hooks[key] = value
            hooks.update(later)

    return put_back


_compile_context: Any = optional(
    "torch._guards",
    "CompileContext",
    "whether torch.compile is making a graph on this thread",
    without="a backward that torch.compile traces may be taken for the script's",
    otherwise=None,
)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called. A torch without this attribute compiles no module in its place."""
    return vars(module).get("_compiled_call_impl") is not None


def makes_graph() -> bool:
    """Whether torch.compile is making a graph on this thread: what runs meanwhile computes nothing of a step."""
    return _compile_context is not None and _compile_context.try_get() is not None


COMPILE: Place = patched("torch", "compile", "that dynamo is there", without="torch.compile may compile once more")
_EVAL_FRAME, _SET_EVAL_FRAME, RUNS_COMPILED = "torch._dynamo.eval_frame", "_maybe_set_eval_frame", "compile_wrapper"
"""The last is the function in which compiled code runs."""
CALLS_MODULE = "_call_impl"
"""The method of a module that ``module.compile()`` compiles: the variable ``fn`` of that function's frame."""


def compiled_code() -> Place | None:
    """What dynamo calls before and after it runs compiled code; ``None`` where it is not imported, or has no such.

    It was there in 2.11. Not asked for by the probe, since dynamo takes seconds to import.
    """
    module = sys.modules.get(_EVAL_FRAME)
    return None if module is None or _SET_EVAL_FRAME not in vars(module) else (module, _SET_EVAL_FRAME)


NEXT_BATCH: Place = patched(
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "__next__",
    "what is born while a DataLoader makes a batch",
    without="what a DataLoader allocates is in no phase of its own",
)
SAMPLER = attribute(
    "torch.utils.data.dataloader._BaseDataLoaderIter.__init__",
    "_index_sampler",
    "how many samples a DataLoader puts into a batch",
    without="no dimension is known to be the batch, so nothing is said of batch sizes",
    example=lambda: SimpleNamespace(**dict.fromkeys(NEXT_BATCH[0].__init__.__code__.co_names)),
)

# -- the CPU profiler -------------------------------------------------------------------------------

enable_profiler: Callable[..., None] = needed("torch._C._autograd", "_enable_profiler", "starts a window")
disable_profiler: Callable[[], Any] = needed("torch._C._autograd", "_disable_profiler", "ends it")
prepare_profiler: Callable[..., None] = needed("torch._C._autograd", "_prepare_profiler", "sets kineto up")
profiler_enabled: Callable[[], bool] = needed(
    "torch._C._autograd", "_profiler_enabled", "whether another one runs: there is but one per process"
)
FILTERS = "activity_filter" in str(prepare_profiler.__doc__)
"""Whether torch can leave out a part of an activity (2.12 can). If not, "CPU" has every call of CUDA's runtime too."""
enable_record_function: Callable[[bool], None] = needed(
    "torch._C._autograd", "_enable_record_function", "keeps the script's record_function out of the profile"
)
enter_scope: Callable[[str], Any] = needed(
    "torch._C._autograd", "_record_function_with_args_enter", "the markers that set the profiler's clock"
)
exit_scope: Callable[[Any], None] = needed(
    "torch._C._autograd", "_record_function_with_args_exit", "the markers that set the profiler's clock"
)
USER_SCOPE = needed("torch._C._profiler.RecordScope", "USER_SCOPE", "the markers")
BACKWARD_SCOPE = needed("torch._C._profiler.RecordScope", "BACKWARD_FUNCTION", "the autograd nodes")
OP_FIELDS: Any = needed(
    "torch._C._profiler", "_ExtraFields_TorchOp", "tells nodes and markers from calls of CUDA's runtime"
)
ALLOCATION: Any = needed("torch._C._profiler", "_ExtraFields_Allocation", "tells allocations and frees from nodes")
for _owner, _names in {
    "torch._C._autograd._ProfilerResult": ("experimental_event_tree",),
    "torch._C._profiler._ProfilerEvent": ("name", "tag", "children", "start_time_ns", "end_time_ns", "extra_fields"),
    "torch._C._profiler._ExtraFields_Allocation": ("ptr", "alloc_size", "total_allocated", "device"),
    "torch._C._profiler._ExtraFields_TorchOp": ("sequence_number",),
    "torch.autograd.profiler.profile": ("config",),
}.items():
    for _name in _names:
        attribute(_owner, _name, "what the profiler saw, or is to see")
ENTER_SCOPE: Place = patched(
    "torch.autograd.profiler.record_function", "__enter__", "keeps the script's record_function out of the profile"
)
CONFIG_LOADER, STOP_THREAD = (f"_ZN9libkineto12ConfigLoader{name}Ev" for name in ("8instance", "10stopThread"))
"""Symbols of libtorch_cpu for the thread that kineto starts; without them a forked child hangs when it ends."""
KINETO, REGISTER_CLIENT = (
    "_ZN9libkineto3apiEv",
    "_ZN9libkineto12LibkinetoApi14registerClientEPNS_15ClientInterfaceE",
)
"""Symbols of libtorch_cpu for who is told of kineto's start; without them one on a thread prints a line of kineto's."""
LOG_LEVEL = "FLAGS_caffe2_log_level"
"""Symbol of libc10: how grave what torch's C++ prints has to be. Without it windows take longer to close."""
CPU_REPORTER = "_ZN3c1025profiledCPUMemoryReporterEv"
"""Symbol of libc10: torch's count of the CPU's blocks. Without it the CPU's memory cannot be watched."""
PREPARE: Place = patched(
    "torch.autograd.profiler.profile",
    "_prepare_trace",
    "a profiler of the script's own: there is but one per process, so ampmem makes way",
    without="a script that starts torch.profiler itself ends the recording with an error",
)

# -- precision ------------------------------------------------------------------------------------

CLEAR_CACHE: Place = patched("torch", "clear_autocast_cache", "which copies autocast's cache held")
SCALER_STEP: Place = patched("torch.amp.GradScaler", "step", "the loss scale, and updates that are skipped")
_FOUND_INF = attribute(
    "torch.amp.GradScaler.step",
    "found_inf",
    "what it tells an optimizer that skips by itself; an optimizer has it only while it steps",
    without="an update that a fused optimizer skipped counts as made",
    example=lambda: SimpleNamespace(**dict.fromkeys(inspect.unwrap(GradScaler.step).__code__.co_names)),
)


def found_inf(optimizer: torch_optimizer.Optimizer) -> torch.Tensor | None:
    """Above 0 where ``optimizer``, which a GradScaler runs, leaves its update out; ``None`` where none has said."""
    found = getattr(optimizer, _FOUND_INF, None)
    return found if isinstance(found, torch.Tensor) else None


def scale_of(scaler: GradScaler) -> torch.Tensor | None:
    """The scale of ``scaler`` on its device; ``None`` before it has scaled, or where it is not to be had."""
    return getattr(scaler, _SCALE, None)


_SCALE = attribute(
    "torch.amp.GradScaler",
    "_scale",
    "the loss scale, for which `get_scale` would wait",
    without="reading the loss scale waits for the device",
    example=lambda: GradScaler("cpu"),
)
_SCALER_ENABLED, _SCALER_DEVICE, _SCALER_STATES = (
    attribute("torch.amp.GradScaler", name, why, use=Use.ARM, example=lambda: GradScaler("cpu"))
    for name, why in (
        ("_enabled", "switches a scaler on or off"),
        ("_device", "whose it is"),
        ("_per_optimizer_states", "whether its class has set it up"),
    )
)


ENTER_REGION, EXIT_REGION = (
    patched("torch.autocast", name, "the script's regions", use=Use.ARM) for name in ("__enter__", "__exit__")
)
SCALER_INIT, SCALER_SCALE = (
    patched("torch.amp.GradScaler", name, "the script's scalers", use=Use.ARM) for name in ("__init__", "scale")
)


def scaler_enabled(scaler: GradScaler) -> bool:
    """Whether ``scaler`` scales, of whichever class it is."""
    return bool(getattr(scaler, _SCALER_ENABLED))


def enable_scaler(scaler: GradScaler, enabled: bool) -> None:
    """Switch ``scaler`` on or off."""
    setattr(scaler, _SCALER_ENABLED, enabled)


def scaler_device(scaler: GradScaler) -> str:
    """The type of the device that ``scaler`` is for."""
    return str(getattr(scaler, _SCALER_DEVICE)).split(":")[0]


def is_set_up(scaler: GradScaler) -> bool:
    """Whether ``scaler`` has all that one that was made enabled has."""
    return hasattr(scaler, _SCALER_STATES)


def _left_region() -> Any:
    with autocast("cpu", enabled=False) as region:
        pass
    return region


_SAYS = tuple(
    attribute("torch.autocast", name, "what an autocast region is entered with", use=Use.ARM, example=_left_region)
    for name in ("_enabled", "fast_dtype", "_cache_enabled")
)
for _name in ("device", "prev_cache_enabled"):
    attribute(
        "torch.autocast", _name, "whose regions they are, and what they go back to", use=Use.ARM, example=_left_region
    )
region_says: Callable[[Any], tuple[bool, torch.dtype, bool]] = attrgetter(*_SAYS)
"""Whether a region is enabled, its dtype, and whether it caches."""


def say(region: Any, values: tuple[bool, torch.dtype, bool]) -> None:
    """Have ``region`` say ``values``, as :func:`region_says` gives them."""
    for name, value in zip(_SAYS, values, strict=True):
        setattr(region, name, value)


CHECKPOINT: Place = patched(
    "torch.utils.checkpoint",
    "_get_autocast_kwargs",
    "the state that checkpoint keeps to recompute under, before any module has started",
    use=Use.ARM,
)
ENTER_AUTOCAST = attribute(
    "torch.amp.autocast_mode",
    "_enter_autocast",
    "by which compiled code enters its regions",
    without="autocast in compiled code is taken for the script's own",
    use=Use.ARM,
)
DECORATED = attribute(
    "torch.autocast",
    "__script_unsupported",
    "left on a function that autocast decorates",
    without="a forward that is decorated with autocast may be run under ampmem's as well",
    use=Use.ARM,
    example=lambda: autocast("cpu")(_left_region),
)
_exec_strategy, _exec_strategies, _actions = (
    optional(
        "torch._C._dynamo.eval_frame",
        name,
        "keeps torch.compile away from what ampmem puts in place",
        without="torch.compile may compile what ampmem puts in place",
        otherwise=None,
    )
    for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
)


_UNTRACED = "_torchdynamo_disable"


def untraced(function: _FunctionT) -> _FunctionT:
    """Have dynamo break its graph where compiled code calls ``function``, and call it as it is."""
    setattr(function, _UNTRACED, True)
    return function


def never_compiled(function: _FunctionT) -> _FunctionT:
    """Have dynamo run ``function`` as it is: it compiles what is called at a break in the graph of compiled code."""
    if None not in (_exec_strategy, _exec_strategies, _actions):
        passed_over(function)  # as a patch is, which makes another code of it
        skip = _actions.SKIP
        _exec_strategy(function.__code__, _exec_strategies(skip, skip))
    return function
