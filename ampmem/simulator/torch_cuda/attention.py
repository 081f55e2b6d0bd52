"""Chooses and calls the kernel of ``scaled_dot_product_attention`` on the simulated GPU.

On fake tensors torch silently uses the plain kernel, which keeps the whole matrix of scores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library
from torch.torch_version import TorchVersion

from ampmem.patching import added
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.general import give_back

aten = torch.ops.aten

_KEYS = {"cuda": ("AutogradCUDA", "CUDA"), "cpu": ("AutogradCPU", "CPU")}
"""Dispatch keys at which the kernel is chosen, by device type."""
_HALF = (torch.float16, torch.bfloat16)
_MASK_ALIGNMENT = 8
"""Masks for the memory-efficient kernel are padded to a multiple of this many elements (``preprocess_mask``)."""
_UNSQUEEZES = TorchVersion(torch.__version__) >= "2.14"
"""Whether three-dimensional tensors get a fourth dimension. Before, their attention is the plain one."""
_EFFICIENT_GROUPS = TorchVersion(torch.__version__) >= "2.14"
"""Whether the memory-efficient kernel supports fewer heads of keys and values than of queries.

Before, such attention in FP32 is the plain one, because the other kernels need 16 bits.
"""

_CUDNN_TAKES_256 = TorchVersion(torch.__version__) >= "2.14"
_CUDNN_DROPS_SIXTEENTHS = TorchVersion(torch.__version__) >= "2.12"
"""Whether cuDNN's kernel needs a dropout that is a multiple of 1/16 (``check_cudnn_dropout``); 0.1 is not."""


class AttentionKernel(StrEnum):
    """The kernels of attention."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


class SdpaCall(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    gqa: bool = False

    @property
    def trained(self) -> bool:
        """Whether autograd follows it."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self[:3])

    def suits(self, *, gqa: bool) -> bool:
        """Whether a kernel takes these tensors, with groups of heads if it can do ``gqa``.

        The numbers of heads are equal, or there are fewer of keys and values; elements of a head are adjacent.
        """
        same = self.query.shape[1] == self.key.shape[1] == self.value.shape[1]
        return (gqa or same) and all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in self[:3])


def choose(device: SimulatedDevice, call: SdpaCall) -> AttentionKernel:
    """The kernel for dense tensors, as in ``select_sdp_backend``.

    Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, 2.13. Raises torch's ``RuntimeError`` if the plain
    kernel is disabled and no other can be used.
    """
    query, key, value = call[:3]
    capability = device.gpu.compute_capability or (8, 0)
    order: tuple[AttentionKernel, ...] = ()
    if query.dim() == key.dim() == value.dim() == 4 and 0 not in (query.shape[2], key.shape[2]):
        order = (AttentionKernel.FLASH, AttentionKernel.EFFICIENT, AttentionKernel.CUDNN)
        if capability[0] in (9, 10) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1":
            order = (AttentionKernel.CUDNN, AttentionKernel.FLASH, AttentionKernel.EFFICIENT)
    backends = torch.backends.cuda
    usable = {
        AttentionKernel.CUDNN: lambda: backends.cudnn_sdp_enabled() and _cudnn(capability, call),
        AttentionKernel.FLASH: lambda: backends.flash_sdp_enabled() and _flash(capability, call),
        AttentionKernel.EFFICIENT: lambda: backends.mem_efficient_sdp_enabled() and _efficient(capability, call),
    }
    chosen = next((kernel for kernel in order if usable[kernel]()), AttentionKernel.MATH)
    if chosen is AttentionKernel.MATH and not backends.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return chosen


def _cudnn(capability: tuple[int, int], call: SdpaCall) -> bool:
    query, key, value, mask, dropout = call[:5]
    masked_with_gradient = mask is not None and mask.requires_grad
    deterministic = torch.are_deterministic_algorithms_enabled() and not (
        torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if capability < (8, 0) or masked_with_gradient or deterministic:
        return False
    fits = query.shape[-1] == key.shape[-1] and _cudnn_widths(
        capability, query.shape[-1], value.shape[-1], trained=call.trained
    )
    if _CUDNN_DROPS_SIXTEENTHS and dropout * 16 != math.floor(dropout * 16):
        return False
    lengths = key.shape[2] > 1 and (dropout == 0 or query.shape[2] > 1)
    return query.dtype in _HALF and fits and lengths and call.suits(gqa=call.gqa)


def _cudnn_widths(capability: tuple[int, int], width: int, of_values: int, *, trained: bool) -> bool:
    """Whether cuDNN supports this head size: ``check_cudnn_tensor_shapes``, with the cuDNN of the wheels for CUDA 13.

    Up to 128 everywhere. On Hopper 256 since cuDNN 9.10, and on data center Blackwell only keys of 192 with values of
    128; the wheels of 2.14 have cuDNN 9.24, with which both support 256, but not all of that in training
    (``check_cudnn_d256_bprop_head_dim``). Those of 2.12 and 2.13 have cuDNN 9.20, and the earlier rule.
    """
    widest = max(width, of_values)
    if width % 8 or of_values % 8 or widest > 256:
        return False
    if widest <= 128 or (capability[0] in (9, 10) and (width, of_values) == (192, 128)):
        return True
    if _CUDNN_TAKES_256:
        return capability[0] in (9, 10) and (not trained or (width, of_values) == (256, 256))
    return capability == (9, 0)


def _flash(capability: tuple[int, int], call: SdpaCall) -> bool:
    query, key, value = call[:3]
    width = query.shape[-1]
    if query.dtype not in _HALF or call.mask is not None or capability < (8, 0) or width > 256:
        return False
    if not (width == key.shape[-1] == value.shape[-1]) or (call.causal and query.shape[2] != key.shape[2]):
        return False
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if small and call.trained and (192 < width <= 224 or (width > 224 and call.dropout > 0)):
        return False
    return call.suits(gqa=call.gqa)


def _efficient(capability: tuple[int, int], call: SdpaCall) -> bool:
    """Whether the memory-efficient kernel can be used.

    Before Ampere not with bfloat16; without tensor cores, as for float32 there, with any head size.
    """
    query, _, value = call[:3]
    ampere = capability >= (8, 0)
    alignment = 8 if query.dtype in _HALF else 4 if ampere else 1
    widths = (query.shape[-1], value.shape[-1])
    dtypes = (*_HALF, torch.float32) if ampere else (torch.float16, torch.float32)
    if query.dtype not in dtypes or any(width % alignment for width in widths):
        return False
    return call.suits(gqa=call.gqa and _EFFICIENT_GROUPS)


def install(mode: SimulatedMode) -> Callable[[], None]:
    """Replace the op that chooses the kernel; returns the undo."""
    device, additions = mode.device_model, mode.additions

    def attention(*args: Any, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
        call = SdpaCall(*args)._replace(scale=scale, gqa=enable_gqa)
        if _UNSQUEEZES and all(tensor.dim() == 3 for tensor in call[:3]):
            four = (tensor.unsqueeze(0) for tensor in call[:3])
            return attention(*four, *args[3:], scale=scale, enable_gqa=enable_gqa).squeeze(0)
        kernel = choose(device, call)
        device.assume(f"attention ran with the {kernel} kernel, as torch {torch.__version__} chooses it for this GPU")
        needs_grad = call.trained
        mask = _additive(call.mask, call.query.dtype)
        if kernel is AttentionKernel.FLASH:
            return _flash_attention(call)
        if kernel is AttentionKernel.CUDNN:
            out: tuple[Tensor, ...] = aten._scaled_dot_product_cudnn_attention(
                *call[:3], mask, needs_grad, call.dropout, call.causal, False, scale=scale
            )
            return out[0]
        if kernel is AttentionKernel.EFFICIENT:
            mask = None if mask is None else _prepared(mask, call.query, call.key)
            out = aten._scaled_dot_product_efficient_attention(
                *call[:3], mask, needs_grad, call.dropout, call.causal, scale=scale
            )
            return out[0]
        with additions.in_place():
            out = aten._scaled_dot_product_attention_math(
                *call[:3], mask, call.dropout, call.causal, None, scale=scale, enable_gqa=enable_gqa
            )
            return out[0]

    if device.label == "cuda":  # inside another op, autograd does not see the op
        mode.special[aten.scaled_dot_product_attention.default] = lambda func, args, kwargs: attention(*args, **kwargs)
    library = Library("aten", "IMPL")
    for dispatch_key in _KEYS[device.label]:
        library.impl("scaled_dot_product_attention", attention if device.label == "cuda" else _on_cpu, dispatch_key)
    return added("torch.library", "Library", give_back(library))


def _on_cpu(*args: Any, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """The CPU's own kernel, for runs compared with the CPU profiler."""
    call, attention = SdpaCall(*args), aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = attention(*call[:3], call.dropout, call.causal, attn_mask=call.mask, scale=scale)[0]
    return out


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask that is added to the scores (``convert_boolean_attn_mask``)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.full((), -math.inf, dtype=dtype, device=mask.device))


def _prepared(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask for the memory-efficient kernel (``preprocess_mask``): padded before it is expanded."""
    if mask.stride(-1) != 1 or any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        # Padded and cut again, so that each row begins at an aligned address.
        columns = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, _MASK_ALIGNMENT - columns % _MASK_ALIGNMENT))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _flash_attention(call: SdpaCall) -> Tensor:
    """Attention by the flash kernel, which needs head sizes that are a multiple of 8 (``pad_last_dim``)."""
    query, key, value, scale = *call[:3], call.scale
    width = query.shape[-1]
    short = -width % 8
    if short:
        # The default scale is that of the head before it is padded.
        scale = scale if scale is not None else width**-0.5
        query, key, value = (torch.nn.functional.pad(tensor, (0, short)) for tensor in (query, key, value))
    attention = aten._scaled_dot_product_flash_attention
    out: Tensor = attention(query, key, value, call.dropout, call.causal, False, scale=scale)[0]
    return out[..., :width] if short else out
