"""GPUs that can be simulated: memory, properties that determine allocation sizes, and CUDA's context."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from ampmem.allocator.settings import KIB, MIB
from ampmem.errors import UsageError
from ampmem.units import format_bytes, parse_bytes


class Context(NamedTuple):
    """Minimum and maximum bytes assumed for the CUDA context."""

    least: int
    most: int


class ContextReading(NamedTuple):
    """The figures in one of PyTorch's out-of-memory messages, as printed.

    The memory in use by the process and the allocated memory are in GiB, rounded to 0.01; reserved but unallocated
    memory (``cached``) is in MiB. The remainder is the context.
    """

    in_use: float
    allocated: float
    cached: float

    @property
    def mib(self) -> float:
        """The context in MiB, within 10 MiB."""
        return (self.in_use - self.allocated) * 1024 - self.cached


READINGS: Mapping[str, Sequence[ContextReading]] = {
    "T4": (
        ContextReading(14.71, 14.54, 10.14),
        ContextReading(14.37, 14.20, 59.17),
        ContextReading(14.74, 14.31, 320.39),
        ContextReading(10.20, 9.21, 899.87),
        ContextReading(14.52, 14.06, 330.42),
    ),
    "V100": (
        ContextReading(31.72, 29.66, 1.68 * 1024),
        ContextReading(31.54, 28.49, 2.68 * 1024),
        ContextReading(16.95, 2.10, 14.46 * 1024),
        ContextReading(15.75, 14.89, 497.13),
    ),
    "A100": (
        ContextReading(39.12, 25.48, 13.11 * 1024),
        ContextReading(39.19, 38.61, 102.73),
        ContextReading(77.89, 55.51, 21.87 * 1024),
        ContextReading(74.35, 73.25, 615.51),
    ),
    "A10": (
        ContextReading(22.05, 21.68, 24.24),
        ContextReading(22.03, 20.51, 1.22 * 1024),
        ContextReading(22.12, 21.72, 23.99),
        ContextReading(22.04, 21.75, 15.17),
    ),
    "RTX 3060": (
        ContextReading(11.66, 11.37, 174.05),
        ContextReading(11.68, 11.37, 211.54),
        ContextReading(11.54, 11.34, 105.47),
    ),
    "RTX 3090": (
        ContextReading(11.79, 11.44, 43.59),
        ContextReading(23.49, 23.24, 1.17),
        ContextReading(19.40, 17.97, 1.02 * 1024),
    ),
    "RTX 4060": (
        ContextReading(7.47, 7.38, 0.35),
        ContextReading(7.52, 7.29, 74.34),
        ContextReading(5.73, 4.59, 1.03 * 1024),
    ),
    "RTX 4090": (
        ContextReading(23.26, 22.19, 656.69),
        ContextReading(23.48, 23.11, 0.14),
        ContextReading(22.58, 22.05, 94.18),
        ContextReading(22.64, 20.64, 1.55 * 1024),
        ContextReading(23.04, 21.37, 1.22 * 1024),
        ContextReading(23.46, 22.91, 2.00),
    ),
    "L40S": (
        ContextReading(44.44, 43.90, 132.19),
        ContextReading(44.43, 43.68, 251.29),
        ContextReading(44.40, 43.94, 41.95),
    ),
    "RTX 5090": (
        ContextReading(31.29, 30.80, 2.80),
        ContextReading(31.28, 30.76, 33.46),
        ContextReading(31.33, 30.57, 185.26),
    ),
    "H100": (
        ContextReading(79.13, 77.91, 648.28),
        ContextReading(39.75, 39.13, 35.42),
        ContextReading(79.08, 77.69, 674.48),
        ContextReading(139.60, 138.14, 824.86),
        ContextReading(139.20, 2.05, 136.64 * 1024),
    ),
    "B200": (ContextReading(168.34, 167.64, 4.62),),
}
"""Readings by chip, from processes that ran out of memory at work, under torch 2.1 or newer, which prints all three.

Published in public repositories; the capacity in each message identifies the GPU. Those of the RTX 4060 are of an
unspecified GeForce with 8 GB, those of the A10 may be an A10G's, one of the L40S is an RTX 6000 Ada's with the same
chip, and the H200 has the H100's chip, so it is listed there.
"""

_BEYOND = 0.1
"""Margin below and above the readings, as a fraction."""
_BEYOND_FEW = 0.25
"""Margin if there are fewer than three readings."""
_STEP = 16 * MIB


def context_of(chip: str | None) -> Context:
    """The context assumed for a GPU of ``chip``; without readings, the range of all chips."""
    if chip is None or chip not in READINGS:
        every = [context_of(known) for known in READINGS]
        return Context(min(each.least for each in every), max(each.most for each in every))
    found = [reading.mib * MIB for reading in READINGS[chip]]
    beyond = _BEYOND if len(found) > 2 else _BEYOND_FEW
    least, most = min(found) * (1 - beyond), max(found) * (1 + beyond)
    return Context(int(least // _STEP) * _STEP, int(-(-most // _STEP)) * _STEP)


# GPUs that can be simulated: their memory, and properties that determine allocation sizes.


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """A GPU. ``total_memory`` is in bytes, as ``torch.cuda.get_device_properties`` reports it.

    The SM count and the compute capability are ``None`` if only the memory is known. ``chip`` is its name in
    :data:`~ampmem.allocator.gpus.READINGS`, ``None`` without readings of its CUDA context.
    """

    name: str
    total_memory: int
    sm_count: int | None = None
    compute_capability: tuple[int, int] | None = None
    chip: str | None = None

    @property
    def context(self) -> Context:
        """Memory assumed to be in use outside of the allocator: the CUDA context."""
        return context_of(self.chip)

    @property
    def threads_per_sm(self) -> int:
        """Maximum resident threads per SM; an A100's if unknown."""
        return _THREADS.get(self.compute_capability or _UNKNOWN, 2048)

    @property
    def shared_memory_per_sm(self) -> int:
        """Shared memory per SM in bytes; an A100's if unknown."""
        return _SHARED_MEMORY.get(self.compute_capability or _UNKNOWN, _SHARED_MEMORY[_UNKNOWN])

    @property
    def shared_memory_per_block(self) -> int:
        """Maximum shared memory per block in bytes.

        Before Volta it was 48 KiB whatever an SM has; since Ampere CUDA reserves 1 KiB per block.
        """
        capability = self.compute_capability or _UNKNOWN
        if capability < (7, 0):
            return 48 * KIB
        return self.shared_memory_per_sm - (KIB if capability >= (8, 0) else 0)


_UNKNOWN = (8, 0)
"""The compute capability assumed if it is unknown: an A100's."""

_THREADS = {(7, 5): 1024} | dict.fromkeys(((8, 6), (8, 7), (8, 9), (11, 0), (12, 0), (12, 1)), 1536)
"""Maximum resident threads per SM, if not 2048 (CUDA programming guide, technical specifications)."""

_SHARED_MEMORY = {
    (6, 0): 64 * KIB,
    (6, 1): 96 * KIB,
    (7, 0): 96 * KIB,
    (7, 5): 64 * KIB,
    (8, 0): 164 * KIB,
    (8, 6): 100 * KIB,
    (8, 7): 164 * KIB,
    (8, 9): 100 * KIB,
    (9, 0): 228 * KIB,
    (10, 0): 228 * KIB,
    (10, 3): 228 * KIB,
    (11, 0): 228 * KIB,
    (12, 0): 100 * KIB,
    (12, 1): 100 * KIB,
}
"""Shared memory of an SM, in bytes, by compute capability (the same table of the CUDA programming guide)."""


def _gpu(name: str, total_memory: int, chip: str | None, sm_count: int, capability: tuple[int, int]) -> GpuSpec:
    return GpuSpec(name=name, total_memory=total_memory, sm_count=sm_count, compute_capability=capability, chip=chip)


GPUS = {
    "b300": _gpu("NVIDIA B300 SXM6 AC", 274_124 * MIB, None, 148, (10, 3)),
    "b200": _gpu("NVIDIA B200", 182_642 * MIB, "B200", 148, (10, 0)),
    "h200": _gpu("NVIDIA H200", 143_156 * MIB, "H100", 132, (9, 0)),
    "gh200": _gpu("NVIDIA GH200 480GB", 96_768 * MIB, "H100", 132, (9, 0)),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 81_090 * MIB, "H100", 132, (9, 0)),
    "a100-80": _gpu("NVIDIA A100-SXM4-80GB", 85_094_825_984, "A100", 108, (8, 0)),
    "a100-40": _gpu("NVIDIA A100-SXM4-40GB", 42_298_834_944, "A100", 108, (8, 0)),
    "rtxpro6000": _gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_250 * MIB, None, 188, (12, 0)),
    "rtx6000ada": _gpu("NVIDIA RTX 6000 Ada Generation", 48_622 * MIB, "L40S", 142, (8, 9)),
    "rtxa6000": _gpu("NVIDIA RTX A6000", 48_676 * MIB, None, 84, (8, 6)),
    "a40": _gpu("NVIDIA A40", 45_629 * MIB, None, 84, (8, 6)),
    "l40s": _gpu("NVIDIA L40S", 45_589 * MIB, "L40S", 142, (8, 9)),
    "l4": _gpu("NVIDIA L4", 23_583_784_960, None, 58, (8, 9)),
    "a30": _gpu("NVIDIA A30", 24_164 * MIB, None, 56, (8, 0)),
    "a10": _gpu("NVIDIA A10", 22_600 * MIB, "A10", 72, (8, 6)),
    "a10g": _gpu("NVIDIA A10G", 22_587 * MIB, "A10", 80, (8, 6)),
    "v100": _gpu("Tesla V100-SXM2-16GB", 16_151 * MIB, "V100", 80, (7, 0)),
    "v100-32": _gpu("Tesla V100-SXM2-32GB", 32_494 * MIB, "V100", 80, (7, 0)),
    "p100": _gpu("Tesla P100-PCIE-16GB", 17_071_734_784, None, 56, (6, 0)),
    "t4": _gpu("Tesla T4", 15_095 * MIB, "T4", 40, (7, 5)),
    "rtx5090": _gpu("NVIDIA GeForce RTX 5090", 33_680_457_728, "RTX 5090", 170, (12, 0)),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", 24_207 * MIB, "RTX 4090", 128, (8, 9)),
    "rtx4080": _gpu("NVIDIA GeForce RTX 4080", 16_077 * MIB, None, 76, (8, 9)),
    "rtx4070ti": _gpu("NVIDIA GeForce RTX 4070 Ti", 12_007 * MIB, None, 60, (8, 9)),
    "rtx4060": _gpu("NVIDIA GeForce RTX 4060", 7_807 * MIB, "RTX 4060", 24, (8, 9)),
    "rtx3090": _gpu("NVIDIA GeForce RTX 3090", 24_259 * MIB, "RTX 3090", 82, (8, 6)),
    "rtx3080ti": _gpu("NVIDIA GeForce RTX 3080 Ti", 12_054 * MIB, None, 80, (8, 6)),
    "rtx3080": _gpu("NVIDIA GeForce RTX 3080", 10_002 * MIB, None, 68, (8, 6)),
    "rtx3060": _gpu("NVIDIA GeForce RTX 3060", 11_931 * MIB, "RTX 3060", 28, (8, 6)),
    "rtx2080ti": _gpu("NVIDIA GeForce RTX 2080 Ti", 11_020 * MIB, None, 68, (7, 5)),
}
"""The GPUs that can be simulated, with their memory as CUDA reports it.

The driver reserves some memory, so the number differs by up to two percent between driver versions, and from the memory
that is sold. A GPU whose chip is ``None`` has no readings of its CUDA context in :data:`READINGS`: the range of all
chips is assumed for it.

Sources of the memory:

- Output of ``torch.cuda.get_device_properties`` published in public repositories: B200 182,642 MB, H200 143,156 MB,
  H100 81,090 MB, RTX PRO 6000 Blackwell Server Edition 97,250 MB (torch 2.7.1), L40S 45,589 MB, RTX 6000 Ada 48,622 MB
  (2.3.0), RTX A6000 48,676 MB, A10G 22,587 MB (2.15), V100 16,151 MB, T4 15,095 MB, RTX 3090 24,259 MB, RTX 3060
  11,931 MB (2.4.1).
- Ultralytics' trainers, which print the same: V100 32 GB 32,494 MiB (torch 2.6.0), RTX 4060 7,807 MiB (2.5.1), A30
  24,164 MiB (2.8.0), RTX 4070 Ti 12,007 MiB (2.1.1), RTX 3080 with 10 GB 10,002 MiB (2.6.0), RTX 3080 Ti 12,054 MiB
  (1.12.0), RTX 2080 Ti 11,020 MiB (1.11.0).
- A published inventory: A100 80 GB.
- CUDA's ``deviceQuery``: A100 40 GB, 42,298,834,944 bytes, in bottlerocket-os/bottlerocket#3873; L4, 23,583,784,960
  bytes, in bottlerocket-os/bottlerocket-kernel-kit#139; RTX 5090, 33,680,457,728 bytes, in NVIDIA/nccl#1637; P100,
  17,071,734,784 bytes, in public repositories, as NVML and ``get_device_properties`` (16,280 MB) have it, too.
- Out-of-memory messages, so within 5 MiB: "total capacity of 23.64 GiB" on an RTX 4090, and 22.07 GiB of an A10 under
  torch 2.7.0.

Not confirmed, for want of a published output of torch on Linux: B300 (reviews: 268 GiB), GH200 with 96 GB (94.5 GiB;
``nvidia-smi`` shows 97,871 MiB), A40 with ECC (44.56 GiB; without ECC torch 1.8.1 printed 48,688 MiB), RTX 4080 (15.7
GiB; on Windows torch 2.5.1 printed 16,376 MiB). The GH200 has the H100's chip.

Not confirmed: what torch reports on an RTX PRO 6000 Blackwell Workstation Edition. The figures of the Server Edition
stand for both: ``nvidia-smi`` shows 97,887 MiB on the Workstation Edition, and both have 188 SMs. Where ``nvidia-smi``
shows 46,068 MiB on an RTX 6000 Ada, torch has some 3 GiB less than here (44.43 GiB in an out-of-memory message).

SM counts and capabilities: the same outputs, and NVIDIA's architecture white papers and data sheets.
"""

_ROCM = re.compile(r"(amd|instinct|radeon|mi ?\d{2,3}|gfx\d|rx ?\d{4}|w\d{4}).*")
"""Names of AMD's GPUs."""

_BESIDE = re.compile(r"nvidia|geforce|tesla|quadro|generation|blackwell|(workstation|server) ?edition|[\s_-]+")
"""Words in a GPU's name that do not distinguish it from others, so they may be left out."""

_SIZE_WITHOUT_UNIT = re.compile(r"(\d+(?:\.\d+)?) ?g?")
"""An amount without GiB or GB."""

_LEAST_MEMORY = 64 * MIB
"""A plain number below it is not an amount of bytes: no GPU has so little."""

DEFAULT_GPU = "a100-80"
"""The GPU that is simulated by default."""


def find_gpu(text: str) -> GpuSpec:
    """The GPU called ``text`` (``h100``, ``RTX 4090``, ``3090``), or one with ``text`` of memory (``24GiB``, ``80GB``).

    A plain number is a card (``3090``) or bytes (``25769803776``). Raises :class:`UsageError` for an unknown GPU,
    and names those with a similar name.
    """
    wanted = text.strip().lower()
    named = _named(wanted)
    if named is not None:
        return named
    if _ROCM.fullmatch(wanted):
        raise UsageError(
            f"{text.strip()} runs ROCm, whose kernels and libraries allocate differently from CUDA's; ampmem can "
            "simulate NVIDIA GPUs only"
        )
    try:
        total = parse_bytes(wanted)
    except ValueError:
        raise _unknown(text) from None
    if wanted.isdigit() and total < _LEAST_MEMORY:
        raise _unknown(text)
    if total < 1:
        raise UsageError(f"a GPU with {text} of memory cannot be simulated; give more than 0 bytes")
    return GpuSpec(name=text.strip(), total_memory=total)


def _named(wanted: str) -> GpuSpec | None:
    """The GPU with this name: its key in :data:`GPUS`, CUDA's name, or a short form such as ``4090`` or ``a6000``."""
    short = _short(wanted)
    return next((gpu for name, gpu in GPUS.items() if short in (_short(name), _short(gpu.name.lower()))), None)


def _short(name: str) -> str:
    return _BESIDE.sub("", name).removeprefix("rtx").removesuffix("gb")


def _unknown(text: str) -> UsageError:
    meant = _similar(text.strip().lower())
    if not meant:
        return UsageError(f"unknown GPU {text!r}; give one of {', '.join(GPUS)}, or its memory, such as 24GiB")
    listed = " or ".join(filter(None, (", ".join(meant[:-1]), meant[-1])))
    return UsageError(f"unknown GPU {text!r}; did you mean {listed}? Or give a size, such as 24GiB")


def _similar(wanted: str) -> Sequence[str]:
    """Suggestions for ``wanted``: GPUs whose names contain or resemble it, and an amount of memory."""
    short, names = _short(wanted), {_short(name): name for name in GPUS}
    found = [name for key, name in names.items() if len(short) > 1 and short in key]
    found = found or [names[key] for key in get_close_matches(short, names, n=3, cutoff=0.65)]
    size = _SIZE_WITHOUT_UNIT.fullmatch(wanted)
    if size is not None and 1 <= float(size[1]) <= 1024:
        found.append(f"{size[1]}GiB")
    return found


def gpu_to_simulate(text: str, option: str = "gpu=") -> GpuSpec:
    """The GPU called ``text``; ``option`` begins the error message.

    Raises :class:`UsageError` for an unknown GPU, such as an empty text, and for one with no memory left for the
    script.
    """
    if not text.strip():
        raise UsageError(f"{option.strip()} is empty; give one of {', '.join(GPUS)}, or its memory, such as 24GiB")
    found = find_gpu(text)
    if found.total_memory <= found.context.least:
        raise UsageError(
            f"{option}{text} leaves nothing for the script: at least {format_bytes(found.context.least)} are assumed "
            "in use outside of PyTorch's allocator (CUDA context); give more than that, such as 4GiB"
        )
    return found
