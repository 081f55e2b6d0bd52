"""The merged view of the ranks of one job, as typed values and as JSON (``ampmem.ranks/1``).

The dataclasses have the names and the order of the JSON. ``None`` means not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, TypeVar

from ampmem.analysis.jsonable import (
    AtLeast,
    Json,
    JsonDocument,
    OneOf,
    Positive,
    Signed,
    like,
    named,
    schema_of_printed,
)
from ampmem.analysis.summary import DeviceSummary, MeasuredPeak, Optimizer, PrecisionSummary, WholePeak
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown, Category
from ampmem.analysis.timeline.timeline import ByPart, ByPhase, PhaseName
from ampmem.events import MeshAxis
from ampmem.output import Shown
from ampmem.units import format_peak
from ampmem.vocabulary import SourceKind

SCHEMA = "ampmem.ranks/1"

MOST_NAMED = 4096
"""In jobs with more ranks, missing ranks are not looked for one by one."""

SAME = 1024
"""Ranks whose peaks differ by at most this many bytes count as equal."""
_NOTABLE = 0.01


class Absence(StrEnum):
    """Why a rank is not compared."""

    NO_FILE = "no_file"
    """No file of the rank was given, and none was found next to the given files."""
    LIES_BESIDE = "lies_beside"
    """The rank's file is next to the others, but was not given."""
    NOTHING_RECORDED = "nothing_recorded"
    """The rank's file has no step, no backward or no model, or cannot be read; ``detail`` says which."""
    ENDED_EARLY = "ended_early"
    """The rank did not end the compared step; ``detail`` says why, if the recording knows."""


class GroupKind(StrEnum):
    """The property that the ranks of a group share."""

    MESH = "mesh"
    """The same place on one axis of the device mesh."""
    STAGE = "stage"
    """The same stage of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The properties that all ranks share. ``script`` is with its arguments."""

    script: str
    world_size: Positive
    ampmem: str
    torch: str
    source: SourceKind
    device: DeviceSummary
    precision: PrecisionSummary = field(metadata=named("arm"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak(MeasuredPeak):
    """The peak of a rank in the compared step; ``op`` and ``module`` are null if not seen."""

    bytes: int
    """Bytes requested at the peak: the sum of ``categories``."""
    phase: PhaseName
    op: str | None
    module: str | None
    categories: Breakdown
    temporaries_by_phase: ByPhase
    communication_by_part: ByPart
    allocated: int | None = None
    """The peak of allocated bytes, with the rounding of blocks; null if there is no such allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestPeak(MeasuredPeak):
    """The largest peak of all steps of a rank, including a step in which memory ran out."""

    step: int
    bytes: int
    """Bytes requested at that peak."""
    allocated: int | None = None
    """Bytes allocated, with the rounding of blocks; null if there is no such allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters:
    """The parameters on a rank, and the whole parameters of all ranks; null if nothing is sharded."""

    count: int
    bytes: int
    global_count: int | None
    global_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rank(Shown):
    """One rank whose recording was read."""

    rank: int
    local_rank: int | None
    mesh: tuple[MeshAxis, ...]
    stage: int | None
    """The pipeline stage; null if neither a stage nor the mesh says it."""
    file: str
    peak: RankPeak | None
    """The peak in the compared step; null if the rank did not end that step."""
    reserved: int | None
    """The peak of reserved bytes in that step."""
    largest: LargestPeak
    whole: WholePeak
    """The peak of the rank's whole run, as its own file has it."""
    parameters: RankParameters
    optimizer: tuple[Optimizer, ...]
    batch_size: int | None
    """The first dimension of the model's input in that step."""
    backwards: int | None
    """The number of backwards in that step."""
    finished_steps: int
    last_step: int | None
    """The last step that the rank ended."""
    residual_bytes: int | None
    """The largest difference between the sums and the allocator's own totals, in bytes."""
    out_of_memory: int | None
    """Bytes in use when memory ran out, if that ended the rank's run; else null."""
    failure: str | None
    """Why the script failed, in one line."""
    notes: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The peak in the compared step, as it is called; 0 if the rank did not end that step."""
        return 0 if self.peak is None else self.peak.said

    def _in_short(self) -> str:
        return f"rank {self.rank}, largest peak {format_peak(self.largest.said)} in step {self.largest.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRank:
    """A rank that is not compared, and why. ``step`` is the last step that it ended."""

    rank: int
    why: Absence
    file: str | None
    step: int | None
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The spread of one size over the compared ranks, in bytes.

    ``median`` is the size of some rank: of an even number, the smaller of the middle two. ``spread`` is max less min.
    ``worst`` is the first rank with the most.
    """

    min: int
    median: int
    max: int
    spread: int
    worst: int

    def marks(self, size: int) -> bool:
        """Whether ``size`` is the largest and is worth a mark: the ranks differ by 1 % of it or more."""
        return size == self.max and self.spread >= _NOTABLE * self.max and self.spread > SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class CategorySpread(Spread):
    """The spread of one category, at each rank's own peak."""

    category: Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a difference between two ranks that is in one category."""

    category: Category
    bytes: Signed


class Circumstance(StrEnum):
    """A property other than a size that may explain why the memory of two ranks differs."""

    PHASE = "phase"
    STAGE = "stage"
    BATCH_SIZE = "batch_size"
    BACKWARDS = "backwards"
    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A circumstance in which the worst rank and another differ, with the values of both; null if unknown."""

    what: Circumstance
    worst: str | None
    other: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """The bytes that the worst rank needs more than another rank.

    ``parts`` are the differing categories, the largest first: they add up to ``bytes``, apart from the rounding of
    blocks. ``contrasts`` are other properties that differ, such as the batch size.
    """

    rank: int
    bytes: int
    parts: tuple[Part, ...]
    contrasts: tuple[Contrast, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The rank with the largest peak in the compared step; ``ranks`` are all ranks with that peak."""

    rank: int
    bytes: int
    ranks: tuple[int, ...]
    over_median: Excess
    """The excess over the rank with the median peak."""
    over_least: Excess
    """The excess over the rank with the smallest peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks with something in common: a place on a mesh axis, or a stage. Sizes are of their peaks, in bytes."""

    kind: GroupKind
    axis: str | None
    coordinate: int
    ranks: tuple[int, ...]
    peak: Spread
    worst_categories: Breakdown
    """The categories of the group's worst rank, at its peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Ranks of one stage with their peaks in one phase; no two differ by more than ``within`` bytes in any category."""

    ranks: tuple[int, ...]
    within: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Ranks(JsonDocument, Shown):
    """The merged view of the ranks of one job.

    The ranks' own peaks in the same step are compared: the peaks of two ranks need not be at the same instant.
    """

    schema: Annotated[str, OneOf((SCHEMA,))]
    job: Job
    """The properties that all ranks share."""
    step: int | None
    """The compared step: of the steps that more than half of the ranks ended, the one in which any rank needed the
    most; with other precisions, the last of them with an update in all. Null without such a step, and then each rank's
    last step is compared."""
    later_steps: bool
    """Whether some rank ended a later step."""
    ranks: Annotated[tuple[Rank, ...], AtLeast(1)]
    """The ranks that were read, by rank."""
    missing: tuple[MissingRank, ...]
    """The missing ranks, by rank; in a job of more than 4,096 ranks only those below that number."""
    peak: Spread | None
    """The spread of the peak; null if no rank can be compared, and then everything below is empty."""
    categories: tuple[CategorySpread, ...]
    """The categories that any rank has at its peak, in stacking order."""
    reserved: Spread | None
    """The spread of reserved memory; null unless it is known for all ranks."""
    worst: Worst | None
    """The rank with the largest peak, and its excess over others; null if no rank can be compared."""
    imbalance: float | None
    """The worst rank's peak over the median, less 1: 0.09 is 9 %."""
    groups: tuple[RankGroup, ...]
    """The groups by stage, then by mesh axis; empty if there are neither."""
    alike: tuple[Alike, ...]
    """Classes of equal ranks: each compared rank once, in order of first appearance."""
    unsound: tuple[int, ...]
    """Ranks whose sums differ from the allocator's: their numbers cannot be trusted."""
    launches: tuple[tuple[int, ...], ...]
    """The ranks of each launch of the script, if they cannot be one job's; else empty."""
    not_ended: tuple[int, ...]
    """Ranks whose recordings were not ended: they were killed, or their machines were lost."""
    remarks: tuple[str, ...]
    """Why the ranks may not be comparable, in words; empty if they are."""

    def rank(self, number: int) -> Rank:
        """The rank ``number``. Raises ``KeyError`` if its recording was not read."""
        for rank in self.ranks:
            if rank.rank == number:
                return rank
        raise KeyError(number)

    @property
    def compared(self) -> tuple[Rank, ...]:
        """The ranks that ended the compared step."""
        return tuple(rank for rank in self.ranks if rank.peak is not None)

    def _in_short(self) -> str:
        job = self.job
        words = [
            f"{len(self.ranks)} of {job.world_size} ranks",
            f"{job.source}, {job.device.name}",
            " ".join(filter(None, (job.precision.name, job.precision.dtype))),
        ]
        if self.worst is not None:
            words.append(f"worst rank {self.worst.rank} with {format_peak(self.worst.bytes)}")
        return ", ".join(words)


def ranks_schema() -> dict[str, Json]:
    """The JSON Schema of :class:`Ranks`."""
    return schema_of_printed(Ranks, SCHEMA, "ampmem show --ranks")


# The spread of a size over ranks.

_T = TypeVar("_T")


def middle(ascending: Sequence[_T]) -> _T:
    """The middle item; of an even number of items the smaller of the middle two."""
    return ascending[(len(ascending) - 1) // 2]


def spread_of(sizes: Mapping[int, int]) -> Spread:
    """The spread of the sizes by rank; there must be at least one rank."""
    least, most = min(sizes.values()), max(sizes.values())
    return Spread(
        min=least,
        median=middle(sorted(sizes.values())),
        max=most,
        spread=most - least,
        worst=min(rank for rank, size in sizes.items() if size == most),
    )


def category_spreads(ranks: Sequence[tuple[Rank, RankPeak]]) -> tuple[CategorySpread, ...]:
    """The spread of every category that any rank has at its peak."""
    found = []
    for category in CATEGORIES if ranks else ():
        one = spread_of({rank.rank: peak.categories[category] for rank, peak in ranks})
        if one.max:
            found.append(like(CategorySpread, one, category=category))
    return tuple(found)


def alike(ranks: Sequence[tuple[Rank, RankPeak]]) -> tuple[Alike, ...]:
    """Classes of equal ranks: within a class all peaks are in one phase and differ by at most :data:`SAME`."""
    classes: list[list[tuple[Rank, RankPeak]]] = []
    for each in ranks:
        home = next((those for those in classes if _alike([*those, each])), None)
        if home is None:
            classes.append([each])
        else:
            home.append(each)
    return tuple(Alike(ranks=tuple(rank.rank for rank, _ in those), within=_within(those)) for those in classes)


def _alike(those: Sequence[tuple[Rank, RankPeak]]) -> bool:
    return len({(peak.phase, rank.stage) for rank, peak in those}) == 1 and _within(those) <= SAME


def _within(those: Sequence[tuple[Rank, RankPeak]]) -> int:
    """The largest difference between any two of them, in total or in a category."""
    sizes = [[peak.said for _, peak in those]]
    sizes += [[peak.categories[category] for _, peak in those] for category in CATEGORIES]
    return max(max(each) - min(each) for each in sizes)
