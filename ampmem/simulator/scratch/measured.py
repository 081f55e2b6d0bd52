"""Workspaces of convolutions that were measured on a GPU, where there is a table for it.

``tests/gpu/workspaces.py`` writes such tables (schema ``ampmem.workspaces/1``). Each lies in ``tables/``, under any
name that ends in ``.json``, or in ``.json.gz`` where it is compressed. A table counts for the GPU that it names, and
for the version of torch, of which its last part, such as ``+cu130``, is ignored: a build for the CPU simulates for one
with CUDA.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ampmem.allocator.gpus import GpuSpec
from ampmem.simulator.scratch.convolutions import Convolution

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
    return tuple(read(path) for path in sorted((*folder.glob("*.json"), *folder.glob("*.json.gz"))))


def read(path: Path) -> MeasuredWorkspaces:
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
