"""The private parts of torch that other ranks on paper need, beside those in ``general.py``: why, and since when."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.distributed.tensor import _dispatch as dtensor_dispatch
from torch.distributed.tensor import _sharding_prop as sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

from ampmem.patching import added, patch, replace_all
from ampmem.simulator.private.general import FakeTensorMode, without_modes
from ampmem.simulator.world import World

c10d = torch.ops.c10d

FAKE = "fake"
"""The backend without peers, whose collectives return at once: torch's own, for its tests. Since 2.1; importing
``fake_pg`` registers it."""

ALL_GATHERS = (c10d.allgather_.default, c10d._allgather_base_.default)
REDUCE_SCATTERS = (c10d.reduce_scatter_.default, c10d._reduce_scatter_base_.default)
"""Collectives as ops, since 2.0; a dispatch mode sees them. Of each the one that takes lists of tensors is first."""

_functional = torch.ops._c10d_functional
_NAMES = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_into_tensor_out",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_out",
)
FUNCTIONAL = tuple(getattr(_functional, name).default for name in _NAMES if hasattr(_functional, name))
"""Collectives that return what they have filled, as DTensor and tensor parallelism have them. Since 2.3."""
WAITS = (_functional.wait_tensor.default, torch.ops.c10d_functional.wait_tensor.default)
"""What waits for one of them. The second is the older name. Since 2.3 and 2.1."""


def group_named(name: str) -> Any:
    """The process group that an op of :data:`FUNCTIONAL` names. Since 2.2."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    return resolve(name)


def install(world: World, *, cuda: bool) -> Callable[[], None]:
    """All that follows but :func:`done`, for a rank of ``world`` on ``cuda``; returns what undoes it."""
    with ExitStack() as undo:
        if cuda:
            undo.callback(current_device(world.local_rank))
        undo.callback(cuda_is_the_accelerator())
        undo.callback(shapes_take_no_memory())
        undo.callback(random_without_states())
        undo.callback(slices_on_demand())
        undo.callback(strides_looked_up_once())
        return undo.pop_all().close


def done(tensors: Iterable[Tensor]) -> Any:
    """What an op returns of a collective that is over. Since 2.11 or before.

    Its future gives ``tensors``, as NCCL's does: DDP's reducer and hooks of scripts take them from there. Those of
    torch's own backend without peers give ``None``.
    """
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def current_device(index: int) -> Callable[[], None]:
    """Let torch's C++ take ``cuda`` for ``cuda:index``; returns what undoes it.

    ``torch._C._accelerator_setDeviceIndex`` asks the device guard, here torch's inert one, since 2.6. Without it a
    tensor on ``cuda:3`` would be copied by ``.to("cuda")``. Fake tensors remember on which device an op's result was,
    of ``device="cuda"`` too; the method that lets them forget is there since 2.2.
    """

    def become(index: int) -> None:
        torch._C._accelerator_setDeviceIndex(index)
        FakeTensorMode.cache_clear()

    become(index)
    return added("torch._C", "device index", functools.partial(become, 0))


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

    return patch(sharding_prop.ShardingPropagator, "_propagate_tensor_meta_non_cached", wrap)


def random_without_states() -> Callable[[], None]:
    """Let DTensor draw random numbers by the op alone; returns what undoes it.

    On CUDA it runs them as a higher-order operator, which moves the generator's state before and after and knows no
    dispatch modes. It is there since 2.12.
    """

    def draw(start: int, end: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return replace_all((dtensor_dispatch,), {"run_dtensor_rng_op": draw})


def slices_on_demand() -> Callable[[], None]:
    """Let FSDP2 make the slices of a parameter that it uses, not those of all ranks; returns what undoes it.

    They are views and take no memory, but each is a tensor: three million of them for 700 parameters on 4096 ranks.
    ``_chunk_with_empty`` is there since 2.2, in this module since 2.6.
    """
    return replace_all((fsdp_param,), {"_chunk_with_empty": _Slices})


class _Slices:
    """``torch.chunk(tensor, count, dim)``, with empty ones at the end for ranks that get nothing."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._size = -(-tensor.size(dim) // count)

    def __getitem__(self, index: int) -> torch.Tensor:
        start, length = index * self._size, self._tensor.size(self._dim)
        if start >= length and index > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, length - start))


def strides_looked_up_once() -> Callable[[], None]:
    """Let DTensor see once for an op on lists whether any tensor has strided shards; returns what undoes it.

    It asks all of them for each of them, half a minute for the 720 parameters of an optimizer's first step. The
    function is there since 2.12, and does nothing where none has.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        seen: list[Any] = [None, True]

        @functools.wraps(original)
        def propagate(op_strategy: Any, op_schema: Any) -> None:
            if seen[0] is not op_schema:
                strided = any(isinstance(p, StridedShard) for spec in op_schema.args_spec for p in spec.placements)
                seen[:] = op_schema, strided
            if seen[1]:
                original(op_strategy, op_schema)

        return propagate

    name = "_propagate_use_strided_shard_flag"
    found = getattr(sharding_prop, name, None)
    return replace_all((sharding_prop,), {} if found is None else {name: wrap(found)})
