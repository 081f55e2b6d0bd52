"""The private names of torch that tell of the memory of tensors: where that of wrappers is, and what autograd saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch

from ampmem.recorder.torch_private.entries import Place, attribute, needed, optional, patched
from ampmem.recorder.torch_private.general import without_dispatch

_WRAPPED = "what wraps other tensors, such as DTensor, is in no category"
is_wrapper: Callable[[torch.Tensor], bool] = optional(
    "torch.utils._python_dispatch",
    "is_traceable_wrapper_subclass",
    "tensors that wrap others, such as DTensor",
    without=_WRAPPED,
    otherwise=lambda _: False,
)
COPY = needed("torch.ops.aten.copy_", "default", "the op by which parameters get into a flat buffer")
PRODUCT = needed("torch.ops.aten._unsafe_view", "default", "the last op of a matrix product of many dimensions")
_LAYOUT: Any = torch.Tensor.layout
layout_of: Callable[[torch.Tensor], torch.layout] = _LAYOUT.__get__
"""Torch's own, whatever the class of a tensor makes of it."""


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


# -- one tensor --------------------------------------------------------------------------------------

version_of: Callable[[torch.Tensor], int] = attrgetter(
    attribute("torch.Tensor", "_version", "whether a saved tensor was overwritten")
)
is_view: Callable[[torch.Tensor], bool] = methodcaller(
    attribute("torch.Tensor", "_is_view", "casts of views, which autocast does not cache")
)
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter(
    attribute("torch.Tensor", "_base", "which tensors lie in a parameter's memory")
)
use_count: Callable[[torch.Tensor], int] = methodcaller(
    attribute("torch.Tensor", "_use_count", "whether autocast's cache holds a copy")
)

SWAP: Place = patched(
    "torch.utils",
    "swap_tensors",
    "that two tensors are swapped, which nobody may refer to then",
    without="a script that swaps tensors may fail",
)

_GRADIENT_HOOKS = attribute(
    "torch.Tensor",
    "_post_accumulate_grad_hooks",
    "the hooks on a parameter, which are gone with ours",
    without="an empty list of hooks may stay at parameters after the recording",
)


def gradient_hooks(parameter: torch.Tensor) -> Any:
    """The hooks that ``parameter`` has for its gradient; ``None`` where it never had any."""
    return getattr(parameter, _GRADIENT_HOOKS, None)


def forget_gradient_hooks(parameter: torch.Tensor) -> None:
    """``parameter`` has no hooks: let it be as if it never had any."""
    if gradient_hooks(parameter) is not None:
        setattr(parameter, _GRADIENT_HOOKS, None)


# -- what autograd saves ----------------------------------------------------------------------------


def _made_node() -> Any:
    return torch.ones((), device="cpu", requires_grad=True).exp().grad_fn


node_number: Callable[[Any], int] = methodcaller(
    attribute("torch.autograd.graph.Node", "_sequence_nr", "which op made a node", example=_made_node)
)
_RAW = attribute("torch.autograd.graph.Node", "_raw_saved_result", "which tensors a node saves", example=_made_node)


def saved_names(kind: type) -> tuple[str, ...]:
    """The attributes of a node of this class that are tensors that it saved, or tuples of such."""
    names = (name.removeprefix("_raw") for name in dir(kind) if name.startswith("_raw"))
    return tuple(name for name in names if hasattr(kind, name))


push_saved_hooks: Callable[..., None] = needed(
    "torch._C._autograd", "_push_saved_tensors_default_hooks", "to hear of every tensor that autograd saves"
)
pop_saved_hooks: Callable[[], None] = needed(
    "torch._C._autograd", "_pop_saved_tensors_default_hooks", "to hear no more of them"
)
top_saved_hooks: Callable[[bool], tuple[Any, Any] | None] = needed(
    "torch._C._autograd", "_top_saved_tensors_default_hooks", "to pop no hooks but our own"
)
saved_hooks_refused: Callable[[], str | None] = needed(
    "torch._C._autograd",
    "_saved_tensors_hooks_get_disabled_error_message",
    "torch.func, which refuses to run under hooks",
)
DISABLE_SAVED_HOOKS: Place = patched(
    "torch._C._autograd",
    "_saved_tensors_hooks_disable",
    "torch.func, compiled or not, which calls it and finds no hooks in place then",
)
ENABLE_SAVED_HOOKS: Place = patched(
    "torch._C._autograd", "_saved_tensors_hooks_enable", "the end of what refuses to run under hooks"
)
_UNNAMED = "what a Function saves is in the recording only where ops saved it, too"
SAVES: Place = patched(
    "torch.autograd.function.FunctionCtx", "save_for_backward", "that a Function saves tensors", without=_UNNAMED
)
HOOKS_ON_SAVED: Place = patched(
    "torch._C._autograd.SavedTensor",
    "register_hooks",
    "hooks of the script's on what one node saved",
    without="hooks that the script puts on what one node saved may be called once more",
)
_FUNCTION = "torch._C._FunctionBase"
_TO_SAVE = attribute(_FUNCTION, "to_save", "whether a Function's forward still runs", without=_UNNAMED)
_SAVED = attribute(_FUNCTION, "saved_tensors", "what a Function has saved", without=_UNNAMED)


def to_save(function: Any) -> Any:
    """What ``function`` is going to save when its forward is over; ``None`` afterwards."""
    return _own(_TO_SAVE).__get__(function)


def saved_by(function: Any) -> tuple[torch.Tensor | None, ...]:
    """What ``function`` has saved, past what its class may say."""
    saved: tuple[torch.Tensor | None, ...] = _own(_SAVED).__get__(function)
    return saved


def _own(name: str) -> Any:
    return getattr(torch.autograd.Function, name)
