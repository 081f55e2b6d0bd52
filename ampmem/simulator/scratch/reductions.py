"""Scratch memory of reductions, sorts and scans on a GPU, which is freed before they return.

Reductions: if several blocks of threads share one output, they leave their partial results in a staging buffer and
count themselves with semaphores (``gpu_reduce_kernel`` and ``setReduceConfig`` in
``aten/src/ATen/native/cuda/Reduce.cuh``, 2.13). Their number depends on the shape, on the reduced dimensions and their
order in memory, and on the GPU.

Sorts and scans: the temporary storage of CUB, and of PyTorch's own sort and topk. The sizes are those that CUB computes
on the host (``cub/device/dispatch``, in CUDA 12 and 13): they depend on the number of elements, on the sizes of keys
and values, and a little on the GPU. If the GPU is unknown, an A100 is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampmem.allocator.gpus import GpuSpec
from ampmem.allocator.settings import round_up

WARP = 32
MAX_THREADS = 512
"""Maximum threads per block (``max_reduce_threads``)."""
_OUTPUTS_AT_ONCE = 4
"""Maximum vector width over adjacent outputs (``get_output_vec_size``)."""
_MIN_VALUES, _MAX_VALUES = 16, 256
"""Values per thread between which the work is split over blocks."""
_INT_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionKernel:
    """A reduction kernel. ``element`` is the size of a partial result in bytes, ``item`` that of an input element.

    ``loads`` is the number of values that a thread loads at once along the reduced dimension (``vt0``). ``in_output``
    says that the output can hold partial results, too.
    """

    element: int
    item: int
    loads: int = 4
    in_output: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The dimensions of a reduction in ``TensorIterator``'s order: reduced ones first, the fastest before.

    Strides are bytes; the output's stride of a reduced dimension is 0. ``offset`` is the number of bytes in the input's
    storage before its first element.
    """

    shape: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    offset: int = 0

    @property
    def reduced(self) -> int:
        """Number of reduced dimensions."""
        return sum(stride == 0 for stride in self.target)

    def fits_32_bits(self) -> bool:
        """Whether 32-bit indices are enough (``can_use_32bit_indexing``)."""
        reach = max(_reach(self.shape, strides) for strides in (self.source, self.target))
        return math.prod(self.shape) <= _INT_MAX and reach <= _INT_MAX

    def halves(self) -> tuple[Iteration, Iteration]:
        """The two halves along the dimension with the largest extent (``get_dim_to_split`` and ``split``)."""
        extents = [(size - 1) * max(pair) for size, *pair in zip(self.shape, self.source, self.target, strict=True)]
        farthest = max(range(len(extents)), key=lambda at: (extents[at], at))
        first = self.shape[farthest] // 2
        shapes = [
            (*self.shape[:farthest], size, *self.shape[farthest + 1 :])
            for size in (first, self.shape[farthest] - first)
        ]
        offset = self.offset + first * self.source[farthest]
        return replace(self, shape=shapes[0]), replace(self, shape=shapes[1], offset=offset)


def iteration(
    shape: Sequence[int], strides: Sequence[int], dims: Sequence[int], item: int, *, result_item: int, offset: int = 0
) -> Iteration:
    """The reduction over ``dims`` of a tensor with these element ``strides`` (``reorder_dimensions``, ``coalesce``)."""
    target = _contiguous(shape, dims, result_item)
    source = [stride * item for stride in strides]
    order = list(reversed(range(len(shape))))
    # Insertion sort, as in ``TensorIterator``: an undecided pair does not end the search for a place.
    for position in range(1, len(order)):
        at = position
        for before in range(position - 1, -1, -1):
            compared = _compare(order[before], order[at], shape, (target, source))
            if compared > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif compared < 0:
                break
    return _coalesced([(shape[dim], source[dim], target[dim]) for dim in order], offset * item)


def scratch(kernel: ReductionKernel, work: Iteration, gpu: GpuSpec) -> list[tuple[int, int]]:
    """Bytes of the staging buffer and of the semaphores, for each launch that has them.

    There are several launches if the tensor is too large for 32-bit indices; see also :func:`accumulated`.
    """
    if not work.fits_32_bits():
        return [sizes for half in work.halves() for sizes in scratch(kernel, half, gpu)]
    sizes = _staging(kernel, work, gpu)
    return [] if sizes is None else [sizes]


def accumulated(kernel: ReductionKernel, work: Iteration, result_item: int) -> int:
    """Bytes in which several launches accumulate, if the output cannot hold that (``AccumulationBuffer``)."""
    if kernel.in_output or work.fits_32_bits() or result_item >= kernel.element:
        return 0
    return math.prod(work.shape[work.reduced :]) * kernel.element


def _staging(kernel: ReductionKernel, work: Iteration, gpu: GpuSpec) -> tuple[int, int] | None:
    """Bytes of staging buffer and semaphores: ``setReduceConfig``, ``global_memory_size`` and ``semaphore_size``."""
    outputs = math.prod(work.shape[work.reduced :])
    inputs = math.prod(work.shape) // outputs
    along_fastest = work.reduced == len(work.shape) or work.source[0] < work.source[work.reduced]
    across, down = (inputs, outputs) if along_fastest else (outputs, inputs)
    vector = 1
    if work.shape and work.source[0 if along_fastest else work.reduced] == kernel.item:
        if not along_fastest:
            vector = _outputs_at_once(work, kernel.item)
            across //= vector
        elif across >= 128 and work.reduced == 1:
            across //= kernel.loads
    threads = MAX_THREADS // vector
    across, down = (min(power_of_2(size), threads) for size in (across, down))
    # The shape of a block of threads (``set_block_dimension``).
    width = min(across, WARP)
    height = min(down, threads // width)
    width = min(across, threads // height)
    step_input, step_output = (width, 1) if along_fastest else (1, width)
    if -(-inputs // step_input) < min(height * 16, _MAX_VALUES):
        return None
    values = -(-inputs // (step_input * height))
    grid = -(-(outputs // vector) // step_output)
    target = (gpu.sm_count or 108) * (gpu.threads_per_sm // (width * height))
    if values < _MAX_VALUES or grid > target:
        return None
    blocks = max(min(-(-target // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if blocks < 2:
        return None
    staging = kernel.element * outputs * blocks
    return (staging if along_fastest else staging * width * vector), 4 * grid


def _outputs_at_once(work: Iteration, item: int) -> int:
    """Number of adjacent outputs per thread; the allocator's blocks have a larger alignment."""
    numbers = [work.offset // item, work.shape[work.reduced]]
    numbers += [stride // item for at, stride in enumerate(work.source) if at != work.reduced]
    vector = _OUTPUTS_AT_ONCE
    while any(number % vector for number in numbers):
        vector //= 2
    return vector


def _contiguous(shape: Sequence[int], dims: Sequence[int], item: int) -> list[int]:
    """Byte strides of the result, 0 in the reduced dimensions (``review_reduce_result``)."""
    strides, step = [0] * len(shape), item
    for dim in reversed(range(len(shape))):
        if dim not in dims:
            strides[dim] = step
            step *= shape[dim]
    return strides


def _compare(dim: int, other: int, shape: Sequence[int], operands: tuple[list[int], list[int]]) -> int:
    """1 if two dimensions are in the wrong order, -1 if in the right one, 0 if undecided."""
    target, _ = operands
    if (target[dim] == 0) != (target[other] == 0):
        return 1 if target[other] == 0 else -1
    for strides in operands:
        if strides[dim] == 0 or strides[other] == 0:
            continue
        if strides[dim] != strides[other]:
            return -1 if strides[dim] < strides[other] else 1
        if shape[dim] > shape[other]:
            return 1
    return 0


def _coalesced(dims: Sequence[tuple[int, int, int]], offset: int) -> Iteration:
    """``dims`` with contiguous dimensions merged (``coalesce_dimensions``)."""
    merged: list[tuple[int, int, int]] = list(dims[:1])
    for size, source, target in dims[1:]:
        last, last_source, last_target = merged[-1]
        if last == 1:
            merged[-1] = (size, source, target)
        elif size == 1 or (last * last_source == source and last * last_target == target):
            merged[-1] = (last * size, last_source, last_target)
        else:
            merged.append((size, source, target))
    shape, from_strides, to_strides = zip(*merged, strict=True) if merged else ((), (), ())
    return Iteration(shape=shape, source=from_strides, target=to_strides, offset=offset)


def power_of_2(number: int) -> int:
    """The largest power of two that is at most ``number``, at least 1 (``last_pow2``)."""
    return 1 << max(number, 1).bit_length() - 1


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


SMALL_SORT = 4096
"""Maximum elements of a row that PyTorch's own kernel sorts in place (``should_use_small_sort``)."""
_LONG = 8
_DIGITS = 256
"""Bins of one pass of a radix sort, which uses eight bits."""
_ALIGNED = 256
"""Alignment of each part of the storage, and padding of the whole (``alias_temporaries``)."""
_THREADS = 384
"""Threads per block of the radix sort, except for small keys."""
_SMALL_KEYS = {1: (384, 18), 2: (512, 23)}
"""Threads per block, and four-byte elements per thread, for keys of one and two bytes.

For values of eight bytes on GPUs of compute capability 9 and more (``sm90_small_key_tuning``).
"""
_ALONE_THREADS, _ALONE_ITEMS = 256, 19
"""Threads and four-byte elements per thread of a sort in a single block, for which CUB needs one byte."""
_SUBSCRIPTION, _SUBSCRIBED_THREADS = 5, 256
"""Oversubscription and threads per block of the sort of one- and two-byte keys before Hopper."""
_SPINE_TILE = 512 * 11
"""Elements per block that adds up the counts of those kernels."""
_SCAN_THREADS, _SCAN_ITEMS = 128, 15
_UNIQUE_TILE = 1024
_PIECE = 1 << 30
"""Number of elements from which on ``nonzero`` works in pieces of this size."""
_SUM_ALONE = 4096
_SELECT_TILES = {(8, 0): 2304, (9, 0): 4224, **dict.fromkeys(((10, 0), (10, 3), (12, 0), (12, 1)), 3520)}
_SELECT_TILE = 640
"""Elements per block of the search for nonzeros, by compute capability, and for all others.

From the sizes that CUB requests on the emulated runtime of ``tests/emulated/``.
"""
_ROW_BLOCK = 1_000_000
"""Rows with at least so many elements are sorted one by one (``launch_stable_sort_kernel``)."""
_FEW_ROWS = 128
"""Fewer rows than this are sorted as one."""
_TOPK_THREADS, _TOPK_BLOCKS, _TOPK_ITEMS = 256, 6, (4, 64)
"""Threads per block, blocks per SM (40 registers per thread), minimum and maximum elements per thread."""
_TOPK_BOUNDS = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
"""(Maximum rows, minimum elements) for which several blocks search a row (``should_use_multiblock``)."""
_TOPK_OTHERWISE = 400


def temporary(*parts: int) -> int:
    """Bytes of the storage for all ``parts``."""
    return sum(round_up(part, _ALIGNED) for part in parts) + _ALIGNED - 1


def radix_sort(count: int, key: int, value: int, gpu: GpuSpec, *, bits: int = 0) -> int:
    """Bytes to sort ``count`` keys of ``key`` bytes with values of ``value`` bytes (``DeviceRadixSort``).

    ``value`` is 0 if only keys are sorted. ``bits`` is the number of key bits that differ: all if it is 0.
    """
    widest = max(key, value)
    if count <= _ALONE_THREADS * _per_thread(_ALONE_ITEMS, widest):
        return 1
    passes = -(-(bits or 8 * key) // 8)
    buffers = (count * key, count * value) if passes > 1 else ()
    if key < 4 and _before_hopper(gpu):
        blocks = (gpu.sm_count or 108) * (gpu.threads_per_sm // _SUBSCRIBED_THREADS) * _SUBSCRIPTION
        digits = 128 if key > 1 else 64
        return temporary((blocks * digits + _SPINE_TILE) * _LONG, count * key, count * value)
    threads, items = _SMALL_KEYS[key] if key < 4 else (_THREADS, _nominal(key, value, gpu))
    tile = threads * _per_thread(items, widest)
    at_once = ((1 << 28) - 1) // tile * tile
    portions = -(-count // at_once)
    lookback = -(-min(count, at_once) // tile) * _DIGITS * 4
    return temporary(portions * passes * _DIGITS * _LONG, lookback, *buffers, portions * passes * 4)


def _nominal(key: int, value: int, gpu: GpuSpec) -> int:
    """Four-byte elements per thread (``OnesweepPolicy`` with offsets of 64 bits)."""
    if _before_hopper(gpu):
        return 17 if key == 4 and value else 21
    if key == 4:
        return (17 if value < _LONG else 29) if value else 18
    return 30 if value < _LONG else 24


def _before_hopper(gpu: GpuSpec) -> bool:
    return (gpu.compute_capability or (8, 0)) < (9, 0)


def _per_thread(nominal: int, size: int) -> int:
    return max(1, min(nominal * 4 // size, nominal * 2))


def scan(count: int, item: int) -> int:
    """Bytes for the running sum of ``count`` elements of four or eight bytes (``DeviceScan``)."""
    tiles = -(-count // (_SCAN_THREADS * _per_thread(_SCAN_ITEMS, item)))
    return temporary((tiles + 32) * 2 * item, 1)


def unique(count: int) -> int:
    """Bytes to find where runs of equal keys begin (``DeviceSelect::UniqueByKey``).

    The number of keys per block is unknown: 512 or more, by the cases of ``tests/emulated/``.
    """
    return temporary((-(-count // _UNIQUE_TILE) + 32) * _LONG, 1, 1)


def nonzero(count: int, gpu: GpuSpec) -> list[tuple[int, int]]:
    """Bytes to count the nonzeros among ``count`` elements, and to find them, per piece.

    Sources: ``DeviceReduce::Sum``, ``DeviceSelect::Flagged`` and ``nonzero_cuda_out_impl``.
    """
    whole = count < _INT_MAX
    pieces = [count] if whole else [min(_PIECE, count - begin) for begin in range(0, count, _PIECE)]
    return [(_sum(piece, gpu), _select(piece, gpu)) for piece in pieces]


def _sum(count: int, gpu: GpuSpec) -> int:
    """Bytes for a sum: a single block adds up few elements; many take as many blocks as fill the GPU several times."""
    if count <= _SUM_ALONE:
        return 1
    blocks = (gpu.sm_count or 108) * (gpu.threads_per_sm // _SUBSCRIBED_THREADS) * _SUBSCRIPTION
    return temporary(blocks * 4)


def _select(count: int, gpu: GpuSpec) -> int:
    tile = _SELECT_TILES.get(gpu.compute_capability or (8, 0), _SELECT_TILE)
    return temporary((-(-count // tile) + 32) * _LONG, 1)


def bits_of(number: int) -> int:
    """Bits of numbers up to ``number`` (``get_num_bits``)."""
    return max(number, 1).bit_length()


def sort(length: int, rows: int, item: int, gpu: GpuSpec) -> list[tuple[int, ...]]:
    """Scratch of a sort of ``rows`` rows: sets that are alive together, one set after the other."""
    count = length * rows
    if length <= SMALL_SORT:
        return [(length * _LONG,)]
    if rows == 1 or length >= _ROW_BLOCK:
        return [(length * _LONG, radix_sort(length, item, _LONG, gpu))]
    if rows < _FEW_ROWS:  # sorts by value, carrying row and index, and then by row
        pairs = (count * _LONG, count * _LONG, count * item, radix_sort(count, item, _LONG, gpu))
        return [pairs, (radix_sort(count, _LONG, 0, gpu, bits=math.ceil(math.log2(rows))),)]
    return [(count * _LONG, temporary(count * item, count * _LONG))]


def topk(length: int, rows: int, item: int, gpu: GpuSpec) -> list[tuple[int, ...]]:
    """Scratch of ``topk`` if several blocks search each of the ``rows`` rows; otherwise nothing."""
    if length < next((least for most, least in _TOPK_BOUNDS if rows <= most), _TOPK_OTHERWISE):
        return []
    threads = (gpu.sm_count or 108) * _TOPK_BLOCKS * _TOPK_THREADS
    each = min(max(-(-length * rows // threads), _TOPK_ITEMS[0]), _TOPK_ITEMS[1])
    blocks = -(-length // (each * _TOPK_THREADS)) * rows
    counts = (blocks * _DIGITS * 2, rows * _DIGITS * 4, blocks * 4, blocks * 4)
    sums = scan(blocks, _LONG)
    return [(rows * item, rows * _LONG, rows * _LONG, *counts, sums), (sums,)]


def randperm(count: int, item: int, gpu: GpuSpec) -> list[tuple[int, ...]]:
    """Scratch of ``randperm_out_cuda``: random keys by which the numbers are sorted."""
    if count < 2:
        return []
    threshold = math.log(0.9) * 12  # with this probability no key is drawn twice
    bits = min(64, math.ceil(math.log2(count - (6 * count * count + 1) / threshold)))
    key = 4 if bits <= 32 else _LONG
    # The first is the count as a tensor, for the check of the dtype (check_supported_max_int_with_precision).
    return [(item,), (count * item, count * key, count * key, radix_sort(count, key, item, gpu, bits=bits))]
