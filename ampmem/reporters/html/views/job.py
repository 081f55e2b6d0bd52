"""What the page of a job of many ranks has before that of one rank."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampmem.analysis.ranks.ranks import Ranks
from ampmem.reporters.html.safety import MAX_PROSE, visible
from ampmem.reporters.html.views.ranks import RankTable, rank_table
from ampmem.reporters.text.answer import capital
from ampmem.reporters.text.ranks.arms import heading
from ampmem.reporters.text.ranks.render import absences, doubts
from ampmem.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """``shown`` is the run that the page opens on; ``pages`` says whose are in the file, ``command`` makes another."""

    title: str
    facts: tuple[str, ...]
    problems: tuple[str, ...]
    tables: tuple[RankTable, ...]
    shown: str
    pages: str
    command: str


def job_view(jobs: Sequence[Ranks], pages: Sequence[Mapping[int, str]], opens: str) -> JobView:
    """The page of ``jobs``, one for each precision, which opens on the run ``opens``.

    ``pages`` has of each, by rank, the label of its run.
    """
    first = jobs[0].job
    several = len(jobs) > 1
    whole = max((ranks.peak.max for ranks in jobs if ranks.peak is not None), default=0)
    return JobView(
        title=visible(first.script, MAX_PROSE),
        facts=tuple(visible(fact) for fact in _facts(jobs)),
        problems=tuple(visible(text, MAX_PROSE) for ranks in jobs for text in _problems(ranks)),
        tables=tuple(
            rank_table(ranks, shown, whole=whole, title=heading(ranks) if several else "")
            for ranks, shown in zip(jobs, pages, strict=True)
        ),
        shown=visible(opens),
        pages=_pages(jobs, pages),
        command=_command(jobs, pages),
    )


def _facts(jobs: Sequence[Ranks]) -> Iterable[str]:
    job = jobs[0].job
    yield f"{format_count(job.world_size)} ranks"
    yield f"{job.device.name} ({job.device.type}), events from {job.source}"
    yield f"precision: {', '.join(map(heading, jobs))}"
    yield f"torch {job.torch}, ampmem {job.ampmem}"


def _problems(ranks: Ranks) -> Iterable[str]:
    for text in (*doubts(ranks), *absences(ranks)):
        yield f"{capital(text.removeprefix('note: ').removesuffix('.'))}."


def _pages(jobs: Sequence[Ranks], pages: Sequence[Mapping[int, str]]) -> str:
    if all(len(shown) == len(ranks.ranks) for ranks, shown in zip(jobs, pages, strict=True)):
        return (
            "Every rank's page is in this file: its number in the table above leads there, or the chooser at the top."
        )
    return (
        "All that follows is of this one rank. In this file are the pages of the worst rank and of ranks that differ "
        "from it: their numbers in the table above lead there, or the chooser at the top."
    )


def _command(jobs: Sequence[Ranks], pages: Sequence[Mapping[int, str]]) -> str:
    for ranks, shown in zip(jobs, pages, strict=True):
        for rank in ranks.ranks:
            if rank.rank not in shown:
                return visible(f"ampmem report {shlex.quote(rank.file)}")
    return ""
