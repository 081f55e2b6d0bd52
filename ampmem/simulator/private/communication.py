"""Private torch APIs for simulating other ranks: why they are needed, and since when they exist.

Those for data, pipeline and sharded parallelism are here, too; all others are in ``general.py``. All exist since 2.11
or before, unless noted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from ampmem.patching import Undo, added, patch, replace_all, undone_together
from ampmem.simulator.private.general import FakeTensorMode, without_modes
from ampmem.simulator.world import World

c10d = torch.ops.c10d

FAKE = "fake"
"""Torch's own backend for tests, without peers, whose collectives return at once.

Since 2.1; importing ``fake_pg`` registers it.
"""

ALL_GATHERS = (c10d.allgather_.default, c10d._allgather_base_.default)
REDUCE_SCATTERS = (c10d.reduce_scatter_.default, c10d._reduce_scatter_base_.default)
"""Collectives as ops, since 2.0; a dispatch mode sees them. The first of each kind takes lists of tensors."""

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
"""Functional collectives, which return new tensors; used by DTensor and tensor parallelism. Since 2.3."""
WAITS = (_functional.wait_tensor.default, torch.ops.c10d_functional.wait_tensor.default)
"""Ops that wait for a functional collective. The second is the older name. Since 2.3 and 2.1."""


def group_named(name: str) -> Any:
    """The process group that a functional collective names. Since 2.2."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    return resolve(name)


@undone_together
def install(world: World, *, cuda: bool) -> Iterator[Undo]:
    """Install all of the following except :func:`done`, for a rank of ``world`` on ``cuda``; returns the undo."""
    if cuda:
        yield current_device(world.local_rank)
    yield cuda_is_the_accelerator()
    yield shapes_take_no_memory()
    yield random_without_states()
    yield slices_on_demand()
    yield strides_looked_up_once()


def done(tensors: Iterable[Tensor]) -> Any:
    """The work object of a completed collective. Since 2.11 or before.

    Its future returns ``tensors``, as NCCL's does: DDP's reducer and the script's hooks read them there. The future of
    torch's fake backend returns ``None``.
    """
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def current_device(index: int) -> Callable[[], None]:
    """Make torch's C++ resolve ``cuda`` to ``cuda:index``; returns the undo.

    ``torch._C._accelerator_setDeviceIndex`` sets the device guard, here torch's inert one, since 2.6. Without it
    ``.to("cuda")`` would copy a tensor on ``cuda:3``. The fake tensors' cache has the device of an op's result, also
    for ``device="cuda"``; the method that clears it exists since 2.2.
    """

    def become(index: int) -> None:
        torch._C._accelerator_setDeviceIndex(index)
        FakeTensorMode.cache_clear()

    become(index)
    return added("torch._C", "device index", functools.partial(become, 0))


def cuda_is_the_accelerator() -> Callable[[], None]:
    """Make ``fully_shard`` and others use CUDA as a mesh's device; returns the undo.

    ``torch._C._get_accelerator`` exists since 2.5, and CPU builds return "cpu".
    """
    return patch(torch._C, "_get_accelerator", lambda original: lambda check=None: torch.device("cuda"))


def shapes_take_no_memory() -> Callable[[], None]:
    """Make DTensor compute a result's global shape without the simulated device; returns the undo.

    DTensor runs the op on fake tensors of the global shape, in whichever fake mode is active: the method exists since
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
    """Make DTensor draw random numbers by the op alone; returns the undo.

    On CUDA it runs them as a higher-order operator, which sets the generator's state before and after and does not
    support dispatch modes. Since 2.12.
    """

    def draw(start: int, end: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return replace_all((dtensor_dispatch,), {"run_dtensor_rng_op": draw})


def slices_on_demand() -> Callable[[], None]:
    """Make FSDP2 create only the slices of a parameter that it uses, not those of all ranks; returns the undo.

    They are views and take no memory, but each is a tensor: three million for 700 parameters on 4096 ranks.
    ``_chunk_with_empty`` exists since 2.2, in this module since 2.6.
    """
    return replace_all((fsdp_param,), {"_chunk_with_empty": _Slices})


class _Slices:
    """``torch.chunk(tensor, count, dim)`` on demand, with empty slices for ranks that get nothing."""

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
    """Make DTensor check once per op on lists whether any tensor has strided shards; returns the undo.

    It checks all of them for each of them: half a minute for the 720 parameters of an optimizer's first step. The
    function exists since 2.12, and does nothing if no tensor has.
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


_distributed: Any = torch.distributed  # Any: these names are not exported for type checkers

_register_comm_hook = _distributed._register_comm_hook
HashStore: Any = _distributed.HashStore
FP16_COMPRESS = _distributed.BuiltinCommHookType.FP16_COMPRESS

SYMMETRIC = ("empty", "rendezvous", "enable_symm_mem_for_group", "get_symm_mem_workspace")
"""Functions that make or share symmetric memory."""


def fsdp_copies() -> tuple[Any, Any]:
    """The ops that split what FSDP2 has gathered and join what it will scatter; its import registers them."""

    return torch.ops.fsdp.split_with_sizes_copy.default, torch.ops.fsdp.chunk_cat.default


def symmetric_memory() -> Any:
    """The module of symmetric memory."""
    return _symmetric_memory


def checkpoints() -> tuple[Any, ...]:
    """The modules with ``save``, ``async_save`` and ``load`` for sharded checkpoints."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    return checkpoint, state_dict_loader, state_dict_saver


def tracers() -> tuple[Any, ...]:
    """The modules with ``pipeline``, which traces a model with ``torch.export``."""
    return torch.distributed.pipelining, torch.distributed.pipelining._IR


def built_in_hooks(register: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Replace the registration of DDP's C++ hooks by ``register``; returns the undo.

    ``register`` gets the reducer and the kind. The hooks take C++ lists of tensors out of a future, and a future made
    in Python has a Python list.
    """
    return patch(torch.distributed, "_register_builtin_comm_hook", lambda original: register)


def hooks_of_cuda_builds() -> Callable[[], None]:
    """Make DDP accept the hook that compresses to bfloat16 in a build without CUDA; returns the undo.

    ``_check_comm_hook`` reads ``torch.version.cuda``.
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
    """Register ``hook`` with ``reducer`` for each bucket; ``group`` is ``None`` for the default one."""
    _register_comm_hook(reducer, group, hook)


def nobody_to_verify(verify: Callable[[Any, Sequence[Tensor]], None]) -> Callable[[], None]:
    """Make DDP call ``verify`` instead of comparing parameters with other ranks; returns the undo.

    Torch reads the answers of other ranks in C++.
    """

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def verify_params(group: Any, parameters: Sequence[Tensor], logger: Any = None) -> None:
            if isinstance(parameters[0], torch._subclasses.FakeTensor):
                verify(group, parameters)
            else:
                original(group, parameters, logger)

        return verify_params

    return patch(torch.distributed, "_verify_params_across_processes", wrap)


@undone_together
def nothing_is_timed() -> Iterator[Undo]:
    """Prevent DDP's reducer from timing its first iterations with CUDA events; returns the undo.

    It does so in C++, where there is no device. The call before each forward starts the count of iterations, and
    nothing else; the logger then dereferences the times.
    """
    yield patch(_distributed.Reducer, "prepare_for_forward", _nothing)
    yield patch(_distributed.Logger, "set_runtime_stats_and_log", _nothing)


def _nothing(original: Callable[..., None]) -> Callable[..., None]:
    return lambda reducer: None


@undone_together
def around_bookkeeping(region: Callable[[], Any]) -> Iterator[Undo]:
    """Enter ``region`` while DDP's reducer makes its own integers; returns the undo."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def inside(reducer: Any, *args: Any) -> Any:
            with region():
                return original(reducer, *args)

        return inside

    reducer, parallel = _distributed.Reducer, torch.nn.parallel.DistributedDataParallel
    yield patch(reducer, "_rebuild_buckets", wrap)
    yield patch(reducer, "_set_static_graph", wrap)
    yield patch(parallel, "_ddp_init_helper", wrap)


@undone_together
def stages_meet(hear: Callable[[Any, int], Any], tell: Callable[[Any, Any], None]) -> Iterator[Undo]:
    """Make a pipeline stage get the shapes of another rank's stage from ``hear``, and pass its own to ``tell``.

    Returns the undo. Since 2.12; before, a stage asked for a tuple of tensors.
    """
    if "_recv_meta" in vars(PipelineStage):
        yield patch(PipelineStage, "_recv_meta", lambda original: hear)
        yield patch(PipelineStage, "_send_meta", lambda original: lambda stage, meta, to: tell(stage, meta))
    else:
        yield patch(PipelineStage, "_shape_inference", lambda original: _asks_first(original, hear))


def _asks_first(original: Callable[..., Any], hear: Callable[[Any, int], Any]) -> Callable[..., Any]:
    def shape_inference(stage: Any, *args: Any, **kwargs: Any) -> Any:
        before = stage.stage_index - 1
        if before >= 0 and stage.stage_index_to_group_rank[before] != stage.group_rank:
            hear(stage, before)
        return original(stage, *args, **kwargs)

    return shape_inference


def stages_vote(note: Callable[[Tensor, int], None]) -> Callable[[], None]:
    """Call ``note`` with the result when stages vote whether shapes must be computed; returns the undo.

    Other ranks are assumed to vote like this one. From 2.12 to 2.14.
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
    """The inputs of ``stage`` from the script's ``input_args``; ``None`` without them. Since 2.12."""
    return None if getattr(stage, "_user_meta", None) is None else stage._user_meta.inputs


def forward_shapes(inputs: Sequence[Any]) -> Any:
    """The metadata that the previous stage sends for ``inputs``, its results, which are in its graph. Since 2.12."""
    from torch.distributed.pipelining._utils import _StageForwardMeta

    return _StageForwardMeta(tuple(replace(meta, requires_grad=meta.dtype.is_floating_point) for meta in inputs))


def backward_shapes(stage: Any) -> Any:
    """The metadata of the gradients that the next stage sends: they are like this stage's results. Since 2.12."""
    from torch.distributed.pipelining._utils import _StageBackwardMeta

    results = stage._stage_meta.outputs
    return _StageBackwardMeta(
        tuple(replace(meta, requires_grad=False) if meta.requires_grad else None for meta in results)
    )
