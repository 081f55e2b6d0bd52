"""Which points the curves of the atlas need: the ends, a bisection, and those around each break-even."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

FIRST, SECOND = 1, 16
LARGEST = 1 << 17
"""The largest batch that is run, even if larger ones would fit."""
BASE, AMP = "fp32", "amp"
"""The precision that the others are compared with, and the one whose break-even is searched."""
PAIR = (BASE, AMP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The peak of a run in bytes, and whether the run surely fits."""

    peak: int
    fits: bool


Curve: TypeAlias = Mapping[int, Size]
"""The runs of one precision, by batch size."""


def wanted(
    curves: Mapping[str, Curve], room: int, compared: Sequence[str], second: int, *, fine: bool
) -> list[tuple[str, int]]:
    """The runs that are still needed, as precision and batch; empty if the curves are complete.

    ``curves`` has the runs of each precision so far; ``room`` is the GPU's memory in bytes. The precisions in
    ``compared`` are run at the end of FP32's curve, AMP also at its beginning and around the break-even. With ``fine``
    AMP is run at every batch of FP32, the others at both ends, and AMP's own largest batch is searched. ``second`` is
    the batch that the search tries after the first, if it may fit.
    """
    base = curves[BASE]
    if (batch := next_end(base, room, second)) is not None:
        return [(BASE, batch)]
    missing = common(curves, compared, fine=fine) or around_break_even(curves)
    return missing or (own_end(curves, room, compared) if fine else [])


def next_end(curve: Curve, room: int, second: int) -> int | None:
    """The next batch to run to find the largest that fits; ``None`` if it is found.

    A batch is not run if its extrapolated peak is above ``room``.
    """
    if FIRST not in curve:
        return FIRST
    fits = sorted(fitting(curve))
    if not fits:
        return None
    largest = fits[-1]
    too_large = min((batch for batch in curve if batch > largest), default=None)
    if largest >= LARGEST or too_large == 2 * largest:
        return None
    if len(fits) > 1:
        high = LARGEST if too_large is None else middle(largest, too_large)
        found = min(guess(curve, fits[-2], largest, room), high)
        return found if found > largest else None
    if too_large is not None:
        return middle(largest, too_large)
    surely = power_below(room / max(curve[FIRST].peak, 1))
    return max(2, min(second, surely))


def guess(curve: Curve, low: int, high: int, room: int) -> int:
    """The largest power of two that would fit if the peak grew on as from ``low`` to ``high``."""
    each = (curve[high].peak - curve[low].peak) / (high - low)
    if each <= 0:
        return LARGEST
    return power_below(high + (room - curve[high].peak) / each)


def power_below(number: float) -> int:
    """The largest power of two up to ``number``."""
    return 1 << max(int(number).bit_length() - 1, 0)


def middle(low: int, high: int) -> int:
    """The power of two in the middle between two others."""
    return 1 << (low.bit_length() + high.bit_length() - 2) // 2


def common(curves: Mapping[str, Curve], compared: Sequence[str], *, fine: bool) -> list[tuple[str, int]]:
    """The runs at batches that fit in FP32, where the other precisions are compared."""
    base = sorted(fitting(curves[BASE])) or [FIRST]
    ends = list(dict.fromkeys((base[0], base[-1])))
    of_amp, of_others = (base, ends) if fine else (ends, base[-1:])
    batches = {precision: of_amp if precision == AMP else of_others for precision in compared if precision != BASE}
    return [
        (precision, batch) for precision, each in batches.items() for batch in each if batch not in curves[precision]
    ]


def own_end(curves: Mapping[str, Curve], room: int, compared: Sequence[str]) -> list[tuple[str, int]]:
    """The run on the way to AMP's largest batch, in groups where all precisions are compared."""
    if set(compared) == set(PAIR) or not fitting(curves[AMP]):
        return []
    batch = next_end(curves[AMP], room, SECOND)
    return [] if batch is None else [(AMP, batch)]


def around_break_even(curves: Mapping[str, Curve]) -> list[tuple[str, int]]:
    """The runs between two batches where AMP costs at one and saves at the other."""
    found: dict[tuple[str, int], None] = {}
    for (low, before), (high, after) in pairwise(differences_of(curves[BASE], curves[AMP]).items()):
        if high > 2 * low and (before < 0) != (after < 0):
            between = middle(low, high)
            found |= {(precision, between): None for precision in PAIR if between not in curves[precision]}
    return list(found)


def differences_of(base: Curve, curve: Curve) -> dict[int, int]:
    """The peak of ``curve`` less that of ``base`` in bytes, for each batch that fits in both."""
    both = sorted(fitting(base) & fitting(curve))
    return {batch: curve[batch].peak - base[batch].peak for batch in both}


def fitting(curve: Curve) -> set[int]:
    """The batches that fit."""
    return {batch for batch, size in curve.items() if size.fits}


def break_even(base: Curve, curve: Curve) -> tuple[int | None, int | None]:
    """The largest batch at which ``curve`` saves nothing, and the smallest larger batch at which it saves.

    The first is ``None`` if it saves at every batch, the second if it saves at none.
    """
    differences = differences_of(base, curve)
    costs = max((batch for batch, difference in differences.items() if difference >= 0), default=None)
    saves: Iterable[int] = (batch for batch, difference in differences.items() if difference < 0)
    return costs, min((batch for batch in saves if costs is None or batch > costs), default=None)
