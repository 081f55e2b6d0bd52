"""``DistributedDataParallel``: its buckets are made in C++ and are seen like any tensor; the rest is here."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from ampmem.patching import added, replace_all
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.parallel import (
    FP16_COMPRESS,
    around_bookkeeping,
    built_in_hooks,
    hooks_of_cuda_builds,
    nobody_to_verify,
    nothing_is_timed,
    register_hook,
)
from ampmem.simulator.world import check_index

aten = torch.ops.aten


def install(mode: SimulatedMode) -> Callable[[], None]:
    """Put all of it in place; returns what undoes it."""
    with ExitStack() as undo:
        undo.callback(nobody_to_verify(_verify))
        undo.callback(nothing_is_timed())
        undo.callback(_pinned(mode))
        undo.callback(built_in_hooks(_register))
        undo.callback(hooks_of_cuda_builds())
        undo.callback(_on_this_device())
        if mode.everything:
            undo.callback(around_bookkeeping(lambda: _real_integers(mode)))
        return undo.pop_all().close


def _verify(group: Any, parameters: Sequence[Tensor]) -> None:
    """Allocate what ``verify_params_across_processes`` (``reducer.cpp``) does, to compare counts and shapes."""
    device = parameters[0].device
    count = torch.tensor([len(parameters)], device=device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    torch.distributed.all_gather(counts, count, group=group)
    shapes = torch.empty(2 * sum(parameter.dim() for parameter in parameters), dtype=torch.int64)
    sent = shapes.to(device)
    torch.distributed.broadcast(sent, group=group, group_src=0)
    sent.copy_(shapes)  # rank 0 has sent the same: on the others they would count as numbers that nobody knows
    torch.empty_like(shapes).copy_(sent)


def _register(reducer: Any, kind: Any) -> None:
    """The hooks that are there in C++ too; they allocate the same."""
    register_hook(reducer, None, fp16_compress_hook if kind == FP16_COMPRESS else allreduce_hook)


def _on_this_device() -> Callable[[], None]:
    """Say that the other GPUs are other ranks', before torch looks for them."""
    parallel = torch.nn.parallel.DistributedDataParallel
    original = parallel.__init__

    @functools.wraps(original)
    def init(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        for where in device_ids or ():
            check_index(where if isinstance(where, int) else torch.device(where).index)
        original(self, module, device_ids, *args, **kwargs)

    return replace_all((parallel,), {"__init__": init})


def _pinned(mode: SimulatedMode) -> Callable[[], None]:
    """Let tensors claim to be in pinned memory, of which there is none without a driver.

    The reducer copies by way of it which parameters were used, and insists.
    """
    pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def empty(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not kwargs.get("pin_memory"):
            return mode.unanswered(func, (), args, kwargs)
        made = mode.unanswered(func, (), args, {**kwargs, "pin_memory": False})
        pinned.add(made.untyped_storage())
        return made

    def is_pinned(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return args[0].untyped_storage() in pinned

    empties = (aten.empty.memory_format, aten.empty_strided.default)
    return _answered(mode, dict.fromkeys(empties, empty) | {aten.is_pinned.default: is_pinned})


@contextmanager
def _real_integers(mode: SimulatedMode) -> Iterator[None]:
    """Where tensors on the CPU are simulated too: the reducer reads and writes its own integers in C++."""

    def make(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if kwargs.get("dtype") != torch.int32:
            return mode.unanswered(func, (), args, kwargs)
        made = func(*args, **kwargs)
        mode.real.add(made.untyped_storage())
        mode.device_model.born(made.untyped_storage())
        return made

    undo = _answered(mode, {aten.empty.memory_format: make, aten.zeros.default: make})
    try:
        yield
    finally:
        undo()


def _answered(mode: SimulatedMode, answers: Mapping[Any, Callable[..., Any]]) -> Callable[[], None]:
    """Answer these ops from now on; returns what puts the answers back that were there."""
    former = {op: mode.answers.get(op) for op in answers}
    mode.answers.update(answers)

    def put_back() -> None:
        for op, answer in former.items():
            if answer is None:
                mode.answers.pop(op, None)
            else:
                mode.answers[op] = answer

    return added("answers", "DistributedDataParallel", put_back)
