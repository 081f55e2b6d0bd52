"""Convolutions on a GPU: which of them cuDNN does, in which memory format, and what they allocate besides.

Sources: ``aten/src/ATen/native/Convolution.cpp``, ``ConvUtils.h``, ``cudnn/ConvShared.cpp`` and ``cudnn/Conv_v8.cpp``
of PyTorch, and the workspaces in a snapshot of ResNet-50 (``tests/unit/simulator/test_convolutions.py``).

Where there is a table of workspaces that were measured on a GPU, those count. ``tests/gpu/workspaces.py`` writes such
tables (schema ``ampmem.workspaces/1``). Each lies in ``tables/``, under any name that ends in ``.json``, or in
``.json.gz`` where it is compressed. A table counts for the GPU that it names, and for the version of torch, of which
its last part, such as ``+cu130``, is ignored: a build for the CPU simulates for one with CUDA.
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
"""What some of cuDNN's engines for kernels of 1×1 ask for at least, whatever the tensors are: 213 of 402 workspaces in
a snapshot of ResNet-50 at batch size 1."""
_MARGIN = 4 * MIB
"""What engines ask for beside copies of tensors, at most: up to 2.3 MiB in that snapshot, for partial gradients."""
_LEAST_CHANNELS = 32
"""Depthwise convolutions in float16 with fewer channels are PyTorch's own kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One call of a convolution, forward or backward.

    ``target`` is the result of forward or its gradient, ``passes`` what is computed.
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
        """Whether cuDNN may be asked at all.

        PyTorch has kernels of its own for depthwise convolutions of contiguous tensors. They are used for all dtypes
        but float16, and for some shapes of that (``use_cudnn_depthwise``, seen in PyTorch 2.14).
        """
        if not torch.backends.cudnn.enabled:
            return False
        return not self.depthwise or self.format is not torch.contiguous_format or self._suits_cudnn_depthwise()

    def _suits_cudnn_depthwise(self) -> bool:
        """Whether cuDNN may be asked for this depthwise convolution of contiguous tensors.

        In two dimensions PyTorch asks for more than that (``check_cudnn_depthwise_workload_with_filter``): then this
        says yes where it may be no.
        """
        source, kernel = self.source, self.weight.shape[2:]
        if source.dtype != torch.float16 or source.shape[1] < _LEAST_CHANNELS or set(self.dilation) != {1}:
            return False
        if source.dim() == 3:
            return self.stride == (1,)
        return source.dim() == 4 and len(set(self.stride)) == len(set(kernel)) == 1 and kernel[0] in (1, 3, 5)

    @property
    def depthwise(self) -> bool:
        """``is_depthwise``."""
        channels = self.source.shape[1]
        return not self.transposed and 1 < self.groups == channels and self.weight.shape[0] % channels == 0

    @property
    def pointwise(self) -> bool:
        """Whether the kernel is 1×1, so that it is one matrix product."""
        return all(size == 1 for size in self.weight.shape[2:])

    @property
    def format(self) -> torch.memory_format:
        """The memory format of what it reads and writes."""
        return memory_format(self.source, self.weight)

    def course(self, result: Any) -> tuple[Any, ...]:
        """Its copies of what it reads, in bytes, among its results, in the order in which it allocates them; a negative
        number gives a copy back (``_convolution``, ``convolution_backward``, ``cudnn_convolution_backward``)."""
        source, weight, target = (self._copy(tensor) for tensor in (self.source, self.weight, self.target))
        if self.passes == (FORWARD,):
            return (*source, result, *weight)
        of_source, of_weight = result[:2]
        if not self.by_cudnn:
            return (*source, *weight, *target, of_weight, of_source) if self.depthwise else (*source, *weight, *target)
        source = source if of_weight is not None else ()
        weight = (of_source, *weight, *_back(weight)) if of_source is not None else ()
        return (*source, *target, *weight, of_weight, *_back(target), *_back(source))

    def _copy(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The bytes of a copy of ``tensor`` where it lies in another memory format."""
        return () if _is_in(tensor, self.format) else (_bytes(tensor),)

    def most(self, environment: Mapping[str, str]) -> int:
        """The most bytes that cuDNN is taken to ask for at once in any of the passes; 0 where it is not asked.

        Its kernels for tensor cores read channels-last tensors. So others are copied first: what the pass reads, and
        by some kernels what it writes.
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
        """What PyTorch remembers the algorithm of pass ``name`` by, once it has chosen (``ConvolutionParams``)."""
        how = (self.stride, self.padding, self.dilation, self.transposed, self.groups, self.format)
        settings = (torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32)
        return (name, self.source.dtype, self.source.shape, self.weight.shape, *how, *settings)


def workspace_limit(environment: Mapping[str, str]) -> int | None:
    """``CUDNN_CONV_WSCAP_DBG`` in bytes, the most that is allowed, or ``None``."""
    cap = environment.get("CUDNN_CONV_WSCAP_DBG", "")
    return int(cap) * MIB if cap.isdigit() else None


def convolution_of(func: Any, args: Sequence[Any], result: Any) -> Convolution:
    """What ``func`` computed, which is ``aten.convolution`` or its backward."""
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
    """In which format a convolution of ``source`` runs on a GPU, and what it returns, the gradients too.

    cuDNN takes channels-last tensors as they are, and then the other one is copied to that format; PyTorch's own
    kernels, which are without it, take contiguous ones (``cudnn_conv_suggest_memory_format``).
    """
    if torch.float64 in (source.dtype, weight.dtype) or not torch.backends.cudnn.enabled:
        return torch.contiguous_format
    formats = [suggest_memory_format(tensor) for tensor in (source, weight) if tensor.dim() in (4, 5)]
    return next((found for found in formats if found is not torch.contiguous_format), torch.contiguous_format)


def _back(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-size for size in sizes)


def _is_in(tensor: torch.Tensor, wanted: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=wanted)


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * tensor.dtype.itemsize


SCHEMA = "ampmem.workspaces/1"
TABLES = Path(__file__).parent / "tables"

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWorkspaces:
    """One table: ``sizes`` has bytes by what was called, ``cudnn`` the version as torch gives it, such as 91002."""

    gpu: str
    torch: str
    cudnn: int
    sizes: Mapping[tuple[object, ...], int]

    @property
    def source(self) -> str:
        """In words."""
        return f"measured on {self.gpu} with torch {self.torch} and cuDNN {self.cudnn}"

    def of(self, convolution: Convolution, call: str, *, benchmark: bool) -> int | None:
        """Bytes that this pass allocated beside its result, ``None`` for one that was not measured."""
        key = _key(convolution, call, benchmark=benchmark)
        return None if key is None else self.sizes.get(key)


def table_for(gpu: GpuSpec, version: str = torch.__version__, folder: Path = TABLES) -> MeasuredWorkspaces | None:
    """That of the newest cuDNN among the tables for ``gpu`` and this ``version`` of torch; ``None`` without one."""
    fitting = [table for table in _tables(folder) if (table.gpu, _base(table.torch)) == (gpu.name, _base(version))]
    return max(fitting, key=lambda table: table.cudnn, default=None)


@functools.cache
def _tables(folder: Path) -> tuple[MeasuredWorkspaces, ...]:
    return tuple(read_table(path) for path in sorted((*folder.glob("*.json"), *folder.glob("*.json.gz"))))


def read_table(path: Path) -> MeasuredWorkspaces:
    """The table at ``path``. Raises ``ValueError`` for one of another schema."""
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
    """What a row would be called that has this pass; ``None`` where no row can be of its kind."""
    source, weight = convolution.source, convolution.weight
    dtype = _NAMES.get(source.dtype)
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
