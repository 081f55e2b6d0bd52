"""The private parts of torch that other ranks on paper need, beside those in ``private.py``: why, and since when."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import _dispatch as dtensor_dispatch
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

from ampmem.patching import patch, replace_all
from ampmem.simulator.private import FakeTensorMode, without_modes

c10d = torch.ops.c10d

FAKE = "fake"
"""The backend without peers, whose collectives return at once: torch's own, for its tests. Since 2.1; importing
``fake_pg`` registers it."""

ALL_GATHERS = (c10d.allgather_.default, c10d._allgather_base_.default)
REDUCE_SCATTERS = (c10d.reduce_scatter_.default, c10d._reduce_scatter_base_.default)
"""Collectives as ops, since 2.0; a dispatch mode sees them. Of each the one that takes lists of tensors is first."""


def done(tensors: Iterable[Tensor]) -> Any:
    """What an op returns of a collective that is over. Since 2.11 or before.

    Its future gives ``tensors``, as NCCL's does: DDP's reducer and hooks of scripts take them from there. Those of
    torch's own backend without peers give ``None``.
    """
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()


def cuda_is_the_accelerator() -> Callable[[], None]:
    """Let ``fully_shard`` and others take CUDA for the device of a mesh; returns what undoes it.

    ``torch._C._get_accelerator`` is there since 2.5, and CPU builds answer "cpu".
    """
    return patch(torch._C, "_get_accelerator", lambda original: lambda check=None: torch.device("cuda"))


def shapes_take_no_memory() -> Callable[[], None]:
    """Let DTensor learn the global shape of a result without the simulated device; returns what undoes it.

    It runs the op on fake tensors of the global shape, under whichever fake mode is active: the method is there since
    2.1, by this name since 2.7.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        beside = FakeTensorMode()

        @functools.wraps(original)
        def propagate(propagator: Any, op_schema: Any) -> Any:
            with without_modes(), beside:
                return original(propagator, op_schema)

        return propagate

    return patch(ShardingPropagator, "_propagate_tensor_meta_non_cached", wrap)


def random_without_states() -> Callable[[], None]:
    """Let DTensor draw random numbers by the op alone; returns what undoes it.

    On CUDA it runs them as a higher-order operator, which moves the generator's state before and after and knows no
    dispatch modes. It is there since 2.12.
    """

    def draw(start: int, end: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return replace_all((dtensor_dispatch,), {"run_dtensor_rng_op": draw})
