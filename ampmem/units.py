"""Bytes and nanoseconds as text, and text as bytes; everywhere else they stay ``int``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# Sizes that agree to this many decimals are written in bytes, which are not longer than the decimals then.
_MOST_DECIMALS = 6
_GIB = _BINARY_UNITS.index("GiB")
MOST_BYTES = 1 << 62
"""The largest size that is read."""
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,40})?)\s*([a-zA-Z]*)")
_FACTORS: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for unit, base in (("ib", 1024), ("b", 1000))
}


def parse_bytes(text: str) -> int:
    """The bytes in ``24GiB``, ``1.5 MiB``, ``80GB`` (powers of 1000), ``1073741824``; a fraction of a byte is rounded.

    Raises ``ValueError`` for any other text, for more than :data:`MOST_BYTES`, and for a number below 1 MiB without a
    unit, such as ``20``, by which nobody means bytes.
    """
    size = _SIZE.fullmatch(text.strip())
    factor = None if size is None else _FACTORS.get(size[2].lower())
    found = None if size is None or factor is None else round(Fraction(size[1]) * factor)
    if found is None or found > MOST_BYTES:
        raise ValueError(f"{text!r:.60} is not a size; write bytes as 24GiB, 512MiB or 1073741824")
    if size is not None and not size[2] and 0 < found < _FACTORS["mib"]:
        raise ValueError(f"{size[1]} has no unit; write {size[1]}GiB, {size[1]}MiB or {size[1]}B")
    return found


def format_bytes(count: int | None) -> str:
    """``count`` bytes in binary units: ``0 B``, ``512 B``, ``1.5 KiB``, ``-2.0 MiB``; ``?`` for ``None``."""
    if count is None:
        return "?"
    return _in_binary_units(count, decimals=1)


def format_peak(count: int) -> str:
    """``count`` bytes for headlines: as ``format_bytes``, but with three decimals from 1 GiB on."""
    return _in_binary_units(count, _decimals_of_peak(count))


def peaks_apart(first: int, second: int) -> tuple[str, str]:
    """Two sizes in bytes for headlines, with enough further decimals to read unequal if they are."""
    texts = format_peak(first), format_peak(second)
    return texts if first == second or texts[0] != texts[1] else format_apart(first, second)


def _decimals_of_peak(count: int) -> int:
    return 3 if _power_of(count) >= _GIB else 1


def format_apart(first: int, second: int) -> tuple[str, str]:
    """Two sizes in bytes as ``format_bytes`` writes them, with the fewest decimals that tell unequal sizes apart.

    For example ``1.98 GiB`` and ``2.00 GiB``. Sizes that agree to six decimals are written in bytes: ``2,147,483,647
    B``.
    """
    if first == second:
        return format_bytes(first), format_bytes(second)
    for decimals in range(1, _MOST_DECIMALS + 1):
        texts = _in_binary_units(first, decimals), _in_binary_units(second, decimals)
        if texts[0] != texts[1]:
            return texts
    return f"{first:,} B", f"{second:,} B"


def format_alike(pairs: Iterable[tuple[int, int]]) -> Callable[[int], str]:
    """A function that writes the sizes of ``pairs``, in bytes, for one column: all in the unit of the largest.

    It uses the fewest decimals, at most three, with which unequal sizes of a pair read unequal and only 0 reads as 0.
    """
    known = list(pairs)
    power = _power_of(max((size for pair in known for size in pair), default=0))

    def shown(size: int, decimals: int) -> str:
        return _in_binary_units(size, decimals, power)

    def tells(decimals: int) -> bool:
        zero = shown(0, decimals)
        return all(
            (first == second or shown(first, decimals) != shown(second, decimals))
            and all(not size or shown(size, decimals) != zero for size in (first, second))
            for first, second in known
        )

    decimals = next((many for many in (1, 2) if tells(many)), 3)
    return lambda size: shown(size, decimals)


def format_close(first: int, second: int) -> tuple[str, str]:
    """Two nearly equal sizes with one or two decimals: sizes that agree to two read the same."""
    decimals = next((many for many in (1, 2) if _in_binary_units(first, many) != _in_binary_units(second, many)), 1)
    return _in_binary_units(first, decimals), _in_binary_units(second, decimals)


def peaks_close(first: int, second: int) -> tuple[str, str]:
    """Two nearly equal sizes for headlines."""
    if _decimals_of_peak(max(first, second)) == 1:
        return format_close(first, second)
    return format_peak(first), format_peak(second)


def _in_binary_units(count: int, decimals: int, power: int | None = None) -> str:
    """``count`` in the unit of 1024 to the ``power``, or in its own unit."""
    power = _power_of(count) if power is None else power
    sign = "-" if count < 0 else ""
    if power == 0:
        return f"{sign}{abs(count)} B"
    return f"{sign}{abs(count) / 1024**power:.{decimals}f} {_BINARY_UNITS[power]}"


def _power_of(count: int) -> int:
    """The power of 1024 of the unit in which ``count`` is written."""
    size, power = float(abs(count)), 0
    while size >= 1023.95 and power < len(_BINARY_UNITS) - 1:
        size, power = size / 1024, power + 1
    return power


def format_count(count: int | None) -> str:
    """A count with thousands separators: ``1,234,567``; ``?`` for ``None``."""
    return "?" if count is None else f"{count:,}"


def counted(count: int, what: str) -> str:
    """``1 stream``, ``2 streams``, ``1,000 streams``."""
    return f"{format_count(count)} {what}{'' if count == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """The words as a list: ``a, b and c``."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def format_duration(nanoseconds: int) -> str:
    """A duration in the largest unit in which it is at least 1."""
    if nanoseconds >= 1_000_000_000:
        return f"{nanoseconds / 1e9:.2f} s"
    if nanoseconds >= 1_000_000:
        return f"{nanoseconds / 1e6:.1f} ms"
    return f"{nanoseconds / 1e3:.0f} µs"
