"""The workspaces of cuBLAS and cuBLASLt, which PyTorch allocates.

Sources: ``aten/src/ATen/cuda/CublasHandlePool.cpp`` of torch 2.13 and 2.15, and what PyTorch's CUDA builds of 2.11 to
2.15 allocate in each kind of matrix product on the emulated runtime (``tests/emulated/``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ampmem.allocator.settings import KIB, MIB
from ampmem.vocabulary import WORKSPACE_CONFIG

_EACH_CALL = "2.15"
"""From this torch on each matrix product has a workspace of its own, which is freed when the product is launched."""
_SHARED = "2.12"
"""From this torch on cuBLASLt uses cuBLAS's workspace, unless the environment says otherwise."""

_LARGE, _SMALL = 32 * MIB, 8_519_680
_LARGE_SINCE = (9, 10, 12)
"""Majors of the compute capabilities whose default is 32 MiB; elsewhere it is ``:4096:2:16:8``."""


def cublas(capability: tuple[int, int] | None, environment: Mapping[str, str]) -> int:
    """Bytes per handle and stream (``parseChosenWorkspaceSize``)."""
    pools = re.findall(r":([0-9]+):([0-9]+)", environment.get(WORKSPACE_CONFIG, ""))
    if pools:
        return sum(int(size) * int(count) for size, count in pools) * KIB
    return _LARGE if (capability or (0, 0))[0] in _LARGE_SINCE else _SMALL


def kept(environment: Mapping[str, str], version: str = torch.__version__) -> bool:
    """Whether a handle keeps its workspace for ever; else each call has one (``isCUDABlasWorkspaceCachingEnabled``)."""
    return TorchVersion(version) < _EACH_CALL or environment.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def cublaslt(environment: Mapping[str, str], version: str = torch.__version__) -> int:
    """Bytes of cuBLASLt's own workspace; 0 where it shares cuBLAS's, which is the default where that is kept."""
    shared = environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1" if TorchVersion(version) >= _SHARED else "0")
    if shared != "0" and kept(environment, version):
        return 0
    size = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    return (int(size) if size.isdigit() else 1024) * KIB


def takes_lt(args: Sequence[Any], beta: complex = 1) -> bool:
    """Whether ``addmm`` with these arguments goes through cuBLASLt, which adds the bias by itself
    (``isInputCompliesAddmmCudaLt``).
    """
    bias, _, matrix = args[:3]
    if beta != 1 or matrix.dtype.is_complex or min(matrix.shape) <= 1 or not bias.is_contiguous():
        return False
    half = matrix.dtype in (torch.float16, torch.bfloat16)
    return bias.dim() == 1 or bias.shape[0] == 1 or half
