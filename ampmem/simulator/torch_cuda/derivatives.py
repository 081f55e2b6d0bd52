"""Ops with autograd nodes other than torch's own on a simulated device.

The gradients of ``prod`` and ``cumprod`` are computed as for CUDA tensors: for subclasses, as fake tensors are, torch
uses another formula, which needs up to three times the memory. ``affine_grid`` multiplies matrices inside, below its
node, and autocast casts them there; a dispatch mode sees only the whole op, and not autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from ampmem.patching import added
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.ops import affine_grid, nonzero_places
from ampmem.simulator.private.general import FakeTensor, give_back, has_forward_gradients, name_nodes

aten = torch.ops.aten

_KEY = "AutogradCUDA"
_NO_ZEROS = "assumed: prod and cumprod multiply no zeros; with zeros their gradients are computed differently"


def install(mode: SimulatedMode) -> Callable[[], None]:
    """Replace these ops; returns the undo.

    ``cumprod`` calls an op for its gradient. The gradient of ``prod`` is computed inside its autograd node, so the
    simulation gives ``prod`` another node of the same name.
    """
    library = Library("aten", "IMPL")
    library.impl("cumprod_backward", _cumprod_backward(mode), _KEY)
    library.impl("prod", _with_node(_whole(mode), "aten::prod", "ProdBackward0"), _KEY, with_keyset=True)
    library.impl(
        "prod.dim_int", _with_node(_of_dim(mode), "aten::prod.dim_int", "ProdBackward1"), _KEY, with_keyset=True
    )
    library.impl("affine_grid_generator", _affine_grid(), _KEY, with_keyset=True)
    return added("torch.library", "derivatives", give_back(library))


def _take_for_granted(mode: SimulatedMode) -> None:
    """Note the assumption: the host reads the number of zeros, which decides the formula."""
    mode.device_model.synchronize_current()
    mode.device_model.assume(_NO_ZEROS)


def _cumprod_backward(mode: SimulatedMode) -> Callable[..., Tensor]:
    def cumprod_backward(grad: Tensor, source: Tensor, dim: int, output: Tensor) -> Tensor:
        """``cumprod_backward`` (``ReduceOps.cpp``)."""
        if not all(isinstance(tensor, FakeTensor) for tensor in (grad, source, output)):
            return aten.cumprod_backward.default.decompose(grad, source, dim, output)  # type: ignore[no-any-return]
        if source.numel() <= 1 or source.shape[dim] == 1:
            return grad
        weighted = output.conj() * grad
        is_zero = source == 0
        is_zero.any()
        _take_for_granted(mode)
        return _reversed_cumsum(weighted, dim).div(source.conj())

    return cumprod_backward


def _reversed_cumsum(tensor: Tensor, dim: int) -> Tensor:
    """A reversed running sum; C++ keeps all temporaries to the end of the statement."""
    flipped = tensor.flip(dim)
    summed = flipped.cumsum(dim)
    return summed.flip(dim)


def _whole(mode: SimulatedMode) -> Callable[..., Tensor]:
    def gradient(grad: Tensor, source: Tensor, result: Tensor) -> Tensor:
        """``prod_backward`` (``FunctionsManual.cpp``), which searches the zeros."""
        nonzero_places(source == 0, lambda: 0, mode.device_model.gpu)
        _take_for_granted(mode)
        return grad * (result / source).conj()

    return gradient


def _of_dim(mode: SimulatedMode) -> Callable[..., Tensor]:
    def gradient(grad: Tensor, source: Tensor, result: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        """``prod_backward`` along one dimension, which counts the zeros."""
        if not keepdim:
            grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
        is_zero = source == 0
        counts = is_zero.sum(dim, True)
        counts.sum()
        _take_for_granted(mode)
        return grad * (result / source).conj()

    return gradient


def _with_node(gradient: Callable[..., Tensor], op: str, name: str) -> Callable[..., Tensor]:
    """The op ``op`` with ``gradient`` in a node called ``name``."""
    kernel: Any = get_kernel(op, _KEY)  # torch's own kernel, which makes torch's own node

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: Any, source: Tensor, dtype: Any, *how: Any) -> Any:
            result = kernel.call_boxed(keys, source, *how, dtype=dtype)
            ctx.how = how
            ctx.save_for_backward(source, result)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            source, result = ctx.saved_tensors
            if source.dim():
                grad = gradient(grad, source.to(grad.dtype), result, *ctx.how)
            return None, grad, None, *(None for _ in ctx.how)

    name_nodes(Node, name)

    def prod(keys: Any, source: Tensor, *how: Any, dtype: Any = None) -> Any:
        needed = torch.is_grad_enabled() and source.requires_grad
        if needed and isinstance(source, FakeTensor) and not has_forward_gradients():
            return Node.apply(keys, source, dtype, *how)  # type: ignore[no-untyped-call]
        return kernel.call_boxed(keys, source, *how, dtype=dtype)

    return prod


def _affine_grid() -> Callable[..., Tensor]:
    kernel: Any = get_kernel("aten::affine_grid_generator", _KEY)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, theta: Tensor, size: Any, align_corners: bool) -> Tensor:
            ctx.how = size, align_corners
            return affine_grid(None, theta, size, align_corners)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return aten.affine_grid_generator_backward.default(grad, *ctx.how), None, None

    name_nodes(Node, "AffineGridGeneratorBackward0")

    def affine_grid_generator(keys: Any, theta: Tensor, size: Any, align_corners: bool) -> Tensor:
        """The parts of the op under autocast, which then casts each of them as on a GPU."""
        if torch.is_autocast_enabled("cuda") and isinstance(theta, FakeTensor) and not has_forward_gradients():
            return Node.apply(theta, size, align_corners)  # type: ignore[no-any-return, no-untyped-call]
        return kernel.call_boxed(keys, theta, size, align_corners)  # type: ignore[no-any-return]

    return affine_grid_generator
