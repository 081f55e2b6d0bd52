"""Replacements of ops that torch cannot run without values or a GPU, or runs as several ops where a GPU runs one.

Each runs on fake tensors what PyTorch's host code runs on CUDA tensors, and makes the tensors that the CUDA kernel
makes, in the same order: intermediate tensors have memory for as long as they live there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ampmem.allocator.gpus import GpuSpec
from ampmem.simulator.scratch import reductions
from ampmem.simulator.scratch.scratch import is_mask
from ampmem.simulator.where import stop

aten = torch.ops.aten

_EXTREMES_TOGETHER = TorchVersion(torch.__version__) >= "2.12"
"""Whether ``multinomial`` asks for the least and the largest probability in one call, and keeps both."""
_MEAN, _SUM = 1, 2
"""Members of ``at::Reduction``."""
Maybe: TypeAlias = Tensor | None


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    """The reduced loss: ``apply_loss_reduction`` (``Loss.cpp``)."""
    if reduction == _MEAN:
        return loss.mean()
    return loss.sum() if reduction == _SUM else loss


def _shrunk(loss: Tensor, reduction: int) -> Tensor:
    """A loss that keeps the memory of all elements when it is reduced (``resize_`` frees nothing)."""
    if reduction in (_MEAN, _SUM):
        reduced = _reduced(loss, reduction)
        loss.resize_(reduced.shape).copy_(reduced)
    return loss


def _bce_with_logits(
    found: Any, source: Tensor, target: Tensor, weight: Maybe = None, pos_weight: Maybe = None, reduction: int = _MEAN
) -> Tensor:
    """``binary_cross_entropy_with_logits`` (``Loss.cpp``)."""
    log_sigmoid = aten.log_sigmoid_forward.default(source)[0]
    if pos_weight is not None:
        log_sigmoid.mul_((pos_weight - 1).mul(target).add_(1))
    loss = (1 - target).mul_(source).sub_(log_sigmoid)
    if weight is not None:
        loss.mul_(weight)
    return _reduced(loss, reduction)


def _bce(found: Any, source: Tensor, target: Tensor, weight: Maybe = None, reduction: int = _MEAN) -> Tensor:
    """``binary_cross_entropy_out_cuda`` (``cuda/Loss.cu``)."""
    loss = torch.empty_like(source)
    if weight is not None:
        loss.mul_(weight)
    return _shrunk(loss, reduction)


def _soft_margin(found: Any, source: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    """``soft_margin_loss_out`` (``Loss.cpp``)."""
    loss = source.neg()
    return _shrunk(loss.mul_(target).exp_().log1p_(), reduction)


def _soft_margin_backward(found: Any, grad: Tensor, source: Tensor, target: Tensor, reduction: int) -> Tensor:
    """``soft_margin_loss_backward_out`` (``Loss.cpp``)."""
    negative = target.neg()
    product = negative * source
    z = product.exp()
    del negative, product
    return torch.mul(target, z).mul_(-1).div_(z).mul_(grad)


def _multi_margin(
    found: Any,
    source: Tensor,
    target: Tensor,
    p: Any = 1,
    margin: Any = 1,
    weight: Maybe = None,
    reduction: int = _MEAN,
) -> Tensor:
    """``multi_margin_loss_cuda_out`` (``cuda/MultiMarginLoss.cu``)."""
    rows = source.dim() > 1
    loss = source.new_empty((source.shape[0],) if rows and reduction not in (_MEAN, _SUM) else ())
    if rows and reduction in (_MEAN, _SUM):
        each = source.new_empty((source.shape[0],))
        torch.sum(each, 0, out=loss)
    return loss


def _margin_backward(found: Any, grad: Tensor, source: Tensor, *_: Any, **__: Any) -> Tensor:
    return source.new_empty(source.shape)


def _multilabel_margin(found: Any, source: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """``multilabel_margin_loss_forward_out_cuda_template`` (``cuda/MultiLabelMarginCriterion.cu``)."""
    rows = source.dim() > 1
    is_target = source.new_empty(target.shape)
    if not rows or reduction not in (_MEAN, _SUM):
        return source.new_empty((source.shape[0],) if rows else ()), is_target
    each = source.new_empty((source.shape[0],))
    loss = source.new_empty(())
    torch.sum(each, 0, out=loss)
    return loss, is_target


def _logsumexp(found: Any, source: Tensor, dim: Sequence[int] | int, keepdim: bool = False) -> Any:
    """``logsumexp_out_impl`` (``ReduceOps.cpp``)."""
    if not source.numel():
        return NotImplemented
    if not (source.is_floating_point() or source.is_complex()):
        source = source.to(torch.get_default_dtype())
    dims = [dim] if isinstance(dim, int) else list(dim)
    maxima = source.amax(dims, True)
    size = maxima.abs()
    infinite = size == math.inf
    maxima.masked_fill_(infinite, 0)
    # C++ keeps ``maxima`` to the end of the function, and these only to the end of their statements.
    del size, infinite
    less = source - maxima
    result = less.exp_().sum(dims, keepdim)
    del less
    return result.log_().add_(maxima if keepdim else maxima.view(result.shape))


def _count_nonzero(found: Any, source: Tensor, dim: Any = None) -> Any:
    """``count_nonzero_cuda`` (``TensorAdvancedIndexing.cpp``)."""
    if source.is_complex():
        return NotImplemented
    there = source != 0
    return there.sum() if dim is None else there.sum(dim)


def _lstm_cell(found: Any, input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, *biases: Maybe) -> Any:
    """``_thnn_fused_lstm_cell_cuda`` (``cuda/RNN.cu``); torch's meta kernel asks for biases."""
    workspace = input_gates.new_empty(input_gates.shape)
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), workspace


def _multinomial(
    found: Any, source: Tensor, samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """``multinomial_out`` (``Distributions.cpp``) and ``multinomial_with_replacement_kernel_impl``."""
    result = source.new_empty((*source.shape[:-1], samples), dtype=torch.int64)
    if replacement and samples > 1:
        kept = [source.new_empty(source.shape) for _ in range(3)]
        del kept
        return result
    if _EXTREMES_TOGETHER:
        least, most = source.aminmax()
        valid = (most < math.inf) & (least >= 0)
    else:
        valid = (source.max() < math.inf) & (source.min() >= 0)
    both = valid & (source.sum(-1) == 0).any()
    quotient = torch.empty_like(source)
    if samples == 1:
        torch.argmax(quotient, -1, True, out=result)
    else:
        torch.topk(quotient, samples, out=(source.new_empty(result.shape), result))
    del valid, both
    return result


def _median(found: Any, source: Tensor) -> Any:
    """``median_impl`` (``cuda/Sorting.cpp``)."""
    if not source.numel():
        return NotImplemented
    ordered = source.flatten().sort()[0]
    nan = ordered[-1].isnan() if source.is_floating_point() else None
    result = source.new_empty(())
    del ordered, nan
    return result


def _pool_3d_backward(found: Any, grad: Tensor, source: Tensor, *_: Any) -> Tensor:
    """``fractional_max_pool3d_backward_out_cuda_template``."""
    return source.new_zeros(source.shape)


def _cudnn_grid_sampler(found: Any, source: Tensor, grid: Tensor) -> Tensor:
    """``cudnn_grid_sampler_forward`` (``cudnn/GridSampler.cpp``)."""
    return source.new_empty((source.shape[0], source.shape[1], *grid.shape[1:3]))


def _cudnn_grid_sampler_backward(found: Any, source: Tensor, grid: Tensor, grad: Tensor) -> Any:
    return source.new_empty(source.shape), grid.new_empty(grid.shape)


def _no_cudnn_ctc(found: Any, *_: Any, **__: Any) -> bool:
    """``False``: cuDNN's loss needs targets on the CPU; PyTorch's own loss is used here."""
    return False


def _ctc(
    found: Any, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Sequence[int], *_: Any
) -> Any:
    """``ctc_loss_gpu_template`` (``cuda/LossCTC.cu``)."""
    batched = log_probs.dim() > 2
    batch = log_probs.shape[1] if batched else 1
    numbers = _ctc_numbers(log_probs, batch)
    alpha = log_probs.new_empty((batch, log_probs.shape[0], 2 * max(target_lengths, default=0) + 1))
    del numbers
    return log_probs.new_empty((batch,) if batched else ()), alpha


def _ctc_backward(found: Any, grad: Tensor, log_probs: Tensor, *rest: Any, **__: Any) -> Tensor:
    """``ctc_loss_backward_gpu_template`` (``cuda/LossCTC.cu``)."""
    alpha = rest[4]
    numbers = _ctc_numbers(log_probs, alpha.shape[0])
    beta = log_probs.new_empty(alpha.shape)
    gradient = torch.full_like(log_probs, -math.inf)
    del beta, numbers
    return gradient


def _ctc_numbers(log_probs: Tensor, batch: int) -> list[Tensor]:
    """Both lengths of each sequence, and the offset of its targets."""
    return [log_probs.new_empty((batch,), dtype=torch.int64) for _ in range(3)]


def _dist(found: Any, source: Tensor, other: Tensor, p: Any = 2) -> Any:
    """``dist`` (``ReduceOps.cpp``)."""
    return torch.norm(source - other, p)


def _euclidean_dist(found: Any, source: Tensor, other: Tensor) -> Any:
    """``_euclidean_dist`` (``Distance.cpp``): ``cdist`` of many rows, by a matrix product."""
    if source.shape[:-2] != other.shape[:-2]:
        return NotImplemented
    norm = source.pow(2).sum(-1, True)
    ones = torch.ones_like(norm)
    other_norm = other.pow(2).sum(-1, True)
    other_ones = torch.ones_like(other_norm)
    first = torch.cat((source.mul(-2), norm, ones), -1)
    del norm, ones
    second = torch.cat((other, other_ones, other_norm), -1)
    del other_norm, other_ones
    return first.matmul(second.mT).clamp_min_(0).sqrt_()


def _isinf(found: Any, source: Tensor) -> Any:
    """``isinf`` (``TensorCompare.cpp``)."""
    if not source.is_floating_point():
        return NotImplemented
    return source.abs() == math.inf


def _batch_norm_with_update(found: Any, source: Tensor, weight: Tensor | None, *rest: Any) -> Any:
    """``_batch_norm_with_update_cuda`` (``cuda/Normalization.cu``), by cuDNN or PyTorch's own kernels."""
    result = torch.empty_like(source)
    kind = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    mean, inverse = (source.new_empty((source.shape[1],), dtype=kind) for _ in range(2))
    return result, mean, inverse, source.new_empty((0,), dtype=torch.uint8)


def _bernoulli(found: Any, source: Tensor, *, generator: Any = None) -> Tensor:
    """``bernoulli`` (``Distributions.cpp``): of 16 bits the probabilities are made FP32 (``bernoulli_tensor_cuda``)."""
    result = torch.empty_like(source)
    if source.dtype in (torch.float16, torch.bfloat16):
        # The copy is read once and freed.
        source.to(torch.float32)
    return result


def affine_grid(found: Any, theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """``affine_grid_generator`` (``AffineGridGenerator.cpp``)."""
    points, grid = _points(theta, size, align_corners)
    shape = (*grid.shape[:-1], len(size) - 2)
    return grid.view(len(theta), points, -1).bmm(theta.transpose(1, 2)).view(shape)


def _affine_grid_backward(found: Any, grad: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    points, grid = _points(grad, size, align_corners)
    flat = grid.view(len(grad), points, -1).transpose(1, 2).bmm(grad.reshape(len(grad), points, -1))
    return flat.transpose(1, 2)


def _points(like: Tensor, size: Sequence[int], align_corners: bool) -> tuple[int, Tensor]:
    """Number of points of each grid, and their coordinates with a 1 appended (``make_base_grid_4D``, ``_5D``)."""
    batch, _, *extents = size
    grid = like.new_empty((batch, *extents, len(extents) + 1))
    for extent in reversed(extents):
        if extent > 1:  # one coordinate: ``linspace_from_neg_one``, which is then copied
            spread = like.new_empty((extent,))
            if not align_corners:
                spread = spread * (extent - 1) / extent
            del spread
    return math.prod(extents), grid


def _trilinear(found: Any, first: Tensor, second: Tensor, third: Tensor, *dims: Any) -> Any:
    """``_trilinear`` (``Linear.cpp``), which runs one product per index of one dimension.

    ``dims`` are those to insert into each of the three tensors, those to sum over, and that one.
    """
    expansions, summed, unrolled = dims[:3], dims[3], (*dims, 1)[4]
    given = [first, second, third]
    for place, expanded in enumerate(expansions):
        for dim in sorted(expanded):
            given[place] = given[place].unsqueeze(dim)
    if not all(each.numel() for each in given):
        return NotImplemented
    whole = torch.broadcast_shapes(*(each.shape for each in given))
    early = [dim for dim in summed if dim != unrolled and given[2].shape[dim] == 1 and dim in expansions[2]]
    late = [dim for dim in summed if dim != unrolled and dim not in early]
    result = first.new_zeros([1 if dim in summed else length for dim, length in enumerate(whole)])
    for index in range(whole[unrolled]):
        parts = [
            each if unrolled in expanded else each.narrow(unrolled, index, 1)
            for each, expanded in zip(given, expansions, strict=True)
        ]
        product = _product_of_two(parts[0], parts[1], early)
        product = _product_of_two(product, parts[2], late)
        (result if unrolled in summed else result.narrow(unrolled, index, 1)).add_(product)
    return result.squeeze(tuple(summed)) if summed else result


def _product_of_two(left: Tensor, right: Tensor, summed: Sequence[int]) -> Tensor:
    """``sumproduct_pair`` (``Linear.cpp``), which keeps the dimensions that it sums over."""
    if not summed:
        return left * right
    both: list[int] = []
    of_left: list[int] = []
    of_right: list[int] = []
    for dim in range(left.dim()):
        wide_left, wide_right = left.shape[dim] != 1, right.shape[dim] != 1
        if dim in summed:
            if wide_left and not wide_right:
                left = left.sum(dim, True)
            elif wide_right and not wide_left:
                right = right.sum(dim, True)
        elif wide_left and wide_right:
            both.append(dim)
        else:
            (of_left if wide_left else of_right).append(dim)
    size = [math.prod(left.shape[dim] for dim in dims) for dims in (both, of_left, summed)]
    columns = math.prod(right.shape[dim] for dim in of_right)
    order = [*both, *of_left, *summed, *of_right]
    shape = [*(left.shape[dim] for dim in (*both, *of_left)), *(1 for _ in summed), *(right.shape[d] for d in of_right)]
    rows = left.permute(order).reshape(size)
    turned = right.permute([*both, *summed, *of_right, *of_left]).reshape(size[0], size[2], columns)
    product = rows.bmm(turned).view(shape)
    return product.permute([order.index(dim) for dim in range(left.dim())])


def _encoder_layer(found: Any, source: Tensor, width: int, heads: int, *given: Any) -> Any:
    """``transformer_encoder_layer_forward`` (``transformers/transformer.cpp``), without a mask.

    ``given`` are weight and bias of the projections in and out; whether the function is GELU, whether norms come first,
    and their epsilon; weight and bias of both norms and of both linear layers; and the mask and its type.
    """
    weight, bias, out_weight, out_bias, gelu, norm_first, epsilon = given[:7]
    first_norm, second_norm, (up_weight, up_bias), down = given[7:9], given[9:11], given[11:13], given[13:15]
    if any(each is not None for each in given[15:16]):  # with a mask, another attention is used
        return NotImplemented

    def norm(tensor: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        return aten.native_layer_norm.default(tensor, [width], *parameters, epsilon)[0]  # type: ignore[no-any-return]

    def attention(tensor: Tensor) -> Tensor:
        projected = torch.nn.functional.linear(tensor, weight, bias)
        query, key, value = (each.view(*each.shape[:2], heads, -1).transpose(1, 2) for each in projected.chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        del projected, query, key, value
        attended = attended.transpose(1, 2).reshape(*tensor.shape[:2], width)
        return torch.nn.functional.linear(attended, out_weight, out_bias)

    def feed_forward(tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1, width)
        inner = aten._addmm_activation.default(up_bias, flat, up_weight.t(), use_gelu=gelu)
        return torch.nn.functional.linear(inner.view(*tensor.shape[:-1], -1), *down)

    result = attention(norm(source, first_norm) if norm_first else source).add_(source)
    if not norm_first:
        result = norm(result, first_norm)
    before = result
    result = feed_forward(norm(result, second_norm) if norm_first else result).add_(before)
    return result if norm_first else norm(result, second_norm)


def _dirichlet(found: Any, alpha: Tensor, generator: Any = None) -> Tensor:
    """``_s_dirichlet_cuda`` (``cuda/Distributions.cpp``), which draws from gamma distributions first."""
    result = alpha.new_empty(alpha.shape)
    alpha.new_empty(alpha.shape)
    return result


def _dirichlet_grad(found: Any, sample: Tensor, alpha: Tensor, total: Tensor) -> Tensor:
    """``_dirichlet_grad_cuda``, in the same file."""
    return sample.new_empty(sample.shape)


def _grouped_mm(
    found: Any, first: Tensor, second: Tensor, offs: Maybe = None, bias: Maybe = None, out_dtype: Any = None
) -> Any:
    """``_grouped_mm_cuda`` (``cuda/GroupedBlas.cpp``) in FP32 and FP16: a product for each group, into the result.

    Torch's meta kernel takes bfloat16 only. Rows of the result begin at multiples of 16 bytes.
    """
    if first.dtype not in (torch.float32, torch.float16):
        return NotImplemented
    shape = [first.shape[-2], second.shape[-1]]
    if first.dim() == second.dim():  # the offsets divide what is summed over, or nothing
        shape.insert(0, first.shape[0] if offs is None else offs.shape[0])
    step = 16 // first.element_size()
    columns = -(-shape[-1] // step) * step
    strides = [shape[-2] * columns, columns, 1][-len(shape) :]
    return first.new_empty_strided(shape, strides, dtype=out_dtype or first.dtype)


COMPOSITES: dict[Any, Any] = {
    **({aten._grouped_mm.default: _grouped_mm} if hasattr(aten, "_grouped_mm") else {}),
    aten.bernoulli.default: _bernoulli,
    aten._sample_dirichlet.default: _dirichlet,
    aten._dirichlet_grad.default: _dirichlet_grad,
    aten.affine_grid_generator.default: affine_grid,
    aten.affine_grid_generator_backward.default: _affine_grid_backward,
    aten._trilinear.default: _trilinear,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
    aten.binary_cross_entropy.default: _bce,
    aten.soft_margin_loss.default: _soft_margin,
    aten.soft_margin_loss_backward.default: _soft_margin_backward,
    aten.multi_margin_loss.default: _multi_margin,
    aten.multi_margin_loss_backward.default: _margin_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin,
    aten.multilabel_margin_loss_backward.default: _margin_backward,
    aten.logsumexp.default: _logsumexp,
    aten.dist.default: _dist,
    aten.isinf.default: _isinf,
    aten._euclidean_dist.default: _euclidean_dist,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten.multinomial.default: _multinomial,
    aten.median.default: _median,
    aten.fractional_max_pool3d_backward.default: _pool_3d_backward,
    aten.cudnn_grid_sampler.default: _cudnn_grid_sampler,
    aten.cudnn_grid_sampler_backward.default: _cudnn_grid_sampler_backward,
    aten._use_cudnn_ctc_loss.default: _no_cudnn_ctc,
    aten._use_cudnn_ctc_loss.Tensor: _no_cudnn_ctc,
    **{
        getattr(aten._use_miopen_ctc_loss, overload): _no_cudnn_ctc
        for overload in (aten._use_miopen_ctc_loss.overloads() if hasattr(aten, "_use_miopen_ctc_loss") else ())
    },
    aten._ctc_loss.default: _ctc,
    aten._ctc_loss_backward.default: _ctc_backward,
    aten._batch_norm_with_update.default: _batch_norm_with_update,
}


@dataclass(frozen=True, slots=True)
class Found:
    """The first argument of each replacement of an op; ``gpu`` is the simulated GPU."""

    count: Callable[[str, Tensor, int], int]
    """Returns how many of so many elements of a tensor an op finds: the known number, or as ``--assume`` says."""
    gpu: GpuSpec


OpAnswer: TypeAlias = Callable[..., Any]
"""A replacement of an op; it gets :class:`Found` first. It returns ``NotImplemented`` if torch can run the op."""


def _nothing(found: Found, *_: Any, **__: Any) -> None:
    """Do nothing: fused optimizers work in place and allocate nothing."""


def no_layout(layout: torch.layout) -> str:
    """The error for tensors with a layout other than strided."""
    name = str(layout).removeprefix("torch.").lstrip("_")
    kind = "sparse" if name.startswith("sparse") else name
    return (
        f"{kind} tensors cannot be simulated; make them dense, which takes a different amount of memory, or record "
        "the script on a GPU or with --device cpu"
    )


def _no_sparse(found: Found, *_: Any, **__: Any) -> Any:
    raise stop(no_layout(torch.sparse_coo))


def _with_dense_gradient(place: int) -> OpAnswer:
    """Refuses an op whose argument at ``place`` asks for sparse gradients.

    Here, not in backward, where the engine could not propagate the error.
    """

    def refuse(found: Found, *args: Any) -> Any:
        if any(args[place : place + 1]):
            raise stop("sparse gradients cannot be simulated; leave sparse=True out (Embedding, EmbeddingBag)")
        return NotImplemented

    return refuse


def _gru_cell(found: Found, input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *_: Any, **__: Any) -> Any:
    """``_thnn_fused_gru_cell_cuda`` (``aten/src/ATen/native/cuda/RNN.cu``)."""
    workspace = hx.new_empty((hx.shape[0], hx.shape[1] * 5))
    return hx.new_empty(hx.shape), workspace


def _gru_cell_backward(found: Found, grad: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """``_thnn_fused_gru_cell_backward_cuda``, in the same file."""
    batch, hidden = workspace.shape[0], workspace.shape[1] // 5
    input_gates = workspace.new_empty((batch, hidden * 3))
    hidden_gates = workspace.new_empty((batch, hidden * 3))
    hx = grad.new_empty(grad.shape)
    biases = (input_gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return input_gates, hidden_gates, hx, *biases


def _sort(found: Found, tensor: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """``sort``: all sorts on a GPU are stable, so both overloads are the same."""
    return aten.sort.default(tensor, dim, descending)


def _nonzero(found: Found, tensor: Tensor) -> Tensor:
    return nonzero_places(tensor, lambda: found.count("nonzero", tensor, tensor.numel()), found.gpu)


def nonzero_places(tensor: Tensor, find: Callable[[], int], gpu: GpuSpec) -> Tensor:
    """The indices of nonzero elements: ``nonzero_cuda_out_impl`` (``cuda/Nonzero.cu``).

    The result is column by column, as on the CPU. ``find`` returns how many elements there are, once they are counted.
    """
    pieces = reductions.nonzero(tensor.numel(), gpu) if tensor.device.type == "cuda" else []
    source = tensor.contiguous() if pieces else tensor
    counts = source.new_empty((len(pieces),), dtype=torch.int32)
    for summed, _ in pieces:
        source.new_empty((summed,), dtype=torch.uint8)
    count = find()
    result = tensor.new_empty_strided((count, tensor.dim()), (1, max(count, 1)), dtype=torch.int64)
    for _, selected in pieces if tensor.dim() else ():
        source.new_empty((selected,), dtype=torch.uint8)
    del counts, source
    return result


def _masked_select(found: Found, tensor: Tensor, mask: Tensor) -> Tensor:
    """``masked_select_out_cuda_impl``: an index by a mask, after broadcasting."""
    tensor, mask = torch.broadcast_tensors(torch.atleast_1d(tensor), torch.atleast_1d(mask))
    selected: Tensor = aten.index.Tensor(tensor, [mask])
    return selected


def _index(found: Found, tensor: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """``index``: masks become indices, which live as long as the op (``expandTensors``)."""
    if not any(map(is_mask, indices)):
        return NotImplemented
    return aten.index.Tensor(tensor, _expanded(indices))


def _expanded(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """``indices`` with those of the elements that a mask selects in place of each mask."""
    groups = (index.nonzero().unbind(1) if index is not None and is_mask(index) else (index,) for index in indices)
    return list(chain.from_iterable(groups))


def _accumulating(op: Any) -> OpAnswer:
    """``index_put`` with accumulation: the gradient of an index by a mask searches the mask once more."""

    def index_put(found: Found, tensor: Tensor, indices: Sequence[Tensor | None], values: Tensor, *how: bool) -> Any:
        if not (any(how[:1]) and any(map(is_mask, indices))):
            return NotImplemented
        return op(tensor, _expanded(indices), values, *how)

    return index_put


def _unique(
    found: Found, tensor: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    count = found.count("unique", tensor, tensor.numel())
    values = tensor.new_empty((count,))
    inverse = tensor.new_empty(tensor.shape if return_inverse else (0,), dtype=torch.int64)
    return values, inverse, tensor.new_empty((count if return_counts else 0,), dtype=torch.int64)


def _unique_consecutive(
    found: Found, tensor: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    if dim is not None:
        return _unique_dim(found, tensor, dim, True, return_inverse, return_counts)
    return _unique(found, tensor, True, return_inverse, return_counts)


def _unique_dim(
    found: Found,
    tensor: Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    length = tensor.shape[dim]
    count = found.count("unique", tensor, length)
    inverse = tensor.new_empty((length if return_inverse else 0,), dtype=torch.int64)
    counts = tensor.new_empty((count if return_counts else 0,), dtype=torch.int64)
    shape = list(tensor.shape)
    shape[dim] = count
    return tensor.new_empty(shape), inverse, counts


def _scaled_product(found: Found, left: Tensor, right: Tensor, *how: Any, out: Tensor, **named: Any) -> Tensor:
    """``_scaled_mm`` into ``out``, which compiled code calls; only without ``out`` does it have a meta kernel."""
    return out.resize_((left.shape[0], right.shape[1]))


def _pack_padded_sequence(found: Found, tensor: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """``_pack_padded_sequence`` (``PackedSequence.cpp``): the lengths are real CPU tensors, so sizes are known."""
    padded = tensor.transpose(0, 1) if batch_first else tensor
    # The sizes depend on the lengths alone, so torch computes them with a real tensor of one column.
    _, batch_sizes = aten._pack_padded_sequence.default(torch.empty(*padded.shape[:2], 1), lengths, False)
    steps: list[Tensor] = []
    begin, sizes = 0, batch_sizes.tolist()
    for end, (size, following) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True), 1):
        if following != size:  # steps with the same batch size are one piece
            steps.append(padded[begin:end, :size].contiguous().view(-1, *padded.shape[2:]))
            begin = end
    return torch.cat(steps), batch_sizes


DISTINCT: dict[Any, OpAnswer] = {
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim.default: _unique_dim,
    aten.unique_dim_consecutive.default: lambda found, tensor, dim, *how: _unique_dim(found, tensor, dim, True, *how),
}

KERNELS: dict[Any, OpAnswer] = {
    **{
        getattr(getattr(aten, name), overload): _nothing
        for name in ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")
        for overload in getattr(aten, name).overloads()
    },
    **{
        getattr(getattr(aten, name), overload): _no_sparse
        for name in (
            "_sparse_coo_tensor_with_dims_and_tensors",
            "_to_sparse",
            "_to_sparse_csr",
            "_to_sparse_csc",
            "_to_sparse_bsr",
            "_to_sparse_bsc",
        )
        for overload in getattr(aten, name).overloads()
        if overload != "out"
    },
    **dict.fromkeys((aten._scaled_mm.out, aten._scaled_mm_v2.out), _scaled_product),
    aten.embedding.default: _with_dense_gradient(4),
    aten._embedding_bag.default: _with_dense_gradient(5),
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten.sort.stable: _sort,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    **{
        op: _accumulating(op) for op in (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
    },
    **DISTINCT,
    **COMPOSITES,
    aten._pack_padded_sequence.default: _pack_padded_sequence,
}

WITHOUT = {
    "nonzero": "avoid it (masked_fill or torch.where instead of indexing with a mask)",
    "unique": "compute it on the CPU",
}
"""Advice for ops whose result depends on the data, if their fraction is not assumed."""
REMEDIES = {
    aten.repeat_interleave.Tensor: "give repeat_interleave its output_size=",
    aten.bincount.default: "compute it on the CPU",
    aten.batch_norm_stats.default: "the op belongs to SyncBatchNorm: leave convert_sync_batchnorm out",
}
"""Advice for ops that cannot run without values, whatever is assumed."""
