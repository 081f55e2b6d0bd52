"""Temporary storage of sorts and scans on a GPU: what CUB asks for, and PyTorch's own sort and topk beside it.

The sizes are those that CUB computes on the host (``cub/device/dispatch``, in CUDA 12 and 13): they depend on how many
elements there are, on the sizes of keys and values, and a little on the GPU. Where that is not known, an A100 is taken.
"""

from __future__ import annotations

import math

from ampmem.allocator.gpus import GpuSpec
from ampmem.allocator.settings import round_up

SMALL_SORT = 4096
"""Rows of up to so many elements are sorted in place by PyTorch's own kernel (``should_use_small_sort``)."""
_LONG = 8
_DIGITS = 256
"""Bins of one pass of a radix sort, which takes eight bits."""
_ALIGNED = 256
"""Each part of the storage begins at a multiple of this, and so may the whole (``alias_temporaries``)."""
_THREADS = 384
"""Threads of a block of the radix sort, but for small keys."""
_SMALL_KEYS = {1: (384, 18), 2: (512, 23)}
"""Threads of a block, and elements of four bytes that each takes, for keys of one and two bytes with values of eight,
on GPUs of compute capability 9 and more (``sm90_small_key_tuning``)."""
_ALONE_THREADS, _ALONE_ITEMS = 256, 19
"""Threads and elements of four bytes each of a block that sorts alone, for which CUB asks for one byte."""
_SUBSCRIPTION, _SUBSCRIBED_THREADS = 5, 256
"""How often the kernels that sort keys of one and two bytes before Hopper may fill the GPU, and the threads of their
blocks."""
_SPINE_TILE = 512 * 11
"""Elements of a block that adds up the counts of those kernels."""
_SCAN_THREADS, _SCAN_ITEMS = 128, 15
_UNIQUE_TILE = 1024
_INT_MAX, _PIECE = (1 << 31) - 1, 1 << 30
"""From so many elements on ``nonzero`` looks through pieces of so many."""
_SUM_ALONE = 4096
_SELECT_TILES = {(8, 0): 2304, (9, 0): 4224, **dict.fromkeys(((10, 0), (10, 3), (12, 0), (12, 1)), 3520)}
_SELECT_TILE = 640
"""Elements of a block that looks for what is not 0, by compute capability and on all others: by the sizes that CUB asks
for on the emulated runtime of ``tests/emulated/``."""
_ROW_BLOCK = 1_000_000
"""From rows of so many elements on, each is sorted by itself (``launch_stable_sort_kernel``)."""
_FEW_ROWS = 128
"""Fewer rows than these are sorted as one."""
_TOPK_THREADS, _TOPK_BLOCKS, _TOPK_ITEMS = 256, 6, (4, 64)
"""Threads of a block, blocks of a multiprocessor (40 registers a thread), and the least and most elements a thread."""
_TOPK_BOUNDS = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
"""With up to so many rows several blocks look through a row of so many elements (``should_use_multiblock``)."""
_TOPK_OTHERWISE = 400


def temporary(*parts: int) -> int:
    """Bytes of the storage that has all ``parts``."""
    return sum(round_up(part, _ALIGNED) for part in parts) + _ALIGNED - 1


def radix_sort(count: int, key: int, value: int, gpu: GpuSpec, *, bits: int = 0) -> int:
    """Bytes for sorting ``count`` keys of ``key`` bytes with values of ``value`` bytes (``DeviceRadixSort``).

    ``value`` is 0 where keys are sorted alone. ``bits`` is how many of a key's bits differ: all where it is 0.
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
    """Elements of four bytes that a thread takes (``OnesweepPolicy`` with offsets of 64 bits)."""
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
    """Bytes for a running sum of ``count`` elements of four or eight bytes (``DeviceScan``)."""
    tiles = -(-count // (_SCAN_THREADS * _per_thread(_SCAN_ITEMS, item)))
    return temporary((tiles + 32) * 2 * item, 1)


def unique(count: int) -> int:
    """Bytes for finding where runs of equal keys begin (``DeviceSelect::UniqueByKey``).

    How many keys a block takes is not known: 512 or more, by the cases of ``tests/emulated/``.
    """
    return temporary((-(-count // _UNIQUE_TILE) + 32) * _LONG, 1, 1)


def nonzero(count: int, gpu: GpuSpec) -> list[tuple[int, int]]:
    """Bytes for counting what is not 0 among ``count`` elements (``DeviceReduce::Sum``), and for finding where that is
    (``DeviceSelect::Flagged``), for each piece in which ``nonzero`` looks through them (``nonzero_cuda_out_impl``)."""
    whole = count < _INT_MAX
    pieces = [count] if whole else [min(_PIECE, count - begin) for begin in range(0, count, _PIECE)]
    return [(_sum(piece, gpu), _select(piece, gpu)) for piece in pieces]


def _sum(count: int, gpu: GpuSpec) -> int:
    """A block adds up few elements alone; many have as many blocks as fill the GPU some times over."""
    if count <= _SUM_ALONE:
        return 1
    blocks = (gpu.sm_count or 108) * (gpu.threads_per_sm // _SUBSCRIBED_THREADS) * _SUBSCRIPTION
    return temporary(blocks * 4)


def _select(count: int, gpu: GpuSpec) -> int:
    tile = _SELECT_TILES.get(gpu.compute_capability or (8, 0), _SELECT_TILE)
    return temporary((-(-count // tile) + 32) * _LONG, 1)


def bits_of(number: int) -> int:
    """The bits that numbers up to ``number`` have (``get_num_bits``)."""
    return max(number, 1).bit_length()


def sort(length: int, rows: int, item: int, gpu: GpuSpec) -> list[tuple[int, ...]]:
    """What a sort of ``rows`` rows allocates besides its results: sets that are alive together, one after the other."""
    count = length * rows
    if length <= SMALL_SORT:
        return [(length * _LONG,)]
    if rows == 1 or length >= _ROW_BLOCK:
        return [(length * _LONG, radix_sort(length, item, _LONG, gpu))]
    if rows < _FEW_ROWS:  # by value, with the row and the place in it as values, and then by row
        pairs = (count * _LONG, count * _LONG, count * item, radix_sort(count, item, _LONG, gpu))
        return [pairs, (radix_sort(count, _LONG, 0, gpu, bits=math.ceil(math.log2(rows))),)]
    return [(count * _LONG, temporary(count * item, count * _LONG))]


def topk(length: int, rows: int, item: int, gpu: GpuSpec) -> list[tuple[int, ...]]:
    """What ``topk`` allocates to look through ``rows`` rows with several blocks each, nothing elsewhere."""
    if length < next((least for most, least in _TOPK_BOUNDS if rows <= most), _TOPK_OTHERWISE):
        return []
    threads = (gpu.sm_count or 108) * _TOPK_BLOCKS * _TOPK_THREADS
    each = min(max(-(-length * rows // threads), _TOPK_ITEMS[0]), _TOPK_ITEMS[1])
    blocks = -(-length // (each * _TOPK_THREADS)) * rows
    counts = (blocks * _DIGITS * 2, rows * _DIGITS * 4, blocks * 4, blocks * 4)
    sums = scan(blocks, _LONG)
    return [(rows * item, rows * _LONG, rows * _LONG, *counts, sums), (sums,)]


def randperm(count: int, item: int, gpu: GpuSpec) -> list[tuple[int, ...]]:
    """What ``randperm_out_cuda`` allocates beside its result: random keys by which the numbers are sorted."""
    if count < 2:
        return []
    threshold = math.log(0.9) * 12  # no key is drawn twice, with that probability
    bits = min(64, math.ceil(math.log2(count - (6 * count * count + 1) / threshold)))
    key = 4 if bits <= 32 else _LONG
    # The number of elements as a tensor: whether the type can hold it (check_supported_max_int_with_precision).
    return [(item,), (count * item, count * key, count * key, radix_sort(count, key, item, gpu, bits=bits))]
