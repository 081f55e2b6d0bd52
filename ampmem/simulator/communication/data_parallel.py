"""``DistributedDataParallel``: its buckets are made in C++ and are seen like any tensor; the rest is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private_parallel import around_bookkeeping, nobody_to_verify, nothing_is_timed

aten = torch.ops.aten


def install(mode: SimulatedMode) -> Callable[[], None]:
    """Put all of it in place; returns what undoes it."""
    with ExitStack() as undo:
        undo.callback(nobody_to_verify(_verify))
        undo.callback(nothing_is_timed())
        if mode.everything:
            undo.callback(around_bookkeeping(lambda: _real_integers(mode)))
        return undo.pop_all().close


def _verify(group: Any, parameters: Sequence[Tensor]) -> None:
    """What ``verify_params_across_processes`` (``reducer.cpp``) allocates to compare counts and shapes with the others."""
    device = parameters[0].device
    count = torch.tensor([len(parameters)], device=device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    torch.distributed.all_gather(counts, count, group=group)
    shapes = torch.empty(2 * sum(parameter.dim() for parameter in parameters), dtype=torch.int64)
    sent = shapes.clone().to(device)
    torch.distributed.broadcast(sent, group=group, group_src=0)
    torch.empty_like(shapes).copy_(sent)


@contextmanager
def _real_integers(mode: SimulatedMode) -> Iterator[None]:
    """Where tensors on the CPU are simulated too: the reducer reads and writes its own integers in C++."""

    def make(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if kwargs.get("dtype") != torch.int32:
            return mode.run(func, args, kwargs)
        made = func(*args, **kwargs)
        mode.real.add(made.untyped_storage())
        mode.device_model.born(made.untyped_storage())
        return made

    ops = (aten.empty.memory_format, aten.zeros.default)
    mode.answer(dict.fromkeys(ops, make))
    try:
        yield
    finally:
        mode.answer(dict.fromkeys(ops, mode.run))
