"""What a GPU run allocates beside the tensors that ops return, as far as a formula for it is known."""

from __future__ import annotations

from typing import Any

import torch

from ampmem.allocator.rounding import round_up
from ampmem.allocator.settings import MIB
from ampmem.recorder.simulated.device import SimulatedDevice
from ampmem.recorder.simulated.private import in_backward

aten = torch.ops.aten

WORKSPACE_HOPPER = 32 * MIB
WORKSPACE = 8_519_680
"""cuBLAS's workspace per handle and stream (``getChosenWorkspaceSize``, ``CublasHandlePool.cpp``)."""

_MATMULS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.addbmm.default,
        aten.addmv.default,
        aten.mv.default,
        aten.dot.default,
        aten._scaled_mm.default,
        aten._addmm_activation.default,
    }
)
_FLASH_BACKWARD = (aten._scaled_dot_product_flash_attention_backward.default, aten._flash_attention_backward.default)
_INDEX_PUT = (aten.index_put_.default, aten._index_put_impl_.default)
_CUDNN_ATTENTION = (aten._scaled_dot_product_cudnn_attention.default,)
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_RECURRENT = (aten._thnn_fused_lstm_cell.default, aten.rnn_tanh.input, aten.rnn_relu.input)

UNMODELLED_CONVOLUTION = "not modelled: the workspaces that cuDNN asks for in convolutions"
UNMODELLED_CUDNN_ATTENTION = "not modelled: the workspaces that cuDNN asks for in attention"
UNMODELLED_RECURRENT = "not modelled: recurrent layers ran step by step, where a GPU uses cuDNN and its reserve"


class Extras:
    """Books them when the op that needs them has run."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._handles: set[bool] = set()
        """For which threads a cuBLAS handle exists: the one that runs backward has its own."""

    def after(self, func: Any, args: Any, result: Any) -> None:
        """``func`` has returned ``result``."""
        device = self._device
        if device.label != "cuda":
            return
        if func in _MATMULS:
            self._blas(result)
        elif func in _FLASH_BACKWARD:
            self._flash_backward(args)
        elif func in _INDEX_PUT and len(args) > 3 and args[3]:
            self._sorted_indices(args[1])
        elif func in _CUDNN_ATTENTION:
            device.assume(UNMODELLED_CUDNN_ATTENTION)
        elif func in _CONVOLUTIONS:
            device.assume(UNMODELLED_CONVOLUTION)
        elif func in _RECURRENT:
            device.assume(UNMODELLED_RECURRENT)

    def _blas(self, result: torch.Tensor) -> None:
        thread = in_backward()
        if thread in self._handles or result.device.type != "cuda":
            return
        self._handles.add(thread)
        capability = self._device.gpu.compute_capability
        if capability is None:
            self._device.assume(f"cuBLAS workspaces of {WORKSPACE} bytes: the GPU's architecture is not known")
        self._device.workspace(WORKSPACE_HOPPER if (capability or (0, 0)) >= (9, 0) else WORKSPACE)

    def _flash_backward(self, args: Any) -> None:
        """``softmax_d`` and ``dq_accum`` of ``mha_bwd`` (``flash_attn/flash_api.cpp``), both FP32."""
        query = args[1]
        batch, heads, length, width = query.shape
        rounded = round_up(length, 128)
        padded = round_up(width, 32) if width <= 128 else round_up(width, 64)
        self._device.scratch(batch * heads * rounded * 4, batch * heads * rounded * padded * 4)

    def _sorted_indices(self, indices: Any) -> None:
        """Adding at indices sorts them first (``index_put_with_sort_kernel``); how many arrays: from a trace."""
        count = max((index.numel() for index in indices if index is not None), default=0)
        self._device.scratch(*(count * 8,) * 5, 1)
