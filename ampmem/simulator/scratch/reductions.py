"""What a reduction on a GPU allocates for itself, and gives back before it returns.

Where the blocks of threads that share one output are several, they leave their partial results in a staging buffer
and count themselves with semaphores (``gpu_reduce_kernel`` and ``setReduceConfig`` in
``aten/src/ATen/native/cuda/Reduce.cuh``, 2.13). How many there are depends on the shape, on which dimensions are
reduced, in which order they lie in memory, and on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampmem.allocator.gpus import GpuSpec

WARP = 32
MAX_THREADS = 512
"""Per block of threads (``max_reduce_threads``)."""
_OUTPUTS_AT_ONCE = 4
"""The widest load of neighbouring outputs (``get_output_vec_size``)."""
_MIN_VALUES, _MAX_VALUES = 16, 256
"""Values per thread between which the work is spread over blocks."""
_INT_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionKernel:
    """A reduction kernel. ``element`` is the size of its partial results, ``item`` that of an input's element.

    ``loads`` is how many values a thread loads at once along the reduced dimension (``vt0``). ``in_output`` says
    that the output can hold partial results too.
    """

    element: int
    item: int
    loads: int = 4
    in_output: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The dimensions of a reduction as ``TensorIterator`` puts them: the reduced ones first, the fastest before.

    The strides are bytes; a reduced dimension's stride of the output is 0. ``offset`` are the bytes of the input's
    storage before its first element.
    """

    shape: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    offset: int = 0

    @property
    def reduced(self) -> int:
        """How many of the dimensions are reduced."""
        return sum(stride == 0 for stride in self.target)

    def fits_32_bits(self) -> bool:
        """``can_use_32bit_indexing``."""
        reach = max(_reach(self.shape, strides) for strides in (self.source, self.target))
        return _product(self.shape) <= _INT_MAX and reach <= _INT_MAX

    def halves(self) -> tuple[Iteration, Iteration]:
        """Split where it reaches farthest (``get_dim_to_split`` and ``split``)."""
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
    """The reduction of ``dims`` of a tensor with these element ``strides`` (``reorder_dimensions``, ``coalesce``)."""
    target = _contiguous(shape, dims, result_item)
    source = [stride * item for stride in strides]
    order = list(reversed(range(len(shape))))
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

    There are several launches where the tensor is too large for indices of 32 bits; see :func:`accumulated` too.
    """
    if not work.fits_32_bits():
        return [sizes for half in work.halves() for sizes in scratch(kernel, half, gpu)]
    sizes = _staging(kernel, work, gpu)
    return [] if sizes is None else [sizes]


def accumulated(kernel: ReductionKernel, work: Iteration, result_item: int) -> int:
    """Bytes that several launches add up in, where the output cannot hold that (``AccumulationBuffer``)."""
    if kernel.in_output or work.fits_32_bits() or result_item >= kernel.element:
        return 0
    return _product(work.shape[work.reduced :]) * kernel.element


def _staging(kernel: ReductionKernel, work: Iteration, gpu: GpuSpec) -> tuple[int, int] | None:
    """``setReduceConfig``, ``global_memory_size`` and ``semaphore_size``."""
    outputs = _product(work.shape[work.reduced :])
    inputs = _product(work.shape) // outputs
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
    """How many neighbouring outputs a thread makes; the allocator's blocks are aligned to more than that."""
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
    """Whether two dimensions are in the wrong order (1), the right one (-1), or it cannot be said (0)."""
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
    """Dimensions that lie in memory like one are one (``coalesce_dimensions``)."""
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
    """The largest power of two up to ``number``, at least 1 (``last_pow2``)."""
    return 1 << max(number, 1).bit_length() - 1


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
