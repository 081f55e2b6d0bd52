"""Which op gives what scratch back before it returns: memory that fake tensors do not show."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ampmem.allocator.gpus import GpuSpec
from ampmem.allocator.rounding import round_up
from ampmem.simulator.private.ops import schema_of
from ampmem.simulator.scratch.reductions import Iteration, ReductionKernel, accumulated, iteration, scratch

aten = torch.ops.aten

Sizes: TypeAlias = "list[tuple[int, ...]]"
"""Sets of allocations: those of a set are alive together, one set after the other."""

_HALF = (torch.float16, torch.bfloat16)
_LONG = 8
_PAIR = 16
"""A value and its index (``MaxOps``, ``ArgMaxOps``)."""
_CHUNK = 65536
"""Elements that a block of ``multi_tensor_apply`` goes through."""
_PARTIAL_ROWS = 10
"""Rows of gradients that a thread of an embedding's backward adds up (``NROWS_PER_THREAD``)."""
_SORTED_SINCE = 3072
"""With more indices than that an embedding's backward sorts them."""
_SORTED_FOR_NOTHING = 512
"""So many indices were sorted in the traces, and the sort asked for one byte."""
_INDEX_PUTS = (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)

_ITSELF = "what {op} allocates for itself"
SORTS = "the temporary storage of sorts and scans (CUB)"
_ATTENTION = "cuDNN's workspaces in attention"
_OF_LIBRARIES = "what {library}'s own kernels allocate for themselves"
_TORCHS = frozenset({"aten", "prims", "prim", "c10d", "c10d_functional", "dtensor", "fsdp", "symm_mem", "inductor"})
"""The namespaces of ops that come with torch, without underscores before them."""
_SOLVERS = "the workspaces of cuSOLVER and cuFFT"

_UNKNOWN = {
    **dict.fromkeys(("sort", "topk", "kthvalue", "median", "mode", "multinomial", "histc", "bincount"), SORTS),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "randperm"), SORTS),
    **dict.fromkeys(("logsumexp", "nansum", "count_nonzero", "_ctc_loss", "_ctc_loss_backward"), _ITSELF),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward", "grid_sampler_2d_backward"), _ITSELF),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_dense_backward"), _ITSELF),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c", "_linalg_svd", "_linalg_eigh"), _SOLVERS),
    **dict.fromkeys(("linalg_qr", "linalg_cholesky_ex", "linalg_lu_factor_ex"), _SOLVERS),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), "what cuDNN keeps for batch norms"
    ),
    **dict.fromkeys(
        ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"), _ATTENTION
    ),
}
"""Ops whose scratch has no formula here, by name."""


@functools.cache
def unmodelled(func: Any) -> str | None:
    """What ``func`` allocates on a GPU for which there is no formula here; ``None`` when there is nothing."""
    library, _, name = schema_of(func).name.partition("::")
    if library.lstrip("_") not in _TORCHS:
        return _OF_LIBRARIES.format(library=library)
    text = _UNKNOWN.get(name)
    return None if text is None else text.format(op=name)


def sorts_much(func: Any, args: Sequence[Any]) -> bool:
    """Whether ``func`` sorts so many indices that the sort's own storage, for which there is no formula, may count."""
    if func is aten.embedding_dense_backward.default:
        return bool(args[1].numel() > _SORTED_SINCE)
    return func in _INDEX_PUTS and len(args) > 3 and bool(args[3]) and _indices(args) > _SORTED_FOR_NOTHING


def has_scratch(func: Any) -> bool:
    """Whether there is a formula for what ``func`` allocates besides."""
    return func in _KNOWN


def scratch_of(func: Any, args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """What ``func``, which has returned ``result``, allocated besides."""
    known = _KNOWN.get(func)
    if known is None:
        return []
    return [sizes for sizes in (tuple(filter(None, sizes)) for sizes in known(args, result, gpu)) if sizes]


def _reduction(
    kernel: ReductionKernel, source: torch.Tensor, dims: Sequence[int], result_item: int, gpu: GpuSpec
) -> Sizes:
    """The scratch of one reduction of ``source``, or of a copy with elements of the size that ``kernel`` reads."""
    if not source.numel():
        return []
    offset = int(source.storage_offset()) if kernel.item == source.dtype.itemsize else 0
    work = iteration(source.shape, source.stride(), dims, kernel.item, result_item=result_item, offset=offset)
    return _launches(kernel, work, result_item, gpu)


def _launches(kernel: ReductionKernel, work: Iteration, result_item: int, gpu: GpuSpec) -> Sizes:
    held = accumulated(kernel, work, result_item)
    return [(held, *sizes) for sizes in scratch(kernel, work, gpu)] or [(held,)]


def _dims(source: torch.Tensor, dims: Any) -> tuple[int, ...]:
    """Which dimensions are reduced: all where none is named."""
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(dim % source.dim() for dim in dims) if dims and source.dim() else tuple(range(source.dim()))


def _accumulated_in(dtype: torch.dtype) -> int:
    """Bytes of the type that a sum of ``dtype`` is made in (``opmath_type``)."""
    return 4 if dtype in _HALF else dtype.itemsize


def _sum(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec, *, at: int = 1) -> Sizes:
    """Sums, means and norms; an input of another type is cast first, but half to float (``make_reduction``)."""
    source = args[0]
    if source.dtype.is_complex or result.dtype.is_complex:
        return []
    read, cast = source.dtype, 0
    if result.dtype != read and not (read in _HALF and result.dtype == torch.float32):
        read, cast = result.dtype, source.numel() * result.dtype.itemsize
    kernel = _sum_kernel(read, result.dtype)
    dims = _dims(source, args[at] if len(args) > at else None)
    sets = _reduction(kernel, source, dims, result.dtype.itemsize, gpu) or [()]
    return [(cast, *sizes) for sizes in sets]


def _sum_kernel(read: torch.dtype, made: torch.dtype) -> ReductionKernel:
    return ReductionKernel(
        element=_accumulated_in(read), item=read.itemsize, in_output=not (read in _HALF and made == read)
    )


def _norm(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    return _sum(args, result, gpu, at=2)


def _variance(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """Mean, square sum and count twice (``WelfordData`` with a 32-bit count)."""
    source, first = args[0], result[0] if isinstance(result, tuple) else result
    if source.dtype.is_complex:
        return []
    kernel = ReductionKernel(
        element=4 * _accumulated_in(source.dtype), item=source.dtype.itemsize, loads=2, in_output=False
    )
    dims = _dims(source, args[1] if len(args) > 1 else None)
    return _reduction(kernel, source, dims, first.dtype.itemsize, gpu)


def _extremum(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """Also ``any`` and ``all``, which read elements of any type."""
    source = args[0]
    kernel = ReductionKernel(element=source.dtype.itemsize, item=source.dtype.itemsize)
    dims = _dims(source, args[1] if len(args) > 1 else None)
    return _reduction(kernel, source, dims, result.dtype.itemsize, gpu)


def _indexed_extremum(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    source, first = args[0], result[0] if isinstance(result, tuple) else result
    kernel = ReductionKernel(element=_PAIR, item=source.dtype.itemsize, in_output=False)
    dims = _dims(source, args[1] if len(args) > 1 and args[1] is not None else None)
    return _reduction(kernel, source, dims, first.dtype.itemsize, gpu)


def _foreach_norm(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """One partial norm per tensor and chunk of the largest (``foreach_tensor_norm_cuda``)."""
    tensors = args[0]
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    return [(len(tensors) * chunks * _accumulated_in(result[0].dtype),)]


def _layer_norm_backward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """Partial sums, where there are many rows and few columns (``LaunchGammaBetaBackwardCUDAKernel``)."""
    columns = math.prod(args[2])
    rows = args[1].numel() // max(columns, 1)
    if rows <= 64 * 1024 or columns // 32 >= (gpu.sm_count or 108) // 2:
        return []
    blocks = min(32 * 1024 // -(-columns // 32), -(-rows // 32))
    gradients = [gradient for gradient in result[1:] if gradient is not None]
    held = tuple(blocks * columns * gradient.dtype.itemsize for gradient in gradients)
    sets: Sizes = [held]
    for gradient in gradients:  # each is then replaced by the sum of its partial ones
        item = gradient.dtype.itemsize
        work = iteration((blocks, columns), (columns, 1), (0,), item, result_item=item)
        sums = _launches(_sum_kernel(gradient.dtype, gradient.dtype), work, item, gpu)
        sets += [(*held, columns * item, *sizes) for sizes in sums]
    return sets


def _embedding_backward(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """The sorted indices, then sums of every :data:`_PARTIAL_ROWS` rows (``EmbeddingBackwardKernel.cu``)."""
    gradient, indices, rows, by_frequency = args[0], args[1], args[2], args[4]
    count, item = indices.numel(), indices.dtype.itemsize
    if count <= _SORTED_SINCE and not by_frequency:
        return []
    kept = (count * item,) * (3 if by_frequency else 2)
    segments = min(count, rows)
    partials = count // _PARTIAL_ROWS + segments
    sums = partials * gradient.shape[-1] * _accumulated_in(gradient.dtype)
    numbers = (count * item, _LONG, segments * item, segments * item, _LONG, partials * item)
    return [(*kept, count * item), (*kept, *numbers, sums)]


def _flash_backward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """``softmax_d`` and ``dq_accum`` of ``mha_bwd`` (``flash_attn/flash_api.cpp``), both FP32."""
    batch, heads, length, width = args[1].shape
    rounded = round_up(length, 128)
    padded = round_up(width, 32) if width <= 128 else round_up(width, 64)
    return [(batch * heads * rounded * 4, batch * heads * rounded * padded * 4)]


def _index_put(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """Adding at indices sorts them first (``index_put_with_sort_kernel``); how many arrays: from a trace."""
    if len(args) < 4 or not args[3]:
        return []
    return [(*(_indices(args) * _LONG,) * 5, 1)]


def _indices(args: Sequence[Any]) -> int:
    return max((index.numel() for index in args[1] if index is not None), default=0)


def _convolution_backward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """The bias's gradient is a sum over all dimensions but the channels."""
    gradient = args[0]
    if result[2] is None:
        return []
    return _sum((gradient, (0, *range(2, gradient.dim()))), result[2], gpu)


def _elementwise_loss(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """The loss of each element, then their mean or sum (``mse_loss_out``, ``smooth_l1_loss_out``, ``huber_loss``)."""
    reduced = args[2] if len(args) > 2 else 1
    elements = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
    if not reduced or not elements:
        return []
    item = result.dtype.itemsize
    work = iteration((elements,), (1,), (0,), item, result_item=item)
    launches = _launches(_sum_kernel(result.dtype, result.dtype), work, item, gpu)
    return [(elements * item, *sizes) for sizes in launches]


_COMPUTED_WHOLE = frozenset(
    {
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.soft_margin_loss.default,
        aten.binary_cross_entropy.default,
    }
)


def whole_loss(func: Any, args: Sequence[Any], result: Any) -> int | None:
    """Bytes of the memory of a loss that is a single number and keeps that of each element's; ``None`` of all else.

    These ops give their result the shape of the inputs first, and resize it then, which frees nothing
    (``TORCH_META_FUNC(mse_loss)``, ``soft_margin_loss_out``, ``binary_cross_entropy_out_cuda``).
    """
    if func not in _COMPUTED_WHOLE or result.dim():
        return None
    elements = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
    return elements * int(result.dtype.itemsize) if elements > 1 else None


_Known: TypeAlias = Callable[[Sequence[Any], Any, GpuSpec], Sizes]

_KNOWN: dict[Any, _Known] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _sum),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int), _sum),
    **dict.fromkeys((aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar), _norm),
    **dict.fromkeys((aten.var.correction, aten.std.correction), _variance),
    **dict.fromkeys((aten.var_mean.correction, aten.std_mean.correction), _variance),
    **dict.fromkeys((aten.amax.default, aten.amin.default, aten.max.default, aten.min.default), _extremum),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), _extremum),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), _extremum),
    **dict.fromkeys((aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default), _indexed_extremum),
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default), _elementwise_loss),
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm_backward.default: _layer_norm_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._flash_attention_backward.default: _flash_backward,
    **dict.fromkeys(_INDEX_PUTS, _index_put),
    aten.convolution_backward.default: _convolution_backward,
}
