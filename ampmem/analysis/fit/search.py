"""Which runs to make next, so that few of them say what fits and where autocast begins to save.

Every function looks at nothing but the runs there are, in whatever order they came in. Peaks grow nearly in
proportion to a batch size, so a line through two runs tells where to look next; what it tells is run, never
believed. A search that such guesses do not bring to its end in time, or that creeps, is bisected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from ampmem.analysis.fit.fit import BASELINE, Memory, Points, Vary, bracket, crossing, differences
from ampmem.vocabulary import Arm

DOUBLINGS = 16
"""Without an upper bound, no value is run that is more than two to this power times the smallest."""

_GROWTH = 4
"""Without an upper bound, the next value is so many times the last one where peaks have not grown yet."""
_MOST_GROWTH = 16
"""... and at most so many times where they have: a line through two small values may lead far off."""

GUESSES = 10
"""From so many runs on, a search goes by halves."""


def wanted(points: Mapping[Arm, Points], vary: Vary, *, total: int, curve: int) -> list[tuple[Arm, int]]:
    """The arms and values to run next, all of which can run at once; empty at the end.

    First what fits is found, then the break-even points; then the curve is filled up to ``curve`` values.
    """
    return _to_fit(points, vary, total) or _to_break_even(points, vary.low) or _to_draw(points, vary.low, curve)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What the runs to come are for, of which some are not known before those before them.

    ``searched`` has the arms whose largest value is not found yet, with the largest that fits and the smallest that
    does not; where there are none, ``crossings`` says that a break-even point is not. ``runs`` counts those that are
    left for the curve, 0 until everything is found.
    """

    searched: Mapping[Arm, tuple[int | None, int | None]]
    crossings: bool
    runs: int


def remaining(points: Mapping[Arm, Points], vary: Vary, *, total: int, curve: int) -> Remaining:
    """What is left to be done, as :func:`wanted` goes about it."""
    searched = {arm: bracket(points[arm]) for arm, _ in _to_fit(points, vary, total)}
    crossings = not searched and bool(_to_break_even(points, vary.low))
    runs = 0 if searched or crossings else len(_to_draw(points, vary.low, curve))
    return Remaining(searched=searched, crossings=crossings, runs=runs)


def next_to_fit(points: Points, vary: Vary, total: int) -> int | None:
    """What to run to find the largest value that fits on a device of ``total`` bytes."""
    if vary.low not in points:
        return vary.low
    fits, too_large = bracket(points)
    if fits is None:
        return None
    if too_large is None:
        last = vary.low << DOUBLINGS if vary.high is None else vary.high
        if fits >= last:
            return None
        return last if vary.high is not None else min(_grown(points, total), last)
    if too_large - fits == 1:
        return None
    guesses = GUESSES + (DOUBLINGS // 2 if vary.high is None else 0)  # those that only raised the value prove nothing
    guess = None if len(points) >= guesses else _largest_expected(points, fits, too_large, total)
    return _inside(fits, too_large, guess)


def next_to_break_even(found: Mapping[int, int]) -> int | None:
    """What to run to find neighbours between which a difference of peaks falls below 0."""
    costs, saves = crossing(found)
    if costs is None or saves is None or saves - costs == 1:
        return None
    guess = None
    if len(found) < GUESSES:
        guess = costs + (saves - costs) * found[costs] // (found[costs] - found[saves])
    return _inside(costs, saves, guess)


def _to_fit(points: Mapping[Arm, Points], vary: Vary, total: int) -> list[tuple[Arm, int]]:
    found = ((arm, next_to_fit(mine, vary, total)) for arm, mine in points.items())
    return [(arm, value) for arm, value in found if value is not None]


def _to_break_even(points: Mapping[Arm, Points], low: int) -> list[tuple[Arm, int]]:
    largest = {arm: bracket(mine)[0] for arm, mine in points.items()}
    base = largest.get(BASELINE)
    needed: dict[tuple[Arm, int], None] = {}
    for arm, top in largest.items():
        if arm == BASELINE or top is None or base is None:
            continue
        ends = _not_run(points, arm, min(base, top))
        value = None if ends else next_to_break_even(differences(points, arm))
        needed |= dict.fromkeys(ends if value is None else _not_run(points, arm, value))
    return list(needed)


def _not_run(points: Mapping[Arm, Points], arm: Arm, value: int) -> list[tuple[Arm, int]]:
    """Which of ``arm`` and the baseline have not been run with ``value``."""
    return [(name, value) for name in (BASELINE, arm) if value not in points[name]]


def _to_draw(points: Mapping[Arm, Points], low: int, curve: int) -> list[tuple[Arm, int]]:
    """Runs for a curve over ``curve`` values, evenly spaced but for those that were run close by."""
    largest = {arm: bracket(mine)[0] for arm, mine in points.items()}
    top = max((value for value in largest.values() if value is not None), default=low)
    if curve < 2 or top == low:
        return []
    fitting = {value for mine in points.values() for value, memory in mine.items() if memory is not None}
    span, parts = top - low, curve - 1
    values = []
    for part in range(curve):
        even = low + (span * part + parts // 2) // parts
        nearest = min(fitting, key=lambda value: (abs(value - even), value))
        values.append(nearest if abs(nearest - even) * 3 * parts <= span else even)
    return [
        (arm, value)
        for value in dict.fromkeys(values)
        for arm, limit in largest.items()
        if limit is not None and value <= limit and value not in points[arm]
    ]


def _largest_expected(points: Points, fits: int, too_large: int, total: int) -> int | None:
    """The largest value that surely fits, by a straight line through two around it whose peaks are known."""
    known = [(value, memory) for value, memory in sorted(points.items()) if memory is not None and value <= too_large]
    if len(known) == 1:
        return isqrt(fits * too_large)
    (smaller, below), (larger, above) = known[-2:]
    less, more = _growing(below, above, total)
    if _creeps(points, fits, too_large):
        if above.highest is None or more < above.most:
            return None
        less, more = _allocated(below), _allocated(above)
    if more <= less:
        return None
    if above.allowed is not None:  # what is used outside of the allocator is not part of what the process may take
        total = min(total, above.allowed + above.used - above.reserved)
    expected = larger + (total - more) * (larger - smaller) // (more - less)
    return expected if expected < too_large else None


def _creeps(points: Points, fits: int, too_large: int) -> bool:
    """Whether the search has moved one end by little again and again, without coming to its end: the line is wrong.

    That is by 1 and by 1 again, or three times by less than a quarter of what was left; where bytes are assumed, twice.
    """
    if {fits - 1, fits - 2} <= points.keys() or {too_large + 1, too_large + 2} <= points.keys():
        return True
    largest = points[fits]
    moves = 3 if largest is None or largest.highest is None else 2
    below = sorted((value for value in points if value <= fits), reverse=True)
    above = sorted(value for value in points if value >= too_large)
    return _slow(below[: moves + 1], too_large, moves) or _slow(above[: moves + 1], fits, moves)


def _slow(ends: list[int], other: int, moves: int) -> bool:
    """Whether these places of one end, the last first, are so many small moves; ``other`` is the other end."""
    small = (abs(now - before) * 4 < abs(other - before) for now, before in pairwise(ends))
    return len(ends) > moves and all(small)


def _grown(points: Points, total: int) -> int:
    """A larger value than all that were run, which all fit: where the line through the two largest fills the device.

    It may be close to the last one; in a search of :data:`GUESSES` runs it is twice as large at least.
    """
    known = [(value, memory) for value, memory in sorted(points.items()) if memory is not None][-2:]
    larger, above = known[-1]
    smaller, below = known[0]
    less, more = _growing(below, above, total)
    if more <= less:
        return larger * _GROWTH
    expected = larger + (total - more) * (larger - smaller) // (more - less)
    least = larger + 1 if len(points) < GUESSES else larger * 2
    return min(max(expected, least), larger * _MOST_GROWTH)


def _growing(below: Memory, above: Memory, total: int) -> tuple[int, int]:
    """The bytes of two runs that a line goes through.

    The most that is assumed keeps to what the device has, and so says nothing of how it grows once it is there; what
    is allocated does not.
    """
    if all(point.highest is None or point.highest < total for point in (below, above)):
        return below.most, above.most
    return _allocated(below), _allocated(above)


def _allocated(memory: Memory) -> int:
    """What the device has to have room for at least: what is allocated, and what is in use beside it at most."""
    return memory.allocated + memory.outside_at_most


def _inside(below: int, above: int, guess: int | None) -> int:
    """``guess`` between the two values, or the middle."""
    return (below + above) // 2 if guess is None else min(max(guess, below + 1), above - 1)
