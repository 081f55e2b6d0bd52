"""Ops for which torch has no answer without values or a GPU, and which are simple enough to give one here.

Each makes the tensors that the CUDA kernel makes, in its order; what is made gets memory like any other tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ampmem.allocator.gpus import GpuSpec
from ampmem.simulator.composites import COMPOSITES
from ampmem.simulator.scratch import sorts
from ampmem.simulator.where import stop

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Found:
    """What an op finds in a tensor; ``gpu`` is the GPU on which it looks."""

    count: Callable[[str, Tensor, int], int]
    gpu: GpuSpec

    def __call__(self, op: str, tensor: Tensor, elements: int) -> int:
        """How many of so many elements an op of this name finds: what is known, or as ``--assume`` says."""
        return self.count(op, tensor, elements)


class OpAnswer(Protocol):
    """Takes the op's own arguments; ``NotImplemented`` when torch can do it itself."""

    def __call__(self, found: Found, *args: Any, **kwargs: Any) -> Any: ...


def _nothing(found: Found, *_: Any, **__: Any) -> None:
    """Fused optimizers work in place and ask for no memory."""


def no_layout(layout: torch.layout) -> str:
    """What is said of tensors of another layout than the strided one."""
    name = str(layout).removeprefix("torch.").lstrip("_")
    kind = "sparse" if name.startswith("sparse") else name
    return (
        f"{kind} tensors cannot be simulated; make them dense, which takes another amount of memory, or record the "
        "script on a GPU or with --device cpu"
    )


def _no_sparse(found: Found, *_: Any, **__: Any) -> Any:
    raise stop(no_layout(torch.sparse_coo))


def _no_sparse_gradient() -> Any:
    raise stop("sparse gradients cannot be simulated; leave sparse=True out (Embedding, EmbeddingBag)")


def _embedding(found: Found, weight: Tensor, indices: Tensor, *how: Any) -> Any:
    """Said here and not in backward, where the engine cannot pass it on."""
    return _no_sparse_gradient() if len(how) > 2 and how[2] else NotImplemented


def _embedding_bag(found: Found, weight: Tensor, indices: Tensor, offsets: Tensor, *how: Any) -> Any:
    return _no_sparse_gradient() if len(how) > 2 and how[2] else NotImplemented


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
    """All sorts on a GPU are stable, so this is the other overload, too."""
    return aten.sort.default(tensor, dim, descending)


def _nonzero(found: Found, tensor: Tensor) -> Tensor:
    return places(tensor, lambda: found("nonzero", tensor, tensor.numel()), found.gpu)


def places(tensor: Tensor, find: Callable[[], int], gpu: GpuSpec) -> Tensor:
    """``nonzero_cuda_out_impl`` (``cuda/Nonzero.cu``), whose result is column by column; the CPU has it so, too.

    ``find`` says how many elements there are, once they are counted.
    """
    pieces = sorts.nonzero(tensor.numel(), gpu) if tensor.device.type == "cuda" else []
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
    """An index by a mask, once both have the same shape (``masked_select_out_cuda_impl``)."""
    tensor, mask = torch.broadcast_tensors(torch.atleast_1d(tensor), torch.atleast_1d(mask))
    selected: Tensor = aten.index.Tensor(tensor, [mask])
    return selected


def _index(found: Found, tensor: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Masks become the indices of what they take, which live as long as the op (``expandTensors``)."""
    if not _has_mask(indices):
        return NotImplemented
    return aten.index.Tensor(tensor, _expanded(indices))


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _expanded(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            expanded += index.nonzero().unbind(1)
        else:
            expanded.append(index)
    return expanded


def _accumulating(op: Any) -> OpAnswer:
    """The gradient of an index by a mask looks for the elements once more. Elsewhere nothing has to be known."""

    def index_put(found: Found, tensor: Tensor, indices: Sequence[Tensor | None], values: Tensor, *how: bool) -> Any:
        if not (any(how[:1]) and _has_mask(indices)):
            return NotImplemented
        return op(tensor, _expanded(indices), values, *how)

    return index_put


def _unique(
    found: Found, tensor: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    return _distinct(tensor, found("unique", tensor, tensor.numel()), tensor.shape, return_inverse, return_counts)


def _unique_consecutive(
    found: Found,
    tensor: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    if dim is not None:
        return _unique_dim(found, tensor, dim, True, return_inverse, return_counts)
    return _distinct(tensor, found("unique", tensor, tensor.numel()), tensor.shape, return_inverse, return_counts)


def _unique_dim(
    found: Found,
    tensor: Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    length = tensor.shape[dim]
    count = found("unique", tensor, length)
    inverse = tensor.new_empty((length if return_inverse else 0,), dtype=torch.int64)
    counts = tensor.new_empty((count if return_counts else 0,), dtype=torch.int64)
    shape = list(tensor.shape)
    shape[dim] = count
    return tensor.new_empty(shape), inverse, counts


def _unique_dim_consecutive(
    found: Found, tensor: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    return _unique_dim(found, tensor, dim, True, return_inverse, return_counts)


def _distinct(tensor: Tensor, count: int, shape: torch.Size, return_inverse: bool, return_counts: bool) -> Any:
    values = tensor.new_empty((count,))
    inverse = tensor.new_empty(shape if return_inverse else (0,), dtype=torch.int64)
    return values, inverse, tensor.new_empty((count if return_counts else 0,), dtype=torch.int64)


def _pack_padded_sequence(found: Found, tensor: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """The lengths are on the CPU and real, so the sizes are known (``PackedSequence.cpp``)."""
    padded = tensor.transpose(0, 1) if batch_first else tensor
    _, batch_sizes = aten._pack_padded_sequence.default(torch.empty(*padded.shape[:2], 1), lengths, False)
    steps: list[Tensor] = []
    begin, sizes = 0, batch_sizes.tolist()
    for end, (size, following) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True), 1):
        if following != size:  # as long as the batch does not shrink, the steps are one piece
            steps.append(padded[begin:end, :size].contiguous().view(-1, *padded.shape[2:]))
            begin = end
    return torch.cat(steps), batch_sizes


DISTINCT: dict[Any, OpAnswer] = {
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim.default: _unique_dim,
    aten.unique_dim_consecutive.default: _unique_dim_consecutive,
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
    aten.embedding.default: _embedding,
    aten._embedding_bag.default: _embedding_bag,
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
    "nonzero": "write it without (masked_fill or torch.where in place of indexing with a mask)",
    "unique": "compute it on the CPU",
}
"""By what an op can be replaced whose result depends on the data."""
REMEDIES = {
    aten.repeat_interleave.Tensor: "give repeat_interleave its output_size=",
    aten.bincount.default: "compute it on the CPU",
    aten.batch_norm_stats.default: "it is SyncBatchNorm's: leave convert_sync_batchnorm out",
}
"""The same of ops that cannot be run without values, whatever is assumed."""
