"""GPUs that can be simulated: how much memory they have, and what sizes some allocations on them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ampmem.allocator.contexts import Context, context_of
from ampmem.allocator.settings import KIB, MIB
from ampmem.errors import UsageError
from ampmem.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """A GPU. ``total_memory`` is in bytes, as ``torch.cuda.get_device_properties`` reports it.

    The SM count, the compute capability and the ``chip``, by which :mod:`~ampmem.allocator.contexts` knows it, are
    ``None`` for a GPU of which only the memory is known.
    """

    name: str
    total_memory: int
    sm_count: int | None = None
    compute_capability: tuple[int, int] | None = None
    chip: str | None = None

    @property
    def context(self) -> Context:
        """What is taken to be in use outside of the allocator: the CUDA context."""
        return context_of(self.chip)

    @property
    def threads_per_sm(self) -> int:
        """How many threads an SM holds at a time; an A100's where the GPU is not known."""
        return _THREADS.get(self.compute_capability or (8, 0), 2048)

    @property
    def shared_memory_per_sm(self) -> int:
        """Bytes; an A100's where the GPU is not known."""
        return _SHARED_MEMORY[self.compute_capability or (8, 0)]

    @property
    def shared_memory_per_block(self) -> int:
        """The most bytes that a kernel may ask for; CUDA keeps 1 KiB of an SM's for itself since Ampere."""
        return self.shared_memory_per_sm - (KIB if (self.compute_capability or (8, 0)) >= (8, 0) else 0)


_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (11, 0): 1536, (12, 0): 1536, (12, 1): 1536}
"""Threads that an SM holds, where that is not 2048 (CUDA programming guide, technical specifications)."""

_SHARED_MEMORY = {
    (7, 0): 96 * KIB,
    (7, 5): 64 * KIB,
    (8, 0): 164 * KIB,
    (8, 6): 100 * KIB,
    (8, 9): 100 * KIB,
    (9, 0): 228 * KIB,
    (10, 0): 228 * KIB,
    (12, 0): 100 * KIB,
}
"""Of an SM, in bytes, likewise."""


def _gpu(name: str, total_memory: int, chip: str, sm_count: int, capability: tuple[int, int]) -> GpuSpec:
    return GpuSpec(name=name, total_memory=total_memory, sm_count=sm_count, compute_capability=capability, chip=chip)


GPUS = {
    "b200": _gpu("NVIDIA B200", 182_642 * MIB, "B200", 148, (10, 0)),
    "h200": _gpu("NVIDIA H200", 143_156 * MIB, "H100", 132, (9, 0)),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 81_090 * MIB, "H100", 132, (9, 0)),
    "a100-80": _gpu("NVIDIA A100-SXM4-80GB", 85_094_825_984, "A100", 108, (8, 0)),
    "a100-40": _gpu("NVIDIA A100-SXM4-40GB", 42_298_834_944, "A100", 108, (8, 0)),
    "l40s": _gpu("NVIDIA L40S", 45_589 * MIB, "L40S", 142, (8, 9)),
    "a10": _gpu("NVIDIA A10", 22_600 * MIB, "A10", 72, (8, 6)),
    "v100": _gpu("Tesla V100-SXM2-16GB", 16_151 * MIB, "V100", 80, (7, 0)),
    "v100-32": _gpu("Tesla V100-SXM2-32GB", 32_494 * MIB, "V100", 80, (7, 0)),
    "t4": _gpu("Tesla T4", 15_095 * MIB, "T4", 40, (7, 5)),
    "rtx5090": _gpu("NVIDIA GeForce RTX 5090", 33_680_457_728, "RTX 5090", 170, (12, 0)),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", 24_207 * MIB, "RTX 4090", 128, (8, 9)),
    "rtx4060": _gpu("NVIDIA GeForce RTX 4060", 7_807 * MIB, "RTX 4060", 24, (8, 9)),
    "rtx3090": _gpu("NVIDIA GeForce RTX 3090", 24_259 * MIB, "RTX 3090", 82, (8, 6)),
    "rtx3060": _gpu("NVIDIA GeForce RTX 3060", 11_931 * MIB, "RTX 3060", 28, (8, 6)),
}
"""What CUDA reports on such machines; the driver keeps some for itself, so the number differs by up to two
percent between driver versions, and from the memory that is sold.

Sources of the memory: output of ``torch.cuda.get_device_properties`` published in public repositories (B200 182,642 MB,
H200 143,156 MB, H100 81,090 MB, L40S 45,589 MB, V100 16,151 MB, T4 15,095 MB, RTX 3090 24,259 MB, RTX 3060 11,931 MB
under torch 2.4.1) and by Ultralytics' trainers, which print the same (V100 32 GB 32,494 MiB under torch 2.6.0,
RTX 4060 7,807 MiB under 2.5.1); a published inventory (A100 80 GB); CUDA's ``deviceQuery`` in
bottlerocket-os/bottlerocket#3873 (A100 40 GB, 42,298,834,944 bytes) and in NVIDIA/nccl#1637 (RTX 5090, 33,680,457,728
bytes); a "total capacity of 23.64 GiB" in an out-of-memory message on an RTX 4090, and 22.07 GiB of an A10 under torch
2.7.0, so within 5 MiB. SM counts and capabilities: the same, and NVIDIA's architecture white papers and data sheets.
"""

_ROCM = re.compile(r"(amd|instinct|radeon|mi ?\d{2,3}|gfx\d|rx ?\d{4}|w\d{4}).*")
"""What AMD's GPUs are called."""

DEFAULT_GPU = "a100-80"
"""What is simulated unless somebody says otherwise."""


def find_gpu(text: str) -> GpuSpec:
    """The GPU called ``text``, or one with ``text`` bytes of memory (``24GiB``, ``80GB``, ``25769803776``)."""
    wanted = text.strip().lower()
    if wanted in GPUS:
        return GPUS[wanted]
    if _ROCM.fullmatch(wanted):
        raise UsageError(
            f"{text.strip()} runs ROCm, whose kernels and libraries ask for other memory than CUDA's; ampmem can "
            "simulate NVIDIA's GPUs only"
        )
    try:
        total = parse_bytes(wanted)
    except ValueError:
        names = ", ".join(GPUS)
        raise UsageError(f"unknown GPU {text!r}; give one of {names}, or its memory, such as 24GiB") from None
    if total < 1:
        raise UsageError(f"a GPU with {text} of memory cannot be simulated; give more than 0 bytes")
    return GpuSpec(name=text.strip(), total_memory=total)


def gpu_to_simulate(text: str | None, option: str = "gpu=") -> GpuSpec:
    """The GPU called ``text``, or :data:`DEFAULT_GPU`; ``option`` is what a message says before it.

    Raises :class:`UsageError` for one that nobody knows, such as an empty one, and for one with nothing
    left for the script.
    """
    if text is not None and not text.strip():
        raise UsageError(f"{option.strip()} is empty; give one of {', '.join(GPUS)}, or its memory, such as 24GiB")
    found = find_gpu(DEFAULT_GPU if text is None else text)
    if found.total_memory <= found.context.least:
        raise UsageError(
            f"{option}{text} leaves nothing for the script: at least {format_bytes(found.context.least)} are assumed "
            "in use outside of PyTorch's allocator (CUDA context); give more than that, such as 4GiB"
        )
    return found
