"""The ranks by their place: stages of a pipeline, axes of the device mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ampmem.analysis.ranks.ranks import Group, GroupKind, Rank, RankPeak
from ampmem.analysis.ranks.spread import spread_of
from ampmem.events import MeshAxis

_PIPELINE = frozenset({"pp", "pipe", "pipeline", "stage"})
"""What scripts call the axis of a mesh whose coordinate is the stage."""


def stage_of(mesh: Sequence[MeshAxis], stages: Sequence[int] = ()) -> int | None:
    """The stage of a pipeline that this place is; ``None`` where it has no stage that is seen, and no axis says so.

    Of several ``stages``, as interleaved schedules have them, none is the one: then it is the place on the axis.
    """
    if len(stages) == 1:
        return stages[0]
    return next((axis.coordinate for axis in mesh if axis.name in _PIPELINE), None)


def groups_of(ranks: Sequence[tuple[Rank, RankPeak]]) -> tuple[Group, ...]:
    """The groups of those that are compared."""
    return (*_by_stage(ranks), *_by_axis(ranks))


def _by_stage(ranks: Sequence[tuple[Rank, RankPeak]]) -> Iterator[Group]:
    stages = {rank.rank: rank.stage for rank, _ in ranks if rank.stage is not None}
    for stage in sorted(set(stages.values())):
        yield _group(GroupKind.STAGE, None, stage, [each for each in ranks if each[0].stage == stage])


def _by_axis(ranks: Sequence[tuple[Rank, RankPeak]]) -> Iterator[Group]:
    names = dict.fromkeys(axis.name for rank, _ in ranks for axis in rank.mesh if axis.name not in _PIPELINE)
    for name in names:
        places = {rank.rank: _places(rank)[name] for rank, _ in ranks if name in _places(rank)}
        for place in sorted(set(places.values())):
            yield _group(GroupKind.MESH, name, place, [each for each in ranks if places.get(each[0].rank) == place])


def _places(rank: Rank) -> Mapping[str, int]:
    return {axis.name: axis.coordinate for axis in rank.mesh}


def _group(kind: GroupKind, axis: str | None, coordinate: int, those: Sequence[tuple[Rank, RankPeak]]) -> Group:
    peak = spread_of({rank.rank: peak.said for rank, peak in those})
    return Group(
        kind=kind,
        axis=axis,
        coordinate=coordinate,
        ranks=tuple(rank.rank for rank, _ in those),
        peak=peak,
        worst_categories=next(at.categories for rank, at in those if rank.rank == peak.worst),
    )
