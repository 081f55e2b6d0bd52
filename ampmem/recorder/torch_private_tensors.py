"""The private names of torch that tell where the memory of a tensor is that has none of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ampmem.recorder.torch_entries import attribute, optional
from ampmem.recorder.torch_private import without_dispatch

_WRAPPED = "what wraps other tensors, such as DTensor, is in no category"
is_wrapper: Callable[[torch.Tensor], bool] = optional(
    "torch.utils._python_dispatch",
    "is_traceable_wrapper_subclass",
    "tensors that wrap others, such as DTensor",
    without=_WRAPPED,
    otherwise=lambda _: False,
)


def wrapped_names(tensor: torch.Tensor) -> Sequence[str]:
    """The attributes of the wrapper ``tensor`` that hold the tensors in it."""
    names: Sequence[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return names


_SPARSE = "indices and values of sparse tensors are in no category"
_INDICES, _VALUES = (
    attribute("torch.Tensor", name, "the memory of a sparse tensor that is not coalesced", without=_SPARSE)
    for name in ("_indices", "_values")
)
_COMPRESSED = {
    torch.sparse_coo: (_INDICES, _VALUES),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The indices and values of a sparse tensor; none of a layout that shows none."""
    with without_dispatch(), torch.no_grad():  # the script's own modes count only what the script does
        return [getattr(tensor, name)() for name in _COMPRESSED.get(tensor.layout, ())]
