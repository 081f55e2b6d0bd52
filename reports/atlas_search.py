"""Which points the curves of the atlas need: the ends, a bisection, and what lies around each break-even."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

FIRST, SECOND = 1, 16
LARGEST = 1 << 17
"""No batch is larger than this, whatever fits."""
BASE = "fp32"
"""The precision that the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The peak of a run, in bytes, and whether the run surely fits."""

    peak: int
    fits: bool


Curve: TypeAlias = Mapping[int, Size]
"""The runs of one precision, by batch size."""


def wanted(curves: Mapping[str, Curve], room: int) -> list[tuple[str, int]]:
    """The runs that are still to be made, as precision and batch; none where the curves are whole.

    ``curves`` has every precision, with the runs that were made; ``room`` is the memory of the GPU.
    """
    ends = [(precision, batch) for precision, curve in curves.items() if (batch := next_end(curve, room)) is not None]
    if ends:
        return ends
    return [*common(curves), *around_break_even(curves)]


def next_end(curve: Curve, room: int) -> int | None:
    """The next batch on the way to the largest that fits; ``None`` where that is found."""
    if FIRST not in curve:
        return FIRST
    fitting = sorted(batch for batch, size in curve.items() if size.fits)
    if not fitting:
        return None
    largest = fitting[-1]
    too_large = min((batch for batch in curve if batch > largest), default=None)
    if largest >= LARGEST or too_large == 2 * largest:
        return None
    if len(fitting) == 1:
        return SECOND if too_large is None else middle(largest, too_large)
    high = LARGEST if too_large is None else too_large // 2
    return min(max(guess(curve, fitting[-2], largest, room), 2 * largest), high)


def guess(curve: Curve, low: int, high: int, room: int) -> int:
    """The largest power of two that would fit, if the peak went on as it does from ``low`` to ``high``."""
    each = (curve[high].peak - curve[low].peak) / (high - low)
    if each <= 0:
        return LARGEST
    return power_below(high + (room - curve[high].peak) / each)


def power_below(number: float) -> int:
    """The largest power of two that is not above ``number``."""
    return 1 << max(int(number).bit_length() - 1, 0)


def middle(low: int, high: int) -> int:
    """The power of two in the middle between two powers of two."""
    return 1 << (low.bit_length() + high.bit_length() - 2) // 2


def common(curves: Mapping[str, Curve]) -> list[tuple[str, int]]:
    """Runs at the batches that fit in FP32, which the other precisions are compared at."""
    base = [batch for batch, size in curves[BASE].items() if size.fits]
    return [(precision, batch) for precision, curve in curves.items() for batch in base if batch not in curve]


def around_break_even(curves: Mapping[str, Curve]) -> list[tuple[str, int]]:
    """Runs between two batches at one of which a precision costs, while it saves at the other."""
    base = curves[BASE]
    found: dict[tuple[str, int], None] = {}
    for curve in curves.values():
        differences = differences_of(base, curve)
        for (low, before), (high, after) in pairwise(differences.items()):
            if high > 2 * low and (before < 0) != (after < 0):
                between = middle(low, high)
                found |= {(precision, between): None for precision, each in curves.items() if between not in each}
    return list(found)


def differences_of(base: Curve, curve: Curve) -> dict[int, int]:
    """By how many bytes the peak of ``curve`` is above that of ``base``, for each batch that fits in both."""
    both = sorted(fitting(base) & fitting(curve))
    return {batch: curve[batch].peak - base[batch].peak for batch in both}


def fitting(curve: Curve) -> set[int]:
    """The batches that fit."""
    return {batch for batch, size in curve.items() if size.fits}


def break_even(base: Curve, curve: Curve) -> tuple[int | None, int | None]:
    """The largest batch at which ``curve`` saves nothing, and the smallest above it at which it saves.

    The first is ``None`` where it saves at every batch, the second where it saves at none.
    """
    differences = differences_of(base, curve)
    costs = max((batch for batch, difference in differences.items() if difference >= 0), default=None)
    saves: Iterable[int] = (batch for batch, difference in differences.items() if difference < 0)
    return costs, min((batch for batch in saves if costs is None or batch > costs), default=None)
