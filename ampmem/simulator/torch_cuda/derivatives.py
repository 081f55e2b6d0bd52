"""The gradient of ``cumprod`` as torch computes it of CUDA tensors; of subclasses, as fake tensors are, it takes another
formula, for zeros and for gradients of gradients, which needs more than twice the memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import Library

from ampmem.patching import added
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private.general import FakeTensor
from ampmem.simulator.private.ops import give_back

aten = torch.ops.aten

_NO_ZEROS = "assumed: nothing that prod or cumprod multiplies is 0; for 0 their gradients take another course"


def install(device: SimulatedDevice) -> Callable[[], None]:
    """Take the place of the ops that compute these gradients; returns what gives them back."""

    def without_zeros() -> None:
        """The host waits for the count of zeros, as it decides the formula."""
        device.synchronize_current()
        device.assume(_NO_ZEROS)

    def cumprod_backward(grad: Tensor, source: Tensor, dim: int, output: Tensor) -> Tensor:
        """``cumprod_backward`` (``ReduceOps.cpp``)."""
        if not all(isinstance(tensor, FakeTensor) for tensor in (grad, source, output)):
            return aten.cumprod_backward.default.decompose(grad, source, dim, output)  # type: ignore[no-any-return]
        if source.numel() <= 1 or source.shape[dim] == 1:
            return grad
        weighted = output.conj() * grad
        is_zero = source == 0
        is_zero.any()
        without_zeros()
        return _reversed_cumsum(weighted, dim).div(source.conj())

    library = Library("aten", "IMPL")
    library.impl("cumprod_backward", cumprod_backward, "AutogradCUDA")
    return added("torch.library", "derivatives", give_back(library))


def _reversed_cumsum(tensor: Tensor, dim: int) -> Tensor:
    """C++ keeps all that is made on the way to the end of the statement."""
    flipped = tensor.flip(dim)
    summed = flipped.cumsum(dim)
    return summed.flip(dim)
