"""What a GPU run allocates beside the tensors that ops return: allocated where there is a formula, else named."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private import FakeTensor, in_backward
from ampmem.simulator.scratch import workspaces
from ampmem.simulator.scratch.scratch import SORTS, has_scratch, scratch_of, sorts_much, unmodelled
from ampmem.units import format_bytes

aten = torch.ops.aten

_LT_MATMULS = frozenset({aten.addmm.default, aten._addmm_activation.default, aten._scaled_mm.default})
"""The matrix products that may go through cuBLASLt."""
_MATMULS = _LT_MATMULS | frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.addbmm.default,
        aten.addmv.default,
        aten.mv.default,
        aten.dot.default,
    }
)
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)

CUDNN_CONVOLUTIONS = "cuDNN's workspaces in convolutions"
_AT_MOST = (
    f"assumed: {CUDNN_CONVOLUTIONS} are at most the matrix of all patches (im2col) and a copy of each tensor; cuDNN "
    "chooses, and PyTorch sets no limit, but takes another algorithm where there is no memory"
)
_BENCHMARK = "the trials of torch.backends.cudnn.benchmark, which may take all memory that is free"


class Extras:
    """Books them when the op that needs them has run."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._handles: set[tuple[str, bool, int]] = set()
        """Which libraries have a handle in which thread (the one that runs backward has its own), on which stream."""

    def after(self, func: Any, args: Any, result: Any) -> None:
        """``func`` has returned ``result``."""
        device = self._device
        if not _matters(func) or device.label != "cuda" or not _on_gpu(result):
            return
        if func in _MATMULS:
            self._blas(func)
        elif func in _CONVOLUTIONS:
            self._convolution(func, args, result)
        for sizes in scratch_of(func, args, result, device.gpu):
            device.scratch(str(func), sizes)
        missing = SORTS if sorts_much(func, args) else unmodelled(func)
        if missing is not None:
            device.leave_out(missing)

    def _blas(self, func: Any) -> None:
        capability = self._device.gpu.compute_capability
        size = workspaces.cublas(capability, os.environ)
        if self._first_use("cuBLAS"):
            if capability is None:
                self._device.assume(f"cuBLAS workspaces of {format_bytes(size)}: the GPU's architecture is not known")
            self._device.workspace("cuBLAS", size)
        own = workspaces.cublaslt(os.environ) if func in _LT_MATMULS else 0
        if own and self._first_use("cuBLASLt"):
            self._device.workspace("cuBLASLt", own)

    def _first_use(self, library: str) -> bool:
        """Whether the thread that runs now has not used ``library`` before on the current stream."""
        handle = (library, in_backward(), self._device.order.current())
        known = handle in self._handles
        self._handles.add(handle)
        return not known

    def _convolution(self, func: Any, args: Any, result: Any) -> None:
        forward = func is aten.convolution.default
        source, weight = args[:2] if forward else args[1:3]
        target, transposed = (result, args[6]) if forward else (args[0], args[7])
        bound = workspaces.convolution_bound(
            source.shape, weight.shape, target.shape, source.dtype.itemsize, transposed=transposed
        )
        self._device.assume_at_most(CUDNN_CONVOLUTIONS, bound)
        self._device.assume(_AT_MOST)
        if torch.backends.cudnn.benchmark:
            self._device.leave_out(_BENCHMARK)


@functools.cache
def _matters(func: Any) -> bool:
    return func in _MATMULS or func in _CONVOLUTIONS or has_scratch(func) or unmodelled(func) is not None


def _on_gpu(result: Any) -> bool:
    first = next((item for item in result if item is not None), None) if isinstance(result, (tuple, list)) else result
    return isinstance(first, FakeTensor) and first.fake_device.type == "cuda"
