"""The largest value of a script's argument that a GPU has the memory for, and the runs that find it (``ampmem.fit/1``).

Every statement is about runs that were made: a point is one run of the script in one precision with one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise, takewhile
from math import isqrt
from typing import Annotated, TypeAlias

from ampmem.analysis.estimate import Fit, prediction_of
from ampmem.analysis.jsonable import Json, JsonDocument, OneOf, Positive, Signed, like, named, schema_of_printed
from ampmem.errors import RecordingError
from ampmem.events import Recording
from ampmem.version import __version__
from ampmem.vocabulary import Precision

BASELINE = Precision.FP32
"""The precision that the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vary:
    """The varied argument and its range from ``low`` to ``high``; without ``high``, as far as it fits.

    ``separator`` stands between name and value: ``=``, or a space if the value is an argument of its own. It is empty
    for a positional argument, which is the value alone; its ``name`` is then ``argument 2``.
    """

    name: str = field(metadata=named("argument"))
    low: Positive
    high: Positive | None
    separator: str = "="

    def shown(self, value: int) -> str:
        """The argument with ``value``, for people: ``--batch-size=8``, ``argument 2 = 8``."""
        return f"{self.name}{self.separator or ' = '}{value}"

    def words(self, value: int) -> tuple[str, ...]:
        """The script's arguments for ``value``."""
        if not self.separator:
            return (str(value),)
        return (self.name, str(value)) if self.separator == " " else (self.shown(value),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The peaks of a run that fits or may fit, over all that was recorded, in bytes.

    ``used`` is the peak of the device's memory, the allocator's and everything outside of it; ``highest`` is its upper
    bound where something is unknown, else ``None``. ``surely`` says that the run fits even with the upper bound.
    """

    allocated: int
    reserved: int
    used: int
    highest: int | None = None
    surely: bool = True
    outside_at_most: int = 0
    """The upper bound of the memory in use outside of the allocator."""
    allowed: int | None = None
    """The process's limit that the script sets (``set_per_process_memory_fraction``); ``None`` without a limit."""

    @property
    def most(self) -> int:
        """The upper bound of the device's memory in use."""
        return self.used if self.highest is None else self.highest


Points: TypeAlias = Mapping[int, Memory | None]
"""The result of each value that was run in one precision; ``None`` where memory ran out."""


class SavingVerdict(StrEnum):
    """The comparison of a precision's peaks with those of :data:`BASELINE`, at the values that fit in both."""

    CROSSES = "crosses"
    """Higher or equal at small values, lower from some larger value on."""
    ALWAYS = "always"
    """Lower at every value."""
    NEVER = "never"
    """Lower at no value."""
    REVERSED = "reversed"
    """Lower at small values only."""
    UNKNOWN = "unknown"
    """No value fits in both."""


# What ``ampmem fit --json`` prints (``ampmem.fit/1``): the result, from which the tables and the page are made, too.

SCHEMA = "ampmem.fit/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGpu:
    """The GPU, sizes in bytes.

    ``outside`` is the lower bound of the memory in use outside of the allocator, ``outside_at_most`` its upper bound;
    ``None`` if nothing fits. ``allowed`` is the smallest limit that the script sets for the process in a run that fits,
    ``None`` without one.
    """

    name: str
    total: Positive = field(metadata=named("total_bytes"))
    outside: int | None = field(metadata=named("outside_bytes"))
    outside_at_most: int | None = field(metadata=named("outside_at_most_bytes"))
    allowed: int | None = field(default=None, metadata=named("allowed_bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run: its peaks, null where memory ran out.

    ``fits`` is true if the run surely fits, ``may_fit`` if it fits with the lower bound of the unknown memory;
    ``highest_device_used_bytes`` is the upper bound, null if nothing had to be assumed. ``outside_at_most_bytes`` is
    the upper bound of the memory in use outside of the allocator, ``allowed_bytes`` the limit that the script sets.
    """

    value: Positive
    fits: bool
    may_fit: bool
    allocated: int | None = field(metadata=named("allocated_bytes"))
    reserved: int | None = field(metadata=named("reserved_bytes"))
    used: int | None = field(metadata=named("device_used_bytes"))
    highest: int | None = field(metadata=named("highest_device_used_bytes"))
    outside_at_most: int = field(default=0, metadata=named("outside_at_most_bytes"))
    allowed: int | None = field(default=None, metadata=named("allowed_bytes"))

    @property
    def memory(self) -> Memory | None:
        """The peaks of the run; ``None`` where memory ran out."""
        return None if None in (self.allocated, self.reserved, self.used) else like(Memory, self, surely=self.fits)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFit:
    """All runs of one precision, by ascending value.

    ``largest_fitting`` surely fits, ``smallest_not_fitting`` is the smallest larger value that does not;
    ``largest_that_may_fit`` is the largest larger value that fits with the lower bound of the unknown memory, null
    without one.
    """

    name: Precision = field(metadata=named("arm"))
    largest_fitting: Positive | None
    smallest_not_fitting: Positive | None
    largest_that_may_fit: Positive | None
    points: tuple[Point, ...]

    @property
    def memory(self) -> Points:
        """The peaks by value."""
        return {point.value: point.memory for point in self.points}

    @property
    def gaps(self) -> tuple[int, ...]:
        """Values that do not fit although a larger one does."""
        largest = self.largest_fitting or 0
        return tuple(point.value for point in self.points if not point.may_fit and point.value < largest)

    @property
    def flat_from(self) -> int | None:
        """The smallest value with the peak of the largest that fits; ``None`` if that is hardly smaller.

        What an allocator rounds up to a segment is the same for values that are near to each other.
        """
        peaks = {point.value: point.allocated for point in self.points if point.may_fit}
        largest = self.largest_fitting
        same = min((value for value, peak in peaks.items() if largest and peak == peaks[largest]), default=0)
        return same if largest and 0 < same < largest * 7 / 8 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakDifference:
    """The precision's peak of allocated bytes less the baseline's."""

    value: Positive
    bytes: Signed


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Where the peak allocated by ``precision`` falls below that by ``against``, among the values that fit in both.

    ``costs_at`` is the largest value at which the peak is not below, ``saves_at`` the smallest larger value at which it
    is; for :attr:`SavingVerdict.ALWAYS` and :attr:`SavingVerdict.REVERSED` the smallest value at which it is below.
    """

    precision: Precision = field(metadata=named("arm"))
    against: Precision
    verdict: SavingVerdict
    costs_at: Positive | None
    saves_at: Positive | None
    differences: tuple[PeakDifference, ...]

    @property
    def by_value(self) -> dict[int, int]:
        """The differences in bytes by value."""
        return {each.value: each.bytes for each in self.differences}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult(JsonDocument):
    """The result of the whole search. ``notes`` are the runs', each once."""

    schema: Annotated[str, OneOf((SCHEMA,))]
    ampmem: str
    script: str
    steps: Positive
    runs: int
    vary: Vary
    gpu: SimulatedGpu
    precisions: tuple[PrecisionFit, ...] = field(metadata=named("arms"))
    break_even: tuple[BreakEven, ...]
    notes: tuple[str, ...]

    @property
    def values(self) -> tuple[int, ...]:
        """Every value that was run."""
        return tuple(sorted({point.value for precision in self.precisions for point in precision.points}))

    def same_as(self, precision: PrecisionFit) -> PrecisionFit | None:
        """As the function :func:`same_as`; ``None`` also if nothing fits, as no peak is known then."""
        found = same_as({each.name: each.memory for each in self.precisions}, precision.name)
        fits = any(point.may_fit for point in precision.points)
        return next((each for each in self.precisions if fits and each.name == found), None)

    @property
    def without_effect(self) -> bool:
        """Whether the peaks of each precision are the same at all values, of which there are several."""
        peaks = [{point.allocated for point in each.points} for each in self.precisions]
        return len(self.values) > 1 and all(len(found) == 1 and None not in found for found in peaks)


def fit_schema() -> dict[str, Json]:
    """The JSON Schema of a :class:`FitResult`."""
    return schema_of_printed(FitResult, SCHEMA, "ampmem fit")


def fit_result(
    points: Mapping[Precision, Points],
    *,
    script: str,
    steps: int,
    vary: Vary,
    gpu: str,
    total: int,
    notes: tuple[str, ...],
) -> FitResult:
    """The result of a search that made these runs on a GPU of ``total`` bytes."""
    found = [memory for those in points.values() for memory in those.values() if memory is not None]
    outside = [(memory.used - memory.reserved, memory.outside_at_most) for memory in found]
    return FitResult(
        schema=SCHEMA,
        ampmem=__version__,
        script=script,
        steps=steps,
        runs=sum(map(len, points.values())),
        vary=vary,
        gpu=SimulatedGpu(
            name=gpu,
            total=total,
            outside=max((known for known, _ in outside), default=None),
            outside_at_most=max(map(max, outside), default=None),
            allowed=min((memory.allowed for memory in found if memory.allowed is not None), default=None),
        ),
        precisions=precision_fits(points),
        break_even=break_evens(points),
        notes=notes,
    )


def precision_fits(points: Mapping[Precision, Points]) -> tuple[PrecisionFit, ...]:
    """The runs of each precision, by value."""
    return tuple(_precision(precision, found) for precision, found in points.items())


def _precision(precision: Precision, points: Points) -> PrecisionFit:
    fits, too_large = bracket(points)
    may = (value for value, memory in points.items() if memory and value > (fits or 0))
    return PrecisionFit(
        name=precision,
        largest_fitting=fits,
        smallest_not_fitting=too_large,
        largest_that_may_fit=max(may, default=None),
        points=tuple(_point(value, memory) for value, memory in sorted(points.items())),
    )


def _point(value: int, memory: Memory | None) -> Point:
    if memory is None:
        return Point(value=value, fits=False, may_fit=False, allocated=None, reserved=None, used=None, highest=None)
    return like(Point, memory, value=value, fits=memory.surely, may_fit=True)


def break_evens(points: Mapping[Precision, Points]) -> tuple[BreakEven, ...]:
    """The break-even point of each other precision against :data:`BASELINE`; empty if that was not run.

    A precision that was run at the ends only, being like another one, has the break-even point of that one.
    """
    others = [precision for precision in points if precision != BASELINE and BASELINE in points]
    of = {precision: same_as(points, precision) or precision for precision in others}
    return tuple(_break_even(precision, differences(points, of[precision])) for precision in others)


def like_another(points: Mapping[Precision, Points], precision: Precision) -> Precision | None:
    """The first precision before this one with equal results at every value that was run in this one.

    :data:`BASELINE` counts as before all others. The first precision may have been run with more values.
    """
    before = takewhile(lambda other: other != precision, sorted(points, key=lambda each: each != BASELINE))
    mine = points[precision].items()
    return next((other for other in before if mine and mine <= points[other].items()), None)


def same_as(points: Mapping[Precision, Points], precision: Precision) -> Precision | None:
    """The precision that :func:`like_another` finds, if both have the same largest value that fits."""
    other = like_another(points, precision)
    return other if other is not None and bracket(points[other]) == bracket(points[precision]) else None


def bracket(points: Points) -> tuple[int | None, int | None]:
    """The largest value that surely fits, and the smallest above it that does not."""
    sure = {value: memory is not None and memory.surely for value, memory in points.items()}
    fits = max((value for value, fitting in sure.items() if fitting), default=None)
    above = (value for value, fitting in sure.items() if not fitting and (fits is None or value > fits))
    return fits, min(above, default=None)


def differences(points: Mapping[Precision, Points], precision: Precision) -> dict[int, int]:
    """The peak of ``precision`` less that of :data:`BASELINE` at each value that fits in both, by ascending value."""
    both = ((value, points[precision][value], points[BASELINE].get(value)) for value in sorted(points[precision]))
    return {value: ours.allocated - theirs.allocated for value, ours, theirs in both if ours and theirs}


def crossing(found: Mapping[int, int]) -> tuple[int | None, int | None]:
    """The largest value with a difference of 0 or more, and the smallest larger value with one below 0."""
    costs = max((value for value, difference in found.items() if difference >= 0), default=None)
    saves = (value for value, difference in found.items() if difference < 0 and (costs is None or value > costs))
    return costs, min(saves, default=None)


def memory_of(recording: Recording) -> Memory | None:
    """The peaks of a simulated run; ``None`` if it ran out of memory. Raises :class:`RecordingError`."""
    if recording.ooms:
        return None
    if recording.prediction is None:
        raise RecordingError("the recording does not say how much of the GPU's memory the run needs")
    found = prediction_of(recording.prediction)
    if found.fit is Fit.DOES_NOT_FIT:
        return None
    return Memory(
        allocated=found.at_peak_allocated.allocated,
        reserved=found.least_reserved,
        used=found.least_total,
        highest=None if found.highest is None else found.most_total,
        surely=found.fit is Fit.FITS,
        outside_at_most=0 if found.highest is None else found.highest.total - found.highest.reserved,
        allowed=found.allowed,
    )


def _break_even(precision: Precision, found: Mapping[int, int]) -> BreakEven:
    costs, saves = crossing(found)
    smallest = min((value for value, difference in found.items() if difference < 0), default=None)
    verdict = SavingVerdict.NEVER if smallest is None else SavingVerdict.REVERSED
    if costs is None:
        verdict = SavingVerdict.ALWAYS if found else SavingVerdict.UNKNOWN
    elif saves is not None:
        verdict = SavingVerdict.CROSSES
    return BreakEven(
        precision=precision,
        against=BASELINE,
        verdict=verdict,
        costs_at=costs,
        saves_at=smallest if saves is None else saves,
        differences=tuple(PeakDifference(value=value, bytes=size) for value, size in found.items()),
    )


# Which runs to make next, so that few runs find what fits and where autocast begins to save. Every function depends
# only on the runs there are, in any order. Peaks grow nearly in proportion to a batch size, so a line through two runs
# predicts where to look next; the prediction is run, never trusted. A search whose predictions do not end it in time,
# or that creeps, is bisected.

DOUBLINGS = 16
"""Without an upper bound, no value above the smallest times two to this power is run."""

_GROWTH = 4
"""Without an upper bound, the factor to the next value while peaks do not grow yet."""
_MOST_GROWTH = 16
"""The largest factor to the next value once they do: a line through two small values may mislead."""

GUESSES = 10
"""From this many runs on, a search is bisected."""


def wanted(points: Mapping[Precision, Points], vary: Vary, *, total: int, curve: int) -> list[tuple[Precision, int]]:
    """The precisions and values to run next, all of which can run at once; empty at the end of the search.

    First the largest fitting values are searched, then the break-even points; then the curve is filled up to ``curve``
    values. ``total`` is the GPU's memory in bytes.
    """
    return _to_fit(points, vary, total) or _to_break_even(points) or _to_draw(points, vary.low, curve)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """The runs that are left, by purpose; some depend on the results of others.

    ``searched`` has the precisions whose largest value is not found yet, with the largest that fits and the smallest
    that does not; once it is empty, ``crossings`` says that a break-even point is missing. ``runs`` counts the runs
    left for the curve, 0 until all is found.
    """

    searched: Mapping[Precision, tuple[int | None, int | None]]
    crossings: bool
    runs: int


def remaining(points: Mapping[Precision, Points], vary: Vary, *, total: int, curve: int) -> Remaining:
    """The work that is left, in the order of :func:`wanted`."""
    searched = {precision: bracket(points[precision]) for precision, _ in _to_fit(points, vary, total)}
    crossings = not searched and bool(_to_break_even(points))
    runs = 0 if searched or crossings else len(_to_draw(points, vary.low, curve))
    return Remaining(searched=searched, crossings=crossings, runs=runs)


def next_to_fit(points: Points, vary: Vary, total: int) -> int | None:
    """The next value to run to find the largest that fits on a device of ``total`` bytes; ``None`` if it is found."""
    if vary.low not in points:
        return vary.low
    fits, too_large = bracket(points)
    last = vary.low << DOUBLINGS if vary.high is None else vary.high
    if fits is None or (fits >= last if too_large is None else too_large - fits == 1):
        return None
    if too_large is None:
        return last if vary.high is not None else min(_grown(points, total), last)
    # Runs that only raised the value say nothing about the predictions.
    guesses = GUESSES + (DOUBLINGS // 2 if vary.high is None else 0)
    guess = None if len(points) >= guesses else _largest_expected(points, fits, too_large, total)
    return _inside(fits, too_large, guess)


def next_to_break_even(found: Mapping[int, int]) -> int | None:
    """The next value to run, between neighbours where the difference of peaks falls below 0; ``None`` if found."""
    costs, saves = crossing(found)
    if costs is None or saves is None or saves - costs == 1:
        return None
    guess = None
    if len(found) < GUESSES:
        guess = costs + (saves - costs) * found[costs] // (found[costs] - found[saves])
    return _inside(costs, saves, guess)


def _to_fit(points: Mapping[Precision, Points], vary: Vary, total: int) -> list[tuple[Precision, int]]:
    first = [(precision, vary.low) for precision, mine in points.items() if vary.low not in mine]
    found = ((precision, _next_of(precision, points, vary, total)) for precision in points)
    return first or [(precision, value) for precision, value in found if value is not None]


def _next_of(precision: Precision, points: Mapping[Precision, Points], vary: Vary, total: int) -> int | None:
    """The next value to run in ``precision``: one like another precision waits for it, and is run at its ends only."""
    other = like_another(points, precision)
    if other is None:
        return next_to_fit(points[precision], vary, total)
    if next_to_fit(points[other], vary, total) is not None:
        return None
    ends = (end for end in bracket(points[other]) if end is not None)
    return next((end for end in ends if end not in points[precision]), None)


def _to_break_even(points: Mapping[Precision, Points]) -> list[tuple[Precision, int]]:
    largest = {precision: bracket(mine)[0] for precision, mine in points.items()}
    base = largest.get(BASELINE)
    needed: dict[tuple[Precision, int], None] = {}
    for precision, top in largest.items():
        if precision == BASELINE or top is None or base is None or like_another(points, precision):
            continue
        ends = _not_run(points, precision, min(base, top))
        value = None if ends else next_to_break_even(differences(points, precision))
        needed |= dict.fromkeys(ends if value is None else _not_run(points, precision, value))
    return list(needed)


def _not_run(points: Mapping[Precision, Points], precision: Precision, value: int) -> list[tuple[Precision, int]]:
    """The runs with ``value`` that are missing, in ``precision`` and in the baseline."""
    return [(name, value) for name in (BASELINE, precision) if value not in points[name]]


def _to_draw(points: Mapping[Precision, Points], low: int, curve: int) -> list[tuple[Precision, int]]:
    """The runs for a curve over ``curve`` values, evenly spaced unless a value close by was run."""
    largest = {precision: bracket(mine)[0] for precision, mine in points.items()}
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
        (precision, value)
        for value in dict.fromkeys(values)
        for precision, limit in largest.items()
        if limit is not None and value <= limit and value not in points[precision]
        if like_another(points, precision) is None
    ]


def _largest_expected(points: Points, fits: int, too_large: int, total: int) -> int | None:
    """The predicted largest value that surely fits, on a straight line through two known peaks around it."""
    known = [(value, memory) for value, memory in sorted(points.items()) if memory is not None and value <= too_large]
    if len(known) == 1:
        return isqrt(fits * too_large)
    (smaller, below), (larger, above) = known[-2:]
    less, more = _growing(below, above, total)
    if _creeps(points, fits, too_large):
        if above.highest is None or more < above.most:
            return None
        less, more = _allocated(below), _allocated(above)
    if above.allowed is not None:  # memory used outside of the allocator does not count for the process's limit
        total = min(total, above.allowed + above.used - above.reserved)
    expected = _on_the_line((smaller, larger), (less, more), total)
    return expected if expected is not None and expected < too_large else None


def _on_the_line(values: tuple[int, int], sizes: tuple[int, int], total: int) -> int | None:
    """The value that needs ``total`` bytes on the line through two runs; ``None`` if the line does not rise."""
    (smaller, larger), (less, more) = values, sizes
    return None if more <= less else larger + (total - more) * (larger - smaller) // (more - less)


def _creeps(points: Points, fits: int, too_large: int) -> bool:
    """Whether the search has moved one end by small steps only, so that the line is a bad prediction.

    Small means by 1 twice, or three times (twice if bytes are assumed) by less than a quarter of what was left.
    """
    if {fits - 1, fits - 2} <= points.keys() or {too_large + 1, too_large + 2} <= points.keys():
        return True
    largest = points[fits]
    moves = 3 if largest is None or largest.highest is None else 2
    below = sorted((value for value in points if value <= fits), reverse=True)
    above = sorted(value for value in points if value >= too_large)
    return _slow(below[: moves + 1], too_large, moves) or _slow(above[: moves + 1], fits, moves)


def _slow(ends: list[int], other: int, moves: int) -> bool:
    """Whether one end (``ends``, the last value first) took ``moves`` small steps towards the ``other`` end."""
    small = (abs(now - before) * 4 < abs(other - before) for now, before in pairwise(ends))
    return len(ends) > moves and all(small)


def _grown(points: Points, total: int) -> int:
    """The next larger value to run: where the line through the two largest values that fit fills the device.

    It may be close to the last value; after :data:`GUESSES` runs it is at least twice as large.
    """
    known = [(value, memory) for value, memory in sorted(points.items()) if memory is not None][-2:]
    larger, above = known[-1]
    smaller, below = known[0]
    expected = _on_the_line((smaller, larger), _growing(below, above, total), total)
    if expected is None:
        return larger * _GROWTH
    least = larger + 1 if len(points) < GUESSES else larger * 2
    return min(max(expected, least), larger * _MOST_GROWTH)


def _growing(below: Memory, above: Memory, total: int) -> tuple[int, int]:
    """The bytes of two runs that the line goes through.

    The upper bound never exceeds the device's memory, so once it gets there it does not show growth; allocated bytes
    do.
    """
    if all(point.highest is None or point.highest < total for point in (below, above)):
        return below.most, above.most
    return _allocated(below), _allocated(above)


def _allocated(memory: Memory) -> int:
    """The bytes that the device must have at least: allocated memory plus the upper bound of memory outside."""
    return memory.allocated + memory.outside_at_most


def _inside(below: int, above: int, guess: int | None) -> int:
    """``guess`` if it is between the two values, else their middle."""
    return (below + above) // 2 if guess is None else min(max(guess, below + 1), above - 1)
