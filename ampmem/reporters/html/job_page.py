"""The page of a job of many ranks: all of them merged, and the whole pages of some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ampmem.analysis.answer import verdict_of
from ampmem.analysis.compare import Comparison, compare
from ampmem.analysis.ranks.jobs import jobs_of
from ampmem.analysis.ranks.merge import merge
from ampmem.analysis.ranks.ranks import Rank, Ranks
from ampmem.analysis.ranks.runs import RankRun
from ampmem.reporters.html.columns import column
from ampmem.reporters.html.data import RunView
from ampmem.reporters.html.page.page import PageView, opens_on, page_view
from ampmem.reporters.html.progress import Progress
from ampmem.reporters.html.views.comparison import comparison_view
from ampmem.reporters.html.views.job import job_view
from ampmem.reporters.html.views.ranks_verdict import ranks_verdict_view
from ampmem.reporters.html.views.verdict import verdict_view

MOST_PAGES = 8
"""Of so many ranks the whole page is in the file."""


def job_page(runs: Sequence[RankRun], limit: Callable[[int], int], progress: Progress) -> PageView:
    """The page of the job whose ranks ``runs`` are, in one precision or several.

    ``limit`` is how many bytes of the page the events of each of so many runs may take. Raises what
    :func:`~ampmem.analysis.ranks.jobs.jobs_of` raises.
    """
    jobs = [_Job(runs=tuple(job), ranks=merge(job)) for job in jobs_of(runs)]
    chosen = [ranks_shown(job.ranks, max(1, MOST_PAGES // len(jobs))) for job in jobs]
    room = limit(sum(map(len, chosen)))
    shown: list[RunView] = []
    pages: list[Mapping[int, str]] = []
    opens: list[int] = []
    for job, numbers in zip(jobs, chosen, strict=True):
        labels = {number: job.label(number, several=len(jobs) > 1) for number in sorted(numbers)}
        opens.append(len(shown) + list(labels).index(numbers[0]))
        pages.append(labels)
        shown += [_run(job.run(number), label, room, progress) for number, label in labels.items()]
    comparison = _comparison(jobs)
    first = jobs[0].ranks
    return page_view(
        tuple(shown),
        None if comparison is None else comparison_view(comparison),
        ranks_verdict_view(first) if comparison is None else verdict_view(verdict_of(comparison)),
        job=job_view([job.ranks for job in jobs], pages),
        opens=opens[opens_on([job.ranks.job.arm.name for job in jobs])],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The ranks in one precision, and what they come to."""

    runs: tuple[RankRun, ...]
    ranks: Ranks

    def run(self, number: int) -> RankRun:
        return next(run for run in self.runs if run.rank == number)

    def label(self, number: int, *, several: bool) -> str:
        return f"{self.ranks.job.arm.name}, rank {number}" if several else f"rank {number}"


def _run(run: RankRun, label: str, room: int, progress: Progress) -> RunView:
    _, view = column(run.path, room, progress)
    return replace(view, label=label)


def _comparison(jobs: Sequence[_Job]) -> Comparison | None:
    """The worst rank of each precision beside those of the others; ``None`` where there is one precision."""
    if len(jobs) == 1:
        return None
    entries = []
    for job in jobs:
        number = ranks_shown(job.ranks, 1)[0]
        entries.append(replace(job.run(number).column, label=job.label(number, several=True)))
    return compare(entries)


def ranks_shown(ranks: Ranks, most: int) -> tuple[int, ...]:
    """The ranks whose whole pages are in the file: the worst, those that failed, then one of each that differ."""
    told = ranks.worst
    first = [] if told is None else [told.rank]
    failed = [rank.rank for rank in ranks.ranks if rank.failure is not None or rank.out_of_memory]
    beside = [] if told is None else [told.over_median.rank, told.over_least.rank]
    classes = [max((ranks.rank(number) for number in alike.ranks), key=_size).rank for alike in ranks.alike]
    classes.sort(key=lambda number: -_size(ranks.rank(number)))
    every = [rank.rank for rank in ranks.ranks]
    wanted = [*first, *failed, *beside, *classes, *(every if len(every) <= most else ())]
    return tuple(dict.fromkeys(wanted))[:most] or tuple(every[:1])


def _size(rank: Rank) -> int:
    return 0 if rank.peak is None else rank.peak.bytes
