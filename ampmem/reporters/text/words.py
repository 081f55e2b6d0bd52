"""Numbers and marks as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable

from ampmem.reporters.text.plain_text import ABSENT, per_parameter
from ampmem.units import format_bytes
from ampmem.vocabulary import Mark

AT_MARK = {
    Mark.AFTER_FORWARD: "at the end of forward",
    Mark.AFTER_BACKWARD: "after backward",
    Mark.AFTER_OPTIMIZER: "after the update",
    Mark.PEAK: "at the peak",
}
"""When a mark is, within a sentence and as a caption."""

IN_SHORT = {
    Mark.AFTER_FORWARD: "after forward",
    Mark.AFTER_BACKWARD: "after backward",
    Mark.AFTER_OPTIMIZER: "after update",
    Mark.PEAK: "peak",
}
"""The same at the head of a column."""


def signed(size: int | None) -> str:
    """A difference in bytes, with its sign."""
    if size is None:
        return ABSENT
    return ("+" if size > 0 else "") + format_bytes(size)


def size_beside(gpu: str) -> bool:
    """Whether the size of ``gpu`` is to stand beside its name: not where ``--gpu 24GiB`` gave it no other name."""
    return not gpu[:1].isdigit()


def short(value: float | None) -> str:
    """A loss or a loss scale."""
    return ABSENT if value is None else f"{value:.6g}"


def times(ratio: float | None) -> str:
    """``0.52x``; something never reads as nothing."""
    if ratio is None:
        return ABSENT
    if 0 < ratio < 0.01:
        return "<0.01x"
    return f"{ratio:.2f}x" if ratio < 1e6 else f"{ratio:.1e}x"


def percent(difference: float | None) -> str:
    """A relative difference of losses; infinite when one of them diverged."""
    if difference is None:
        return ABSENT
    if math.isinf(difference):
        return "not finite"
    return f"{100 * difference:,.0f} %" if difference >= 0.1 else f"{100 * difference:.2g} %"


def trimmed(value: float) -> str:
    """At most two digits after the point: ``16``, ``2.5``."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def share(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent; something is never 0 %, not everything never 100 %."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 1:
        return "<1 %"
    if 99 < percent < 100:
        return ">99 %"
    return f"{percent:.0f} %"


def size_cells(size: int | None, parameters: int) -> list[str]:
    """Bytes, and bytes per parameter where there are parameters; of what is not known neither."""
    if size is None:
        return [ABSENT] * (1 + bool(parameters))
    return [format_bytes(size), *([per_parameter(size, parameters)] if parameters else [])]


def between(low: int, high: int, shown: Callable[[int], str] = format_bytes) -> str:
    """One size, or two that differ, as ``shown`` writes them."""
    first, last = shown(low), shown(high)
    return first if first == last else f"{first} to {last}"
