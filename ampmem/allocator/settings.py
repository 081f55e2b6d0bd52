"""Settings of the caching allocator, the parser of their environment variable, and the rounding of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ampmem.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

MIN_BLOCK_SIZE = 512
"""Every size is rounded to a multiple of this (``kMinBlockSize``, ``c10/core/AllocatorConfig.h``)."""
SMALL_SIZE = MIB
"""The largest allocation that the small pool serves (``kSmallSize``)."""
SMALL_BUFFER = 2 * MIB
"""Size of a segment of the small pool (``kSmallBuffer``)."""
MIN_LARGE_ALLOC = 10 * MIB
"""From this size on, an allocation that finds no block gets a segment of its own size (``kMinLargeAlloc``)."""
LARGE_BUFFER = 20 * MIB
"""Size of a segment shared by smaller allocations of the large pool (``kLargeBuffer``)."""
ROUND_LARGE = 2 * MIB
"""Segments for a single allocation are a multiple of this (``kRoundLarge``)."""

ROUNDUP_INTERVALS = 16
"""``roundup_power2_divisions`` has one entry per power of two from 1 MiB on; the last one has no upper end."""

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables for settings in PyTorch; the first one that is set counts (torch 2.13)."""


UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""If 1, PyTorch calls CUDA for each tensor and caches nothing."""
NATIVE = "native"
"""The name of PyTorch's own caching allocator among the backends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Allocator settings; the defaults are PyTorch's. Sizes are bytes.

    ``max_split_size`` is ``None`` if unlimited. ``roundup_power2_divisions`` has :data:`ROUNDUP_INTERVALS` entries; 0
    and 1 mean no such rounding. ``memory_fraction`` is that of ``torch.cuda.set_per_process_memory_fraction``;
    ``garbage_collection_threshold`` works only with it.
    """

    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_BUFFER
    roundup_power2_divisions: tuple[int, ...] = (0,) * ROUNDUP_INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_size: int = LARGE_BUFFER
    memory_fraction: float | None = None


def parse_settings(text: str, former: Settings | None = None) -> Settings:
    """The settings in ``text``, a value of ``PYTORCH_ALLOC_CONF``.

    ``former`` are the settings in force if they are changed later: three of them return to their defaults unless
    ``text`` has them, and the others stay.

    Follows ``AcceleratorAllocatorConfig::parseArgs`` (``c10/core/AllocatorConfig.cpp``) and
    ``CUDAAllocatorConfig::parseArgs`` (``c10/cuda/CUDAAllocatorConfig.cpp``). Raises :class:`UsageError` for what they
    refuse, and for what the model lacks: the ``cudaMallocAsync`` backend, for one.
    """
    settings = Settings() if former is None else replace(former, **_RESET)
    pairs = _pairs(_tokens(text))
    # Parsed first, wherever it stands: the other sizes are compared with it.
    pairs.sort(key=lambda pair: pair[0] != "large_segment_size_mb")
    for key, value in pairs:
        if key.startswith("pinned_") or key in _IGNORED:
            continue
        if key not in _READERS:
            known = ", ".join(sorted(_READERS))
            raise UsageError(f"unknown allocator option {key!r}; the options that change device memory are {known}")
        settings = replace(settings, **_READERS[key](settings, key, value))
    return settings


def settings_of_environment(environment: Mapping[str, str]) -> Settings:
    """The settings of a process with this environment. Raises :class:`UsageError` as :func:`parse_settings`."""
    if environment.get(UNCACHED) == "1":
        raise UsageError(
            f"{UNCACHED}=1 turns off PyTorch's caching allocator, the only allocator that can be modelled; unset "
            f"{UNCACHED}"
        )
    return parse_settings(text_of_environment(environment)[1])


def text_of_environment(environment: Mapping[str, str]) -> tuple[str, str]:
    """The variable that counts in this environment, and its value; both empty if none is set."""
    return next(((name, environment[name]) for name in VARIABLES if name in environment), ("", ""))


def with_settings(environment: Mapping[str, str], text: str) -> tuple[str, str]:
    """The variable to set and its value, so that the settings in ``text`` are added to the existing ones.

    Raises :class:`UsageError` for settings that :func:`parse_settings` refuses, and for those that the environment has.
    """
    parse_settings(text)
    variable, former = text_of_environment(environment)
    taken = {key for key, _ in _pairs(_tokens(former))} & {key for key, _ in _pairs(_tokens(text))}
    if taken:
        raise UsageError(f"{variable} already has {', '.join(sorted(taken))}: {former}")
    return variable or VARIABLES[-1], f"{former},{text}" if former else text


def backend_of_environment(environment: Mapping[str, str]) -> str:
    """The allocator backend that this environment selects; ``native`` by default."""
    tokens = _tokens(text_of_environment(environment)[1])
    at = next((at for at, token in enumerate(tokens) if token == "backend"), len(tokens))
    return "".join(tokens[at + 2 : at + 3]) or NATIVE


_RESET: dict[str, Any] = {
    "max_split_size": None,
    "roundup_power2_divisions": (0,) * ROUNDUP_INTERVALS,
    "garbage_collection_threshold": 0.0,
}
"""Values that ``AcceleratorAllocatorConfig::parseArgs`` sets before it parses."""
_IGNORED = frozenset({"release_lock_on_cudamalloc", "release_lock_on_hipmalloc"})
"""Options that change neither addresses nor sizes, including those of pinned memory."""


def _tokens(text: str) -> list[str]:
    """``text`` split at ``,``, ``:``, ``[`` and ``]``, which are tokens too; white space is removed."""
    for mark in ",:[]":
        text = text.replace(mark, f"\0{mark}\0")
    return [token for part in text.split("\0") if (token := "".join(part.split()))]


def _pairs(tokens: list[str]) -> list[tuple[str, list[str]]]:
    """Keys and values: one token, or the tokens between brackets."""
    pairs = []
    at = 0
    while at < len(tokens):
        key = tokens[at]
        if tokens[at + 1 : at + 2] != [":"] or at + 2 >= len(tokens):
            raise UsageError(f"the allocator option {key!r} has no value; write it as {key}:VALUE")
        end = at + 3
        if tokens[at + 2] == "[":
            if "]" not in tokens[at:]:
                raise UsageError(f"the list of the allocator option {key!r} has no closing bracket")
            end = tokens.index("]", at) + 1
        pairs.append((key, tokens[at + 2 : end]))
        if end < len(tokens) and tokens[end] != ",":
            raise UsageError(f"allocator options are separated by commas; found {tokens[end]!r} after {key!r}")
        at = end + 1
    return pairs


def _single_value(key: str, value: list[str]) -> str:
    if len(value) != 1:
        raise UsageError(f"the allocator option {key!r} takes one value, not a list")
    return value[0]


def _integer(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"the allocator option {key!r} takes a whole number, not {text!r}")
    return int(text)


def _fraction(key: str, value: list[str], *, one_too: bool) -> float:
    text = _single_value(key, value)
    try:
        number = float(text)
    except ValueError:
        raise UsageError(f"the allocator option {key!r} takes a number, not {text!r}") from None
    if not (0 < number < 1 or (one_too and number == 1)):
        raise UsageError(f"the allocator option {key!r} must lie between 0 and 1, not be {text}")
    return number


def _mebibytes(key: str, value: list[str], least: int) -> int:
    number = _integer(key, _single_value(key, value))
    if number * MIB < least:
        raise UsageError(f"the allocator option {key!r} must be at least {least // MIB} (MiB), not {number}")
    return number * MIB


def _boolean(key: str, value: list[str]) -> bool:
    text = _single_value(key, value)
    if text not in ("True", "False"):
        raise UsageError(f"the allocator option {key!r} is True or False, with a capital letter, not {text!r}")
    return text == "True"


def _not_modelled(settings: Settings, key: str, value: list[str]) -> dict[str, Any]:
    if _boolean(key, value):
        raise UsageError(f"the allocator option {key!r} cannot be modelled; leave it out")
    return {}


def _backend(settings: Settings, key: str, value: list[str]) -> dict[str, Any]:
    text = _single_value(key, value)
    if text != NATIVE:
        raise UsageError(
            f"the backend {text!r} cannot be modelled: only PyTorch's own caching allocator (backend:native) can"
        )
    return {}


def _divisions(key: str, value: list[str]) -> tuple[int, ...]:
    """One number for all sizes, or entries ``SIZE_IN_MIB:DIVISIONS``.

    The first entry also counts below its size, ``>`` above the last.
    """
    if len(value) == 1:
        return (_power_of_two(key, value[0]),) * ROUNDUP_INTERVALS
    table = [0] * ROUNDUP_INTERVALS
    last = 0
    for number, (size, divisions) in enumerate(_roundup_items(key, value[1:-1])):
        if size == ">":
            table[last + 1 :] = [divisions] * len(table[last + 1 :])
            continue
        last = min(_power_of_two(key, size).bit_length() - 1, ROUNDUP_INTERVALS - 1)
        if number == 0:
            table[:last] = [divisions] * last
        table[last] = divisions
    return tuple(table)


def _roundup_items(key: str, items: list[str]) -> list[tuple[str, int]]:
    found = []
    for at in range(0, len(items), 4):
        item = items[at : at + 4]
        if len(item) < 3 or item[1] != ":" or item[3:] not in ([], [","]):
            raise UsageError(f"the list of the allocator option {key!r} is written as [256:1,512:2,>:4]")
        found.append((item[0], 0 if item[2] == "0" else _power_of_two(key, item[2])))
    return found


def _power_of_two(key: str, text: str) -> int:
    number = _integer(key, text)
    if number.bit_count() != 1:
        raise UsageError(f"the allocator option {key!r} takes powers of two, not {number}")
    return number


def _sizes(*names: str) -> Callable[[Settings, str, list[str]], dict[str, Any]]:
    """Reads a size for the settings called ``names``, at least that of a large segment."""
    return lambda settings, key, value: dict.fromkeys(names, _mebibytes(key, value, settings.large_segment_size))


_READERS: dict[str, Callable[[Settings, str, list[str]], dict[str, Any]]] = {
    "backend": _backend,
    "expandable_segments": lambda _, key, value: {"expandable_segments": _boolean(key, value)},
    "garbage_collection_threshold": lambda _, key, value: {key: _fraction(key, value, one_too=False)},
    "graph_capture_record_stream_reuse": _not_modelled,
    "large_segment_size_mb": lambda _, key, value: dict.fromkeys(
        ("large_segment_size", "max_non_split_rounding"), _mebibytes(key, value, MIN_LARGE_ALLOC + MIB)
    ),
    "max_non_split_rounding_mb": _sizes("max_non_split_rounding"),
    "max_split_size_mb": _sizes("max_split_size"),
    "per_process_memory_fraction": lambda _, key, value: {"memory_fraction": _fraction(key, value, one_too=True)},
    "roundup_power2_divisions": lambda _, key, value: {key: _divisions(key, value)},
    "throw_on_cudamalloc_oom": _not_modelled,
}
"""For each option a function of the settings so far, its name and its value, that returns the settings to change."""


# From the requested bytes to the sizes of block and segment.


def round_up(size: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``size``."""
    return -(-size // step) * step


def roundup_power2_next_division(size: int, divisions: int) -> int:
    """``size`` rounded up to the next of ``divisions`` steps between powers of two (``CUDACachingAllocator.cpp``)."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    return floor << 1 if step == 0 else round_up(size, step)


def round_size(size: int, settings: Settings) -> int:
    """The size of the block for ``size`` bytes (``DeviceCachingAllocator::round_size``)."""
    if size < MIN_BLOCK_SIZE:
        return MIN_BLOCK_SIZE
    interval = min(max((size // MIB).bit_length() - 1, 0), ROUNDUP_INTERVALS - 1)
    divisions = settings.roundup_power2_divisions[interval]
    if divisions > 1 and size > MIN_BLOCK_SIZE * divisions:
        return roundup_power2_next_division(size, divisions)
    return round_up(size, MIN_BLOCK_SIZE)


def get_allocation_size(rounded: int, settings: Settings) -> int:
    """The size of a new segment for a block of ``rounded`` bytes (``get_allocation_size``)."""
    if rounded <= SMALL_SIZE:
        return SMALL_BUFFER
    if rounded < MIN_LARGE_ALLOC:
        return settings.large_segment_size
    return round_up(rounded, ROUND_LARGE)
