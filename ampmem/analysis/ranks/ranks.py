"""The merged view of the ranks of one job, as typed values and as JSON (``ampmem.ranks/1``).

The dataclasses have the names and the order of the JSON. ``None`` is what could not be measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

from ampmem.analysis.jsonable import AtLeast, Json, OneOf, Positive, Signed, schema_of, text_of
from ampmem.analysis.summary import ArmSummary, DeviceSummary, Optimizer, WholePeak
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown, Category
from ampmem.analysis.timeline.timeline import ByPart, ByPhase, PhaseName
from ampmem.events import MeshAxis
from ampmem.output import Shown
from ampmem.units import format_peak
from ampmem.vocabulary import SourceKind

SCHEMA = "ampmem.ranks/1"

MOST_NAMED = 4096
"""Of a job of more ranks, those that are missing are not looked for one by one."""


class Absence(StrEnum):
    """Why a rank is not among those that are compared."""

    NO_FILE = "no_file"
    """No file of it was given, and none was found beside those that were."""
    LIES_BESIDE = "lies_beside"
    """Its file lies beside the others, but was not given."""
    NOTHING_RECORDED = "nothing_recorded"
    """Its file has no step, no backward or no model, or cannot be read; ``detail`` says which."""
    ENDED_EARLY = "ended_early"
    """It did not end the step that is compared; ``detail`` says why, where the recording knows."""


class GroupKind(StrEnum):
    """What the ranks of a group have in common."""

    MESH = "mesh"
    """The same place on one axis of the device mesh."""
    STAGE = "stage"
    """The same stage of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all ranks share. ``script`` is with its arguments."""

    script: str
    world_size: Positive
    ampmem: str
    torch: str
    source: SourceKind
    device: DeviceSummary
    arm: ArmSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """When a rank needed the most in the step that is compared; ``op`` and ``module`` are null where not seen."""

    bytes: int
    """What was requested then: the sum of ``categories``."""
    phase: PhaseName
    op: str | None
    module: str | None
    categories: Breakdown
    temporaries_by_phase: ByPhase
    communication_by_part: ByPart
    allocated: int | None = None
    """The peak as the allocator counts it, with the rounding of blocks; null where there is no such allocator."""

    @property
    def said(self) -> int:
        """The number that is called the peak: ``allocated`` where that is known, else ``bytes``."""
        return self.bytes if self.allocated is None else self.allocated


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestPeak:
    """The largest of all steps of a rank, the one in which memory ran out included."""

    step: int
    bytes: int
    """What was requested then."""
    allocated: int | None = None
    """With the rounding of blocks; null where there is no such allocator."""

    @property
    def said(self) -> int:
        """The number that is called the peak: ``allocated`` where that is known, else ``bytes``."""
        return self.bytes if self.allocated is None else self.allocated


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters:
    """What a rank has of the parameters, and what the whole ones come to; null where nothing is sharded."""

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
    """Of a pipeline; null where neither a stage nor the mesh says it."""
    file: str
    peak: RankPeak | None
    """In the step that is compared; null where the rank did not end that."""
    reserved: int | None
    """The most that the allocator had taken from the device during that step."""
    largest: LargestPeak
    whole: WholePeak
    """The peak of the rank's whole run, as its own file has it."""
    parameters: RankParameters
    optimizer: tuple[Optimizer, ...]
    batch_size: int | None
    """The first dimension of what the model was given in that step."""
    backwards: int | None
    """How many backwards that step had."""
    finished_steps: int
    last_step: int | None
    """The last that it ended."""
    residual_bytes: int | None
    """How far the sums are from the allocator's own."""
    out_of_memory: int | None
    """How much was in use when memory ran out, where that ended the rank's run; null where it did not."""
    failure: str | None
    """Why the script failed, in one line."""
    notes: tuple[str, ...]

    def _in_short(self) -> str:
        return f"rank {self.rank}, largest peak {format_peak(self.largest.said)} in step {self.largest.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRank:
    """A rank that is not compared, and why. ``step`` is the last that it ended."""

    rank: int
    why: Absence
    file: str | None
    step: int | None
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One size over the ranks that are compared, in bytes.

    ``median`` is that of a rank: of an even number, the smaller of the two in the middle. ``spread`` is max less min.
    ``worst`` is the first rank with the most.
    """

    min: int
    median: int
    max: int
    spread: int
    worst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CategorySpread(Spread):
    """One category at each rank's own peak."""

    category: Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of a difference between two ranks is in one category."""

    category: Category
    bytes: Signed


class Circumstance(StrEnum):
    """Something that differs between two ranks and is no size: it may be why their memory differs."""

    PHASE = "phase"
    STAGE = "stage"
    BATCH_SIZE = "batch_size"
    BACKWARDS = "backwards"
    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A circumstance in which the worst rank and another differ, and what it is of each; null where not known."""

    what: Circumstance
    worst: str | None
    other: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """What the worst rank has more than another.

    ``parts`` are the categories that differ, those that add most first: they add up to ``bytes``, but for the rounding
    of blocks. They say in what the difference lies; ``contrasts`` are facts beside it.
    """

    rank: int
    bytes: int
    parts: tuple[Part, ...]
    contrasts: tuple[Contrast, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The rank with the largest peak of the step that is compared; ``ranks`` are all that have as much."""

    rank: int
    bytes: int
    ranks: tuple[int, ...]
    over_median: Excess
    """Beside the rank in the middle by its peak."""
    over_least: Excess
    """Beside the rank with the smallest peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks with something in common: a place on a mesh axis, or a stage. Sizes are of their peaks, in bytes."""

    kind: GroupKind
    axis: str | None
    coordinate: int
    ranks: tuple[int, ...]
    peak: Spread
    worst_categories: Breakdown
    """Of the group's worst rank, at its peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Ranks of one stage with their peaks in one phase; no two differ by more than ``within`` bytes in any category."""

    ranks: tuple[int, ...]
    within: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Ranks(Shown):
    """What the ranks of one job come to.

    Of each rank its own peak is compared, of the same step: the peaks of two ranks need not be the same instant.
    """

    schema: Annotated[str, OneOf((SCHEMA,))]
    job: Job
    step: int | None
    """The step that is compared: of those that more than half of the ranks ended, the one in which any rank needed the
    most; beside other precisions the last of them whose update was done in all. Null where there is none, and then each
    rank's last step is compared."""
    later_steps: bool
    """Whether some rank ended a step after that one."""
    ranks: Annotated[tuple[Rank, ...], AtLeast(1)]
    """By rank."""
    missing: tuple[MissingRank, ...]
    """By rank; of a job of more than 4,096 ranks only those below."""
    peak: Spread | None
    """Of all categories together; null, as all that follows is empty, where no rank can be compared."""
    categories: tuple[CategorySpread, ...]
    """Those of which any rank has something at its peak, in stacking order."""
    reserved: Spread | None
    """Of what the allocators had taken from their devices; null where that is not known of all."""
    worst: Worst | None
    imbalance: float | None
    """How much more the worst rank has than the median: 0.09 is 9 %."""
    groups: tuple[RankGroup, ...]
    """By stage, then by mesh axis; empty where nothing says so."""
    alike: tuple[Alike, ...]
    """Each rank that is compared once, in the order of the first of each."""
    unsound: tuple[int, ...]
    """Ranks whose sums are not the allocator's own: of them nothing is proven."""
    launches: tuple[tuple[int, ...], ...]
    """The ranks of each launch of the script, where they cannot be of one job; empty otherwise."""
    not_ended: tuple[int, ...]
    """Ranks whose recordings were not ended: they were killed, or their machines went away."""
    remarks: tuple[str, ...]
    """Why the ranks may not be comparable, in words."""

    def to_json(self) -> str:
        """The merged view as JSON text, as :func:`ranks_schema` describes it."""
        return text_of(self)

    def rank(self, number: int) -> Rank:
        """The rank of that number. Raises ``KeyError`` when its recording was not read."""
        for rank in self.ranks:
            if rank.rank == number:
                return rank
        raise KeyError(number)

    @property
    def compared(self) -> tuple[Rank, ...]:
        """The ranks that have the step that is compared."""
        return tuple(rank for rank in self.ranks if rank.peak is not None)

    def _in_short(self) -> str:
        job = self.job
        words = [
            f"{len(self.ranks)} of {job.world_size} ranks",
            f"{job.source}, {job.device.name}",
            " ".join(filter(None, (job.arm.name, job.arm.dtype))),
        ]
        if self.worst is not None:
            words.append(f"worst rank {self.worst.rank} with {format_peak(self.worst.bytes)}")
        return ", ".join(words)


def ranks_schema() -> dict[str, Json]:
    """The JSON Schema of :meth:`Ranks.to_json`."""
    return schema_of(
        Ranks,
        title="ampmem ranks, version 1",
        description="What `ampmem show --ranks --json` prints. Sizes are bytes; null is what could not be measured.",
    )


# How a size differs between ranks.

_T = TypeVar("_T")

SAME = 1024
"""Ranks whose peaks differ by no more bytes than that are the same."""


def middle(ascending: Sequence[_T]) -> _T:
    """The middle item; of an even number of items the smaller of the middle two."""
    return ascending[(len(ascending) - 1) // 2]


def spread_of(sizes: Mapping[int, int]) -> Spread:
    """The spread of the size of each rank; there is at least one rank."""
    least, most = min(sizes.values()), max(sizes.values())
    return Spread(
        min=least,
        median=middle(sorted(sizes.values())),
        max=most,
        spread=most - least,
        worst=min(rank for rank, size in sizes.items() if size == most),
    )


def category_spreads(ranks: Sequence[tuple[Rank, RankPeak]]) -> tuple[CategorySpread, ...]:
    """The spread of every category of which any rank has something at its peak."""
    found = []
    for category in CATEGORIES if ranks else ():
        one = spread_of({rank.rank: peak.categories[category] for rank, peak in ranks})
        if one.max:
            found.append(
                CategorySpread(
                    category=category, min=one.min, median=one.median, max=one.max, spread=one.spread, worst=one.worst
                )
            )
    return tuple(found)


def alike(ranks: Sequence[tuple[Rank, RankPeak]]) -> tuple[Alike, ...]:
    """The ranks in classes: in one, any two have their peak in the same phase and differ by :data:`SAME` at most."""
    classes: list[list[tuple[Rank, RankPeak]]] = []
    for each in ranks:
        home = next((those for those in classes if _same([*those, each])), None)
        if home is None:
            classes.append([each])
        else:
            home.append(each)
    return tuple(Alike(ranks=tuple(rank.rank for rank, _ in those), within=_within(those)) for those in classes)


def _same(those: Sequence[tuple[Rank, RankPeak]]) -> bool:
    return len({(peak.phase, rank.stage) for rank, peak in those}) == 1 and _within(those) <= SAME


def _within(those: Sequence[tuple[Rank, RankPeak]]) -> int:
    """By how much any two of them differ at most, in total or in a category."""
    sizes = [[peak.said for _, peak in those]]
    sizes += [[peak.categories[category] for _, peak in those] for category in CATEGORIES]
    return max(max(each) - min(each) for each in sizes)
