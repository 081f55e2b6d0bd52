"""Refuses what a simulated GPU cannot do, with the script's line and what to do instead; and ``torch.compile``.

Code for ``torch.compile`` is refused, or runs uncompiled if the user says so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch

from ampmem.patching import replace_all, unseen
from ampmem.simulator.assumed import Assumed
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private.general import CALL, COMPILED_AT_RUN_TIME, FakeTensor, on_call, run_uncompiled
from ampmem.simulator.where import stop

_GRAPHS = (
    "a CUDA graph keeps its own memory pool, which is not simulated; leave the graph out to see what the run needs "
    "without it"
)
_POOLS = "the script's own memory pools are not simulated; leave them out"
_ALLOCATORS = "only PyTorch's own caching allocator is simulated; leave the other allocator out"
_JITERATOR = "torch.cuda.jiterator compiles kernels for a real GPU; write the function with torch's own ops"
_DISTRIBUTED = (
    "one process with one GPU is simulated, without communication; simulate one rank of N with --world-size N, or run "
    "the script without torch.distributed, with the batch of one rank"
)


def install(device: SimulatedDevice, assumed: Assumed, *, alone: bool) -> Callable[[], None]:
    """Install the refusals; returns the undo.

    ``alone`` if no other ranks are simulated. ``assumed`` may say that compiled code runs uncompiled.
    """
    cuda, distributed = torch.cuda, torch.distributed
    with ExitStack() as undo:
        undo.callback(_install_compiled(device, assumed))
        graphs = ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle")
        undo.callback(replace_all((cuda, cuda.graphs), _each_stops(cuda, graphs, _GRAPHS)))
        pools = ("MemPool", "use_mem_pool")
        undo.callback(replace_all((cuda, cuda.memory), _each_stops(cuda, pools, _POOLS)))
        raw = ("caching_allocator_alloc", "caching_allocator_delete")
        allocators = ("CUDAPluggableAllocator", "change_current_allocator", *raw)
        undo.callback(replace_all((cuda, cuda.memory), _each_stops(cuda.memory, allocators, _ALLOCATORS)))
        jitted = (COMPILED_AT_RUN_TIME, ("__call__",), _JITERATOR)
        undo.callback(replace_all((COMPILED_AT_RUN_TIME,), _each_stops(*jitted)))
        if alone and distributed.is_available():
            undo.callback(_without_communication())
        return undo.pop_all().close


def _without_communication() -> Callable[[], None]:
    distributed = torch.distributed
    start = distributed.init_process_group

    @functools.wraps(start)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if backend is None or any(name in str(backend) for name in ("nccl", "fake")):
            raise stop(_DISTRIBUTED)
        return start(backend, *args, **kwargs)

    parallel = torch.nn.parallel.DistributedDataParallel
    wrap = parallel.__init__

    @functools.wraps(wrap)
    def init(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
            raise stop(_DISTRIBUTED)
        wrap(self, module, *args, **kwargs)

    with ExitStack() as undo:
        owners = (distributed, distributed.distributed_c10d)
        undo.callback(replace_all(owners, {"init_process_group": init_process_group}))
        meshes = (distributed, distributed.device_mesh)
        undo.callback(replace_all(meshes, _each_stops(distributed, ("init_device_mesh",), _DISTRIBUTED)))
        undo.callback(replace_all((parallel,), {"__init__": init}))
        return undo.pop_all().close


def _each_stops(owner: object, names: Iterable[str], why: str) -> dict[str, Any]:
    """Replacements for each of ``names`` that ``owner`` has, which raise when called."""
    return {name: _stops(why, getattr(owner, name)) for name in names if hasattr(owner, name)}


def _stops(why: str, original: Any) -> Any:
    """A replacement that raises; for a class it is one that annotations, ``isinstance`` and subclasses may use."""

    def stopped(*_: Any, **__: Any) -> Any:
        raise stop(why)

    if not isinstance(original, type):
        return functools.wraps(original)(stopped)
    body = {"__new__": stopped, "__doc__": original.__doc__, "__module__": original.__module__}
    return type(original)(original.__name__, (original,), body | {"__qualname__": original.__qualname__})


_STOPS = (
    "the memory of compiled code depends on {}; {} runs it uncompiled, or leave torch.compile out to see what the "
    "uncompiled run needs"
)
_INDUCTOR = "the kernels that torch.compile makes, and there is no GPU to make them for"
_OTHER = 'the backend "{}", which does not run on a simulated GPU'
_DEFAULT = "inductor"
_UNCOMPILED = (
    "compiled code, which ran uncompiled, as {} says; a compiled run has other numbers, and usually keeps less, "
    "because pointwise operations are fused and some results are recomputed in backward"
)


def _install_compiled(device: SimulatedDevice, assumed: Assumed) -> Callable[[], None]:
    """Refuse compiled code or run it uncompiled; returns the undo."""
    advice = assumed.advice("compile=eager")
    with ExitStack() as undo:
        if assumed.uncompiled:
            uncompiled = _UNCOMPILED.format(advice)
            undo.callback(run_uncompiled(lambda _: device.leave_out(uncompiled)))
            undo.callback(replace_all((torch,), {"compile": _without_inductor(torch.compile)}))
        else:
            undo.callback(on_call(lambda backend: _refuse(backend, advice)))
            undo.callback(replace_all((torch,), {"compile": _stopping(torch.compile, advice)}))
        return undo.pop_all().close


def _refuse(backend: Any, advice: str) -> NoReturn:
    """Raise the error for ``backend``, a name or function; ``None`` is torch's own."""
    name = str(getattr(backend, "__name__", backend or _DEFAULT))
    raise stop(_STOPS.format(_INDUCTOR if _DEFAULT in name else _OTHER.format(name), advice))


def _without_inductor(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` that wraps as usual (``_orig_mod``), but never loads the compiler."""

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:  # the names of torch's own parameters
        if torch.compile is compile:
            options |= {"backend": "eager", "mode": None, "options": None}
        return original(model, **options)

    return compile


def _stopping(original: Callable[..., Any], advice: str) -> Callable[..., Any]:
    """``torch.compile`` that refuses modules at once, functions when called: libraries compile many unused ones."""

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        if options.get("disable") or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return model
        if isinstance(model, torch.nn.Module):
            _refuse(options.get("backend"), advice)
        if isinstance(model, type):  # torch compiles its calls, and returns the class
            name = CALL if issubclass(model, torch.nn.Module) else "__call__"
            setattr(model, name, when_called(getattr(model, name), {}))
            return model
        return when_called(model, options)

    def when_called(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        compiled = functools.cache(lambda: original(function, **options))

        @functools.wraps(function)
        def stopped(*args: Any, **kwargs: Any) -> Any:
            if torch.compile is compile:
                _refuse(options.get("backend"), advice)
            return compiled()(*args, **kwargs)  # after the end of the simulation

        return unseen(stopped)

    return compile
