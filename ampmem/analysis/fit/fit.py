"""The largest value of a script's argument that a GPU has the memory for, and where autocast begins to save.

Everything here is said of runs that were made: a point is one run of the script in one arm with one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ampmem.analysis.fit.estimate import Fit, prediction_of
from ampmem.errors import RecordingError
from ampmem.events import Recording
from ampmem.vocabulary import Arm

BASELINE = Arm.FP32
"""The arm that the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vary:
    """The argument that differs between runs, from ``low`` to ``high``; ``None``: as far as it fits.

    ``separator`` is what stands before the value: ``=``, or a space for a value that is an argument of its own. It is
    empty for a positional argument, which is the value alone; ``name`` says which one: ``argument 2``.
    """

    name: str
    separator: str
    low: int
    high: int | None

    def shown(self, value: int) -> str:
        """``--batch-size=8``; ``argument 2 = 8``."""
        return f"{self.name}{self.separator or ' = '}{value}"

    def words(self, value: int) -> tuple[str, ...]:
        """The script's arguments for ``value``."""
        if not self.separator:
            return (str(value),)
        return (self.name, str(value)) if self.separator == " " else (self.shown(value),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The peaks of a run that fits or may fit, over all that was recorded, in bytes.

    ``used`` is what the device has in use at most, the allocator's memory and what is outside of it; ``highest`` is
    the same with the most that is assumed for what is not known, ``None`` where nothing had to be assumed. ``surely``
    says that the run fits even with that.
    """

    allocated: int
    reserved: int
    used: int
    highest: int | None = None
    surely: bool = True
    outside_at_most: int = 0
    """What is in use beside the allocator's memory with the most that is assumed for it."""
    allowed: int | None = None
    """What the script lets the process take (``set_per_process_memory_fraction``); ``None`` without a limit."""

    @property
    def most(self) -> int:
        """What the device has in use at most, with the most that is assumed."""
        return self.used if self.highest is None else self.highest


Points: TypeAlias = Mapping[int, Memory | None]
"""What came of each value that was run in one arm; ``None`` where memory ran out."""


class Verdict(StrEnum):
    """How an arm's peaks compare with those of :data:`BASELINE`, at the values that fit in both."""

    CROSSES = "crosses"
    """Not less up to one value, less from a larger one on."""
    ALWAYS = "always"
    """Less at every value."""
    NEVER = "never"
    """Less at none."""
    REVERSED = "reversed"
    """Less at small values only."""
    UNKNOWN = "unknown"
    """No value fits in both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Where the peak of ``arm`` falls below the baseline's.

    ``costs_at`` is the largest value at which it is not below, ``saves_at`` the smallest above that at which it
    is; for :attr:`Verdict.ALWAYS` and :attr:`Verdict.REVERSED` the smallest at which it is. ``differences`` has
    the arm's peak less the baseline's, in bytes, for each value that fits in both.
    """

    arm: Arm
    verdict: Verdict
    costs_at: int | None
    saves_at: int | None
    differences: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFit:
    """All runs of one arm, by ascending value."""

    name: Arm
    points: Points

    @property
    def largest_fitting(self) -> int | None:
        """The largest value that was run and surely fits."""
        return bracket(self.points)[0]

    @property
    def largest_that_may_fit(self) -> int | None:
        """The largest value above :attr:`largest_fitting` that was run and fits with the least of what is assumed."""
        largest = self.largest_fitting or 0
        return max((value for value, memory in self.points.items() if memory and value > largest), default=None)

    @property
    def smallest_not_fitting(self) -> int | None:
        """The smallest value above :attr:`largest_fitting` that was run and does not surely fit."""
        return bracket(self.points)[1]

    @property
    def gaps(self) -> tuple[int, ...]:
        """Values that do not fit though a larger one does."""
        largest = self.largest_fitting or 0
        return tuple(value for value, memory in self.points.items() if memory is None and value < largest)

    @property
    def flat_from(self) -> int | None:
        """The smallest value with the same peak as the largest that fits; ``None`` when that has a peak of its own."""
        largest = self.largest_fitting
        if largest is None:
            return None
        peaks = {value: memory.allocated for value, memory in self.points.items() if memory is not None}
        same = min((value for value, peak in peaks.items() if peak == peaks[largest]), default=largest)
        return None if same == largest else same


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The whole search. ``total`` is the GPU's memory in bytes; ``notes`` are those of the runs, each once."""

    script: str
    vary: Vary
    gpu: str
    total: int
    steps: int
    arms: tuple[ArmFit, ...]
    break_even: tuple[BreakEven, ...]
    notes: tuple[str, ...]

    @property
    def runs(self) -> int:
        """How many runs were made."""
        return sum(len(arm.points) for arm in self.arms)

    @property
    def values(self) -> tuple[int, ...]:
        """Every value that was run."""
        return tuple(sorted({value for arm in self.arms for value in arm.points}))

    def same_as(self, arm: ArmFit) -> ArmFit | None:
        """The first arm before ``arm`` that has the peaks of ``arm`` at every value that was run in ``arm``.

        The same value is the largest that fits in both; the other may have been run with further values. ``None`` also
        where nothing fits: no peak is known then.
        """
        before = self.arms[: self.arms.index(arm)] if any(arm.points.values()) else ()
        return next((other for other in before if _contains(other.points, arm.points)), None)

    @property
    def outside(self) -> int | None:
        """Bytes in use beside the allocator's, at least; ``None`` when nothing fits."""
        found = (memory for arm in self.arms for memory in arm.points.values() if memory is not None)
        return max((memory.used - memory.reserved for memory in found), default=None)

    @property
    def outside_at_most(self) -> int | None:
        """The same with the most that is assumed."""
        found = (memory for arm in self.arms for memory in arm.points.values() if memory is not None)
        return max((max(memory.used - memory.reserved, memory.outside_at_most) for memory in found), default=None)

    @property
    def allowed(self) -> int | None:
        """The least that the script lets the process take in any run that fits; ``None`` without such a limit."""
        found = (memory for arm in self.arms for memory in arm.points.values() if memory is not None)
        return min((memory.allowed for memory in found if memory.allowed is not None), default=None)


def _contains(points: Points, those: Points) -> bool:
    """Whether ``points`` has the runs of ``those``, and both come to the same end."""
    return bracket(points) == bracket(those) and those.items() <= points.items()


def arm_fits(points: Mapping[Arm, Points]) -> tuple[ArmFit, ...]:
    """The arms with their runs in order."""
    return tuple(ArmFit(name=arm, points=dict(sorted(found.items()))) for arm, found in points.items())


def break_evens(points: Mapping[Arm, Points]) -> tuple[BreakEven, ...]:
    """Each other arm against :data:`BASELINE`; none where that was not run."""
    if BASELINE not in points:
        return ()
    return tuple(_break_even(arm, differences(points, arm)) for arm in points if arm != BASELINE)


def bracket(points: Points) -> tuple[int | None, int | None]:
    """The largest value that surely fits, and the smallest above it that does not."""
    sure = {value: memory is not None and memory.surely for value, memory in points.items()}
    fits = max((value for value, fitting in sure.items() if fitting), default=None)
    above = (value for value, fitting in sure.items() if not fitting and (fits is None or value > fits))
    return fits, min(above, default=None)


def differences(points: Mapping[Arm, Points], arm: Arm) -> dict[int, int]:
    """The peak of ``arm`` less that of :data:`BASELINE` at each value that fits in both, by ascending value."""
    found: dict[int, int] = {}
    for value in sorted(points[arm]):
        ours, theirs = points[arm][value], points[BASELINE].get(value)
        if ours is not None and theirs is not None:
            found[value] = ours.allocated - theirs.allocated
    return found


def crossing(found: Mapping[int, int]) -> tuple[int | None, int | None]:
    """The largest value whose difference is not below 0, and the smallest above it whose difference is."""
    costs = max((value for value, difference in found.items() if difference >= 0), default=None)
    saves = (value for value, difference in found.items() if difference < 0 and (costs is None or value > costs))
    return costs, min(saves, default=None)


def memory_of(recording: Recording) -> Memory | None:
    """The peaks of a simulated run, ``None`` for one that ran out of memory. Raises :class:`RecordingError`."""
    if recording.ooms:
        return None
    if recording.prediction is None:
        raise RecordingError("the recording does not say what the run takes of the GPU's memory")
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


def _break_even(arm: Arm, found: Mapping[int, int]) -> BreakEven:
    costs, saves = crossing(found)
    smallest = min((value for value, difference in found.items() if difference < 0), default=None)
    if not found:
        verdict = Verdict.UNKNOWN
    elif costs is None:
        verdict = Verdict.ALWAYS
    elif saves is not None:
        verdict = Verdict.CROSSES
    else:
        verdict = Verdict.NEVER if smallest is None else Verdict.REVERSED
    return BreakEven(
        arm=arm, verdict=verdict, costs_at=costs, saves_at=smallest if saves is None else saves, differences=found
    )
