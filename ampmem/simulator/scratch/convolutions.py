"""Convolutions on a GPU: whether cuDNN runs them, in which memory format, and what they allocate besides the result.

Sources: ``aten/src/ATen/native/Convolution.cpp``, ``ConvUtils.h``, ``cudnn/ConvShared.cpp`` and ``cudnn/Conv_v8.cpp``
of PyTorch, and the workspaces in a snapshot of ResNet-50 (``tests/unit/simulator/test_convolutions.py``).

A table of workspaces measured on a GPU takes precedence. ``tests/gpu/workspaces.py`` writes such tables (schema
``ampmem.workspaces/1``). Each is in ``tables/``, under any name that ends in ``.json``, or in ``.json.gz`` if it is
compressed. A table is used for the GPU and the version of torch that it names; the version's local part, such as
``+cu130``, is ignored: a CPU build simulates for one with CUDA.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ampmem.allocator.gpus import GpuSpec
from ampmem.allocator.settings import MIB
from ampmem.simulator.private.general import suggest_memory_format

aten = torch.ops.aten

FORWARD, DATA, WEIGHT = "forward", "backward-data", "backward-weight"

_GEMM = 128 * MIB
"""Minimum workspace in bytes of some of cuDNN's engines for 1×1 kernels, whatever the tensors are.

213 of 402 workspaces in a snapshot of ResNet-50 at batch size 1 have this size.
"""
_MARGIN = 4 * MIB
"""Maximum bytes that engines need besides copies of tensors: up to 2.3 MiB in that snapshot, for partial gradients."""
_LEAST_CHANNELS = 32
"""Depthwise convolutions in float16 with fewer channels use PyTorch's own kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One call of a convolution, forward or backward.

    ``target`` is the result of forward or its gradient, ``passes`` are the computed passes.
    """

    source: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int
    passes: tuple[str, ...]

    @property
    def by_cudnn(self) -> bool:
        """Whether cuDNN may be used at all.

        PyTorch has its own kernels for depthwise convolutions of contiguous tensors. They are used for all dtypes but
        float16, and for some shapes in float16 (``use_cudnn_depthwise``, as of PyTorch 2.14).
        """
        if not torch.backends.cudnn.enabled:
            return False
        return not self.depthwise or self.format is not torch.contiguous_format or self._suits_cudnn_depthwise()

    def _suits_cudnn_depthwise(self) -> bool:
        """Whether cuDNN may be used for this depthwise convolution of contiguous tensors.

        In two dimensions PyTorch has further conditions (``check_cudnn_depthwise_workload_with_filter``): so this may
        return ``True`` where cuDNN is not used.
        """
        source, kernel = self.source, self.weight.shape[2:]
        if source.dtype != torch.float16 or source.shape[1] < _LEAST_CHANNELS or set(self.dilation) != {1}:
            return False
        if source.dim() == 3:
            return self.stride == (1,)
        return source.dim() == 4 and len(set(self.stride)) == len(set(kernel)) == 1 and kernel[0] in (1, 3, 5)

    @property
    def depthwise(self) -> bool:
        """Whether it is depthwise (``is_depthwise``)."""
        channels = self.source.shape[1]
        return not self.transposed and 1 < self.groups == channels and self.weight.shape[0] % channels == 0

    @property
    def pointwise(self) -> bool:
        """Whether the kernel is 1×1, so it is one matrix product."""
        return all(size == 1 for size in self.weight.shape[2:])

    @property
    def format(self) -> torch.memory_format:
        """The memory format of its inputs and outputs."""
        return memory_format(self.source, self.weight)

    def course(self, result: Any) -> tuple[Any, ...]:
        """Copies of its inputs, in bytes, and its results, in the order of allocation.

        A negative number frees a copy (``_convolution``, ``convolution_backward``, ``cudnn_convolution_backward``).
        """
        source, weight, target = (self._copy(tensor) for tensor in (self.source, self.weight, self.target))
        # Forward makes the input contiguous before it allocates the result, and the weight after that.
        if self.passes == (FORWARD,):
            return (*source, result, *weight)
        of_source, of_weight = result[:2]
        if not self.by_cudnn:
            return (*source, *weight, *target, of_weight, of_source) if self.depthwise else (*source, *weight, *target)
        source = source if of_weight is not None else ()
        weight = (of_source, *weight, *_back(weight)) if of_source is not None else ()
        return (*source, *target, *weight, of_weight, *_back(target), *_back(source))

    def _copy(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Bytes of a copy of ``tensor`` if it has another memory format."""
        return () if tensor.is_contiguous(memory_format=self.format) else (_bytes(tensor),)

    def most(self, environment: Mapping[str, str]) -> int:
        """Maximum bytes that cuDNN is assumed to allocate at once in any pass; 0 if it is not used.

        Its kernels for tensor cores read channels-last tensors. So other tensors are copied first: the inputs of the
        pass, and by some kernels its outputs.
        """
        if not self.by_cudnn:
            return 0
        weight = _bytes(self.weight)
        most = _bytes(self.source) + weight + _bytes(self.target) + _MARGIN
        if self.pointwise:
            most = max(most, _GEMM + weight)
        limit = workspace_limit(environment)
        return most if limit is None else min(most, limit)

    def key(self, name: str) -> tuple[object, ...]:
        """PyTorch's cache key for the algorithm of pass ``name`` (``ConvolutionParams``)."""
        how = (self.stride, self.padding, self.dilation, self.transposed, self.groups, self.format)
        settings = (torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32)
        return (name, self.source.dtype, self.source.shape, self.weight.shape, *how, *settings)


def workspace_limit(environment: Mapping[str, str]) -> int | None:
    """``CUDNN_CONV_WSCAP_DBG`` in bytes, the maximum workspace, or ``None``."""
    cap = environment.get("CUDNN_CONV_WSCAP_DBG", "")
    return int(cap) * MIB if cap.isdigit() else None


def convolution_of(func: Any, args: Sequence[Any], result: Any) -> Convolution:
    """The convolution that ``func`` computed: ``aten.convolution`` or its backward."""
    passes: tuple[str, ...] = (FORWARD,)
    if func is aten.convolution.default:
        source, weight, target, rest = args[0], args[1], result, args[3:]
    else:
        target, source, weight, rest = args[0], args[1], args[2], args[4:]
        passes = tuple(name for name, made in zip((DATA, WEIGHT), result, strict=False) if made is not None)
    return Convolution(
        source=source,
        weight=weight,
        target=target,
        stride=tuple(rest[0]),
        padding=tuple(rest[1]),
        dilation=tuple(rest[2]),
        transposed=bool(rest[3]),
        groups=rest[5],
        passes=passes,
    )


def memory_format(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The memory format of a convolution of ``source`` on a GPU, and of its results and gradients.

    If either tensor is channels-last, cuDNN uses that, and the other one is copied; PyTorch's own kernels use
    contiguous tensors (``cudnn_conv_suggest_memory_format``).
    """
    if torch.float64 in (source.dtype, weight.dtype) or not torch.backends.cudnn.enabled:
        return torch.contiguous_format
    formats = [suggest_memory_format(tensor) for tensor in (source, weight) if tensor.dim() in (4, 5)]
    return next((found for found in formats if found is not torch.contiguous_format), torch.contiguous_format)


def _back(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-size for size in sizes)


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * tensor.dtype.itemsize


SCHEMA = "ampmem.workspaces/1"
TABLES = Path(__file__).parent / "tables"

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWorkspaces:
    """One table: ``sizes`` in bytes by call; ``cudnn`` is the version as torch returns it, such as 91002."""

    gpu: str
    torch: str
    cudnn: int
    sizes: Mapping[tuple[object, ...], int]

    @property
    def source(self) -> str:
        """A description of the table's origin."""
        return f"measured on {self.gpu} with torch {self.torch} and cuDNN {self.cudnn}"

    def of(self, convolution: Convolution, call: str, *, benchmark: bool) -> int | None:
        """Bytes that this pass allocated besides its result; ``None`` if it was not measured."""
        key = _key(convolution, call, benchmark=benchmark)
        return None if key is None else self.sizes.get(key)


def table_for(gpu: GpuSpec, version: str = torch.__version__, folder: Path = TABLES) -> MeasuredWorkspaces | None:
    """The table of the newest cuDNN for ``gpu`` and this ``version`` of torch, if any."""
    # A version's local part, such as +cu130, says how torch was built, and a CPU build has another.
    fitting = [table for table in _tables(folder) if (table.gpu, _base(table.torch)) == (gpu.name, _base(version))]
    return max(fitting, key=lambda table: table.cudnn, default=None)


@functools.cache
def _tables(folder: Path) -> tuple[MeasuredWorkspaces, ...]:
    return tuple(read_table(path) for path in sorted((*folder.glob("*.json"), *folder.glob("*.json.gz"))))


def read_table(path: Path) -> MeasuredWorkspaces:
    """The table at ``path``. Raises ``ValueError`` for another schema."""
    data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} is not a table of schema {SCHEMA}")
    machine = data["machine"]
    rows = [row for row in data["rows"] if row["kind"] == "convolution" and row["error"] is None]
    return MeasuredWorkspaces(
        gpu=machine["gpu"],
        torch=machine["torch"],
        cudnn=machine["cudnn"],
        sizes={_key_of_row(row): row["temporary"] + row["kept"] for row in rows},
    )


def _key_of_row(row: Mapping[str, Any]) -> tuple[object, ...]:
    shape = row["shape"]
    names = ("batch", "channels", "out", "image", "kernel", "stride", "padding", "groups", "channels_last")
    return (row["pass"], row["dtype"], row["benchmark"], *(int(shape[name]) for name in names))


def _key(convolution: Convolution, call: str, *, benchmark: bool) -> tuple[object, ...] | None:
    """The key of the row for this pass; ``None`` if tables have no rows of its kind."""
    source, weight = convolution.source, convolution.weight
    dtype = _NAMES.get(source.dtype)
    # With TF32 allowed cuDNN chooses other engines, so tables have rows of their own for it.
    if dtype == "fp32" and torch.backends.cudnn.allow_tf32:
        dtype = "tf32"
    square = all(len(set(pair)) == 1 for pair in (source.shape[2:], weight.shape[2:], *_steps(convolution)))
    if dtype is None or source.dim() != 4 or convolution.transposed or not square or set(convolution.dilation) != {1}:
        return None
    channels_last = int(convolution.format is torch.channels_last)
    image, kernel, stride, padding = (
        int(pair[0]) for pair in (source.shape[2:], weight.shape[2:], *_steps(convolution))
    )
    batch, channels, out = int(source.shape[0]), int(source.shape[1]), int(weight.shape[0])
    return (
        *(call, dtype, benchmark),
        *(batch, channels, out, image, kernel, stride, padding, convolution.groups, channels_last),
    )


def _steps(convolution: Convolution) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return convolution.stride, convolution.padding


def _base(version: str) -> str:
    return version.partition("+")[0]
