"""The verdict on the ranks of a job: which rank is the worst, and how it differs from the others."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from urllib.parse import urlencode

from ampmem.analysis.ranks.ranks import Absence, Alike, GroupKind, Rank, RankGroup, RankPeak, Ranks, Spread
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.html.palette import label
from ampmem.reporters.html.safety import MAX_PROSE, visible
from ampmem.reporters.html.verdict import (
    Bar,
    BarPiece,
    End,
    VerdictView,
    Waterfall,
    legend_of,
    paint,
    sentences,
    stacked,
    waterfall,
)
from ampmem.reporters.text.answer import capital, in_phase
from ampmem.reporters.text.plain_text import signed
from ampmem.reporters.text.ranks import (
    absences,
    doubts,
    every_rank,
    group_name,
    heading,
    numbers,
    place,
    ranks_named,
    ranks_wording,
)
from ampmem.reporters.text.run import describe_device
from ampmem.units import format_bytes, format_count, format_peak, peaks_apart

MAX_ROWS = 64
"""The most groups of equal ranks that have a row each: those with the largest peaks."""

_ABSENT = {
    Absence.NO_FILE: "no file",
    Absence.LIES_BESIDE: "not given",
    Absence.NOTHING_RECORDED: "nothing to show",
    Absence.ENDED_EARLY: "did not end the step that is compared",
}

_LEAST_SCALE = 0.05
"""The darkest shade stands for at least this share of the largest peak: smaller differences do not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Bytes, exact in ``title``; ``shade`` is in percent of the darkest, ``most`` marks the column's largest."""

    text: str
    title: str = ""
    shade: float = 0
    most: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One row: ``href`` leads to the page that ``shown`` names; ``note`` replaces the cells."""

    label: str
    detail: str = ""
    href: str = ""
    shown: str = ""
    pieces: tuple[BarPiece, ...] = ()
    cells: tuple[Cell, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """Rows under one heading."""

    title: str
    detail: str
    rows: tuple[RankRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """The table of one job; ``scale`` explains the darkest shade, empty if no rank differs."""

    title: str
    scale: str
    columns: tuple[Bar, ...]
    groups: tuple[RankRows, ...]


def rank_table(ranks: Ranks, pages: Mapping[int, str], *, whole: int, title: str = "") -> RankTable:
    """The table of ``ranks``, with bars as shares of ``whole`` bytes.

    ``pages`` has, by rank, the label of the run on the page.
    """
    table = _Table(ranks, pages, whole)
    return RankTable(
        title=visible(title),
        scale=table.scale_in_words,
        columns=tuple(table.columns()),
        groups=tuple(group for group in table.groups() if group.rows),
    )


class _Table:
    """The values that all cells of one table need."""

    def __init__(self, ranks: Ranks, pages: Mapping[int, str], whole: int) -> None:
        self._ranks = ranks
        self._pages = pages
        self._whole = max(1, whole)
        self._spreads: dict[Category, Spread] = {item.category: item for item in ranks.categories}
        spreads = [item.spread for item in (*ranks.categories, ranks.peak) if item is not None]
        most = 0 if ranks.peak is None else ranks.peak.max
        self._scale = max(max(spreads, default=0), round(_LEAST_SCALE * most))
        self._differs = any(spreads)

    @property
    def scale_in_words(self) -> str:
        return format_bytes(self._scale) if self._differs else ""

    def columns(self) -> Iterable[Bar]:
        yield Bar(label="Peak")
        if self._ranks.reserved is not None:
            yield Bar(label="Reserved")
        for category in self._spreads:
            yield Bar(label=label(category), paint=paint(category))

    def groups(self) -> Iterable[RankRows]:
        ranks = self._ranks
        title = every_rank(ranks) or f"{format_count(len(ranks.compared))} ranks"
        rows = tuple(self._overall()) if self._differs else ()
        yield RankRows(title=title, detail="each column by itself", rows=rows)
        yield RankRows(title="Ranks", detail="each at its own peak", rows=(*self._rows_of_classes(), *self._absent()))
        for (kind, axis), those in groupby(ranks.groups, key=lambda group: (group.kind, group.axis)):
            members = tuple(those)
            if len(members) == 1 or all(len(group.ranks) == 1 for group in members):
                continue  # the ranks' own rows show the same
            title = "Pipeline stages" if kind is GroupKind.STAGE else f"Mesh axis {visible(axis or '')}".rstrip()
            yield RankRows(title=title, detail="the worst rank of each", rows=tuple(map(self._group, members)))

    def _overall(self) -> Iterable[RankRow]:
        spreads = [each for each in (self._ranks.peak, self._ranks.reserved) if each is not None]
        spreads += self._spreads.values()
        for name, field in (("Most", "max"), ("Median", "median"), ("Least", "min")):
            sizes = [getattr(item, field) for item in spreads]
            cells = (Cell(text=_size(size), title=f"{format_count(size)} bytes") for size in sizes)
            yield RankRow(label=name, cells=tuple(cells))
        worst = (Cell(text=f"{item.worst}" if item.spread else "") for item in spreads)
        yield RankRow(label="Worst rank", cells=tuple(worst))

    def _rows_of_classes(self) -> Iterable[RankRow]:
        """A row for each class of equal ranks, with the values of the one with the largest peak."""
        rows = [(self._largest(alike), alike) for alike in self._ranks.alike]
        kept = sorted(rows, key=lambda row: -row[0].peak_bytes)[:MAX_ROWS]
        for rank, alike in rows:
            if (rank, alike) in kept:
                yield self._row(rank, visible(numbers(alike.ranks)), alike.ranks, visible(self._details(alike)))
        others = [row for row in rows if row not in kept]
        if others:
            count = sum(len(alike.ranks) for _, alike in others)
            sizes = [rank.peak_bytes for rank, _ in others]
            between = f"their peaks are between {format_peak(min(sizes))} and {format_peak(max(sizes))}"
            yield RankRow(label=f"{format_count(count)} more", note=between)

    def _details(self, alike: Alike) -> str:
        """The class in words: its place in the mesh, the spread of its peaks, and failed ranks."""
        those = [self._ranks.rank(number) for number in alike.ranks]
        found = self._ranks.worst
        worst = len(self._ranks.alike) > 1 and found is not None and found.rank in alike.ranks
        failed = [rank.rank for rank in those if rank.failure is not None or rank.out_of_memory is not None]
        who = "" if len(failed) == len(those) else f"{ranks_named(failed)} "
        ended = f"{who}failed later" if failed else ""
        equal = f"equal to within {format_bytes(alike.within)}; the largest is shown" if alike.within else "the same"
        several = f"{format_count(len(those))} ranks, {equal}" if len(those) > 1 else ""
        return "; ".join(filter(None, ("the worst" if worst else "", place(those), several, ended)))

    def _absent(self) -> Iterable[RankRow]:
        for why in Absence:
            those = [item.rank for item in self._ranks.missing if item.why is why]
            if those:
                yield RankRow(label=visible(numbers(those)), note=_ABSENT[why])

    def _group(self, group: RankGroup) -> RankRow:
        worst = self._ranks.rank(group.peak.worst)
        least, most = format_peak(group.peak.min), format_peak(group.peak.max)
        sizes = f"; peaks {least} to {most}" if group.peak.spread else ""
        detail = visible(f"{ranks_named(group.ranks)}{sizes}")
        return self._row(worst, visible(group_name(group)), (worst.rank,), detail)

    def _row(self, rank: Rank, name: str, ranks: Sequence[int], detail: str) -> RankRow:
        shown = next((number for number in ranks if number in self._pages), None)
        return RankRow(
            label=name,
            detail=detail,
            # The address on this page of that run, which the page's script handles.
            href="" if shown is None else f"#one-rank&{urlencode({'run': visible(self._pages[shown])})}",
            shown="" if shown is None else f"The page of rank {shown}",
            pieces=() if rank.peak is None else stacked(rank.peak.categories, self._whole),
            cells=tuple(self._cells(rank)),
        )

    def _cells(self, rank: Rank) -> Iterable[Cell]:
        if rank.peak is None or self._ranks.peak is None:
            return
        yield self._cell(rank.peak.said, self._ranks.peak)
        if self._ranks.reserved is not None and rank.reserved is not None:
            yield self._cell(rank.reserved, self._ranks.reserved)
        for category, spread in self._spreads.items():
            yield self._cell(rank.peak.categories[category], spread)

    def _cell(self, size: int, spread: Spread) -> Cell:
        above = size - spread.min
        return Cell(
            text=_size(size),
            title=f"{format_count(size)} bytes" + (f", {format_count(above)} above the smallest" if above else ""),
            shade=min(100.0, 100 * above / self._scale) if self._scale else 0.0,
            most=spread.marks(size),
        )

    def _largest(self, alike: Alike) -> Rank:
        return max((self._ranks.rank(number) for number in alike.ranks), key=lambda rank: (rank.peak_bytes, -rank.rank))


def _size(size: int) -> str:
    return format_peak(size) if size else "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The section of a job.

    ``shown`` is the run that the page opens on, empty without one; ``pages`` says which ranks' pages are in the file,
    ``command`` is the shell command for the page of another rank.
    """

    title: str
    facts: tuple[str, ...]
    problems: tuple[str, ...]
    tables: tuple[RankTable, ...]
    shown: str
    pages: str
    command: str


def job_view(jobs: Sequence[Ranks], pages: Sequence[Mapping[int, str]], opens: str) -> JobView:
    """The section of ``jobs``, one for each precision, on a page that opens on the run ``opens``.

    ``pages`` has for each job, by rank, the label of its run; nothing if the jobs were given as JSON.
    """
    whole = max((ranks.peak.max for ranks in jobs if ranks.peak is not None), default=0)
    return JobView(
        title=visible(jobs[0].job.script, MAX_PROSE),
        facts=tuple(visible(fact) for fact in _facts(jobs)),
        problems=tuple(
            visible(f"{capital(text.removeprefix('note: ').removesuffix('.'))}.", MAX_PROSE)
            for ranks in jobs
            for text in (*doubts(ranks), *absences(ranks))
        ),
        tables=tuple(
            rank_table(ranks, shown, whole=whole, title=heading(ranks) if len(jobs) > 1 else "")
            for ranks, shown in zip(jobs, pages, strict=True)
        ),
        shown=visible(opens),
        pages=_pages(jobs, pages),
        command=_command(jobs, pages),
    )


def _facts(jobs: Sequence[Ranks]) -> Iterable[str]:
    job = jobs[0].job
    yield f"{format_count(job.world_size)} ranks"
    yield describe_device(job)
    yield f"precision: {', '.join(map(heading, jobs))}"
    yield f"torch {job.torch}, ampmem {job.ampmem}"


def _pages(jobs: Sequence[Ranks], pages: Sequence[Mapping[int, str]]) -> str:
    if not any(pages):
        beside = ", and the precisions side by side," if len(jobs) > 1 else ""
        return f"This page was made from JSON: the pages of single ranks{beside} need the recordings."
    if all(len(shown) == len(ranks.ranks) for ranks, shown in zip(jobs, pages, strict=True)):
        return "Every rank's page is in this file: follow its number in the table above, or choose it at the top."
    return (
        "All that follows is about this one rank. This file has the pages of the worst rank and of ranks that differ "
        "from it: follow their numbers in the table above, or choose one at the top."
    )


def _command(jobs: Sequence[Ranks], pages: Sequence[Mapping[int, str]]) -> str:
    for ranks, shown in zip(jobs, pages, strict=True) if any(pages) else ():
        for rank in ranks.ranks:
            if rank.rank not in shown:
                return visible(f"ampmem report {shlex.quote(rank.file)}")
    return ""


def ranks_verdict_view(ranks: Ranks) -> VerdictView:
    """The verdict at the top of a job's page."""
    shown = tuple(_ranks_to_show(ranks))
    step = "each rank's last step" if ranks.step is None else f"of step {ranks.step}, each rank's own, on one scale"
    return VerdictView(
        **sentences(ranks_wording(ranks)),
        when=visible(step),
        bars=tuple(_bars(ranks, shown)),
        legend=legend_of(peak.categories for _, _, peak in shown),
        waterfall=_waterfall(ranks),
    )


def _ranks_to_show(ranks: Ranks) -> Iterable[tuple[str, Rank, RankPeak]]:
    """The worst, the median and the least rank; of equal ones only the first."""
    worst = ranks.worst
    if worst is None:
        return
    names = {worst.rank: "most", worst.over_median.rank: "median", worst.over_least.rank: "least"}
    before: list[int] = []
    for number in (worst.rank, worst.over_median.rank, worst.over_least.rank):
        rank = ranks.rank(number)
        if rank.peak is not None and rank.peak.said not in before:
            before.append(rank.peak.said)
            yield names[number], rank, rank.peak


def _bars(ranks: Ranks, shown: Sequence[tuple[str, Rank, RankPeak]]) -> Iterable[Bar]:
    most = max((peak.said for _, _, peak in shown), default=0) or 1
    for name, rank, peak in shown:
        difference = peak.said - most
        yield Bar(
            label=f"Rank {rank.rank}, {name}" if len(shown) > 1 else f"Rank {rank.rank}",
            value=peaks_apart(peak.said, most)[0],
            change=signed(difference) if difference else "",
            pieces=stacked(peak.categories, most),
        )


def _waterfall(ranks: Ranks) -> Waterfall | None:
    """The waterfall from the median rank to the worst, or from the least rank if the median is as large."""
    worst = ranks.worst
    if worst is None or ranks.unsound or ranks.launches:
        return None
    excess = next((each for each in (worst.over_median, worst.over_least) if each.bytes), None)
    peak, other = ranks.rank(worst.rank).peak, None if excess is None else ranks.rank(excess.rank).peak
    if excess is None or other is None or peak is None:
        return None
    return waterfall(
        End(label=f"rank {excess.rank}", bytes=other.said, parts=other.categories),
        End(label=f"rank {worst.rank}", bytes=peak.said, parts=peak.categories),
        f"both {in_phase(peak.phase)}" if other.phase == peak.phase else "between two instants",
    )
