"""What data and pipeline parallelism take of torch beside ``private_communication.py``: why, and since when.

All of it is there since 2.11 or before, unless it is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampmem.patching import patch

c10d = torch.ops.c10d

ALL_GATHER_LISTS, REDUCE_SCATTER_LISTS = c10d.allgather_.default, c10d.reduce_scatter_.default
WITH_RESULT = (
    c10d._allgather_base_.default,
    c10d._reduce_scatter_base_.default,
    ALL_GATHER_LISTS,
    c10d.allreduce_.default,
    c10d.alltoall_.default,
    c10d.broadcast_.default,
    REDUCE_SCATTER_LISTS,
    c10d.scatter_.default,
)
"""The ops of collectives that return what they wrote to beside the work."""
WITHOUT_RESULT = (
    c10d.allgather_coalesced_.default,
    c10d.allgather_into_tensor_coalesced_.default,
    c10d.allreduce_coalesced_.default,
    c10d.alltoall_base_.default,
    c10d.barrier.default,
    c10d.gather_.default,
    c10d.recv_.default,
    c10d.recv_any_source_.default,
    c10d.reduce_.default,
    c10d.reduce_scatter_tensor_coalesced_.default,
    c10d.send.default,
)
"""Those that return the work alone."""


def completed(tensors: Sequence[Tensor]) -> Any:
    """A collective that is done, as an op returns it; its future gives ``tensors``, as NCCL's does.

    The works of torch's backend without peers give ``None``, which neither DDP's reducer nor a script's hook can use.
    """
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()


def nobody_to_verify(verify: Callable[[Any, Sequence[Tensor]], None]) -> Callable[[], None]:
    """Let DDP ask ``verify`` whether all ranks have the same parameters; returns what undoes it.

    Torch reads in C++ what the others have answered.
    """

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def verify_params(group: Any, parameters: Sequence[Tensor], logger: Any = None) -> None:
            if isinstance(parameters[0], torch._subclasses.FakeTensor):
                verify(group, parameters)
            else:
                original(group, parameters, logger)

        return verify_params

    return patch(torch.distributed, "_verify_params_across_processes", wrap)


def nothing_is_timed() -> Callable[[], None]:
    """Keep DDP's reducer from timing its first iterations with CUDA events; returns what undoes it.

    It does so from C++, where there is no device to ask. What it is told before each forward starts the count of
    iterations, and nothing else; the logger then dereferences the times.
    """
    with ExitStack() as undo:
        undo.callback(patch(torch.distributed.Reducer, "prepare_for_forward", _nothing))
        undo.callback(patch(torch.distributed.Logger, "set_runtime_stats_and_log", _nothing))
        return undo.pop_all().close


def _nothing(original: Callable[..., None]) -> Callable[..., None]:
    return lambda reducer: None


def around_bookkeeping(region: Callable[[], Any]) -> Callable[[], None]:
    """Enter ``region`` where DDP's reducer makes the numbers that it keeps for itself; returns what undoes it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def inside(reducer: Any, *args: Any) -> Any:
            with region():
                return original(reducer, *args)

        return inside

    reducer, parallel = torch.distributed.Reducer, torch.nn.parallel.DistributedDataParallel
    with ExitStack() as undo:
        undo.callback(patch(reducer, "_rebuild_buckets", wrap))
        undo.callback(patch(reducer, "_set_static_graph", wrap))
        undo.callback(patch(parallel, "_ddp_init_helper", wrap))
        return undo.pop_all().close
