"""Private APIs of torch.distributed that recording uses, and functions that it patches; as in ``general.py``.

For sharded training: FSDP2's parameters and groups, FSDP1's flat parameters, DTensor's collectives. Nothing is imported
before the script has imported it: :func:`fully_sharded` and :func:`functional` tell. Versions differ: what one lacks is
left out, and a note says what is then not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn

from ampmem.recorder.torch_private.entries import Place, Use, at, attribute, optional, patched

# -- ranks and their places -------------------------------------------------------------------------

default_store: Callable[[], Any] | None = optional(
    "torch.distributed.distributed_c10d",
    "_get_default_store",
    "to let all ranks agree to stop together",
    without="a script with several ranks is not stopped after the last recorded step; it runs to completion",
    otherwise=None,
)
NEW_MESH = patched(
    "torch.distributed.device_mesh.DeviceMesh",
    "__init__",
    "to read the axes of the script's device mesh",
    without="the rank's position in the device mesh is not recorded",
)
JOINED = patched(
    "torch.multiprocessing.ProcessContext",
    "join",
    "to stop a script, too, that waits for stopped ranks",
    without="a script that spawns its ranks is not stopped; it runs to completion",
)
GROUP_MADE = patched(
    "torch.distributed.distributed_c10d",
    "_update_default_pg",
    "to see a process of multiprocessing become a rank",
    without="processes that the script starts with multiprocessing are not recorded",
)


def world_size() -> int:
    """Number of ranks; 1 if torch.distributed is not initialized."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


# -- DistributedDataParallel ------------------------------------------------------------------------

_BUCKETS = "DDP's buckets cannot be identified: they count as other memory"

REDUCER_INIT: Place = patched(
    "torch._C._distributed_c10d.Reducer",
    "__init__",
    "to see the first buckets of DistributedDataParallel",
    without=_BUCKETS,
)
STATIC_GRAPH: Place = patched(
    "torch._C._distributed_c10d.Reducer",
    "_set_static_graph",
    "to see DDP's record of the parameters that a step used",
    without="a few bytes of DDP count as other memory",
)
REBUILD_BUCKETS: Place = patched(
    "torch._C._distributed_c10d.Reducer",
    "_rebuild_buckets",
    "to see the buckets that DDP rebuilds in the order of the gradients",
    without=_BUCKETS,
)
BROADCASTS: tuple[Place, ...] = tuple(
    patched("torch.distributed", name, why, without="memory of DDP's broadcasts counts as other memory")
    for name, why in (
        ("_broadcast_coalesced", "to see the flat copies with which DDP broadcasts parameters and buffers"),
        ("_verify_params_across_processes", "to see the parameter shapes that DDP compares with another rank's"),
    )
)

# -- process groups ---------------------------------------------------------------------------------


def _collective(name: str) -> Place:
    return patched(
        "torch._C._distributed_c10d.ProcessGroup",
        name,
        "to see the tensors given to a process group, whose threads may free them",
        without="tensors freed by the threads of a process group are identified by their sizes",
    )


RECEIVES: tuple[Place, ...] = (_collective("recv"), _collective("recv_anysource"))
COLLECTIVES: tuple[Place, ...] = (*RECEIVES, *map(_collective, ("send", "allreduce", "broadcast")))


_PACKAGE = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_PACKAGE}._fsdp_param_group.FSDPParamGroup"
_PARAM = f"{_PACKAGE}._fsdp_param.FSDPParam"
_FUNCTIONAL = "torch.distributed._functional_collectives"
_DTENSOR = "torch.distributed.tensor"
_NOT_SEEN = "memory of FSDP2's communication counts as other memory"
_NO_SHARDS = "an unsharded parameter of FSDP2 may be taken for another one"


def fully_sharded() -> bool:
    """Whether the script has imported FSDP2."""
    return f"{_PACKAGE}._fsdp_param_group" in sys.modules


def functional() -> bool:
    """Whether the script has imported functional collectives, which return new tensors; DTensor uses them."""
    return _FUNCTIONAL in sys.modules


UNSHARD, WAIT, RESHARD, POST_BACKWARD = (
    attribute(_GROUP, name, why, without=_NOT_SEEN, use=Use.SHARDED)
    for name, why in (
        ("unshard", "to see the output of an all-gather"),
        ("wait_for_unshard", "to see the unsharded parameters"),
        ("reshard", "to see when the unsharded parameters are freed"),
        ("post_backward", "to see the gradients of the unsharded parameters"),
    )
)
REDUCE = attribute(
    f"{_PACKAGE}._fsdp_param_group", "foreach_reduce", "to see what is reduced", without=_NOT_SEEN, use=Use.SHARDED
)
INPUTS = attribute(
    f"{_PACKAGE}._fsdp_collectives",
    "_get_param_all_gather_inputs",
    "to see the inputs of an all-gather that are not shards themselves",
    without=_NOT_SEEN,
    use=Use.SHARDED,
)


def _with_attributes_of(owner: str, *methods: str) -> SimpleNamespace:
    """An object with all attributes that those methods set, and that the class annotates."""
    kind = at(owner)
    named = {name for method in methods for name in vars(kind)[method].__code__.co_names} | set(kind.__annotations__)
    # An attribute that the class has but that cannot be read from it is missing in its objects, too.
    return SimpleNamespace(**{name: None for name in named if name not in vars(kind) or hasattr(kind, name)})


def _of_group(name: str, why: str) -> str:
    return attribute(
        _GROUP, name, why, without=_NOT_SEEN, use=Use.SHARDED, example=lambda: _with_attributes_of(_GROUP, "__init__")
    )


def _of_param(name: str, why: str, without: str = _NO_SHARDS) -> str:
    methods = ("__init__", "_init_sharded_param", "_init_extensions", "init_unsharded_param")
    return attribute(
        _PARAM, name, why, without=without, use=Use.SHARDED, example=lambda: _with_attributes_of(_PARAM, *methods)
    )


_PARAMS = _of_group("fsdp_params", "to know which parameters are gathered together")
_MODULES = _of_group("modules", "to know whose parameters a group has")
_PENDING = _of_group("_all_gather_result", "to see the output of an all-gather")
_SHARD = _of_param("sharded_param", "to find the shard that the optimizer has")
_WHOLE = _of_param("_unsharded_param", "to find the unsharded parameter that modules have while they run")
_OUTPUTS = _of_param("all_gather_outputs", "to find the memory of the unsharded parameter", _NOT_SEEN)
_INNER = _of_param("_unsharded_inner_tensors", "to find the memory of an unsharded quantized parameter", _NOT_SEEN)
_PADDED = _of_param("padded_sharded_param_size", "to know the padding of a shard", "padding of shards is not shown")
_SIZE = _of_param("sharded_size", "to know the padding of a shard", "padding of shards is not shown")
_OFFLOADED = _of_param(
    "offload_to_cpu", "to know which shards are offloaded to the CPU", "offloaded shards count as not recorded"
)
_PARTLY_WHOLE = ("_sharded_post_forward_param_data", "_sharded_post_forward_param")
_FLAT = "torch.distributed.fsdp._flat_param"
_NO_WHOLE = "only this rank's elements of FSDP1's parameters are known"
_FLAT_SIZE, _FLAT_SHAPES, _FLAT_PARAMS = (
    attribute(
        f"{_FLAT}.FlatParameter",
        name,
        why,
        without=_NO_WHOLE,
        use=Use.SHARDED,
        example=lambda: _with_attributes_of(f"{_FLAT}.FlatParameter"),
    )
    for name, why in (
        (
            "_unpadded_unsharded_size",
            "to know the number of elements of a flat parameter of FSDP1 on all ranks together",
        ),
        ("_shapes", "to know the shapes of the parameters in a flat parameter"),
        ("_params", "to find the parameters of a flat parameter that modules keep (use_orig_params)"),
    )
)
_ACCUMULATED = "unsharded_accumulated_grad"
"""The accumulated gradient of an unsharded parameter; only some versions of torch have it."""

_STATE = attribute(
    f"{_PACKAGE}._fully_shard.FSDPModule",
    "_get_fsdp_state",
    "to know which parameters FSDP2 shards",
    without=_NO_SHARDS,
    use=Use.SHARDED,
)
_GROUPS = ("_fsdp_param_groups", "_fsdp_param_group")
"""Names of an FSDP state's groups: a list since 2.12, a single one before."""


def places(name: str) -> list[Place]:
    """The places at which one of the names above is patched; none if this torch lacks it."""
    module = "_fsdp_collectives" if name == INPUTS else "_fsdp_param_group"
    owner = at(_GROUP) if name in (UNSHARD, WAIT, RESHARD, POST_BACKWARD) else at(f"{_PACKAGE}.{module}")
    return [(owner, name)] if name in vars(owner) else []


def fsdp_groups(module: nn.Module) -> list[Any]:
    """The parameter groups that FSDP2 made of ``module``; none if it made none."""
    if not isinstance(module, at(f"{_PACKAGE}._fully_shard").FSDPModule):
        return []
    state = getattr(module, _STATE)()
    # FSDP2 may divide one module's parameters between several groups since torch 2.12.
    several, one = (getattr(state, name, None) for name in _GROUPS)
    return list(several) if several is not None else [one] if one is not None else []


def params_of(group: Any) -> list[Any]:
    """FSDP2's own objects for the parameters of ``group``."""
    return list(getattr(group, _PARAMS, ()))


def fsdp_module(group: Any) -> nn.Module | None:
    """The first module of ``group``."""
    modules = getattr(group, _MODULES, ())
    return modules[0] if modules else None


def is_gathering(group: Any) -> bool:
    """Whether an all-gather for ``group`` is pending."""
    return getattr(group, _PENDING, None) is not None


def gathered(group: Any) -> torch.Tensor | None:
    """The output of the pending all-gather for ``group``."""
    result = getattr(group, _PENDING, None)
    return result[0] if isinstance(result, tuple) and isinstance(result[0], torch.Tensor) else None


def shard_of(param: Any) -> nn.Parameter | None:
    """The sharded parameter, which the optimizer has."""
    return getattr(param, _SHARD, None)


def stand_ins(param: Any) -> Iterator[torch.Tensor]:
    """The parameters that modules have instead of the shard while they run."""
    for name in (_WHOLE, _PARTLY_WHOLE[1]):
        found = getattr(param, name, None)
        if found is not None:
            yield found


def whole_of(param: Any) -> nn.Parameter | None:
    """The unsharded parameter; ``None`` before its first all-gather."""
    return getattr(param, _WHOLE, None)


def whole_memory(param: Any) -> list[torch.Tensor]:
    """The tensors that hold the unsharded parameter; they persist, with empty storages while it is not gathered."""
    partly = getattr(param, _PARTLY_WHOLE[0], None)
    more = [] if partly is None else [partly]
    return [*getattr(param, _OUTPUTS, ()), *getattr(param, _INNER, ()), *more]


def whole_gradients(param: Any) -> Iterator[torch.Tensor]:
    """The current gradients of the unsharded parameter."""
    whole = whole_of(param)
    for gradient in (None if whole is None else whole.grad, getattr(param, _ACCUMULATED, None)):
        if gradient is not None:
            yield gradient


def padding_of(param: Any) -> int:
    """Number of padding elements in the shard's memory."""
    padded, size = getattr(param, _PADDED, None), getattr(param, _SIZE, None)
    return 0 if padded is None or size is None else int(padded.numel() - size.numel())


def flat_wholes(module: nn.Module) -> Iterator[tuple[torch.Tensor, int]]:
    """The parameters that FSDP1 shards for ``module``, each with its elements on all ranks; none without FSDP1."""
    handle = vars(module).get("_handle")
    if handle is None or _FLAT not in sys.modules or not isinstance(handle, at(_FLAT).FlatParamHandle):
        return
    flat = handle.flat_param
    size = getattr(flat, _FLAT_SIZE, None)
    if size is None or not handle.uses_sharded_strategy:
        return
    yield flat, size.numel()
    shapes = getattr(flat, _FLAT_SHAPES, ())
    for parameter, shape in zip(getattr(flat, _FLAT_PARAMS, None) or (), shapes, strict=False):
        yield parameter, shape.numel()


def is_offloaded(param: Any) -> bool:
    """Whether the shard stays on the CPU while its module does not run (``CPUOffloadPolicy``)."""
    return bool(getattr(param, _OFFLOADED, False))


def is_part_of_whole(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor whose elements are divided among processes."""
    module = sys.modules.get(_DTENSOR)
    if module is None or not isinstance(tensor, module.DTensor):
        return False
    sizes = tensor.device_mesh.shape
    return any(
        size > 1 and not placement.is_replicate() and not placement.is_partial()
        for size, placement in zip(sizes, tensor.placements, strict=True)
    )


_COLLECTIVES: dict[str, tuple[str, ...]] = {
    "all_gather": ("all_gather", "all_gather_into_tensor", "all_gather_single", "gather"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    "all_reduce": ("all_reduce", "reduce"),
    "all_to_all": ("all_to_all", "all_to_all_single"),
    "broadcast": ("broadcast", "scatter"),
}
"""Functions of ``torch.distributed`` that fill their arguments, by kind of memory, if this version has them."""

_RETURNING: dict[str, tuple[str, ...]] = {
    "all_gather": (
        "all_gather_tensor",
        "all_gather_single",
        "all_gather_into_tensor_coalesced",
        "all_gather_single_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    ),
    "all_reduce": ("all_reduce", "all_reduce_coalesced"),
    "all_to_all": ("all_to_all_single",),
    "broadcast": ("broadcast",),
}
"""Functional collectives, which return their outputs, by kind of memory, if this version has them."""

for _part, _names in _RETURNING.items():
    attribute(_FUNCTIONAL, _names[0], f"{_part} of DTensor's", without=_NOT_SEEN, use=Use.SHARDED)


def collectives() -> Iterator[tuple[str, Place]]:
    """(kind of memory, place) of each function of ``torch.distributed`` that fills its arguments."""
    return _places_of(torch.distributed, _COLLECTIVES)


def returning_collectives() -> Iterator[tuple[str, Place]]:
    """(kind of memory, place) of each functional collective."""
    return _places_of(at(_FUNCTIONAL), _RETURNING)


def _places_of(owner: ModuleType, names: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Place]]:
    for part, functions in names.items():
        for name in functions:
            if name in vars(owner):
                yield part, (owner, name)
