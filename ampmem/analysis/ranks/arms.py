"""The ranks of a job in each precision: what is compared is the worst rank of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampmem.analysis.comparison.compare import Comparison, Entry, compare, distinct
from ampmem.analysis.ranks.jobs import jobs_of
from ampmem.analysis.ranks.merge import merge
from ampmem.analysis.ranks.ranks import Ranks
from ampmem.analysis.ranks.reading import ranks_beside
from ampmem.analysis.ranks.runs import RankRun
from ampmem.analysis.ranks.steps import step_of_precisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """One job in each precision that was recorded, in the order given.

    ``comparison`` has a column for the worst rank of each, or for the one that ran out of memory; ``None`` of one job.
    """

    jobs: tuple[Ranks, ...]
    comparison: Comparison | None


def merge_all(runs: Sequence[RankRun]) -> Jobs:
    """``runs``, by precision. Raises :class:`~ampmem.errors.UsageError` where they are not ranks of one job."""
    jobs = jobs_of(runs)
    if len(jobs) == 1:
        return Jobs(jobs=(merge(jobs[0], beside=ranks_beside(jobs[0])),), comparison=None)
    step = step_of_precisions([run.summary for job in jobs for run in job])
    merged = tuple(merge(job, beside=ranks_beside(job), step=step) for job in jobs)
    columns = [_worst(job, ranks) for job, ranks in zip(jobs, merged, strict=True)]
    types = [ranks.job.arm.dtype or "" for ranks in merged]
    return Jobs(jobs=merged, comparison=compare(distinct(columns, types), step=step))


def _worst(job: Sequence[RankRun], ranks: Ranks) -> Entry:
    """What ran out of memory, or has the largest peak of the step that is compared, or else of all steps."""
    short = [rank for rank in ranks.ranks if rank.out_of_memory is not None]
    number = max(ranks.ranks, key=lambda rank: rank.largest.said).rank
    if short:
        number = max(short, key=lambda rank: rank.out_of_memory or 0).rank
    elif ranks.worst is not None:
        number = ranks.worst.rank
    column = next(run.column for run in job if run.rank == number)
    return replace(column, label=f"{column.label} rank {number}")
