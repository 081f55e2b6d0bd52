"""The page of a job of many ranks: all of them merged, and the whole pages of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ampmem.analysis.comparison.answer import verdict_of
from ampmem.analysis.comparison.compare import Comparison
from ampmem.analysis.ranks.arms import Jobs, merge_all
from ampmem.analysis.ranks.ranks import Rank, Ranks
from ampmem.analysis.ranks.runs import RankRun
from ampmem.reporters.html.page.page import PageView, opens_on, page_view
from ampmem.reporters.html.progress import Progress
from ampmem.reporters.html.run import RunView, column
from ampmem.reporters.html.views.comparison import comparison_view
from ampmem.reporters.html.views.job import job_view
from ampmem.reporters.html.views.ranks_verdict import ranks_verdict_view
from ampmem.reporters.html.views.verdict import VerdictView, verdict_view
from ampmem.reporters.text.ranks.arms import heading, jobs_wording

MOST_PAGES = 8
"""Of so many ranks the whole page is in the file."""


def job_page(runs: Sequence[RankRun], limit: Callable[[int], int], progress: Progress) -> PageView:
    """The page of the job whose ranks ``runs`` are, in one precision or several.

    ``limit`` is how many bytes of the page the events of each of so many runs may take. Raises what
    :func:`~ampmem.analysis.ranks.arms.merge_all` raises.
    """
    merged = merge_all(runs)
    jobs, comparison = merged.jobs, merged.comparison
    chosen = [ranks_shown(ranks, max(1, MOST_PAGES // len(jobs))) for ranks in jobs]
    pages = [_labels(ranks, numbers, jobs) for ranks, numbers in zip(jobs, chosen, strict=True)]
    room = limit(sum(map(len, chosen)))
    shown = [
        _run(ranks.rank(number), each[number], room, progress)
        for ranks, each in zip(jobs, pages, strict=True)
        for number in each
    ]
    open_arm = opens_on([ranks.job.arm.name for ranks in jobs])
    opens = pages[open_arm][chosen[open_arm][0]]
    return page_view(
        tuple(shown),
        None if comparison is None else comparison_view(comparison),
        ranks_verdict_view(jobs[0]) if comparison is None else _of_worst(merged, comparison),
        job=job_view(jobs, pages, opens),
        opens=[run.label for run in shown].index(opens),
    )


def _labels(ranks: Ranks, numbers: Sequence[int], jobs: Sequence[Ranks]) -> dict[int, str]:
    """What the runs of these ranks are called, by rank."""
    if len(jobs) == 1:
        return {number: f"rank {number}" for number in sorted(numbers)}
    arms = [job.job.arm.name for job in jobs]
    arm = ranks.job.arm.name
    return {number: f"{arm if arms.count(arm) == 1 else heading(ranks)} rank {number}" for number in sorted(numbers)}


def _run(rank: Rank, label: str, room: int, progress: Progress) -> RunView:
    _, view = column(Path(rank.file), room, progress)
    return replace(view, label=label)


def _of_worst(jobs: Jobs, comparison: Comparison) -> VerdictView:
    """The worst rank of each precision beside those of the others."""
    view = verdict_view(verdict_of(comparison), jobs_wording(jobs, comparison))
    return replace(view, waterfall=None) if any(ranks.unsound for ranks in jobs.jobs) else view


def ranks_shown(ranks: Ranks, most: int) -> tuple[int, ...]:
    """The ranks whose whole pages are in the file, the worst first: all, where they are few.

    Else the worst, those that failed, and one of those that are alike: that in the middle, that with the least, then
    the largest.
    """
    worst, every = ranks.worst, [rank.rank for rank in ranks.ranks]
    first = [] if worst is None else [worst.rank]
    if len(every) <= most:
        return tuple(dict.fromkeys([*first, *every]))
    failed = [rank.rank for rank in ranks.ranks if rank.failure is not None or rank.out_of_memory is not None]
    told = [] if worst is None else [worst.rank, worst.over_median.rank, worst.over_least.rank]
    largest = sorted((alike.ranks[0] for alike in ranks.alike), key=lambda number: -_size(ranks.rank(number)))
    class_of = {number: alike.ranks[0] for alike in ranks.alike for number in alike.ranks}
    by_class: dict[int, int] = {}
    for number in (*told, *largest):
        by_class.setdefault(class_of[number], number)
    return tuple(dict.fromkeys([*first, *failed, *by_class.values()]))[:most] or tuple(every[:1])


def _size(rank: Rank) -> int:
    return 0 if rank.peak is None else rank.peak.said
