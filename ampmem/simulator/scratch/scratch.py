"""Scratch memory by op: memory that an op frees before it returns, which fake tensors do not show."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.torch_version import TorchVersion

from ampmem.allocator.gpus import GpuSpec
from ampmem.allocator.settings import round_up
from ampmem.simulator.private.general import in_backward, op_schema
from ampmem.simulator.scratch import reductions
from ampmem.simulator.scratch.reductions import Iteration, ReductionKernel, accumulated, iteration, power_of_2, scratch

aten = torch.ops.aten

Sizes: TypeAlias = "list[tuple[int, ...]]"
"""Sets of allocations in bytes: those of a set are alive together, one set after the other.

A negative number in a set frees the newest allocation of so many bytes before the next one.
"""

Course: TypeAlias = "tuple[int | torch.Tensor | None, ...]"
"""Allocations of an op in order: bytes of scratch, and results.

A negative number frees the newest scratch of so many bytes; the rest is freed when the op ends.
"""

_HALF = (torch.float16, torch.bfloat16)
_LONG = 8
_RANDOM_STATE = 16
"""Bytes of the random generator's seed and offset."""
_SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities since Ampere with little shared memory."""
_PAIR = 16
"""Bytes of a value and its index (``MaxOps``, ``ArgMaxOps``)."""
_CHUNK = 65536
"""Elements per block of ``multi_tensor_apply``."""
_PARTIAL_ROWS = 10
"""Rows of gradients that a thread of an embedding's backward adds up (``NROWS_PER_THREAD``)."""
_SORTED_SINCE = 3072
"""Number of indices above which an embedding's backward sorts them."""
_BAG_MAX = 2
"""The mode ``max`` of an ``EmbeddingBag``."""
_NORMS_OF_CHUNKS = TorchVersion(torch.__version__) >= "2.15"
_GROUPS_BY_LAYOUT = TorchVersion(torch.__version__) >= "2.15"
"""Whether group norm has kernels for channels-last, which need no contiguous copy."""
_SUMS_WITH_AREA = TorchVersion(torch.__version__) >= "2.14"
"""Whether group norm's backward sums per channel only where a channel has more than one element."""
_GROUPS_IN_FP32 = TorchVersion(torch.__version__) >= "2.13"
"""Whether group norm of 16 bit has each group's mean and scale in FP32 first."""
_STATE_ON_HOST = TorchVersion(torch.__version__) < "2.14"
"""Whether memory-efficient attention keeps its random state on the host even without dropout."""
_LIMITS_FIRST = TorchVersion(torch.__version__) >= "2.13"
"""Whether indices are checked by their minimum and maximum, not one by one."""
_INDEX_PUTS = (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)

_ITSELF = "what {op} allocates for itself"
SORTS = "the temporary storage of sorts and scans (CUB)"
_OF_LIBRARIES = "what {library}'s own kernels allocate for themselves"
_TORCHS = frozenset({"aten", "prims", "prim", "c10d", "c10d_functional", "dtensor", "fsdp", "symm_mem", "inductor"})
"""Namespaces of torch's own ops, without leading underscores."""
_SOLVERS = "the workspaces of cuSOLVER and cuFFT"

_UNKNOWN = {
    **dict.fromkeys(("mode", "histc", "bincount"), SORTS),
    **dict.fromkeys(("nansum",), _ITSELF),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c", "_linalg_svd", "_linalg_eigh"), _SOLVERS),
    **dict.fromkeys(("linalg_qr", "linalg_cholesky_ex", "linalg_lu_factor_ex"), _SOLVERS),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), "what cuDNN keeps for batch norms"
    ),
}
"""Ops whose scratch memory has no formula here, by name."""
ASSUMED = dict.fromkeys(
    (aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_cudnn_attention_backward.default),
    "assumed: cuDNN's workspaces in attention are those of cuDNN 9.19, measured on an H200",
)
"""Assumptions for ops whose scratch a library chooses, with measured sizes; noted when such an op runs."""


@functools.cache
def unmodelled(func: Any) -> str | None:
    """The memory of ``func`` on a GPU for which there is no formula here; ``None`` if there is none."""
    library, _, name = op_schema(func).name.partition("::")
    if library.lstrip("_") not in _TORCHS:
        return _OF_LIBRARIES.format(library=library)
    text = _UNKNOWN.get(name)
    return None if text is None else text.format(op=name)


def has_scratch(func: Any) -> bool:
    """Whether there is a formula for the scratch of ``func``."""
    return func in _KNOWN


def scratch_of(func: Any, args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """The scratch of ``func``, which has returned ``result``."""
    known = _KNOWN.get(func)
    if known is None:
        return []
    return [sizes for sizes in (tuple(filter(None, sizes)) for sizes in known(args, result, gpu)) if sizes]


def _reduction(
    kernel: ReductionKernel, source: torch.Tensor, dims: Sequence[int], result_item: int, gpu: GpuSpec
) -> Sizes:
    """The scratch of one reduction of ``source``, or of a copy with the element size that ``kernel`` reads."""
    if not source.numel():
        return []
    offset = int(source.storage_offset()) if kernel.item == source.dtype.itemsize else 0
    work = iteration(source.shape, source.stride(), dims, kernel.item, result_item=result_item, offset=offset)
    return _launches(kernel, work, result_item, gpu)


def _launches(kernel: ReductionKernel, work: Iteration, result_item: int, gpu: GpuSpec) -> Sizes:
    held = accumulated(kernel, work, result_item)
    return [(held, *sizes) for sizes in scratch(kernel, work, gpu)] or [(held,)]


def _dims(args: Sequence[Any], at: int = 1) -> tuple[int, ...]:
    """The reduced dimensions, which are the argument ``at``: all if none is named."""
    source, dims = args[0], args[at] if len(args) > at else None
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(dim % source.dim() for dim in dims) if dims and source.dim() else tuple(range(source.dim()))


def _accumulated_in(dtype: torch.dtype) -> int:
    """Bytes of the dtype in which ``dtype`` is summed (``opmath_type``)."""
    return 4 if dtype in _HALF else dtype.itemsize


def _sum(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec, *, at: int = 1) -> Sizes:
    """Sums, means and norms; an input of another dtype is cast first, except half to float (``make_reduction``)."""
    source = args[0]
    if source.dtype.is_complex or result.dtype.is_complex:
        return []
    read, cast = source.dtype, 0
    if result.dtype != read and not (read in _HALF and result.dtype == torch.float32):
        read, cast = result.dtype, source.numel() * result.dtype.itemsize
    kernel = _sum_kernel(read, result.dtype)
    sets = _reduction(kernel, source, _dims(args, at), result.dtype.itemsize, gpu) or [()]
    return [(cast, *sizes) for sizes in sets]


def _sum_kernel(read: torch.dtype, made: torch.dtype) -> ReductionKernel:
    return ReductionKernel(
        element=_accumulated_in(read), item=read.itemsize, in_output=not (read in _HALF and made == read)
    )


def _norm(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    return _sum(args, result, gpu, at=2)


def _variance(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """Variances: mean, square sum and two counts (``WelfordData`` with a 32-bit count)."""
    source, first = args[0], result[0] if isinstance(result, tuple) else result
    if source.dtype.is_complex:
        return []
    kernel = ReductionKernel(
        element=4 * _accumulated_in(source.dtype), item=source.dtype.itemsize, loads=2, in_output=False
    )
    return _reduction(kernel, source, _dims(args), first.dtype.itemsize, gpu)


def _extremum(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """Minimum and maximum; also ``any`` and ``all``, which read elements of any dtype."""
    source = args[0]
    kernel = ReductionKernel(element=source.dtype.itemsize, item=source.dtype.itemsize)
    return _reduction(kernel, source, _dims(args), result.dtype.itemsize, gpu)


def _both_extrema(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """``aminmax`` over all elements."""
    source = args[0]
    kernel = ReductionKernel(element=2 * source.dtype.itemsize, item=source.dtype.itemsize)
    return _reduction(kernel, source, _dims(args[:1]), source.dtype.itemsize, gpu)


def _indexed_extremum(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    source, first = args[0], result[0] if isinstance(result, tuple) else result
    kernel = ReductionKernel(element=_PAIR, item=source.dtype.itemsize, in_output=False)
    return _reduction(kernel, source, _dims(args), first.dtype.itemsize, gpu)


def _foreach_norm(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Course:
    """Partial norms of each tensor, as many as the largest has chunks (``foreach_tensor_norm_cuda``).

    From torch 2.15 on each tensor has as many as it needs, and their offsets are another tensor.
    """
    tensors = args[0]
    chunks = [-(-tensor.numel() // _CHUNK) for tensor in tensors]
    item = _accumulated_in(result[0].dtype)
    if _NORMS_OF_CHUNKS:
        return ((len(tensors) + 1) * _LONG, sum(chunks) * item)
    return (len(tensors) * max(chunks) * item,)


def _layer_norm_backward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Course:
    """A copy of the input before the results, and one of the gradient after them (``layer_norm_backward_cuda``)."""
    return (*_copies(args[1]), *result, *_copies(args[0]), *_partial_norms(args, result, gpu))


def _partial_norms(args: Sequence[Any], result: Any, gpu: GpuSpec) -> tuple[int, ...]:
    """Partial sums, for many rows and few columns (``LaunchGammaBetaBackwardCUDAKernel``)."""
    columns = math.prod(args[2])
    rows = args[1].numel() // max(columns, 1)
    if rows <= 64 * 1024 or columns // 32 >= (gpu.sm_count or 108) // 2:
        return ()
    blocks = min(32 * 1024 // -(-columns // 32), -(-rows // 32))
    gradients = [gradient for gradient in result[1:] if gradient is not None]
    steps = [blocks * columns * gradient.dtype.itemsize for gradient in gradients]
    for gradient in gradients:  # the partial gradients are then summed
        item = gradient.dtype.itemsize
        work = iteration((blocks, columns), (columns, 1), (0,), item, result_item=item)
        steps.append(columns * item)
        for sizes in _launches(_sum_kernel(gradient.dtype, gradient.dtype), work, item, gpu):
            steps += [*sizes, *(-size for size in sizes)]
        steps.append(-columns * item)
    return tuple(steps)


def _embedding(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Course:
    """The flattened indices (``embedding_symint``)."""
    return _copies(args[1])


def _embedding_backward(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Course:
    gradient, indices, rows, by_frequency = args[0], args[1], args[2], args[4]
    copies = _copies(indices, gradient)
    if indices.numel() <= _SORTED_SINCE and not by_frequency:
        return copies
    return (*copies, *_embedding_sums(gradient, indices, rows, by_frequency, result, gpu))


def _embedding_bag_backward(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Course:
    gradient, indices, rows, by_frequency, mode = args[0], args[1], args[6], args[7], args[8]
    return () if mode == _BAG_MAX else _embedding_sums(gradient, indices, rows, by_frequency, result, gpu)


def _embedding_sums(
    gradient: torch.Tensor, indices: torch.Tensor, rows: int, by_frequency: bool, result: torch.Tensor, gpu: GpuSpec
) -> Course:
    """The sorted indices, then sums over each :data:`_PARTIAL_ROWS` rows (``EmbeddingBackwardKernel.cu``)."""
    count, item = indices.numel(), indices.dtype.itemsize
    each = count * item
    sort = reductions.radix_sort(count, item, item, gpu, bits=reductions.bits_of(rows))
    segments = min(count, rows)
    partials = count // _PARTIAL_ROWS + segments
    sums = partials * gradient.shape[-1] * _accumulated_in(gradient.dtype)
    of_all, of_segments, unique = (
        reductions.scan(count, item),
        reductions.scan(segments, item),
        reductions.unique(count),
    )
    counted = (each, of_all, -of_all, of_all, -of_all) if by_frequency else ()
    found = (each, _LONG, each, unique, -unique, -each)
    numbers = (segments * item, segments * item, of_segments, -of_segments, _LONG, partials * item)
    return (each, each, each, sort, -sort, -each, *counted, result, *found, *numbers, sums)


def _flash_backward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """``softmax_d`` and ``dq_accum`` of ``mha_bwd`` (``flash_attn/flash_api.cpp``), both FP32.

    With fewer heads of keys and values, their gradients are made for each query head first, and then summed.
    """
    batch, heads, length, width = args[1].shape
    rounded = round_up(length, 128)
    sizes = [batch * heads * rounded * 4, batch * heads * rounded * _rounded_width(width) * 4]
    if len(args) > 2 and args[2].shape[1] != heads:
        sizes += [batch * heads * args[2].shape[2] * width * args[2].dtype.itemsize] * 2
    return [tuple(sizes)]


def _rounded_width(width: int) -> int:
    """The head size as the kernel rounds it (``head_size_rounded``)."""
    return round_up(width, 32) if width <= 128 else round_up(width, 64)


def _flash_forward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Course:
    """Partial results of blocks that each process a part of the keys (``set_params_splitkv``), in ``mha_fwd``.

    They are FP32, and allocated before the random state, which is two of the last results. With dropout keys are not
    split, and a second state takes the place of the first.
    """
    query, key = args[0], args[1]
    if len(args) > 3 and args[3]:
        state, unused = result[6:8]
        return (*result[:2], _RANDOM_STATE, unused, state)
    batch, heads, length, width = query.shape
    splits = _key_splits(batch * heads * -(-length // 64), key.shape[2], width, gpu)
    if splits < 2:
        return ()
    rows = splits * batch * heads * length * 4
    return (*result[:2], rows, rows * _rounded_width(width))


def _key_splits(blocks: int, keys: int, width: int, gpu: GpuSpec) -> int:
    """Number of parts of the keys: the smallest that fills the GPU nearly as well as any (``num_splits_heuristic``).

    ``blocks`` is the number without splits, each on half an SM.
    """
    at_once = 2 * (gpu.sm_count or 108)
    if blocks >= 0.8 * at_once:
        return 1
    of_keys = -(-keys // (256 if width <= 64 else 128 if width <= 128 else 64))
    filled: dict[int, float] = {}
    for splits in range(1, min(128, at_once, of_keys) + 1):
        if splits == 1 or -(-of_keys // splits) != -(-of_keys // (splits - 1)):
            waves = blocks * splits / at_once
            filled[splits] = waves / math.ceil(waves)
    return next((splits for splits, part in filled.items() if part >= 0.85 * max(filled.values())), 1)


def _efficient_forward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """The output in FP32, if it does not fit into registers (``kNeedsOutputAccumulatorBuffer``)."""
    query, value = args[0], args[2]
    if query.dtype not in _HALF or max(query.shape[3], value.shape[3]) <= 128:
        return []
    return [(query.numel() // query.shape[3] * value.shape[3] * 4,)]


def _efficient_backward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """Sums over gradient and output, which the 16-bit kernel computes itself, and the kernel's workspace.

    Source: ``_efficient_attention_backward``.
    """
    query, key, value = args[1], args[2], args[3]
    batch, heads, length = query.shape[:3]
    rows = batch * heads * length * 4
    if not (rows and key.numel()):
        return []
    groups: tuple[int, ...] = ()
    if key.shape[1] != heads:  # gradients per query head
        groups = tuple(batch * heads * each.shape[2] * each.shape[3] * each.dtype.itemsize for each in (key, value))
    sums: tuple[int, ...] = (rows,)
    if query.dtype not in _HALF:
        product = batch * heads * length * value.shape[3] * 4
        copied = min(heads, length) > 1  # they are made contiguous
        sums = (product, rows, rows, -product, -rows) if copied else (product, rows, -product)
    dropout = bool(len(args) > 9 and args[9])
    return [(*groups, *sums, batch * heads * _efficient_workspace(query, key, value, gpu, dropout=dropout))]


def _efficient_workspace(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gpu: GpuSpec, *, dropout: bool
) -> int:
    """Bytes of a head's workspace (``Params::workspace_strideBH`` in ``mem_eff_attention/kernel_backward.h``).

    The kernel is the first of ``kernels/cutlassB.h`` that supports the head size and fits into shared memory: which one
    is not confirmed for 16 bits and head sizes above 64 on GPUs other than A100 and H100.
    """
    batch, heads, length, width = query.shape
    keys, widest, half = key.shape[2], max(width, value.shape[3]), query.dtype in _HALF
    capability = gpu.compute_capability or (8, 0)
    rows, columns, most = 64, 64, 64
    if widest > 64 and (half or capability >= (8, 0)):
        rows, most = 128, 128 if widest <= 128 else widest
        if half and widest <= 128 and capability >= (8, 0):
            if capability not in _SMALL:
                columns = 128
            elif widest > 96 or dropout:
                rows = 64
    splits = -(-keys // columns)
    if batch * heads >= 256 and keys <= 2 * columns:
        splits = 1
    staged = half and most > rows
    """Whether the gradients of keys and values do not fit into registers."""
    if staged:
        splits = min(splits, 200 // (batch * heads))
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        splits = 1
    staging = max(splits, 1) * columns * (round_up(width, rows) + round_up(value.shape[3], rows)) * 4 if staged else 0
    return staging + -(-length // rows) * -(-width // columns) * (rows * columns * 4 + 16)


_CUDNN_PLAN = 256
"""Bytes that cuDNN's attention plans request: in 47 of 48 calls on an H200 with torch 2.11 and cuDNN 9.19."""


def _cudnn_forward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """The plan's workspace; nothing for a single query, as measured."""
    return [(_CUDNN_PLAN,)] if args[0].shape[2] > 1 else []


def _cudnn_backward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """The queries' gradient and a sum per query in FP32, and the library's own workspace.

    The first two are requested by cuDNN's frontend, which is compiled into torch. The library's own are the gradients
    of keys and values for each query head, if several share one.
    """
    query, key, value = args[1:4]
    batch, heads, length, width = query.shape
    rows = batch * heads * length * (width + 1) * 4
    groups = 0
    if key.shape[1] != heads:
        groups = sum(batch * heads * each.shape[2] * each.shape[3] * each.dtype.itemsize for each in (key, value))
    return [(rows + groups + _CUDNN_PLAN,)]


def _softmax(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """A copy of a non-contiguous input (``host_softmax``)."""
    return [_copies(args[0])]


def _safe_softmax(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """Masks of the elements that are minus infinity, and of the rows that are so entirely (``_safe_softmax``)."""
    rows = result.numel() // max(result.shape[args[1]], 1) if result.dim() else 1
    return [_copies(args[0]), (result.numel(), rows, result.dtype.itemsize)]


def _softmax_backward(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """The product of gradient and output, and copies of non-contiguous tensors.

    Source: ``structured_softmax_backward_cuda_out``. The product has the memory layout of both; if they differ, the
    gradient's.
    """
    gradient, output = args[0], args[1]
    product = gradient.numel() * max(gradient.dtype.itemsize, output.dtype.itemsize)
    again = () if gradient.is_contiguous() else (product,)
    return [(product, *again, *_copies(output))]


def _log_softmax_backward(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    return [_copies(args[0], args[1])]


def _copies(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Bytes of a contiguous copy of each tensor that is not contiguous."""
    given = [tensor for tensor in tensors if tensor is not None and not tensor.is_contiguous()]
    return tuple(tensor.numel() * tensor.dtype.itemsize for tensor in given)


def _group_norm(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """Mean and scale of each group in FP32, and of each channel if there are weights.

    Source: ``GroupNormKernelImplInternal``.
    """
    source, weight, bias, batch, channels, area, groups = args[:7]
    statistics = batch * groups * 4 if source.dtype in _HALF and _GROUPS_IN_FP32 else 0
    by_layout = _layout_of(source) is not None
    affine = weight is not None or bias is not None
    channel = batch * channels * _accumulated_in(source.dtype) if by_layout or (affine and area > 1) else 0
    return [(*(() if by_layout else _copies(source)), statistics, statistics, channel, channel)]


def _layout_of(source: torch.Tensor) -> torch.memory_format | None:
    """The channels-last layout of ``source`` for which group norm has kernels; ``None`` if it takes the others."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(source.dim())
    suits = _GROUPS_BY_LAYOUT and layout is not None and source.is_contiguous(memory_format=layout)
    return layout if suits else None


def _group_norm_backward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """Two sums per channel; two factors per group, and one per channel if there is a weight and an area.

    Source: ``GroupNormBackwardKernelImplInternal``.
    """
    source, weight, batch, channels, area, groups = args[1], *args[4:9]
    item = _accumulated_in(source.dtype)
    channel, group = batch * channels * item, batch * groups * item
    by_layout = _layout_of(source) is not None
    factor = 0 if weight is None or area == 1 or by_layout else channel
    sums = () if area == 1 and not by_layout and _SUMS_WITH_AREA else (channel, channel)
    return [(*sums, *((group, group, factor) if result[0] is not None else ()))]


def _group_norm_gradient(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Course:
    """Contiguous copies, or with the kernels for channels-last one of a gradient in another layout."""
    gradient, source = args[:2]
    layout = _layout_of(source)
    if layout is None:
        return _copies(gradient, source)
    same = gradient.is_contiguous(memory_format=layout)
    return () if same else (gradient.numel() * gradient.dtype.itemsize,)


def is_mask(index: torch.Tensor | None) -> bool:
    """Whether ``index``, one of the indices of an op, is a mask."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _index_put(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """Scratch of ``index_put`` with accumulation, which sorts the indices (``index_put_with_sort_kernel``).

    Each index has a copy without negative numbers, and one times the stride (``computeLinearIndex``). A mask has been
    converted to indices before, whose scratch is booked separately. If a script calls it, not autograd, the minimum and
    maximum of each index are compared with the size (``wrapIndexOnce``).
    """
    target, indices = args[0], [index for index in args[1] if index is not None]
    if len(args) < 4 or not args[3] or any(map(is_mask, indices)):
        return []
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in indices)))
    if not count:
        return []
    size, slices = count * _LONG, _slice_size(target, args[1])
    largest = sum((length - 1) * stride for length, stride in zip(target.shape, target.stride(), strict=True))
    bits = reductions.bits_of(largest // max(slices, 1))
    ends = (size,) * 4, reductions.radix_sort(count, _LONG, _LONG, gpu, bits=bits)
    checks: Sizes = []
    if not in_backward():
        each = [_LONG, _LONG, 1, 1] if _LIMITS_FIRST else [_LONG, 1, _LONG, 1]
        checks = [tuple(each)] * len(indices)
    return [*checks, *[(size,)] * (2 * len(indices) - 1), (*ends[0], ends[1])]


def _slice_size(target: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> int:
    """Elements per index: the product of the dimensions behind the last index."""
    given = [place for place, index in enumerate(indices) if index is not None]
    between = [place for place, index in enumerate(indices) if index is None and place < given[-1]]
    return math.prod(length for place, length in enumerate(target.shape) if place > given[-1] or place in between)


def _sort(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """``sort_cuda_kernel``: long rows are copied first if they are not contiguous."""
    source = args[0]
    if not source.dim() or source.numel() < 2:
        return []
    dim = args[1] if len(args) > 1 else -1
    length, item = source.shape[dim], source.dtype.itemsize
    sets = reductions.sort(length, source.numel() // length, item, gpu)
    if length <= reductions.SMALL_SORT or source.stride(dim) == 1:
        return sets
    copies = (source.numel() * item, source.numel() * item, source.numel() * _LONG)
    return [(*copies, *sets[0]), *sets[1:]]


def _topk(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """The search for the elements, and a sort of those found if they are many."""
    source, found = args[0], args[1]
    if not source.dim() or not found or not source.numel():
        return []
    dim = args[2] if len(args) > 2 else -1
    length, item = source.shape[dim], source.dtype.itemsize
    rows = source.numel() // length
    sets = reductions.topk(length, rows, item, gpu)
    if (len(args) < 5 or args[4]) and found > reductions.SMALL_SORT:
        kept = (found * rows * _LONG, found * rows * item)
        sets += [(*kept, *sizes) for sizes in reductions.sort(found, rows, item, gpu)]
    return sets


def _running(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """Running sums and products: an input of another dtype is cast first; CUB scans a single row."""
    source, first = args[0], result
    item = first.dtype.itemsize
    cast = source.numel() * item if first.dtype != source.dtype else 0
    alone = source.dim() and source.numel() == source.shape[args[1]] and item in (4, _LONG)
    return [(cast, reductions.scan(source.numel(), item) if alone and source.numel() else 0)]


def _randperm(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    return reductions.randperm(result.numel(), result.dtype.itemsize, gpu)


def _scatter_mean(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """Ones, the count per element, and a mask of zero counts (``scatter_reduce_two``)."""
    if args[4] != "mean" or not args[2].numel():
        return []
    return [(args[3].nbytes, result.nbytes, result.numel())]


def _index_mean(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """The same scratch for ``index_reduce``."""
    return [(result.nbytes, args[3].nbytes), (result.nbytes, result.numel())] if args[4] == "mean" else []


def _masked_scatter(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """The number of selected elements before each element (``launch_masked_scatter_kernel``)."""
    count, mask = result.numel(), args[1]
    mask_copy = 0 if mask.is_contiguous() and mask.shape == result.shape else count
    return [(count * _LONG, mask_copy, reductions.scan(count, _LONG))] if count else []


def _scalar_base(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """The base of ``pow`` as a tensor on the device, if it is a number."""
    return [(_PAIR if isinstance(args[0], complex) else _LONG,)] if args[0] != 1 else []


def _convolution_backward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Sizes:
    """The reduction for the bias's gradient: over all dimensions except the channels."""
    gradient = args[0]
    if result[2] is None:
        return []
    return _sum((gradient, (0, *range(2, gradient.dim()))), result[2], gpu)


def _elementwise_loss(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Sizes:
    """The loss of each element, then the mean or sum (``mse_loss_out``, ``smooth_l1_loss_out``, ``huber_loss``)."""
    reduced = args[2] if len(args) > 2 else 1
    elements = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
    if not reduced or not elements:
        return []
    item = result.dtype.itemsize
    work = iteration((elements,), (1,), (0,), item, result_item=item)
    launches = _launches(_sum_kernel(result.dtype, result.dtype), work, item, gpu)
    return [(elements * item, *sizes) for sizes in launches]


def _huber_loss(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Course:
    """The loss of each element, allocated before the mean or sum (``huber_loss``)."""
    sets = _elementwise_loss(args, result, gpu)
    return (sets[0][0], result, *sets[0][1:]) if sets else ()


def _roll(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Course:
    """The input rolled along one dimension after the other (``roll_common``)."""
    dims = args[2] if len(args) > 2 else ()
    return (*_copies(args[0]), *(result.numel() * result.dtype.itemsize,) * (len(dims) - 1))


def _fold(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Course:
    """The result first has the input's size, and is then resized to a larger one (``im2col_cuda``, ``col2im_cuda``)."""
    before, after = (tensor.numel() * tensor.dtype.itemsize for tensor in (args[0], result))
    return (before,) if before < after else ()


def _unfold_backward(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Course:
    """Indices along the dimension, if windows overlap (``_make_unfold_backward_iter_over_grad_in``)."""
    sizes, dim, size, step = args[1:5]
    return (result, sizes[dim] * _LONG) if sizes and step < size else ()


def _in_rows(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is channels-last (``batch_norm_use_channels_last_kernels``)."""
    if tensor.dim() in (4, 5):
        last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        if tensor.is_contiguous(memory_format=last):
            return True
    return tensor.dim() > 1 and tensor.is_contiguous() and tensor.stride(1) == 1


def _staging(source: torch.Tensor, numbers: int) -> tuple[int, ...]:
    """Staging buffer, with ``numbers`` per channel, and semaphores of several blocks of threads.

    Source: ``flexible_launch_configs`` and the kernels with ``channels_last`` in ``Normalization.cuh``.
    """
    channels = source.shape[1]
    count = source.numel() // max(channels, 1)
    # MAX_BLOCK_SIZE, OPTIMAL_TILE_W, ELEMENTS_PER_THREAD and MAX_H_BLOCK of that file.
    most, width, each, rows = 512, 32, 16, 128
    down = min(power_of_2(-(-count // each)), most // min(power_of_2(channels), width))
    across = min(power_of_2(channels), most // down)
    blocks = min(-(-count // (down * each)), rows)
    if blocks < 8:
        return ()
    return (numbers * channels * blocks * 4, -(-channels // across) * 4)


def _batch_norm(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Course:
    """Scratch of PyTorch's own kernels; none is known for cuDNN's."""
    source = args[0]
    return (*result[:3], *_staging(source, 4)) if args[5] and _in_rows(source) else ()


def _batch_norm_backward(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Course:
    """Two sums per channel first, and the input's gradient last (``batch_norm_backward_cuda``)."""
    source, train, wanted = args[1], args[7], args[9]
    if not train or not wanted[0] or not _in_rows(source):
        return ()
    statistics = source.shape[1] * 4
    staging = _staging(source, 2)
    return (statistics, statistics, *result[1:], *staging, *(-size for size in reversed(staging)), result[0])


def _adaptive_max_pool(args: Sequence[Any], result: Any, gpu: GpuSpec) -> Course:
    """A copy of a non-contiguous input (``adaptive_max_pool2d_out_cuda``)."""
    copies = _copies(args[0])
    return (*result, *(each.nbytes for each in result), *copies) if copies else ()


def _adaptive_max_pool_backward(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Course:
    gradient, source, indices = args[:3]
    return (result, *_copies(gradient, indices), *_copies(source))


def _copied_gradient(args: Sequence[Any], result: torch.Tensor, gpu: GpuSpec) -> Course:
    """A copy of a non-contiguous gradient (``upsample_bicubic2d_backward_out_cuda_template``)."""
    return (result, *_copies(args[0]))


_COURSES: dict[Any, Callable[[Sequence[Any], Any, GpuSpec], Course]] = {
    **dict.fromkeys(
        (aten.native_layer_norm.default, aten._fused_rms_norm.default),
        lambda args, result, gpu: _copies(args[0], args[2]),
    ),
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm_backward.default: _group_norm_gradient,
    **dict.fromkeys((aten.native_batch_norm.default, aten._native_batch_norm_legit.default), _batch_norm),
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: lambda args, result, gpu: _copies(
        args[0].transpose(1, 2), args[4].transpose(1, 2)
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: lambda args, result, gpu: _copies(
        args[0].transpose(1, 2)
    ),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.huber_loss.default: _huber_loss,
    aten.adaptive_max_pool2d.default: _adaptive_max_pool,
    aten.adaptive_max_pool2d_backward.default: _adaptive_max_pool_backward,
    aten.upsample_bicubic2d_backward.default: _copied_gradient,
    aten.roll.default: _roll,
    aten.im2col.default: _fold,
    aten.col2im.default: _fold,
    aten.unfold_backward.default: _unfold_backward,
}


def course_of(func: Any, args: Sequence[Any], result: Any, gpu: GpuSpec) -> Course:
    """Allocations of ``func`` in order: scratch memory, and a part of its results or all.

    Negative numbers free scratch before the end.
    """
    known = _COURSES.get(func)
    if known is None:
        return ()
    steps = known(args, result, gpu)
    return tuple(step for step in steps if step is not None and not (isinstance(step, int) and step == 0))


def made_by(func: Any, args: Sequence[Any], result: Any) -> Sequence[Any]:
    """Results of ``func`` in the order of their allocation."""
    if not isinstance(result, (tuple, list)):
        return (result,)
    if func is aten._scaled_dot_product_efficient_attention.default:
        # The random state is made first; with dropout it is on the host.
        on_host = _STATE_ON_HOST or (len(args) > 5 and args[5])
        return result[:2] if on_host else (*result[2:], *result[:2])
    if func is aten._scaled_dot_product_cudnn_attention.default and not (len(args) > 5 and args[5]):
        return (*result[6:8], *result[:6], *result[8:])
    if func is aten.native_dropout.default:
        return result[::-1]
    if func is aten._embedding_bag.default:
        return (*result[2::-1], *result[3:])
    return result


_COMPUTED_WHOLE = frozenset(
    {
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.soft_margin_loss.default,
        aten.binary_cross_entropy.default,
    }
)


_RESIZED = (aten.im2col.default, aten.col2im.default)


def whole_result(func: Any, args: Sequence[Any], result: Any) -> int | None:
    """Bytes of the memory of a result that keeps more than it needs; ``None`` for other ops.

    These ops first give their result the shape of the inputs, and then resize it, which frees nothing: losses that are
    a single number (``TORCH_META_FUNC(mse_loss)``, ``soft_margin_loss_out``, ``binary_cross_entropy_out_cuda``), and
    folds with a smaller result (``im2col_cuda``, ``col2im_cuda``).
    """
    if func in _RESIZED:
        before, after = (tensor.numel() * int(tensor.dtype.itemsize) for tensor in (args[0], result))
        return before if before > after else None
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
    aten.argmax.out: _indexed_extremum,
    aten.aminmax.default: _both_extrema,
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default), _elementwise_loss),
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _softmax),
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    **dict.fromkeys(_INDEX_PUTS, _index_put),
    aten.sort.default: _sort,
    **dict.fromkeys((aten.topk.default, aten.topk.values), _topk),
    **dict.fromkeys((aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default), _running),
    **dict.fromkeys((aten.randperm.default, aten.randperm.generator), _randperm),
    **dict.fromkeys((aten.scatter_reduce.two, aten.scatter_reduce_.two), _scatter_mean),
    **dict.fromkeys((aten.index_reduce.default, aten.index_reduce_.default), _index_mean),
    **dict.fromkeys((aten.masked_scatter.default, aten.masked_scatter_.default), _masked_scatter),
    aten.pow.Scalar: _scalar_base,
    aten.convolution_backward.default: _convolution_backward,
}
