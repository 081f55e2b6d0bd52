"""Simulates parallel training: DDP, FSDP2's copies, pipelines, and calls that ask other processes.

``DistributedDataParallel`` makes its buckets in C++, which are seen like any tensor. FSDP2's copies between whole
parameters and their shards are not collectives, but kernels whose arguments take memory: a kernel that copies many
pieces reads them from a tensor of integers on the device. Source: ``aten/src/ATen/native/cuda/TensorShape.cu``; torch
2.14.1 allocates the same on the emulated runtime. Of a pipeline one rank runs its stages, and tensors from the other
stages have the shapes that those would send. Calls that wait for other processes, or ask them, are answered here if the
answer is known, and refused if not.
"""

from __future__ import annotations

import math
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

from ampmem.allocator.gpus import GpuSpec
from ampmem.own_code import script_line
from ampmem.patching import Undo, added, in_place_of, replace_all, undone_together
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import communication as private
from ampmem.simulator.private.general import FakeTensor, tree_map
from ampmem.simulator.where import stop, stopping
from ampmem.simulator.world import World, check_index

aten = torch.ops.aten


@undone_together
def install(mode: SimulatedMode, world: World) -> Iterator[Undo]:
    """Install everything in this module; returns the undo."""
    yield _install_data_parallel(mode)
    yield _install_sharded(mode)
    yield private.stages_meet(_hear, _tell)
    yield private.stages_vote(mode.known.fill)
    yield _install_elsewhere(world, mode)


@undone_together
def _install_data_parallel(mode: SimulatedMode) -> Iterator[Undo]:
    """Let ``DistributedDataParallel`` run without peers; returns the undo."""
    ddp = torch.nn.parallel.DistributedDataParallel
    yield private.nobody_to_verify(_verify)
    yield private.nothing_is_timed()
    yield _pinned(mode)
    yield private.built_in_hooks(_register)
    yield private.hooks_of_cuda_builds()
    yield replace_all((ddp,), {"__init__": in_place_of(ddp.__init__, _init_on_this_device)})
    if mode.everything:
        yield private.around_bookkeeping(lambda: _real_integers(mode))


def _verify(group: Any, parameters: Sequence[Tensor]) -> None:
    """Allocate as ``verify_params_across_processes`` (``reducer.cpp``) does, to compare counts and shapes."""
    device = parameters[0].device
    count = torch.tensor([len(parameters)], device=device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    torch.distributed.all_gather(counts, count, group=group)
    shapes = torch.empty(2 * sum(parameter.dim() for parameter in parameters), dtype=torch.int64)
    sent = shapes.to(device)
    torch.distributed.broadcast(sent, group=group, group_src=0)
    sent.copy_(shapes)  # rank 0 sends the same; without the copy other ranks' values would be unknown
    torch.empty_like(shapes).copy_(sent)


def _register(reducer: Any, kind: Any) -> None:
    """Register DDP's built-in C++ hooks as Python hooks that allocate the same."""
    private.register_hook(reducer, None, fp16_compress_hook if kind == private.FP16_COMPRESS else allreduce_hook)


def _init_on_this_device(
    original: Any, parallel: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any
) -> None:
    """``DistributedDataParallel.__init__``, which refuses GPUs of other ranks before torch looks for them."""
    for where in device_ids or ():
        check_index(where if isinstance(where, int) else torch.device(where).index)
    original(parallel, module, device_ids, *args, **kwargs)


def _pinned(mode: SimulatedMode) -> Callable[[], None]:
    """Let tensors claim pinned memory, which does not exist without a driver.

    DDP's reducer requires it for its copy of the used parameters.
    """
    pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def empty(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not kwargs.get("pin_memory"):
            return mode.unanswered(func, (), args, kwargs)
        # Pinning needs a driver, so the tensor only says that it is pinned.
        made = mode.unanswered(func, (), args, {**kwargs, "pin_memory": False})
        pinned.add(made.untyped_storage())
        return made

    def is_pinned(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return args[0].untyped_storage() in pinned

    empties = (aten.empty.memory_format, aten.empty_strided.default)
    return _answered(mode, dict.fromkeys(empties, empty) | {aten.is_pinned.default: is_pinned})


@contextmanager
def _real_integers(mode: SimulatedMode) -> Iterator[None]:
    """Keep tensors real while the reducer makes its integers, which it reads and writes in C++."""

    def make(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if kwargs.get("dtype") != torch.int32:
            return mode.unanswered(func, (), args, kwargs)
        # C++ reads and writes these through their pointers, which fake tensors do not have.
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
    """Use these ``answers`` for ops; the returned undo restores the former ones."""
    former = {op: mode.answers.get(op) for op in answers}
    mode.answers.update(answers)

    def put_back() -> None:
        for op, answer in former.items():
            if answer is None:
                mode.answers.pop(op, None)
            else:
                mode.answers[op] = answer

    return added("answers", "DistributedDataParallel", put_back)


_LONG = 8
_THREADS, _BYTES_PER_THREAD = 128, 16
_BLOCK = _THREADS * _BYTES_PER_THREAD


def _install_sharded(mode: SimulatedMode) -> Callable[[], None]:
    """Book the memory of FSDP2's copies; returns the undo."""
    gather, scatter = private.fsdp_copies()

    def split(func: Any, args: Any, kwargs: Any) -> Any:
        source, sizes, *dim = args
        if not isinstance(source, FakeTensor):
            return func(*args, **kwargs)
        size = of_split(source, sizes, dim[0] if dim else 0, mode.device_model.gpu)
        return _run_with_buffer(mode, func, args, kwargs, kwargs["out"], size)

    def chunk(func: Any, args: Any, kwargs: Any) -> Any:
        tensors, dim, count = args
        out = kwargs["out"]
        if not isinstance(out, FakeTensor):
            return func(*args, **kwargs)
        return _run_with_buffer(mode, func, args, kwargs, [out], of_chunks(tensors, dim, count, out.element_size()))

    mode.answers.update({gather: split, scatter: chunk})
    return added("answers", "FSDP2", lambda: [mode.answers.pop(op) for op in (gather, scatter)])


def _run_with_buffer(mode: SimulatedMode, func: Any, args: Any, kwargs: Any, out: Sequence[Tensor], size: int) -> Any:
    device = mode.device_model
    result = mode.run(func, args, kwargs)
    for tensor in out:
        mode.forget(tensor.untyped_storage())
    if device.label == "cuda" and size:
        device.scratch(str(func), (size,))
    return result


def of_split(source: Tensor, sizes: Sequence[int], dim: int, gpu: GpuSpec) -> int:
    """Bytes of the arguments of the kernel that splits ``source`` (``split_with_sizes_copy_out_cuda``)."""
    chunks = math.prod(source.shape[:dim])
    item = math.prod(source.shape[dim + 1 :]) * source.element_size()
    pieces = [size * item for size in sizes]
    most = (gpu.sm_count or 108) * gpu.threads_per_sm // _THREADS * 2
    factor = max(-(-_blocks(pieces, _BLOCK) * chunks // most), 1)
    together = min(math.ceil(math.sqrt(factor)), chunks)
    blocks = _blocks(pieces, _BLOCK * -(-factor // max(together, 1)))
    return (4 * len(pieces) + 1 + blocks) * _LONG


def of_chunks(tensors: Sequence[Tensor], dim: int, count: int, item: int) -> int:
    """Bytes of the arguments of the kernel that joins chunks of ``tensors`` (``_chunk_cat_out_cuda``).

    ``item`` is the size of an element of the result.
    """
    pieces = [-(-tensor.shape[dim] // count) * math.prod(tensor.shape[dim + 1 :]) * item for tensor in tensors]
    return (6 * len(pieces) + 2 + _blocks(pieces, _BLOCK)) * _LONG


def _blocks(pieces: Sequence[int], size: int) -> int:
    return sum(-(-piece // size) for piece in pieces)


def _hear(stage: Any, source: int) -> Any:
    """The metadata of the tensors that stage ``source``, on another rank, sends to ``stage``."""
    if source > stage.stage_index:
        shapes = private.backward_shapes(stage)
    else:
        inputs = private.known_inputs(stage)
        if inputs is None:
            raise stop(
                f"stage {stage.stage_index} of the pipeline gets its inputs from stage {source}, which runs on "
                "another rank, but only this rank is simulated; give PipelineStage its input_args= (empty tensors "
                "with the shapes of one microbatch), or simulate rank 0"
            )
        shapes = private.forward_shapes(inputs)
    data = len(pickle.dumps(shapes))
    for size, dtype in ((1, torch.int64), (data, torch.uint8)):
        torch.empty(size, dtype=dtype, device=stage.device)
    return shapes


def _tell(stage: Any, shapes: Any) -> None:
    """Allocate the tensors with which torch sends the shapes; the receiver does not exist."""
    data = torch.empty(len(pickle.dumps(shapes)), dtype=torch.uint8).to(stage.device)
    torch.cat([torch.tensor([data.numel()]).to(stage.device)])


_RPC = (
    "remote procedure calls need the other processes, but one rank is simulated alone; leave torch.distributed.rpc out"
)
_SYMMETRIC = (
    "symmetric memory is allocated by NVSHMEM or CUDA outside PyTorch's allocator and is not simulated; leave it out "
    "to see what the run needs with NCCL's collectives"
)
_CONSOLIDATE = (
    "the other ranks are not simulated, so their optimizer state cannot be gathered; leave out "
    "consolidate_state_dict, which copies it to the host"
)
_LOADED = (
    "a distributed checkpoint of another run cannot be loaded on a simulated device, which has no values; leave "
    "torch.distributed.checkpoint.load out"
)
_WITHOUT_TENSORS = "without_tensors.pickle"
"""The file that a simulated run writes for a distributed checkpoint: all but the tensors, which have no values."""
_TRACED = (
    "a pipeline that is traced from the whole model cannot be simulated; give PipelineStage the module of each stage"
)


@undone_together
def _install_elsewhere(world: World, mode: SimulatedMode) -> Iterator[Undo]:
    """Answer or refuse calls that ask other processes; returns the undo."""
    yield replace_all((torch.multiprocessing,), _processes(world))
    yield replace_all((dist, dist.distributed_c10d), {"TCPStore": _Store})
    yield replace_all((rpc,), {"init_rpc": stopping(_RPC)})
    yield replace_all((private.symmetric_memory(),), dict.fromkeys(private.SYMMETRIC, stopping(_SYMMETRIC)))
    yield replace_all((ZeroRedundancyOptimizer,), {"consolidate_state_dict": stopping(_CONSOLIDATE)})
    yield replace_all(private.tracers(), {"pipeline": stopping(_TRACED)})
    yield replace_all(private.checkpoints(), _files(mode))


def _files(mode: SimulatedMode) -> dict[str, Any]:
    """``torch.distributed.checkpoint`` for tensors without values: what the run itself has saved can be loaded."""

    def save(state_dict: dict[str, Any], **where: Any) -> None:
        folder = _checkpoint(where, "storage_writer")
        if folder is None or not mode.saves:
            mode.device_model.not_written(
                f"torch.distributed.checkpoint wrote nothing, because tensors had no values, at {script_line()}"
            )
            return
        folder.mkdir(parents=True, exist_ok=True)
        known = {name: _state(value) for name, value in state_dict.items()}
        with (folder / _WITHOUT_TENSORS).open("wb") as file:
            pickle.dump(tree_map(lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf, known), file)

    def async_save(state_dict: dict[str, Any], **where: Any) -> Any:
        saved: Future[None] = Future()
        save(state_dict, **where)
        saved.set_result(None)
        return saved

    def load(state_dict: dict[str, Any], **where: Any) -> None:
        folder = _checkpoint(where, "storage_reader")
        if folder is None or not (folder / _WITHOUT_TENSORS).exists():
            raise stop(_LOADED)
        with (folder / _WITHOUT_TENSORS).open("rb") as file:
            _fill(state_dict, pickle.load(file))

    return {"save": save, "async_save": async_save, "load": load}


def _checkpoint(where: Mapping[str, Any], by: str) -> Path | None:
    """The folder of a distributed checkpoint, if it is one."""
    folder = where.get("checkpoint_id") or getattr(where.get(by), "path", None)
    return Path(folder) if isinstance(folder, (str, os.PathLike)) else None


def _state(value: Any) -> Any:
    """The state of ``value`` if it has its own functions for it (``Stateful``)."""
    return value.state_dict() if hasattr(value, "load_state_dict") else value


def _fill(state: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Put the ``loaded`` objects into ``state``, in place; its tensors stay, as their values are unknown anyway."""
    for name, value in state.items():
        if hasattr(value, "load_state_dict"):
            own = value.state_dict()
            _fill(own, loaded[name])
            value.load_state_dict(own)
        elif isinstance(value, dict):
            _fill(value, loaded[name])
        elif not isinstance(value, torch.Tensor):
            state[name] = loaded[name]


class _Joined:
    """The processes that a script started, all of them ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        """``True``: all have ended."""
        return True


def _processes(world: World) -> dict[str, Any]:
    """Replace ``mp.spawn``, which starts one process per GPU, by a call for this rank only."""

    def spawn(
        fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> _Joined | None:
        if nprocs != world.local_size:
            raise stop(
                f"the script starts {nprocs} processes, but the machine of rank {world.rank} has {world.local_size} "
                f"of the {world.size} simulated ranks; use --world-size {nprocs}"
            )
        # The other processes would run the same program: this one is the rank that is simulated.
        fn(world.local_rank, *args)
        return None if join else _Joined()

    return {"spawn": spawn, "start_processes": spawn}


class _Store(private.HashStore):  # type: ignore[misc]
    """A ``TCPStore`` that does not wait for the other ranks."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def get(self, key: str) -> bytes:
        """The value that this rank has set."""
        # C++ would wait for a missing key until its time limit, as no other rank sets it.
        self._see(key)
        found: bytes = super().get(key)
        return found

    def wait(self, keys: list[str], *_: Any) -> None:
        """Return at once for keys that are set, and refuse others: no rank will set them."""
        for key in keys:
            self._see(key)

    def _see(self, key: str) -> None:
        if not self.check([key]):
            raise stop(
                f"{key!r} is not in the store: another rank would have put it there, but one rank is simulated alone; "
                "do not wait for this key, or choose another rank with --rank"
            )
