"""From the bytes that are asked for to the size of the block and of the segment behind it."""

from __future__ import annotations

from ampmem.allocator.settings import (
    MIB,
    MIN_BLOCK_SIZE,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    ROUNDUP_INTERVALS,
    SMALL_BUFFER,
    SMALL_SIZE,
    Settings,
)


def round_up(size: int, step: int) -> int:
    """The smallest multiple of ``step`` that is not below ``size``."""
    return -(-size // step) * step


def roundup_power2_next_division(size: int, divisions: int) -> int:
    """Up to the next of ``divisions`` equal steps between two powers of two (``CUDACachingAllocator.cpp``)."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    return floor << 1 if step == 0 else round_up(size, step)


def round_size(size: int, settings: Settings) -> int:
    """The size of the block that ``size`` bytes need (``DeviceCachingAllocator::round_size``)."""
    if size < MIN_BLOCK_SIZE:
        return MIN_BLOCK_SIZE
    interval = min(max((size // MIB).bit_length() - 1, 0), ROUNDUP_INTERVALS - 1)
    divisions = settings.roundup_power2_divisions[interval]
    if divisions > 1 and size > MIN_BLOCK_SIZE * divisions:
        return roundup_power2_next_division(size, divisions)
    return round_up(size, MIN_BLOCK_SIZE)


def get_allocation_size(rounded: int, settings: Settings) -> int:
    """The size of the segment for a block that no free one can hold (``get_allocation_size``)."""
    if rounded <= SMALL_SIZE:
        return SMALL_BUFFER
    if rounded < MIN_LARGE_ALLOC:
        return settings.large_segment_size
    return round_up(rounded, ROUND_LARGE)
