"""The ranks of a job, for the page: one table of every rank, the spread over all, and the groups of the mesh.

It is plain HTML, as the verdict is. A cell is shaded by its bytes above the least that any rank has of the same
category, all on one scale: what is equal on all ranks is not shaded, and what makes one rank the worst is darkest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from urllib.parse import urlencode

from ampmem.analysis.ranks.ranks import SAME, Absence, Alike, GroupKind, Rank, RankGroup, Ranks, Spread
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.html.palette import label
from ampmem.reporters.html.safety import visible
from ampmem.reporters.html.views.bars import Paint, Piece, paint, stacked
from ampmem.reporters.text.ranks.names import group_name, named, numbers, place
from ampmem.units import format_bytes, format_count, format_peak

MAX_ROWS = 64
"""So many groups of equal ranks have a row of their own: those with the largest peaks."""

_NOTABLE = 0.01
"""The most of a column is marked where the ranks differ by this share of it, or more."""

_ABSENT = {
    Absence.NO_FILE: "no file",
    Absence.LIES_BESIDE: "not given",
    Absence.NOTHING_RECORDED: "nothing to show",
    Absence.ENDED_EARLY: "did not end the step that is compared",
}

_LEAST_SCALE = 0.05
"""The darkest shade is this share of the largest peak, or more: what is less is no difference to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Bytes, exactly so in ``title``; ``shade`` is in per cent of the darkest, ``most`` marks that of its column."""

    text: str
    title: str = ""
    shade: float = 0
    most: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One row: ``href`` leads to the page that ``shown`` names; ``note`` stands in the place of cells."""

    label: str
    detail: str = ""
    href: str = ""
    shown: str = ""
    pieces: tuple[Piece, ...] = ()
    cells: tuple[Cell, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """Rows under one heading."""

    title: str
    detail: str
    rows: tuple[RankRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What a column is of."""

    label: str
    paint: Paint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """The table of one job; ``scale`` says what the darkest shade is, empty where no rank differs."""

    title: str
    scale: str
    columns: tuple[Column, ...]
    groups: tuple[RankRows, ...]


def rank_table(ranks: Ranks, pages: Mapping[int, str], *, whole: int, title: str = "") -> RankTable:
    """The table of ``ranks``, whose bars are in parts of ``whole`` bytes.

    ``pages`` has, by rank, the label of the run of the page that shows it.
    """
    table = _Table(ranks, pages, whole)
    return RankTable(
        title=visible(title),
        scale=table.scale_in_words,
        columns=tuple(table.columns()),
        groups=tuple(group for group in table.groups() if group.rows),
    )


class _Table:
    """What all cells of one table are made with."""

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

    def columns(self) -> Iterable[Column]:
        yield Column(label="Peak")
        if self._ranks.reserved is not None:
            yield Column(label="Reserved")
        for category in self._spreads:
            yield Column(label=label(category), paint=paint(category))

    def groups(self) -> Iterable[RankRows]:
        ranks = self._ranks
        count = len(ranks.compared)
        every = "Both ranks" if count == 2 else f"All {format_count(count)} ranks"
        title = every if count == ranks.job.world_size else f"{format_count(count)} ranks"
        rows = tuple(self._overall()) if self._differs else ()
        yield RankRows(title=title, detail="of each column by itself", rows=rows)
        yield RankRows(title="Ranks", detail="each at its own peak", rows=(*self._each(), *self._absent()))
        for (kind, axis), those in groupby(ranks.groups, key=lambda group: (group.kind, group.axis)):
            members = tuple(those)
            if len(members) == 1 or all(len(group.ranks) == 1 for group in members):
                continue  # the rows of the ranks say the same
            title = "Pipeline stages" if kind is GroupKind.STAGE else f"Mesh axis {visible(axis or '')}".rstrip()
            yield RankRows(title=title, detail="of each its worst rank", rows=tuple(map(self._group, members)))

    def _overall(self) -> Iterable[RankRow]:
        spreads = [*(item for item in (self._ranks.peak, self._ranks.reserved) if item is not None)]
        spreads += self._spreads.values()
        yield RankRow(label="Most", cells=tuple(_plain(item.max) for item in spreads))
        yield RankRow(label="Median", cells=tuple(_plain(item.median) for item in spreads))
        yield RankRow(label="Least", cells=tuple(_plain(item.min) for item in spreads))
        worst = (Cell(text=f"{item.worst}" if item.spread else "") for item in spreads)
        yield RankRow(label="Worst rank", cells=tuple(worst))

    def _each(self) -> Iterable[RankRow]:
        """One row for ranks that are alike, of the one with the largest peak."""
        rows = [(self._largest(alike), alike) for alike in self._ranks.alike]
        kept = sorted(rows, key=lambda row: -_bytes(row[0]))[:MAX_ROWS]
        for rank, alike in rows:
            if (rank, alike) in kept:
                yield self._row(rank, visible(numbers(alike.ranks)), alike.ranks, visible(self._details(alike)))
        others = [row for row in rows if row not in kept]
        if others:
            count = sum(len(alike.ranks) for _, alike in others)
            sizes = [_bytes(rank) for rank, _ in others]
            between = f"their peaks are between {format_peak(min(sizes))} and {format_peak(max(sizes))}"
            yield RankRow(label=f"{format_count(count)} more", note=between)

    def _details(self, alike: Alike) -> str:
        """Where they are in the mesh, how alike, and what became of them."""
        those = [self._ranks.rank(number) for number in alike.ranks]
        several = len(self._ranks.alike) > 1
        worst = several and self._ranks.worst is not None and self._ranks.worst.rank in alike.ranks
        failed = [rank.rank for rank in those if rank.failure is not None or rank.out_of_memory is not None]
        ended = "" if not failed else "failed later" if len(failed) == len(those) else f"{named(failed)} failed later"
        return "; ".join(filter(None, ("the worst" if worst else "", place(those), _alike_in_words(alike), ended)))

    def _absent(self) -> Iterable[RankRow]:
        for why in Absence:
            those = [item.rank for item in self._ranks.missing if item.why is why]
            if those:
                yield RankRow(label=visible(numbers(those)), note=_ABSENT[why])

    def _group(self, group: RankGroup) -> RankRow:
        worst = self._ranks.rank(group.peak.worst)
        least, most = format_peak(group.peak.min), format_peak(group.peak.max)
        sizes = f"; peaks {least} to {most}" if group.peak.spread else ""
        detail = visible(f"{named(group.ranks)}{sizes}")
        return self._row(worst, visible(group_name(group)), (worst.rank,), detail)

    def _row(self, rank: Rank, name: str, ranks: Sequence[int], detail: str) -> RankRow:
        shown = next((number for number in ranks if number in self._pages), None)
        return RankRow(
            label=name,
            detail=detail,
            href="" if shown is None else page_of(self._pages[shown]),
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
            text=format_peak(size) if size else "0",
            title=f"{format_count(size)} bytes" + (f", {format_count(above)} above the least" if above else ""),
            shade=min(100.0, 100 * above / self._scale) if self._scale else 0.0,
            most=size == spread.max and spread.spread >= _NOTABLE * spread.max and spread.spread > SAME,
        )

    def _largest(self, alike: Alike) -> Rank:
        return max((self._ranks.rank(number) for number in alike.ranks), key=lambda rank: (_bytes(rank), -rank.rank))


def page_of(run: str) -> str:
    """The address, on this page, of the run with that label; the page's script knows it."""
    return f"#one-rank&{urlencode({'run': visible(run)})}"


def _plain(size: int) -> Cell:
    return Cell(text=format_peak(size) if size else "0", title=f"{format_count(size)} bytes")


def _bytes(rank: Rank) -> int:
    return 0 if rank.peak is None else rank.peak.said


def _alike_in_words(alike: Alike) -> str:
    count = len(alike.ranks)
    if count == 1:
        return ""
    how = f"alike to within {format_bytes(alike.within)}, here the largest" if alike.within else "the same"
    return f"{format_count(count)} ranks, {how}"
