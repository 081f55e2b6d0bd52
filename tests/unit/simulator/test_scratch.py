"""What ops and libraries allocate for themselves on a GPU, against the formulas in PyTorch's source."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.torch_version import TorchVersion  # noqa: E402

from ampmem.allocator.gpus import find_gpu  # noqa: E402
from ampmem.allocator.settings import KIB, MIB  # noqa: E402
from ampmem.simulator import extras  # noqa: E402
from ampmem.simulator.scratch import reductions  # noqa: E402
from ampmem.simulator.scratch import scratch as sizes_of_scratch  # noqa: E402
from ampmem.simulator.scratch.scratch import (  # noqa: E402
    SORTS,
    course_of,
    made_by,
    scratch_of,
    unmodelled,
    whole_result,
)

aten = torch.ops.aten
H100 = find_gpu("h100")


def meta(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def scratch(func: Any, *args: Any) -> list[tuple[int, ...]]:
    return scratch_of(func, args, func(*args), H100)


def course(func: Any, *args: Any) -> list[Any]:
    """The op's course, with the number of the result in place of each result."""
    made = func(*args)
    results = made if isinstance(made, (tuple, list)) else [made]
    numbers = {id(result): f"result {place}" for place, result in enumerate(results)}
    return [numbers.get(id(step), step) for step in course_of(func, args, made, H100)]


@pytest.mark.parametrize(
    ("func", "element"),
    [
        (aten.sum.dim_IntList, 4),
        (aten.mean.dim, 4),
        (aten.amax.default, 4),
        (aten.var.correction, 16),
        (aten.var_mean.correction, 16),
    ],
)
def test_a_reduction_of_rows(func: Any, element: int) -> None:
    # As for a bias's gradient: 768 outputs, 128 blocks, 32 x 4 outputs in each.
    assert scratch(func, meta(8192, 768), [0]) == [(element * 768 * 128 * 128, 24)]


def test_max_keeps_places_beside_values() -> None:
    assert scratch(aten.max.dim, meta(8192, 768), 0) == [(16 * 768 * 128 * 128, 24)]


def test_a_norm_of_everything() -> None:
    assert scratch(aten.linalg_vector_norm.default, meta(4096, 2048)) == [(4 * 528, 4)]


def test_half_is_summed_in_float() -> None:
    # Blocks of threads do not depend on the type, the partial results are FP32.
    assert scratch(aten.sum.dim_IntList, meta(8192, 768, dtype=torch.bfloat16), [0]) == [(4 * 768 * 128 * 128, 24)]


@pytest.mark.parametrize("loss", [aten.mse_loss.default, aten.smooth_l1_loss.default])
def test_a_loss_is_made_of_each_element_first(loss: Any) -> None:
    ((each, *reduction),) = scratch(loss, meta(4096, 2048), meta(4096, 2048))
    assert each == 4 * 4096 * 2048
    assert (tuple(reduction),) == tuple(scratch(aten.mean.default, meta(4096, 2048)))
    ((broadcast, *_),) = scratch(loss, meta(4096, 1), meta(2048))
    assert broadcast == each
    assert scratch(loss, meta(4096, 2048), meta(4096, 2048), 0) == []


def test_huber_loss_makes_its_result_after_each_element() -> None:
    (reduction,) = scratch(aten.mean.default, meta(4096, 2048))
    each = 4 * 4096 * 2048
    assert course(aten.huber_loss.default, meta(4096, 2048), meta(4096, 2048)) == [each, "result 0", *reduction]
    assert course(aten.huber_loss.default, meta(4096, 2048), meta(4096, 2048), 0) == []


def test_the_memory_of_each_element_stays_with_a_reduced_loss() -> None:
    given, number = (meta(4096, 1), meta(2048)), meta()
    for loss in (aten.mse_loss, aten.smooth_l1_loss, aten.soft_margin_loss, aten.binary_cross_entropy):
        assert whole_result(loss.default, given, number) == 4 * 4096 * 2048
        assert whole_result(loss.default, given, meta(4096, 2048)) is None
        assert whole_result(loss.default, (meta(), meta()), number) is None
    assert whole_result(aten.huber_loss.default, given, number) is None


def test_what_is_summed_in_another_type_is_cast_first() -> None:
    assert scratch(aten.sum.default, meta(100, dtype=torch.bool)) == [(800,)]
    ((cast, staging, semaphores),) = scratch(aten.sum.default, meta(1 << 23, dtype=torch.bool))
    assert (cast, staging, semaphores) == (8 << 23, 8 * 528, 4)


@pytest.mark.parametrize(("by_chunks", "sizes"), [(False, [2 * 2 * 4]), (True, [3 * 8, 3 * 4])])
def test_the_partial_norms_of_many_tensors_come_before_the_norms(
    by_chunks: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch 2.15 on there are as many as all tensors have chunks."""
    monkeypatch.setattr("ampmem.simulator.scratch.scratch._NORMS_OF_CHUNKS", by_chunks)
    assert course(aten._foreach_norm.Scalar, [meta(65_537), meta(10)]) == sizes


def test_an_embedding_sorts_many_indices() -> None:
    """The sizes are those of PyTorch's CUDA build for an A100, but for the number of rows that is added up at once."""
    gradient, indices = meta(4096, 64), meta(4096, dtype=torch.int64)
    made = course(aten.embedding_dense_backward.default, gradient, indices, 1000, -1, False)
    each, sort, partials = 32_768, 2 * 2048 + 1024 + 2 * 32_768 + 256 + 255, 4096 // 10 + 1000
    assert made[:6] == [each, each, each, sort, -sort, -each]
    assert made[6:13] == ["result 0", each, 8, each, 1279, -1279, -each]
    assert made[13:] == [8000, 8000, 1279, -1279, 8, partials * 8, partials * 64 * 4]
    few = (meta(3072, 64), meta(3072, dtype=torch.int64), 1000, -1, False)
    assert course(aten.embedding_dense_backward.default, *few) == []


def test_an_embedding_copies_what_is_not_contiguous() -> None:
    words, gradient = meta(4, 128, dtype=torch.int64)[:, :-1], meta(127, 4, 64).transpose(0, 1)
    assert course(aten.embedding.default, meta(1000, 64), words) == [4064]
    assert course(aten.embedding_dense_backward.default, gradient, words, 1000, -1, False) == [4064, 130_048]


def test_the_norms_of_very_many_rows() -> None:
    source, moments, weight = meta(131_072, 256), meta(131_072, 1), meta(256)
    args = (source, source, [256], moments, moments, weight, weight, [True, True, True])
    # 4096 x 8 blocks of 32 rows; then each gradient is the sum of 4096: 64 blocks of 32 x 4 outputs.
    partial, staging = 4096 * 256 * 4, 4 * 256 * 64 * 128
    added = (1024, staging, 8, -staging, -8, -1024)
    results = ["result 0", "result 1", "result 2"]
    expected = [*results, partial, partial, *added, *added]
    assert course(aten.native_layer_norm_backward.default, *args) == expected
    few, moments = meta(65_536, 256), meta(65_536, 1)
    args = (few, few, [256], moments, moments, weight, weight, [True, True, True])
    assert course(aten.native_layer_norm_backward.default, *args) == results


def test_a_convolutions_bias_is_a_sum() -> None:
    gradient, source, weight = meta(64, 256, 56, 56), meta(64, 64, 56, 56), meta(256, 64, 1, 1)
    args = (gradient, source, weight, [256], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    # 256 outputs of 64 x 3136 values, of which 3136 lie together: 512 threads, 392 values each, and 3 x 132 blocks
    # that there is room for; with 16 values a thread 25 blocks would do, and 256 x 3 are enough.
    assert scratch(aten.convolution_backward.default, *args, [True, True, True]) == [(4 * 256 * 3, 4 * 256)]
    assert scratch(aten.convolution_backward.default, *args, [True, True, False]) == []


def test_attention_backward() -> None:
    query = meta(2, 4, 100, 72, dtype=torch.bfloat16)
    sizes = scratch_of(aten._scaled_dot_product_flash_attention_backward.default, (query, query), (), H100)
    assert sizes == [(2 * 4 * 128 * 4, 2 * 4 * 128 * 96 * 4)]


A100 = find_gpu("a100-80")
BF16 = torch.bfloat16
FLASH, EFFICIENT = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention


@pytest.mark.parametrize(
    ("query", "keys", "dropout", "course"),
    [
        ((8, 12, 256, 64), 256, 0.0, ()),
        ((8, 12, 64, 64), 308, 0.0, ("out", "sums", 49152, 3145728)),
        ((2, 12, 256, 80), 256, 0.0, ("out", "sums", 49152, 4718592)),
        ((2, 12, 256, 256), 256, 0.0, ("out", "sums", 49152, 12582912)),
        ((1, 12, 16, 64), 2048, 0.0, ("out", "sums", 6144, 393216)),
        ((8, 12, 64, 64), 308, 0.1, ("out", "sums", 16, "unused", "state")),
    ],
)
def test_flash_attention_divides_the_keys(query: Any, keys: int, dropout: float, course: Any) -> None:
    """The bytes are those of PyTorch's CUDA build for an A100, as in the two tests after this one."""
    key = meta(*query[:2], keys, query[3], dtype=BF16)
    args = (meta(*query, dtype=BF16), key, key, dropout)
    results = ("out", "sums", None, None, None, None, "state", "unused", "mask")
    assert course_of(FLASH.default, args, results, A100) == course
    assert scratch_of(FLASH.default, args, results, A100) == []


def test_flash_attention_backward_copies_and_sums_over_groups() -> None:
    query, key = meta(2, 16, 256, 64, dtype=BF16), meta(2, 4, 256, 64, dtype=BF16)
    func = aten._scaled_dot_product_flash_attention_backward.default
    args = (query, query, key, key, query)
    assert scratch_of(func, args, (), A100) == [(32768, 2097152, 1048576, 1048576)]
    assert course_of(func, args, (), A100) == (1048576, 1048576)
    transposed = meta(2, 256, 16, 64, dtype=BF16).transpose(1, 2)
    assert course_of(func, (transposed, query, key, key, transposed), (), A100) == ()


@pytest.mark.parametrize(
    ("query", "keys", "dtype", "sizes"),
    [
        ((8, 12, 256, 64), 256, torch.float32, (6291456, 98304, 98304, -6291456, -98304, 6297600)),
        ((2, 12, 1, 64), 512, torch.float32, (6144, 96, -6144, 393600)),
        ((2, 12, 256, 80), 256, torch.float32, (1966080, 24576, 24576, -1966080, -24576, 3147264)),
        ((2, 12, 256, 160), 256, torch.float32, (3932160, 24576, 24576, -3932160, -24576, 4720896)),
        ((8, 12, 256, 64), 256, BF16, (98304, 6297600)),
        ((8, 12, 77, 64), 77, BF16, (29568, 3148800)),
    ],
)
def test_efficient_attention_backward(query: Any, keys: int, dtype: Any, sizes: tuple[int, ...]) -> None:
    source, key = meta(*query, dtype=dtype), meta(*query[:2], keys, query[3], dtype=dtype)
    args = (source, source, key, key, None, source, None, None, None, 0.0, [True] * 3 + [False])
    assert scratch_of(aten._scaled_dot_product_efficient_attention_backward.default, args, (), A100) == [sizes]


def test_efficient_attention_with_wide_heads_has_its_output_in_fp32() -> None:
    wide, narrow = meta(2, 4, 512, 256, dtype=BF16), meta(2, 4, 512, 128, dtype=BF16)
    assert scratch_of(EFFICIENT.default, (wide, wide, wide), (), A100) == [(4194304,)]
    assert scratch_of(EFFICIENT.default, (narrow, narrow, narrow), (), A100) == []


def test_cudnns_attention_backward_adds_up_in_fp32() -> None:
    func = aten._scaled_dot_product_cudnn_attention_backward.default
    query = meta(8, 12, 256, 64, dtype=BF16)
    # As on an H200 with torch 2.11 and cuDNN 9.19.
    assert scratch_of(func, (query, query, query, query), (), H100) == [(6390016,)]
    groups = meta(2, 16, 256, 64, dtype=BF16), meta(2, 4, 256, 64, dtype=BF16)
    assert scratch_of(func, (query, groups[0], groups[1], groups[1]), (), H100) == [(4227328,)]
    forward = aten._scaled_dot_product_cudnn_attention.default
    assert scratch_of(forward, (query, query, query), (), H100) == [(256,)]
    assert scratch_of(forward, (meta(2, 12, 1, 64, dtype=BF16), query, query), (), H100) == []


def test_random_numbers_of_efficient_attention_come_first_and_with_dropout_not_at_all() -> None:
    results = ("out", "sums", "seed", "offset")
    without = results[:2] if TorchVersion(torch.__version__) < "2.14" else ("seed", "offset", "out", "sums")
    assert made_by(EFFICIENT.default, (0, 1, 2, None, True, 0.0), results) == without
    assert made_by(EFFICIENT.default, (0, 1, 2, None, True, 0.1), results) == ("out", "sums")


def test_softmax_multiplies_gradient_and_output() -> None:
    scores = meta(8, 12, 128, 128)
    assert scratch(aten._softmax_backward_data.default, scores, scores, -1, torch.float32) == [(6291456,)]
    permuted = scores.transpose(0, 1)
    assert scratch_of(aten._softmax.default, (permuted, -1, False), scores, A100) == [(6291456,)]
    assert scratch_of(aten._log_softmax.default, (scores, -1, False), scores, A100) == []
    assert scratch_of(aten._safe_softmax.default, (scores, -1), scores, A100) == [(1572864, 12288, 4)]


def test_norms_copy_what_is_not_contiguous() -> None:
    images = meta(4, 96, 56, 56).permute(0, 2, 3, 1)
    assert course_of(aten.native_layer_norm.default, (images, [96], None, None, 1e-5), (), A100) == (4816896,)
    assert course_of(aten._fused_rms_norm.default, (images, [96], None, 1e-5), (), A100) == (4816896,)
    backward, results = aten.native_layer_norm_backward.default, ("source", "weight", "bias")
    assert course_of(backward, (images.contiguous(), images, [96]), results, A100) == (4816896, *results)
    assert course_of(backward, (images, images.contiguous(), [96]), results, A100) == (*results, 4816896)
    source, weight = meta(4, 128, 32, 32, dtype=BF16), meta(128, dtype=BF16)
    shape = (4, 128, 1024, 32)
    assert scratch(aten.native_group_norm.default, source, weight, weight, *shape, 1e-5) == [(512, 512, 2048, 2048)]
    assert scratch(aten.native_group_norm.default, source, None, None, *shape, 1e-5) == [(512, 512)]
    means = meta(4, 32, dtype=BF16)
    args = (source, source, means, means, weight, *shape, [True] * 3)
    sizes = scratch_of(aten.native_group_norm_backward.default, args, (source, weight, weight), A100)
    assert sizes == [(2048, 2048, 512, 512, 2048)]


@pytest.mark.parametrize(
    ("version", "forward", "backward", "alone"),
    [
        # mean and scale of each group (none before 2.13), and of each channel; two sums of each channel, two factors of
        # each group; the same of channels with one element
        ("2.12", (1048576, 512, 512), (512, 512, 128, 128, 512), (512, 512, 128, 128)),
        ("2.13", (1048576, 128, 128, 512, 512), (512, 512, 128, 128, 512), (512, 512, 128, 128)),
        ("2.14", (1048576, 128, 128, 512, 512), (512, 512, 128, 128, 512), (128, 128)),
        ("2.15", (128, 128, 512, 512), (512, 512, 128, 128), (512, 512, 128, 128)),
    ],
)
def test_group_norms_by_layout_and_release(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    forward: tuple[int, ...],
    backward: tuple[int, ...],
    alone: tuple[int, ...],
) -> None:
    """The sizes are those of PyTorch's CUDA builds of these releases."""
    for name, since in (("_GROUPS_IN_FP32", "2.13"), ("_SUMS_WITH_AREA", "2.14"), ("_GROUPS_BY_LAYOUT", "2.15")):
        monkeypatch.setattr(sizes_of_scratch, name, version >= since)
    weight, means = meta(32, dtype=BF16), meta(4, 8, dtype=BF16)
    rows = meta(4, 32, 64, 64, dtype=BF16).contiguous(memory_format=torch.channels_last)
    shape = (4, 32, 4096, 8)
    assert scratch(aten.native_group_norm.default, rows, weight, weight, *shape, 1e-5) == [forward]
    op, results = aten.native_group_norm_backward.default, (rows, weight, weight)
    args = (rows, rows, means, means, weight, *shape, [True] * 3)
    assert scratch_of(op, args, results, A100) == [backward]
    copies = () if version == "2.15" else (1048576, 1048576)
    assert sizes_of_scratch._group_norm_gradient(args, results, A100) == copies
    one = meta(4, 32, 1, 1, dtype=BF16)
    args = (one, one, means, means, weight, 4, 32, 1, 8, [True] * 3)
    assert scratch_of(op, args, (one, weight, weight), A100) == [alone]


def test_batch_norms_of_channels_last_tensors_are_added_up_by_several_blocks() -> None:
    """The sizes are those of PyTorch's CUDA build for an A100."""
    images = meta(8, 64, 56, 56, dtype=BF16)
    rows, some = images.contiguous(memory_format=torch.channels_last), meta(64, dtype=BF16)
    results = ("out", "mean", "scale")
    forward = aten.native_batch_norm.default, (rows, some, some, some, some, True, 0.1, 1e-5)
    assert course_of(*forward, results, A100) == (*results, 100352, 8)
    assert course_of(forward[0], (images, *forward[1][1:]), results, A100) == ()
    args = (rows, rows, some, some, some, some, some, True, 1e-5, [True] * 3)
    made = course_of(aten.native_batch_norm_backward.default, args, ("source", "weight", "bias"), A100)
    assert made == (256, 256, "weight", "bias", 50176, 8, -8, -50176, "source")


def test_pools_and_interpolations_copy_channels_last_tensors() -> None:
    """The sizes are those of PyTorch's CUDA build."""
    images = meta(8, 64, 56, 56).contiguous(memory_format=torch.channels_last)
    out, places = aten.adaptive_max_pool2d.default(images, [7, 7])
    made = course_of(aten.adaptive_max_pool2d.default, (images, [7, 7]), (out, places), A100)
    assert made[2:] == (100352, 200704, 6422528)
    made = course_of(aten.adaptive_max_pool2d_backward.default, (out, images, places), "source", A100)
    assert made == ("source", 100352, 200704, 6422528)
    assert course_of(aten.upsample_bicubic2d_backward.default, (images,), "source", A100) == ("source", 6422528)


def test_rolling_and_folding_take_memory_first() -> None:
    images = meta(8, 56, 56, 96)
    assert course_of(aten.roll.default, (images, [3, 3], [1, 2]), images, A100) == (9633792,)
    assert course_of(aten.roll.default, (images, [1], [1]), images, A100) == ()
    image, columns = meta(4, 32, 56, 56), meta(4, 288, 3136)
    assert course_of(aten.im2col.default, (image,), columns, A100) == (1605632,)
    assert whole_result(aten.im2col.default, (image,), columns) is None
    assert course_of(aten.col2im.default, (columns,), image, A100) == ()
    assert whole_result(aten.col2im.default, (columns,), image) == 14450688


def test_what_has_no_formula_is_named() -> None:
    assert unmodelled(aten.bincount.default) == SORTS
    assert unmodelled(aten.nansum.default) == "what nansum allocates for itself"
    assert unmodelled(aten.mm.default) is None


@pytest.mark.parametrize(
    ("capability", "size"),
    [
        *(((major, minor), 8_519_680) for major, minor in ((7, 5), (8, 0), (8, 9))),
        *(((major, 0), 32 * MIB) for major in (9, 10, 12)),
        (None, 8_519_680),
    ],
)
def test_the_workspace_of_cublas(capability: tuple[int, int] | None, size: int) -> None:
    assert extras.cublas(capability, {}) == size
    assert extras.cublas(capability, {"CUBLAS_WORKSPACE_CONFIG": "nonsense"}) == size
    assert extras.cublas(capability, {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}) == 8_519_680
    assert extras.cublas(capability, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == 128 * KIB


def test_cublaslt_has_its_own_when_asked_and_before_torch_2_12() -> None:
    large = {"CUBLASLT_WORKSPACE_SIZE": "4096"}
    for version in ("2.12.1", "2.13.0", "2.14.1"):
        assert extras.keeps_workspace({}, version)
        assert extras.cublaslt({}, version) == extras.cublaslt(large, version) == 0
        apart = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}
        assert extras.cublaslt(apart, version) == MIB
        assert extras.cublaslt(apart | large, version) == 4 * MIB
    assert extras.cublaslt({}, "2.11.0") == MIB
    assert extras.cublaslt({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, "2.11.0") == 0


def test_from_torch_2_15_on_each_call_has_its_workspace() -> None:
    assert not extras.keeps_workspace({}, "2.15.0+cu132")
    assert extras.cublaslt({}, "2.15.0+cu132") == MIB
    cached = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
    assert extras.keeps_workspace(cached, "2.15.0")
    assert extras.cublaslt(cached, "2.15.0") == 0


@pytest.mark.parametrize(
    ("bias", "inner", "columns", "dtype", "by_lt"),
    [
        ((96,), 128, 96, torch.float32, True),
        ((96,), 128, 96, torch.float64, True),
        ((1, 96), 128, 96, torch.float32, True),
        ((64, 96), 128, 96, torch.float32, False),
        ((64, 96), 128, 96, torch.bfloat16, True),
        ((1,), 128, 1, torch.float32, False),
        ((96,), 1, 96, torch.float32, False),
        ((96,), 128, 96, torch.complex64, False),
    ],
)
def test_which_products_go_through_cublaslt(
    bias: tuple[int, ...], inner: int, columns: int, dtype: torch.dtype, by_lt: bool
) -> None:
    made = [torch.empty(shape, dtype=dtype, device="meta") for shape in (bias, (64, inner), (inner, columns))]
    assert extras.takes_lt(made) is by_lt
    assert not extras.takes_lt(made, beta=0.5)


def test_fsdp2_packs_the_arguments_of_its_copies() -> None:
    """The sizes are those of PyTorch's CUDA build: a GPT's block of width 256, over 8 ranks."""
    from ampmem.simulator.communication.parallel import of_chunks, of_split

    shapes = [(256,), (256,), (768, 256), (768,), (256, 256), (256,), (256,), (256,), (1024, 256), (1024,)]
    shapes += [(256, 1024), (256,)]
    whole = [meta(*shape) for shape in shapes]
    sizes = [tensor.numel() // 8 for tensor in whole]
    gathered = meta(8, sum(sizes))
    assert of_split(gathered, sizes, 1, find_gpu("a100-80")) == 1992
    assert of_chunks(whole, 0, 8, 4) == 2192
    assert of_split(meta(8, 1 << 24), [1 << 24], 1, find_gpu("a100-80")) == 26_256


@pytest.mark.parametrize(
    ("count", "key", "value", "bits", "size"),
    [
        (1_000_000, 4, 8, 0, 12_342_527),
        (100_000, 8, 8, 0, 1_644_543),
        (1_000_000, 2, 8, 0, 14_469_119),
        (100_000, 1, 8, 0, 3_157_247),
        (5000, 8, 8, 10, 87_039),
        (40_000, 8, 0, 3, 13_823),
        (100, 8, 8, 0, 1),
    ],
)
def test_a_radix_sort(count: int, key: int, value: int, bits: int, size: int) -> None:
    """As CUB says on an A100, under the emulated runtime."""
    assert reductions.radix_sort(count, key, value, find_gpu("a100-80"), bits=bits) == size


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_a_radix_sort_of_small_keys_since_hopper(gpu: str) -> None:
    """As on an H200 (two bytes), and under the emulated runtime as an H200 and a B200 (both)."""
    assert reductions.radix_sort(200_000, 2, 8, find_gpu(gpu)) == 2_041_599
    assert reductions.radix_sort(200_000, 1, 8, find_gpu(gpu)) == 61_951


@pytest.mark.parametrize(
    ("gpu", "count", "sizes"),
    [
        ("a100-80", 0, (1, 767)),
        ("a100-80", 125, (1, 1023)),
        ("a100-80", 73_728, (17_663, 1023)),
        ("a100-80", 73_729, (17_663, 1279)),
        ("a100-80", 2_560_000, (17_663, 9727)),
        ("h100", 4096, (1, 1023)),
        ("h100", 8192, (21_503, 1023)),
        ("h100", 2_560_000, (21_503, 5631)),
        ("h100", 40_000_000, (21_503, 76_543)),
    ],
)
def test_a_search_for_what_is_not_0(gpu: str, count: int, sizes: tuple[int, int]) -> None:
    """As CUB says under the emulated runtime as these GPUs."""
    assert reductions.nonzero(count, find_gpu(gpu)) == [sizes]


@pytest.mark.parametrize(("gpu", "size"), [("b200", 91_903), ("l40s", 500_991), ("t4", 500_991)])
def test_what_a_block_searches_depends_on_the_gpu(gpu: str, size: int) -> None:
    """As CUB says under the emulated runtime as GPUs of compute capability 10.0, 8.6 and 7.5."""
    assert reductions.nonzero(40_000_000, find_gpu(gpu))[0][1] == size


def test_masks_have_their_scratch_as_indices() -> None:
    mask = meta(1000, dtype=torch.bool)
    args = (meta(1000, 64), [mask], meta(10, 64), True)
    assert scratch_of(aten.index_put_.default, args, args[0], H100) == []
