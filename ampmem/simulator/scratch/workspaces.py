"""The workspaces of cuBLAS, which PyTorch allocates.

Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp`` of torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
