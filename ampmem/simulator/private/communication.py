"""The private parts of torch that other ranks on paper need, beside those in ``general.py``: why, and since when.

Data, pipeline and sharded parallelism have theirs here too. All is there since 2.11 or before, unless it is said.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.distributed.pipelining import PipelineStage
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


_distributed: Any = torch.distributed  # which does not say that it exports these

_register_comm_hook = _distributed._register_comm_hook
HashStore: Any = _distributed.HashStore
FP16_COMPRESS = _distributed.BuiltinCommHookType.FP16_COMPRESS

SYMMETRIC = ("empty", "rendezvous", "enable_symm_mem_for_group", "get_symm_mem_workspace")
"""What makes or shares symmetric memory."""


def fsdp_copies() -> tuple[Any, Any]:
    """The ops that split what FSDP2 has gathered, and that join what it is to scatter; its import makes them."""

    return torch.ops.fsdp.split_with_sizes_copy.default, torch.ops.fsdp.chunk_cat.default


def symmetric_memory() -> Any:
    """The module of symmetric memory."""
    return _symmetric_memory


def checkpoints() -> tuple[Any, ...]:
    """The modules that have ``save``, ``async_save`` and ``load``, which write and read what is sharded."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    return checkpoint, state_dict_loader, state_dict_saver


def tracers() -> tuple[Any, ...]:
    """The modules that have ``pipeline``, which traces a model with ``torch.export``."""
    return torch.distributed.pipelining, torch.distributed.pipelining._IR


def built_in_hooks(register: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Let ``register`` have DDP's hooks in C++, with the reducer and the kind; returns what undoes it.

    They take lists of tensors of C++ out of a future, and one made in Python has a list of Python.
    """
    return patch(torch.distributed, "_register_builtin_comm_hook", lambda original: register)


def hooks_of_cuda_builds() -> Callable[[], None]:
    """Let DDP take the hook that compresses to bfloat16 in a build without CUDA; returns what undoes it.

    ``_check_comm_hook`` asks ``torch.version.cuda``.
    """

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def check(parallel: Any, hook: Any) -> None:
            former = torch.version.cuda
            torch.version.cuda = former or "12.8"
            try:
                original(parallel, hook)
            finally:
                torch.version.cuda = former

        return check

    return patch(torch.nn.parallel.DistributedDataParallel, "_check_comm_hook", wrap)


def register_hook(reducer: Any, group: Any, hook: Callable[..., Any]) -> None:
    """Let ``reducer`` call ``hook`` for each bucket, with ``group``, or ``None`` for the default one."""
    _register_comm_hook(reducer, group, hook)


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
        undo.callback(patch(_distributed.Reducer, "prepare_for_forward", _nothing))
        undo.callback(patch(_distributed.Logger, "set_runtime_stats_and_log", _nothing))
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

    reducer, parallel = _distributed.Reducer, torch.nn.parallel.DistributedDataParallel
    with ExitStack() as undo:
        undo.callback(patch(reducer, "_rebuild_buckets", wrap))
        undo.callback(patch(reducer, "_set_static_graph", wrap))
        undo.callback(patch(parallel, "_ddp_init_helper", wrap))
        return undo.pop_all().close


def stages_meet(hear: Callable[[Any, int], Any], tell: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Let a pipeline's stage ask ``hear`` for the shapes that a stage on another rank has found out, and give its own
    to ``tell``; returns what undoes it.

    Since 2.12; before, a stage asked for a tuple of tensors.
    """
    with ExitStack() as undo:
        if "_recv_meta" in vars(PipelineStage):
            undo.callback(patch(PipelineStage, "_recv_meta", lambda original: hear))
            undo.callback(
                patch(PipelineStage, "_send_meta", lambda original: lambda stage, meta, to: tell(stage, meta))
            )
        else:
            undo.callback(patch(PipelineStage, "_shape_inference", lambda original: _asks_first(original, hear)))
        return undo.pop_all().close


def _asks_first(original: Callable[..., Any], hear: Callable[[Any, int], Any]) -> Callable[..., Any]:
    def shape_inference(stage: Any, *args: Any, **kwargs: Any) -> Any:
        before = stage.stage_index - 1
        if before >= 0 and stage.stage_index_to_group_rank[before] != stage.group_rank:
            hear(stage, before)
        return original(stage, *args, **kwargs)

    return shape_inference


def stages_vote(note: Callable[[Tensor, int], None]) -> Callable[[], None]:
    """Let ``note`` know the result where stages vote whether shapes have to be found out; returns what undoes it.

    The others are taken to vote as this rank's do. From 2.12 to 2.14.
    """
    if "_warmup_forward_vote" not in vars(PipelineStage):
        return lambda: None

    def forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def vote(stage: Any, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
            counted = original(stage, has_backward, received_acc=received_acc)
            note(counted, _vote(stage, has_backward))
            stage.ampmem_vote = _vote(stage, has_backward)
            return counted

        return vote

    def backward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def result(stage: Any, received_result: Tensor | None = None) -> Tensor:
            found = original(stage, received_result=received_result)
            note(found, stage.__dict__.pop("ampmem_vote"))
            return found

        return result

    with ExitStack() as undo:
        undo.callback(patch(PipelineStage, "_warmup_forward_vote", forward))
        undo.callback(patch(PipelineStage, "_warmup_backward_result", backward))
        return undo.pop_all().close


def _vote(stage: Any, has_backward: bool) -> int:
    from torch.distributed.pipelining._utils import InferenceMode

    return 0 if InferenceMode.needs_dynamic(stage._user_meta, has_backward) else 1


def known_inputs(stage: Any) -> Sequence[Any] | None:
    """What comes into ``stage``, as the script's ``input_args`` say; ``None`` where they do not. Since 2.12."""
    return None if getattr(stage, "_user_meta", None) is None else stage._user_meta.inputs


def forward_shapes(inputs: Sequence[Any]) -> Any:
    """What the stage before sends of its results, which are ``inputs``: they are part of its graph. Since 2.12."""
    from torch.distributed.pipelining._utils import _StageForwardMeta

    return _StageForwardMeta(tuple(replace(meta, requires_grad=meta.dtype.is_floating_point) for meta in inputs))


def backward_shapes(stage: Any) -> Any:
    """What the stage after ``stage`` sends of its gradients: they are like this one's results. Since 2.12."""
    from torch.distributed.pipelining._utils import _StageBackwardMeta

    results = stage._stage_meta.outputs
    return _StageBackwardMeta(
        tuple(replace(meta, requires_grad=False) if meta.requires_grad else None for meta in results)
    )
