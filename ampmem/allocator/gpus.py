"""GPUs that can be simulated: how much memory they have, and what sizes some allocations on them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ampmem.allocator.settings import GIB, KIB, MIB
from ampmem.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """A GPU. ``total_memory`` is in bytes, as ``torch.cuda.get_device_properties`` reports it.

    The SM count and the compute capability are ``None`` for a GPU of which only the memory is known.
    """

    name: str
    total_memory: int
    sm_count: int | None = None
    compute_capability: tuple[int, int] | None = None

    @property
    def threads_per_sm(self) -> int:
        """How many threads an SM holds at a time; an A100's where the GPU is not known."""
        return _THREADS.get(self.compute_capability or (8, 0), 2048)


_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (11, 0): 1536, (12, 0): 1536, (12, 1): 1536}
"""Threads that an SM holds, where that is not 2048 (CUDA programming guide, technical specifications)."""

GPUS = {
    "h200": GpuSpec(name="NVIDIA H200", total_memory=143_156 * MIB, sm_count=132, compute_capability=(9, 0)),
    "h100": GpuSpec(name="NVIDIA H100 80GB HBM3", total_memory=81_090 * MIB, sm_count=132, compute_capability=(9, 0)),
    "a100-80": GpuSpec(
        name="NVIDIA A100-SXM4-80GB", total_memory=85_094_825_984, sm_count=108, compute_capability=(8, 0)
    ),
    "a100-40": GpuSpec(
        name="NVIDIA A100-SXM4-40GB", total_memory=42_298_834_944, sm_count=108, compute_capability=(8, 0)
    ),
    "l40s": GpuSpec(name="NVIDIA L40S", total_memory=45_589 * MIB, sm_count=142, compute_capability=(8, 9)),
    "rtx4090": GpuSpec(
        name="NVIDIA GeForce RTX 4090", total_memory=24_207 * MIB, sm_count=128, compute_capability=(8, 9)
    ),
    "rtx3090": GpuSpec(
        name="NVIDIA GeForce RTX 3090", total_memory=24_259 * MIB, sm_count=82, compute_capability=(8, 6)
    ),
}
"""What CUDA reports on such machines; the driver keeps some for itself, so the number differs by up to a
percent between driver versions, and from the memory that is sold.

Sources: output of ``torch.cuda.get_device_properties`` published in public repositories (H200 143,156 MB,
H100 81,090 MB, L40S 45,589 MB, RTX 3090 24,259 MB), a published inventory (A100 80 GB), CUDA's ``deviceQuery``
in bottlerocket-os/bottlerocket#3873 (A100 40 GB, 42,298,834,944 bytes), and a "total capacity of 23.64 GiB" in
an out-of-memory message on an RTX 4090. SM counts and capabilities: NVIDIA's architecture white papers.
"""

CONTEXT = 512 * MIB
"""What is taken to be used outside of the allocator: the CUDA context and the libraries' own memory. Stated in
every recording as an assumption; it differs between drivers and GPUs."""

_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def find_gpu(text: str) -> GpuSpec:
    """The GPU called ``text``, or one with ``text`` bytes of memory (``24GiB``, ``80GB``, ``25769803776``)."""
    wanted = text.strip().lower()
    if wanted in GPUS:
        return GPUS[wanted]
    amount = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", wanted)
    if amount is None or amount[2] not in _UNITS:
        names = ", ".join(GPUS)
        raise UsageError(f"unknown GPU {text!r}; give one of {names}, or its memory, such as 24GiB")
    total = round(float(amount[1]) * _UNITS[amount[2]]) if "." in amount[1] else int(amount[1]) * _UNITS[amount[2]]
    if total < 1:
        raise UsageError(f"a GPU with {text} of memory cannot be simulated; give more than 0 bytes")
    return GpuSpec(name=text.strip(), total_memory=total)
