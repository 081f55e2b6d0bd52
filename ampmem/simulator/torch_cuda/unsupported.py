"""Refuses what a simulated GPU cannot do, with the script's line and what to do instead."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ampmem.patching import Undo, in_place_of, replace_all, undone_together
from ampmem.simulator.private.general import COMPILED_AT_RUN_TIME, FakeTensor
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


@undone_together
def install(*, alone: bool) -> Iterator[Undo]:
    """Install the refusals; returns the undo. ``alone`` if no other ranks are simulated."""
    cuda, distributed = torch.cuda, torch.distributed
    graphs = ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle")
    yield replace_all((cuda, cuda.graphs), _each_stops(cuda, graphs, _GRAPHS))
    pools = ("MemPool", "use_mem_pool")
    yield replace_all((cuda, cuda.memory), _each_stops(cuda, pools, _POOLS))
    raw = ("caching_allocator_alloc", "caching_allocator_delete")
    allocators = ("CUDAPluggableAllocator", "change_current_allocator", *raw)
    yield replace_all((cuda, cuda.memory), _each_stops(cuda.memory, allocators, _ALLOCATORS))
    jitted = (COMPILED_AT_RUN_TIME, ("__call__",), _JITERATOR)
    yield replace_all((COMPILED_AT_RUN_TIME,), _each_stops(*jitted))
    if alone and distributed.is_available():
        yield _without_communication()


@undone_together
def _without_communication() -> Iterator[Undo]:
    distributed, parallel = torch.distributed, torch.nn.parallel.DistributedDataParallel

    def start(original: Any, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        # Other backends, such as gloo, work on the CPU, where tensors are real.
        if backend is None or any(name in str(backend) for name in ("nccl", "fake")):
            raise stop(_DISTRIBUTED)
        return original(backend, *args, **kwargs)

    def init(original: Any, self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        # A model on the CPU is real, and gloo reduces its gradients.
        if any(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
            raise stop(_DISTRIBUTED)
        original(self, module, *args, **kwargs)

    starts = {"init_process_group": in_place_of(distributed.init_process_group, start)}
    yield replace_all((distributed, distributed.distributed_c10d), starts)
    meshes = (distributed, distributed.device_mesh)
    yield replace_all(meshes, _each_stops(distributed, ("init_device_mesh",), _DISTRIBUTED))
    yield replace_all((parallel,), {"__init__": in_place_of(parallel.__init__, init)})


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
