"""The scratch of reductions, against cases worked out by hand and against a trace from a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.snapshots import real

from ampmem.allocator.gpus import find_gpu
from ampmem.importer.unpickle import load_plain
from ampmem.simulator.scratch.reductions import Iteration, ReductionKernel, accumulated, iteration, scratch

SUM = ReductionKernel(element=4, item=4)
MAX = ReductionKernel(element=16, item=4, in_output=False)
"""``max`` with indices: a value and its place."""


def sizes(
    shape: tuple[int, ...],
    dims: tuple[int, ...],
    *,
    strides: tuple[int, ...] | None = None,
    gpu: str = "h100",
    kernel: ReductionKernel = SUM,
    offset: int = 0,
) -> list[tuple[int, int]]:
    if strides is None:
        strides = contiguous(shape)
    work = iteration(shape, strides, dims, kernel.item, result_item=4, offset=offset)
    return scratch(kernel, work, find_gpu(gpu))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def test_dimensions_that_lie_together_are_one() -> None:
    rows = iteration((4, 128, 768), contiguous((4, 128, 768)), (0, 1), 4, result_item=4)
    assert rows == Iteration(shape=(512, 768), source=(3072, 4), target=(0, 4))
    images = iteration((8, 16, 5, 5), contiguous((8, 16, 5, 5)), (0, 2, 3), 4, result_item=4)
    assert images == Iteration(shape=(25, 8, 16), source=(4, 1600, 100), target=(0, 0, 4))
    assert iteration((3, 5), (5, 1), (0, 1), 2, result_item=2, offset=7) == Iteration(
        shape=(15,), source=(2,), target=(0,), offset=14
    )


def test_the_gradient_of_a_bias() -> None:
    # 768 outputs, 4 at once: blocks of 32 x 4 threads, 6 of them side by side. Each thread has 8192 / 4 = 2048 rows;
    # with 16 a thread that is 128 blocks, and 6 * 128 are fewer than the 132 * 16 that the GPU holds.
    assert sizes((8192, 768), (0,)) == [(4 * 768 * 128 * 32 * 4, 4 * 6)]


@pytest.mark.parametrize(("gpu", "blocks"), [("h100", 528), ("a100-80", 432), ("rtx4090", 384), ("rtx3090", 246)])
def test_the_sum_of_everything_depends_on_the_gpu(gpu: str, blocks: int) -> None:
    # One output, 512 threads, 16,384 values each: SMs times what each holds, 2048 / 512 or 1536 / 512 blocks.
    assert sizes((1 << 23,), (0,), gpu=gpu) == [(4 * blocks, 4)]


def test_small_reductions_need_none() -> None:
    assert sizes((4, 128, 1024), (2,)) == []
    assert sizes((4, 128, 1024), (0, 1)) == []
    assert sizes((), ()) == []
    assert sizes((1, 1), (0, 1)) == []


def test_outputs_that_are_not_aligned_are_made_one_at_a_time() -> None:
    # 766 outputs two at a time: blocks of 32 x 8, 383 / 32 = 12 of them, and 8192 / 8 / 16 = 64 blocks each.
    assert sizes((8192, 766), (0,)) == [(4 * 766 * 64 * 32 * 2, 4 * 12)]
    # One at a time: blocks of 32 x 16, 24 of them, and 132 * 4 / 24 = 22 for each, where 32 could be used.
    assert sizes((8192, 768), (0,), offset=1) == [(4 * 768 * 22 * 32, 4 * 24)]


def test_what_32_bits_cannot_index_is_done_in_halves() -> None:
    # 2.4 GB: two launches, each over half of the rows.
    shape = (12_000, 50_304)
    work = iteration(shape, contiguous(shape), (0,), 4, result_item=4)
    assert not work.fits_32_bits()
    assert [half.shape for half in work.halves()] == [(6000, 50_304), (6000, 50_304)]
    assert work.halves()[1].offset == 6000 * 50_304 * 4
    assert len(sizes((1 << 30,), (0,))) == 2
    assert accumulated(SUM, work, 4) == 0
    assert accumulated(ReductionKernel(element=4, item=2, in_output=False), work, 2) == 50_304 * 4


def trace() -> Iterator[tuple[str, int]]:
    """The op and the size of every allocation of a reduction on an H100 (its cuBLAS workspaces are 32 MiB)."""
    data: Any = load_plain(real("lm2700m_ctx128_fp32_step"))
    for event in next(events for events in data["device_traces"] if events):
        names = [frame["name"] for frame in event.get("frames", [])]
        if event["action"] == "alloc" and any("gpu_reduce_kernel" in name for name in names):
            yield "max" if any("::max_dim::" in name for name in names) else "sum", event["size"]


def test_the_sizes_that_a_gpu_asked_for() -> None:
    # The model's last matrix product leaves the tokens, 4 x 128, fastest; 10,000 is the vocabulary, 2560 the width.
    logits, hidden = ((4, 128, size) for size in (10_000, 2560))
    strides = (128, 1, 512)
    expected = {
        "max": [*sizes(logits, (2,), strides=strides, kernel=MAX)[0]],
        "sum": [*sizes(logits, (2,), strides=strides)[0], *sizes(hidden, (2,), strides=strides)[0] * 65],
    }
    seen: dict[str, list[int]] = {"max": [], "sum": []}
    for op, size in trace():
        seen[op].append(size)
    assert seen == expected
    assert seen["max"] == [164_626_432, 16]
