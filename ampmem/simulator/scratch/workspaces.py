"""The workspaces of NVIDIA's libraries: cuBLAS's, which PyTorch allocates, and what cuDNN may ask for.

Sources: ``aten/src/ATen/cuda/CublasHandlePool.cpp`` and ``aten/src/ATen/native/cudnn/Conv_v8.cpp`` of torch 2.13.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ampmem.allocator.settings import KIB, MIB

_LARGE, _SMALL = 32 * MIB, 8_519_680
_LARGE_SINCE = (9, 10, 12)
"""Majors of the compute capabilities whose default is 32 MiB; elsewhere it is ``:4096:2:16:8``."""


def cublas(capability: tuple[int, int] | None, environment: Mapping[str, str]) -> int:
    """Bytes per handle and stream (``parseChosenWorkspaceSize``)."""
    pools = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pools:
        return sum(int(size) * int(count) for size, count in pools) * KIB
    return _LARGE if (capability or (0, 0))[0] in _LARGE_SINCE else _SMALL


def cublaslt(environment: Mapping[str, str]) -> int:
    """Bytes of cuBLASLt's own workspace; 0 where it shares cuBLAS's, which is the default."""
    if environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1") != "0":
        return 0
    size = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    return (int(size) if size.isdigit() else 1024) * KIB


def convolution_bound(
    source: Sequence[int], weight: Sequence[int], target: Sequence[int], item: int, *, transposed: bool
) -> int:
    """Bytes that cuDNN is taken to ask for at most in one pass of a convolution.

    That is the matrix of all patches (im2col), and a copy of each tensor in a layout of its own. It is an assumption:
    PyTorch sets no limit. It takes the first of cuDNN's plans that runs, and the next one when there is no memory
    for its workspace (``try_configs``).
    """
    small, large = (source, target) if transposed else (target, source)
    patches = large[0] * large[1] * math.prod(weight[2:]) * math.prod(small[2:])
    return (patches + sum(math.prod(shape) for shape in (source, weight, target))) * item
