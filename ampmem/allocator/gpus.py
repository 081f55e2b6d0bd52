"""GPUs that can be simulated: memory, properties that determine allocation sizes, and CUDA's context."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
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


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

READINGS: Mapping[str, Sequence[ContextReading]] = {
    chip: tuple(ContextReading(*row) for row in rows) for chip, rows in _DATA["readings"].items()
}
"""Readings by chip."""

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
    **dict.fromkeys(((6, 0), (7, 5)), 64 * KIB),
    **dict.fromkeys(((6, 1), (7, 0)), 96 * KIB),
    **dict.fromkeys(((8, 6), (8, 9), (12, 0), (12, 1)), 100 * KIB),
    **dict.fromkeys(((8, 0), (8, 7)), 164 * KIB),
    **dict.fromkeys(((9, 0), (10, 0), (10, 3), (11, 0)), 228 * KIB),
}
"""Shared memory of an SM, in bytes, by compute capability (the same table of the CUDA programming guide)."""

GPUS = {
    name: GpuSpec(
        name=full, total_memory=parse_bytes(memory), chip=chip or None, sm_count=sms, compute_capability=(major, minor)
    )
    for name, full, memory, chip, sms, (major, minor) in _DATA["gpus"]
}
"""The GPUs that can be simulated, by their names on the command line, with their memory as CUDA reports it.

``gpus.toml`` has the sources.
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

    ``h100@1TiB`` is that GPU with another amount of memory.

    A plain number is a card (``3090``) or bytes (``25769803776``). Raises :class:`UsageError` for an unknown GPU,
    and names those with a similar name.
    """
    name, at, memory = text.partition("@")
    if at:
        return replace(find_gpu(name), name=text.strip(), total_memory=find_gpu(memory).total_memory)
    wanted = text.strip().lower()
    short = _short(wanted)
    # A name is a key of GPUS, CUDA's name, or a short form such as 4090 or a6000.
    named = next((gpu for name, gpu in GPUS.items() if short in (_short(name), _short(gpu.name.lower()))), None)
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


def _short(name: str) -> str:
    """``name`` without the words that many GPUs share: ``nvidia geforce rtx 4090`` is ``4090``."""
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
