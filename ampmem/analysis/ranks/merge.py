"""The ranks of one job merged, for each precision: the compared step, the worst rank, the groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ampmem.analysis.comparison import Comparison, Entry, compare, distinct, of_full_batches
from ampmem.analysis.jsonable import like
from ampmem.analysis.ranks.jobs import RankRun, jobs_of, ranks_beside
from ampmem.analysis.ranks.ranks import (
    MOST_NAMED,
    SCHEMA,
    Absence,
    Circumstance,
    Contrast,
    Excess,
    GroupKind,
    Job,
    LargestPeak,
    MissingRank,
    Part,
    Rank,
    RankGroup,
    RankParameters,
    RankPeak,
    Ranks,
    Worst,
    alike,
    category_spreads,
    middle,
    spread_of,
)
from ampmem.analysis.summary import Step, Summary
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.events import MeshAxis


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """The compared step of each rank; ``None`` for a rank that did not end it.

    ``index`` is the step's; ``None`` if the ranks have no step in common, and then each rank's last step is compared.
    ``later`` says that some rank ended a later step.
    """

    index: int | None
    steps: tuple[Step | None, ...]
    later: bool


def compared_step(summaries: Sequence[Summary | None], index: int | None = None) -> ComparedStep:
    """The step in which any rank needed the most (of equal ones the last), or the step ``index``.

    Only steps count that were ended by more than half of the ranks that ended any: a few ranks give no comparison.
    """
    ended = _ended_steps(summaries)
    chosen = _largest([steps for steps in ended if steps]) if index is None else index
    if chosen is None:
        last = tuple(steps[max(steps)] if steps else None for steps in ended)
        return ComparedStep(index=None, steps=last, later=False)
    return ComparedStep(
        index=chosen,
        steps=tuple(steps.get(chosen) for steps in ended),
        later=any(number > chosen for steps in ended for number in steps),
    )


def step_of_precisions(summaries: Sequence[Summary | None]) -> int | None:
    """The step in which several precisions are compared, as for recordings side by side.

    It is the last step with an update in more than half of the ranks that ended any, and with a full batch if a
    DataLoader made it. ``None`` without such a step.
    """
    ended = [steps for steps in _ended_steps(summaries) if steps]
    done = [number for number, those in _by_step(ended).items() if not any(step.skipped_update for step in those)]
    return max(of_full_batches(done, ended)) if done else None


def _ended_steps(summaries: Sequence[Summary | None]) -> list[dict[int, Step]]:
    """The steps that each rank ended, by index."""
    return [{} if item is None else {step.index: step for step in item.steps if step.finished} for item in summaries]


def _by_step(ended: Sequence[Mapping[int, Step]]) -> dict[int, list[Step]]:
    """The steps that more than half of the ranks have, by index, in order."""
    indices = sorted({number for steps in ended for number in steps})
    having = {number: [steps[number] for steps in ended if number in steps] for number in indices}
    return {number: those for number, those in having.items() if 2 * len(those) > len(ended)}


def _largest(ended: Sequence[Mapping[int, Step]]) -> int | None:
    most = {number: max(step.peak.said for step in those) for number, those in _by_step(ended).items()}
    return max(most, key=lambda number: (most[number], number)) if most else None


# The rank that needs the most, and what makes the difference to the others.


def worst_of(ranks: Sequence[tuple[Rank, RankPeak]]) -> Worst | None:
    """The worst of the compared ranks; ``None`` if no rank is compared."""
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


# The ranks by place: stages of a pipeline, axes of the device mesh.

_PIPELINE = frozenset({"pp", "pipe", "pipeline", "stage"})
"""The names that scripts give to the mesh axis of the pipeline stages."""


def stage_of(mesh: Sequence[MeshAxis], stages: Sequence[int] = ()) -> int | None:
    """The pipeline stage of a rank; ``None`` if it has no known stage and no mesh axis names one.

    With several ``stages``, as in interleaved schedules, the place on the axis counts.
    """
    if len(stages) == 1:
        return stages[0]
    return next((axis.coordinate for axis in mesh if axis.name in _PIPELINE), None)


def rank_groups(ranks: Sequence[tuple[Rank, RankPeak]]) -> tuple[RankGroup, ...]:
    """The groups of the compared ranks, by stage and by axis."""
    names = dict.fromkeys(axis.name for rank, _ in ranks for axis in rank.mesh if axis.name not in _PIPELINE)
    found = []
    for kind, name in ((GroupKind.STAGE, None), *((GroupKind.MESH, name) for name in names)):
        places = {rank.rank: rank.stage if name is None else _places(rank).get(name) for rank, _ in ranks}
        for place in sorted({place for place in places.values() if place is not None}):
            found.append(_group(kind, name, place, [each for each in ranks if places[each[0].rank] == place]))
    return tuple(found)


def _places(rank: Rank) -> Mapping[str, int]:
    return {axis.name: axis.coordinate for axis in rank.mesh}


def _group(kind: GroupKind, axis: str | None, coordinate: int, those: Sequence[tuple[Rank, RankPeak]]) -> RankGroup:
    peak = spread_of({rank.rank: peak.said for rank, peak in those})
    return RankGroup(
        kind=kind,
        axis=axis,
        coordinate=coordinate,
        ranks=tuple(rank.rank for rank, _ in those),
        peak=peak,
        worst_categories=next(at.categories for rank, at in those if rank.rank == peak.worst),
    )


# The ranks of one job, merged.


def merge(runs: Sequence[RankRun], *, beside: Mapping[int, Path] | None = None, step: int | None = None) -> Ranks:
    """The merged view of ``runs``, which belong to one job and differ in rank.

    ``beside`` are files of the job's other ranks that were not given. ``step`` is the step to compare, by default that
    of :func:`compared_step`. At least one of ``runs`` has a summary.
    """
    runs = sorted(runs, key=lambda run: run.rank)
    read = [(run, run.entry, run.entry.summary) for run in runs if run.entry is not None and run.entry.summary]
    _, entry, first = read[0]
    at = compared_step([summary for _, _, summary in read], step)
    ranks = tuple(_rank(*of_rank, here) for of_rank, here in zip(read, at.steps, strict=True))
    peaks = [(rank, rank.peak) for rank in ranks if rank.peak is not None]
    reserved = {rank.rank: rank.reserved for rank, _ in peaks if rank.reserved is not None}
    spread = spread_of({rank.rank: peak.said for rank, peak in peaks}) if peaks else None
    return Ranks(
        schema=SCHEMA,
        job=like(Job, first, script=entry.script),
        step=at.index,
        later_steps=at.later,
        ranks=ranks,
        missing=tuple(_missing(runs, ranks, beside or {})),
        peak=spread,
        categories=category_spreads(peaks),
        reserved=spread_of(reserved) if reserved and len(reserved) == len(peaks) else None,
        worst=worst_of(peaks),
        imbalance=None if spread is None or not spread.median else spread.max / spread.median - 1,
        groups=rank_groups(peaks),
        alike=alike(peaks),
        unsound=tuple(summary.rank for _, _, summary in read if summary.conservation.breach is not None),
        launches=_launches(runs),
        not_ended=tuple(run.rank for run in runs if run.ended is False),
        remarks=_remarks(read, at),
    )


def _rank(run: RankRun, entry: Entry, summary: Summary, step: Step | None) -> Rank:
    oom = summary.out_of_memory
    return like(
        Rank,
        summary,
        rank=run.rank,
        stage=stage_of(summary.mesh, summary.stages),
        file=str(run.path),
        peak=None if step is None else like(RankPeak, step.peak),
        reserved=None if step is None else step.peak_reserved,
        largest=like(LargestPeak, summary.peak),
        parameters=like(RankParameters, summary.parameters),
        batch_size=None if step is None else step.batch_size,
        backwards=None if step is None else step.backwards,
        finished_steps=sum(each.finished for each in summary.steps),
        last_step=max((each.index for each in summary.steps if each.finished), default=None),
        residual_bytes=summary.conservation.residual_bytes,
        out_of_memory=sum(oom.alive.values()) if oom is not None and oom.ended_the_run else None,
        failure=entry.failure,
        notes=entry.notes,
    )


def _missing(runs: Sequence[RankRun], ranks: Sequence[Rank], beside: Mapping[int, Path]) -> Iterator[MissingRank]:
    """The ranks of the job that are not compared, and why."""
    absent = partial(MissingRank, file=None, step=None, detail=None)
    given, read = {run.rank: run for run in runs}, {rank.rank: rank for rank in ranks}
    for number in range(min(max(run.world_size for run in runs), MOST_NAMED)):
        rank = read.get(number)
        if rank is not None:
            if rank.peak is None:
                yield absent(
                    rank=number, why=Absence.ENDED_EARLY, file=rank.file, step=rank.last_step, detail=rank.failure
                )
        elif number in given:
            run = given[number]
            yield absent(rank=number, why=Absence.NOTHING_RECORDED, file=str(run.path), detail=str(run.problem))
        elif number in beside:
            yield absent(rank=number, why=Absence.LIES_BESIDE, file=str(beside[number]))
        else:
            yield absent(rank=number, why=Absence.NO_FILE)


def _launches(runs: Sequence[RankRun]) -> tuple[tuple[int, ...], ...]:
    """The ranks by launch, in order of first appearance; empty if they can be of one job.

    In one job each machine has a launch of its own, and their ranks continue each other: two launches that begin with
    the same rank are two jobs.
    """
    found: dict[str, list[int]] = {}
    begins: dict[str, set[int]] = {}
    for run in runs:
        if run.run is not None and run.run.job and run.run.local_rank is not None:
            found.setdefault(run.run.job, []).append(run.rank)
            begins.setdefault(run.run.job, set()).add(run.rank - run.run.local_rank)
    one_job = len(set().union(*begins.values())) == sum(map(len, begins.values()))
    return () if one_job else tuple(map(tuple, found.values()))


def _remarks(read: Sequence[tuple[RankRun, Entry, Summary]], at: ComparedStep) -> tuple[str, ...]:
    """Why the ranks may not be comparable."""
    started = [run.run for run, _, _ in read if run.run is not None and run.run.job]
    launchers = {run.job for run in started}
    found = []
    if len(launchers) > 1 and any(run.local_rank is None for run in started):
        found.append(
            f"{len(launchers)} launchers started the ranks: unless each ran on its own machine, this is not one job"
        )
    for what, values in (
        ("devices", [summary.device.name for _, _, summary in read]),
        ("versions of ampmem", [summary.ampmem for _, _, summary in read]),
    ):
        if len(set(values)) > 1:
            found.append(f"the {what} differ between the ranks: {', '.join(dict.fromkeys(values))}")
    if at.index is None and len({step.index for step in at.steps if step is not None}) > 1:
        found.append("the ranks have no common step with an update that was done, so each rank's last step is compared")
    return tuple(found)


# The ranks of a job in each precision: the worst ranks are compared.


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """One job in each precision that was recorded, in the order given.

    ``comparison`` has a column for the worst rank of each, or the rank that ran out of memory; ``None`` for a single
    job.
    """

    jobs: tuple[Ranks, ...]
    comparison: Comparison | None


def merge_all(runs: Sequence[RankRun]) -> Jobs:
    """``runs`` merged, by precision. Raises :class:`~ampmem.errors.UsageError` if they are not ranks of one job."""
    jobs = jobs_of(runs)
    if len(jobs) == 1:
        return Jobs(jobs=(merge(jobs[0], beside=ranks_beside(jobs[0])),), comparison=None)
    step = step_of_precisions([run.summary for job in jobs for run in job])
    merged = tuple(merge(job, beside=ranks_beside(job), step=step) for job in jobs)
    columns = [_worst(job, ranks) for job, ranks in zip(jobs, merged, strict=True)]
    types = [ranks.job.precision.dtype or "" for ranks in merged]
    return Jobs(jobs=merged, comparison=compare(distinct(columns, types), step=step))


def _worst(job: Sequence[RankRun], ranks: Ranks) -> Entry:
    """The rank that ran out of memory, else with the largest peak in the compared step, else in all steps."""
    short = [rank for rank in ranks.ranks if rank.out_of_memory is not None]
    number = max(ranks.ranks, key=lambda rank: rank.largest.said).rank
    if short:
        number = max(short, key=lambda rank: rank.out_of_memory or 0).rank
    elif ranks.worst is not None:
        number = ranks.worst.rank
    column = next(run.column for run in job if run.rank == number)
    return replace(column, label=f"{column.label} rank {number}")
