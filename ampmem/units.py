"""Bytes and nanoseconds stay ``int`` everywhere; only these functions turn them into text, or a text into bytes."""

from __future__ import annotations

import re
from fractions import Fraction

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# Two sizes that agree to this many decimals are told apart in bytes, which are then no longer than the decimals.
_MOST_DECIMALS = 6
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")
_FACTORS: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for unit, base in (("ib", 1024), ("b", 1000))
}


def parse_bytes(text: str) -> int:
    """So many bytes: ``24GiB``, ``1.5 MiB``, ``80GB`` (of 1000), ``1024``; a fraction of a byte is rounded.

    Raises ``ValueError`` for any other text.
    """
    size = _SIZE.fullmatch(text.strip())
    if size is None or size[2].lower() not in _FACTORS:
        raise ValueError(f"{text!r} is no size; write bytes as 24GiB, 512MiB or 1073741824")
    return round(Fraction(size[1]) * _FACTORS[size[2].lower()])


def format_bytes(count: int | None) -> str:
    """``count`` bytes in binary units: ``0 B``, ``512 B``, ``1.5 KiB``, ``-2.0 MiB``; ``?`` for unknown."""
    if count is None:
        return "?"
    return _in_binary_units(count, decimals=1)


def format_apart(first: int, second: int) -> tuple[str, str]:
    """Two sizes in bytes, as ``format_bytes`` has them, with the fewest further decimals that make unequal sizes read
    unequal: ``1.98 GiB`` and ``2.00 GiB``. Sizes that agree to six decimals are given in bytes: ``2,147,483,647 B``.
    """
    if first == second:
        return format_bytes(first), format_bytes(second)
    for decimals in range(1, _MOST_DECIMALS + 1):
        texts = _in_binary_units(first, decimals), _in_binary_units(second, decimals)
        if texts[0] != texts[1]:
            return texts
    return f"{first:,} B", f"{second:,} B"


def format_close(first: int, second: int) -> tuple[str, str]:
    """Two sizes that hardly differ, with one decimal or two: those that agree to two read the same."""
    decimals = next((many for many in (1, 2) if _in_binary_units(first, many) != _in_binary_units(second, many)), 1)
    return _in_binary_units(first, decimals), _in_binary_units(second, decimals)


def _in_binary_units(count: int, decimals: int) -> str:
    size = float(abs(count))
    for unit in _BINARY_UNITS:
        if size < 1023.95 or unit == _BINARY_UNITS[-1]:
            break
        size /= 1024
    sign = "-" if count < 0 else ""
    if unit == "B":
        return f"{sign}{abs(count)} B"
    return f"{sign}{size:.{decimals}f} {unit}"


def format_count(count: int | None) -> str:
    """A count with thousands separators: ``1,234,567``; ``?`` for unknown."""
    return "?" if count is None else f"{count:,}"


def format_duration(nanoseconds: int) -> str:
    """A duration in the largest unit that keeps it at or above one."""
    if nanoseconds >= 1_000_000_000:
        return f"{nanoseconds / 1e9:.2f} s"
    if nanoseconds >= 1_000_000:
        return f"{nanoseconds / 1e6:.1f} ms"
    return f"{nanoseconds / 1e3:.0f} µs"
