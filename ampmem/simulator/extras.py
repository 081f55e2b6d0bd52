"""Memory that a GPU run allocates besides the tensors that ops return: modelled if there is a formula, else named.

The workspaces of cuBLAS and cuBLASLt are PyTorch's own allocations. Sources:
``aten/src/ATen/cuda/CublasHandlePool.cpp`` of torch 2.13 and 2.15, and what PyTorch's CUDA builds of 2.11 to 2.15
allocate in each kind of matrix product on the emulated runtime (``tests/emulated/``).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ampmem.allocator.settings import KIB, MIB
from ampmem.names import CUDNN_TRIALS
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private.general import FakeTensor, in_backward
from ampmem.simulator.scratch.convolutions import Convolution, convolution_of, table_for, workspace_limit
from ampmem.simulator.scratch.scratch import ASSUMED, Course, course_of, has_scratch, scratch_of, unmodelled
from ampmem.units import format_bytes
from ampmem.vocabulary import WORKSPACE_CONFIG

aten = torch.ops.aten

_LT_MATMULS = frozenset({aten.addmm.default, aten.addmm.out, aten._addmm_activation.default, aten._scaled_mm.default})
"""The matrix products that may go through cuBLASLt."""
_BY_CUBLAS = "matrix products (workspaces of cuBLAS, call by call)"
_MATMULS = _LT_MATMULS | frozenset(
    {
        aten.mm.default,
        aten.mm.out,  # as compiled code calls them
        aten.bmm.default,
        aten.bmm.out,
        aten.baddbmm.default,
        aten.baddbmm.out,
        aten.addbmm.default,
        aten.addmv.default,
        aten.mv.default,
        aten.dot.default,
        aten.vdot.default,
        aten.mm.dtype,
        aten.bmm.dtype,
    }
)
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)

CUDNN_CONVOLUTIONS = "cuDNN's workspaces in convolutions"
_ASSUMED = (
    f"assumed: {CUDNN_CONVOLUTIONS} likely fit into cached memory, and take at most a copy of what each pass reads "
    "and writes, or 128 MiB for 1×1 kernels; cuDNN chooses the algorithm, and PyTorch uses another one if memory is "
    "short"
)
_TRIED = (
    f"assumed: {CUDNN_TRIALS} take at most the free memory, at the first call of each convolution, after which "
    "PyTorch empties the cache"
)
_NATIVE = "convolutions without cuDNN, which torch.backends.cudnn.enabled turned off"


class Extras:
    """Allocates workspaces and scratch memory when an op that needs them has run."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._handles: set[tuple[str, bool, int]] = set()
        """(library, whether in backward, stream) of each library handle: backward's thread has its own."""
        self._table = table_for(device.gpu)
        self._tried: set[tuple[object, ...]] = set()
        """Convolutions whose algorithms were tried, by thread: each has its own cache (``Conv_v8.cpp``)."""

    def course(self, func: Any, args: Any, result: Any) -> Course:
        """The allocations of ``func`` besides its results, in order, if they are not all after the results."""
        if self._device.label != "cuda" or not _on_gpu(result):
            return ()
        if func in _CONVOLUTIONS:
            return convolution_of(func, args, result).course(result)
        return course_of(func, args, result, self._device.gpu)

    def note_result(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Allocate the workspaces and scratch of ``func``, which has returned ``result``."""
        device = self._device
        if not _matters(func) or device.label != "cuda" or not _on_gpu(result):
            return
        if func in _MATMULS:
            self._blas(func, args, kwargs, result)
        elif func in _CONVOLUTIONS:
            self._convolution(func, args, result)
        # After the results exist, as the kernel runs then.
        for sizes in scratch_of(func, args, result, device.gpu):
            device.scratch(str(func), sizes)
        if func in ASSUMED:
            device.assume(ASSUMED[func])
        missing = unmodelled(func)
        if missing is not None:
            device.leave_out(missing)

    def _blas(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Allocate the workspaces of cuBLAS and cuBLASLt for the matrix product ``func``, where it needs new ones."""
        capability = self._device.gpu.compute_capability
        size = cublas(capability, os.environ)
        by_lt = func in _LT_MATMULS and (
            func not in (aten.addmm.default, aten.addmm.out) or takes_lt(args, kwargs.get("beta", 1))
        )
        own = cublaslt(os.environ) if by_lt else 0
        if not keeps_workspace(os.environ):
            if result.numel():
                self._assume_size(size)
                self._device.scratch(_BY_CUBLAS, (own or size,))
            return
        if self._first_use("cuBLAS"):
            self._assume_size(size)
            self._device.workspace("cuBLAS", size)
        if own and self._first_use("cuBLASLt"):
            self._device.workspace("cuBLASLt", own)

    def _assume_size(self, size: int) -> None:
        if self._device.gpu.compute_capability is None:
            self._device.assume(f"cuBLAS workspaces of {format_bytes(size)}: the GPU's architecture is not known")

    def _first_use(self, library: str) -> bool:
        """Whether the calling thread uses ``library`` for the first time on the current stream."""
        handle = (library, in_backward(), self._device.order.current())
        known = handle in self._handles
        self._handles.add(handle)
        return not known

    def _convolution(self, func: Any, args: Any, result: Any) -> None:
        device, convolution = self._device, convolution_of(func, args, result)
        if not torch.backends.cudnn.enabled and not convolution.depthwise:
            device.leave_out(_NATIVE)
        if not convolution.by_cudnn:
            return
        benchmark = torch.backends.cudnn.benchmark
        for name in convolution.passes:
            if benchmark:
                self._try_all(convolution, name)
            known = None if self._table is None else self._table.of(convolution, name, benchmark=benchmark)
            if known is not None and self._table is not None:
                device.assume(f"{CUDNN_CONVOLUTIONS}, where the shape is known: {self._table.source}")
                if known and device.could_have(known):  # without memory for it cuDNN uses another algorithm
                    device.scratch(str(func), (known,))
                continue
            device.assume_scratch(CUDNN_CONVOLUTIONS, convolution.most(os.environ), convolution.key(name))
            device.assume(_ASSUMED)

    def _try_all(self, convolution: Convolution, name: str) -> None:
        """Allocate for the trials of one pass, at its first call (``get_plans_from_find``).

        PyTorch runs all algorithms whose workspace is at most the free memory or the largest cached block, on one
        workspace that is large enough for all, halved again and again if it cannot be allocated. So this never runs out
        of memory.
        """
        key = (in_backward(), *convolution.key(name))
        if key in self._tried:
            return
        self._tried.add(key)
        self._device.assume_all_that_is_free(CUDNN_TRIALS, workspace_limit(os.environ))
        self._device.empty_cache()
        self._device.assume(_TRIED)


@functools.cache
def _matters(func: Any) -> bool:
    return func in _MATMULS or func in _CONVOLUTIONS or has_scratch(func) or unmodelled(func) is not None


def _on_gpu(result: Any) -> bool:
    first = next((item for item in result if item is not None), None) if isinstance(result, (tuple, list)) else result
    return isinstance(first, FakeTensor) and first.fake_device.type == "cuda"


_EACH_CALL = "2.15"
"""From this torch on each matrix product has its own workspace, freed when the product is launched."""
_SHARED = "2.12"
"""From this torch on cuBLASLt uses cuBLAS's workspace, unless the environment says otherwise."""

_LARGE, _SMALL = 32 * MIB, 8_519_680
_LARGE_SINCE = (9, 10, 12)
"""Major compute capabilities whose default is 32 MiB; for others it is ``:4096:2:16:8``."""


def cublas(capability: tuple[int, int] | None, environment: Mapping[str, str]) -> int:
    """Bytes of cuBLAS's workspace per handle and stream (``parseChosenWorkspaceSize``)."""
    pools = re.findall(r":([0-9]+):([0-9]+)", environment.get(WORKSPACE_CONFIG, ""))
    if pools:
        return sum(int(size) * int(count) for size, count in pools) * KIB
    return _LARGE if (capability or (0, 0))[0] in _LARGE_SINCE else _SMALL


def keeps_workspace(environment: Mapping[str, str], version: str = torch.__version__) -> bool:
    """Whether a handle keeps its workspace forever (``isCUDABlasWorkspaceCachingEnabled``).

    Otherwise each call has its own.
    """
    return TorchVersion(version) < _EACH_CALL or environment.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def cublaslt(environment: Mapping[str, str], version: str = torch.__version__) -> int:
    """Bytes of cuBLASLt's own workspace; 0 if it shares cuBLAS's, the default if that is kept."""
    shared = environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1" if TorchVersion(version) >= _SHARED else "0")
    if shared != "0" and keeps_workspace(environment, version):
        return 0
    size = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    return (int(size) if size.isdigit() else 1024) * KIB


def takes_lt(args: Sequence[Any], beta: complex = 1) -> bool:
    """Whether ``addmm`` with these arguments uses cuBLASLt, which adds the bias itself.

    Source: ``isInputCompliesAddmmCudaLt``.
    """
    bias, _, matrix = args[:3]
    if beta != 1 or matrix.dtype.is_complex or min(matrix.shape) <= 1 or not bias.is_contiguous():
        return False
    half = matrix.dtype in (torch.float16, torch.bfloat16)
    return bias.dim() == 1 or bias.shape[0] == 1 or half
