"""What data and pipeline parallelism take of torch beside ``communication.py``: why, and since when.

All of it is there since 2.11 or before, unless it is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed.pipelining import PipelineStage

from ampmem.patching import patch

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
