"""How a size differs between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from ampmem.analysis.ranks.ranks import Alike, CategorySpread, Rank, RankPeak, Spread
from ampmem.analysis.timeline.categories import CATEGORIES

_T = TypeVar("_T")

SAME = 1024
"""Ranks whose peaks differ by no more bytes than that are the same."""


def middle(ascending: Sequence[_T]) -> _T:
    """The one in the middle; of an even number the smaller of the two."""
    return ascending[(len(ascending) - 1) // 2]


def spread_of(sizes: Mapping[int, int]) -> Spread:
    """Of the size of each rank, of which there is at least one."""
    least, most = min(sizes.values()), max(sizes.values())
    return Spread(
        min=least,
        median=middle(sorted(sizes.values())),
        max=most,
        spread=most - least,
        worst=min(rank for rank, size in sizes.items() if size == most),
    )


def category_spreads(ranks: Sequence[tuple[Rank, RankPeak]]) -> tuple[CategorySpread, ...]:
    """Of every category of which any rank has something at its peak."""
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
