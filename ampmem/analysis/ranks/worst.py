"""Which rank needs the most, and in what the difference to the others lies."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.ranks.ranks import Circumstance, Contrast, Excess, Part, Rank, RankPeak, Worst
from ampmem.analysis.ranks.spread import middle
from ampmem.analysis.timeline.categories import CATEGORIES


def worst_of(ranks: Sequence[tuple[Rank, RankPeak]]) -> Worst | None:
    """The worst of those that are compared; ``None`` where there is none."""
    if not ranks:
        return None
    ascending = sorted(ranks, key=lambda each: (each[1].said, each[0].rank))
    most = ascending[-1][1].said
    as_much = tuple(rank.rank for rank, peak in ascending if peak.said == most)
    worst = next(each for each in ranks if each[0].rank == as_much[0])
    return Worst(
        rank=worst[0].rank,
        bytes=most,
        ranks=as_much,
        over_median=_excess(worst, middle(ascending)),
        over_least=_excess(worst, ascending[0]),
    )


def _excess(worst: tuple[Rank, RankPeak], other: tuple[Rank, RankPeak]) -> Excess:
    mine, others = worst[1].categories, other[1].categories
    parts = [Part(category=category, bytes=mine[category] - others[category]) for category in CATEGORIES]
    return Excess(
        rank=other[0].rank,
        bytes=worst[1].said - other[1].said,
        parts=tuple(sorted((part for part in parts if part.bytes), key=lambda part: -part.bytes)),
        contrasts=_contrasts(worst, other),
    )


def _contrasts(worst: tuple[Rank, RankPeak], other: tuple[Rank, RankPeak]) -> tuple[Contrast, ...]:
    mine, others = _circumstances(*worst), _circumstances(*other)
    return tuple(
        Contrast(what=what, worst=mine[what], other=others[what]) for what in Circumstance if mine[what] != others[what]
    )


def _circumstances(rank: Rank, peak: RankPeak) -> dict[Circumstance, str | None]:
    return {
        Circumstance.PHASE: peak.phase,
        Circumstance.STAGE: None if rank.stage is None else str(rank.stage),
        Circumstance.BATCH_SIZE: None if rank.batch_size is None else str(rank.batch_size),
        Circumstance.BACKWARDS: None if rank.backwards is None else str(rank.backwards),
        Circumstance.PARAMETERS: str(rank.parameters.count),
        Circumstance.OPTIMIZER: ", ".join(item.class_name for item in rank.optimizer) or None,
    }
