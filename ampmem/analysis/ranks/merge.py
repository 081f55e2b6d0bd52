"""The ranks of one job, merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ampmem.analysis.comparison.compare import Entry
from ampmem.analysis.ranks.groups import groups_of, stage_of
from ampmem.analysis.ranks.ranks import (
    MOST_NAMED,
    SCHEMA,
    Absence,
    Job,
    LargestPeak,
    Missing,
    Rank,
    RankParameters,
    RankPeak,
    Ranks,
)
from ampmem.analysis.ranks.runs import RankRun
from ampmem.analysis.ranks.spread import alike, category_spreads, spread_of
from ampmem.analysis.ranks.steps import ComparedStep, compared_step
from ampmem.analysis.ranks.worst import worst_of
from ampmem.analysis.summary import Step, Summary


def merge(runs: Sequence[RankRun], *, beside: Mapping[int, Path] | None = None, step: int | None = None) -> Ranks:
    """What ``runs``, which belong to one job and differ in rank, come to.

    ``beside`` are files of the job's other ranks that were not asked for. ``step`` is the one to compare; found by
    itself when it is left out. At least one of ``runs`` has a summary.
    """
    runs = sorted(runs, key=lambda run: run.rank)
    read = [(run, run.entry, run.entry.summary) for run in runs if run.entry is not None and run.entry.summary]
    at = compared_step([summary for _, _, summary in read], step)
    ranks = tuple(_rank(*of_rank, here) for of_rank, here in zip(read, at.steps, strict=True))
    peaks = [(rank, rank.peak) for rank in ranks if rank.peak is not None]
    reserved = {rank.rank: rank.reserved for rank, _ in peaks if rank.reserved is not None}
    spread = spread_of({rank.rank: peak.said for rank, peak in peaks}) if peaks else None
    return Ranks(
        schema=SCHEMA,
        job=_job(*read[0][1:]),
        step=at.index,
        later_steps=at.later,
        ranks=ranks,
        missing=tuple(_missing(runs, ranks, beside or {})),
        peak=spread,
        categories=category_spreads(peaks),
        reserved=spread_of(reserved) if reserved and len(reserved) == len(peaks) else None,
        worst=worst_of(peaks),
        imbalance=None if spread is None or not spread.median else spread.max / spread.median - 1,
        groups=groups_of(peaks),
        alike=alike(peaks),
        unsound=tuple(summary.rank for _, _, summary in read if summary.conservation.breach is not None),
        launches=_launches(runs),
        not_ended=tuple(run.rank for run in runs if run.ended is False),
        remarks=_remarks(read, at),
    )


def _job(entry: Entry, summary: Summary) -> Job:
    return Job(
        script=entry.script,
        world_size=summary.world_size,
        ampmem=summary.ampmem,
        torch=summary.torch,
        source=summary.source,
        device=summary.device,
        arm=summary.arm,
    )


def _rank(run: RankRun, entry: Entry, summary: Summary, step: Step | None) -> Rank:
    oom, parameters = summary.out_of_memory, summary.parameters
    return Rank(
        rank=run.rank,
        local_rank=summary.local_rank,
        mesh=summary.mesh,
        stage=stage_of(summary.mesh, summary.stages),
        file=str(run.path),
        peak=None if step is None else _peak(step),
        reserved=None if step is None else step.peak_reserved,
        largest=LargestPeak(step=summary.peak.step, bytes=summary.peak.bytes, allocated=summary.peak.allocated),
        whole=summary.whole,
        parameters=RankParameters(
            count=parameters.count,
            bytes=parameters.bytes,
            global_count=parameters.global_count,
            global_bytes=parameters.global_bytes,
        ),
        optimizer=summary.optimizer,
        batch_size=None if step is None else step.batch_size,
        backwards=None if step is None else step.backwards,
        finished_steps=sum(each.finished for each in summary.steps),
        last_step=max((each.index for each in summary.steps if each.finished), default=None),
        residual_bytes=summary.conservation.residual_bytes,
        out_of_memory=sum(oom.alive.values()) if oom is not None and oom.ended_the_run else None,
        failure=entry.failure,
        notes=entry.notes,
    )


def _peak(step: Step) -> RankPeak:
    peak = step.peak
    return RankPeak(
        bytes=peak.bytes,
        phase=peak.phase,
        op=peak.op,
        module=peak.module,
        categories=peak.categories,
        temporaries_by_phase=peak.temporaries_by_phase,
        communication_by_part=peak.communication_by_part,
        allocated=peak.allocated,
    )


def _missing(runs: Sequence[RankRun], ranks: Sequence[Rank], beside: Mapping[int, Path]) -> Iterator[Missing]:
    """Every rank of the job that is not compared."""
    given, read = {run.rank: run for run in runs}, {rank.rank: rank for rank in ranks}
    for number in range(min(max(run.world_size for run in runs), MOST_NAMED)):
        rank = read.get(number)
        if rank is not None:
            if rank.peak is None:
                yield _absent(number, Absence.ENDED_EARLY, file=rank.file, step=rank.last_step, detail=rank.failure)
        elif number in given:
            run = given[number]
            yield _absent(number, Absence.NOTHING_RECORDED, file=str(run.path), detail=str(run.problem))
        elif number in beside:
            yield _absent(number, Absence.LIES_BESIDE, file=str(beside[number]))
        else:
            yield _absent(number, Absence.NO_FILE)


def _absent(
    rank: int, why: Absence, *, file: str | None = None, step: int | None = None, detail: str | None = None
) -> Missing:
    return Missing(rank=rank, why=why, file=file, step=step, detail=detail)


def _launches(runs: Sequence[RankRun]) -> tuple[tuple[int, ...], ...]:
    """The ranks by launch, in the order of the first of each; empty unless they cannot be one job's.

    Of one job each machine has a launch of its own, whose ranks count on from where those of another end: two that
    begin with the same rank are two jobs.
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
        found.append(f"{len(launchers)} launchers started the ranks: on as many machines, or else they are not one job")
    for what, values in (
        ("devices", [summary.device.name for _, _, summary in read]),
        ("versions of ampmem", [summary.ampmem for _, _, summary in read]),
    ):
        if len(set(values)) > 1:
            found.append(f"the {what} differ between the ranks: {', '.join(dict.fromkeys(values))}")
    if at.index is None and len({step.index for step in at.steps if step is not None}) > 1:
        found.append("the ranks have no step in common whose update was done: of each its last step is compared")
    return tuple(found)
