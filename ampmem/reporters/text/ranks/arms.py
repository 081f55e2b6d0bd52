"""A job in several precisions as text: the worst rank of each side by side, then all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampmem.analysis.answer import verdict_of
from ampmem.analysis.comparison import Comparison
from ampmem.analysis.ranks.merge import Jobs
from ampmem.analysis.ranks.ranks import Ranks
from ampmem.reporters.text.answer import Wording, listed, wording
from ampmem.reporters.text.common.layout import PLAIN, Layout, number, side_by_side, words
from ampmem.reporters.text.common.plain_text import ABSENT
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.details import EVERYTHING, NOTHING, Detail
from ampmem.reporters.text.next_steps import render_next
from ampmem.reporters.text.ranks.names import named, numbers
from ampmem.reporters.text.ranks.render import render_ranks
from ampmem.units import format_peak

_NAME = 12


def render_jobs(
    jobs: Jobs, *, details: frozenset[Detail] = NOTHING, files: Sequence[str] = (), layout: Layout = PLAIN
) -> str:
    """The merged view of one job, or of one in each precision, without a newline at its end."""
    every = details == EVERYTHING
    if jobs.comparison is None:
        return render_ranks(jobs.jobs[0], files=files, every=every, layout=layout)
    said = jobs_wording(jobs, jobs.comparison)
    sections = [
        render_comparison(jobs.comparison, details=details, layout=layout, said=said),
        _peaks(jobs.jobs, layout),
        *(render_ranks(job, every=every, layout=layout, heading=heading(job)) for job in jobs.jobs),
        render_next(files, layout, more=not every),
    ]
    return "\n\n".join(section for section in sections if section)


def jobs_wording(jobs: Jobs, comparison: Comparison) -> Wording:
    """The verdict on the worst ranks; none where the sums of any rank are not the allocator's own."""
    unsound = [f"{named(job.unsound)} of {heading(job)}" for job in jobs.jobs if job.unsound]
    if unsound:
        return Wording(headline="No verdict", why=f"the sums of {listed(unsound)} are not the allocator's own")
    mixed = [heading(job) for job in jobs.jobs if job.launches]
    if mixed:
        return Wording(headline="No verdict", why=f"the ranks of {listed(mixed)} are of several launches")
    said = wording(verdict_of(comparison))
    headline = f"On the worst rank of each precision, {said.headline[:1].lower()}{said.headline[1:]}"
    return replace(said, headline=headline)


def heading(job: Ranks) -> str:
    """The job's precision."""
    return " ".join(filter(None, (job.job.arm.name, job.job.arm.dtype)))


def _peaks(jobs: Sequence[Ranks], layout: Layout) -> str:
    """The peak of each rank in each precision, ranks with the same in one row."""
    peaks = [{rank.rank: rank.peak.said for rank in job.compared if rank.peak is not None} for job in jobs]
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted({rank for of_job in peaks for rank in of_job}):
        cells = tuple(format_peak(of_job[rank]) if rank in of_job else ABSENT for of_job in peaks)
        rows.setdefault(cells, []).append(rank)
    tables = side_by_side(
        words("rank", least=_NAME, wraps=True),
        [numbers(ranks) for ranks in rows.values()],
        [[number(heading(job).replace(" ", "\n"))] for job in jobs],
        [[[cells[i]] for cells in rows] for i in range(len(jobs))],
        layout,
    )
    return "\n\n".join([layout.strong("the peak of each rank"), *tables])
