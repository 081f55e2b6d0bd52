"""FSDP2's copies between whole parameters and their shards: not collectives, but kernels whose arguments take memory.

A kernel that copies many pieces is told of them by a tensor of integers on the device. Source:
``aten/src/ATen/native/cuda/TensorShape.cu``, of which torch 2.14.1 allocates the same on the emulated runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ampmem.allocator.gpus import GpuSpec
from ampmem.patching import added
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.general import FakeTensor
from ampmem.simulator.private.parallel import fsdp_copies

_LONG = 8
_THREADS, _BYTES_PER_THREAD = 128, 16
_BLOCK = _THREADS * _BYTES_PER_THREAD


def install(mode: SimulatedMode) -> Callable[[], None]:
    """Count them from now on; returns what undoes it."""
    gather, scatter = fsdp_copies()

    def split(func: Any, args: Any, kwargs: Any) -> Any:
        source, sizes, *dim = args
        if not isinstance(source, FakeTensor):
            return func(*args, **kwargs)
        size = of_split(source, sizes, dim[0] if dim else 0, mode.device_model.gpu)
        return _run(mode, func, args, kwargs, kwargs["out"], size)

    def chunk(func: Any, args: Any, kwargs: Any) -> Any:
        tensors, dim, count = args
        out = kwargs["out"]
        if not isinstance(out, FakeTensor):
            return func(*args, **kwargs)
        return _run(mode, func, args, kwargs, [out], of_chunks(tensors, dim, count, out.element_size()))

    mode.answers.update({gather: split, scatter: chunk})
    return added("answers", "FSDP2", lambda: [mode.answers.pop(op) for op in (gather, scatter)])


def _run(mode: SimulatedMode, func: Any, args: Any, kwargs: Any, out: Sequence[Tensor], size: int) -> Any:
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
    """Bytes of the arguments of the kernel that joins chunks of ``tensors`` (``_chunk_cat_out_cuda``); ``item`` is the
    size of an element of the result.
    """
    pieces = [-(-tensor.shape[dim] // count) * math.prod(tensor.shape[dim + 1 :]) * item for tensor in tensors]
    return (6 * len(pieces) + 2 + _blocks(pieces, _BLOCK)) * _LONG


def _blocks(pieces: Sequence[int], size: int) -> int:
    return sum(-(-piece // size) for piece in pieces)
