"""Recordings side by side: their figures, and the waterfalls from the baseline's bytes to another recording's.

For two runs of changed code this is the verdict and a list of changes that can be sorted and searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ampmem.analysis.answer import verdict_of
from ampmem.analysis.comparison import Compared, Comparison, StepTime, step_in_words
from ampmem.analysis.difference.difference import Difference, Fold, GroupChange, folded
from ampmem.analysis.jsonable import like
from ampmem.analysis.summary import Step
from ampmem.analysis.timeline.categories import Breakdown
from ampmem.reporters.html.run import Headline
from ampmem.reporters.html.safety import MAX_PROSE, visible
from ampmem.reporters.html.verdict import Bar, End, VerdictView, legend_of, stacked, waterfall
from ampmem.reporters.text.answer import capital
from ampmem.reporters.text.difference import (
    cells,
    compiling_title,
    foot,
    headline,
    remarks,
    tensor_in_words,
    what,
)
from ampmem.reporters.text.plain_text import ABSENT, or_absent, percent, short, signed, times
from ampmem.units import format_apart, format_duration
from ampmem.vocabulary import Mark

_WATERFALLS = (Mark.AFTER_FORWARD, Mark.PEAK)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRuns:
    """Runs side by side: the compared steps, as the JSON of each run has them, and the words about them.

    ``labels``, ``steps`` and the cells of the tables have one entry for each run, in order; ``baseline`` is the index
    of the one that the others are compared with. A row of ``figures`` and of ``losses`` begins with its name; without
    a baseline ``loss_differences`` is empty. ``waterfalls`` are drawn from the baseline to the run with that index,
    at that mark. ``compiling`` has a table of what compiling changes in each precision: its title, then its rows.
    """

    labels: tuple[str, ...]
    steps: tuple[Step | None, ...]
    baseline: int | None
    waterfalls: tuple[tuple[int, Mark], ...]
    figures: tuple[tuple[str, ...], ...]
    losses: tuple[tuple[str, ...], ...]
    loss_differences: tuple[str, ...]
    remarks: tuple[str, ...]
    failures: tuple[str, ...]
    compiling: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = ()


def compared_runs(comparison: Comparison, compiling: Sequence[Difference] = ()) -> ComparedRuns:
    """The page's section of ``comparison``, and of what ``compiling`` changes."""
    columns, base = comparison.columns, comparison.baseline
    labels = tuple(entry.label for entry in comparison.entries)
    differences = tuple(percent(column.loss_difference) for column in columns)
    figures = _figures(columns, None if base is None else labels[base])
    return ComparedRuns(
        labels=labels,
        steps=tuple(column.step for column in columns),
        baseline=base,
        waterfalls=tuple(_waterfalls(comparison)),
        figures=tuple(row for row in figures if set(row[1:]) != {ABSENT}),
        losses=tuple((str(step), *map(short, losses)) for step, losses in comparison.losses.items()),
        loss_differences=() if base is None else (f"vs {labels[base]}, up to", *differences),
        remarks=comparison.remarks,
        failures=tuple(
            f"{each.label} failed: {each.failure}" for each in comparison.entries if each.failure is not None
        ),
        compiling=tuple(
            (capital(compiling_title(found)), tuple(tuple(cells(fold)) for fold in folded(found.changes)[:ROWS]))
            for found in compiling
        ),
    )


def _figures(columns: Sequence[Compared], baseline: str | None) -> Iterator[tuple[str, ...]]:
    """Times and memory, a row each: its name, then a cell for each column."""

    def timed(text: Callable[[StepTime], str]) -> Iterator[str]:
        return (ABSENT if column.step_time is None else text(column.step_time) for column in columns)

    yield "Step time, median", *timed(lambda time: format_duration(time.median_ns))
    spread = timed(lambda time: f"{format_duration(time.fastest_ns)} - {format_duration(time.slowest_ns)}")
    yield "Fastest to slowest", *spread
    yield "Peak reserved", *(or_absent(column.peak_reserved) for column in columns)
    if baseline is not None:
        yield f"Step time vs {baseline}", *timed(lambda time: times(time.ratio))
        yield f"Peak vs {baseline}", *(signed(column.peak_difference) for column in columns)
        yield f"Activations after forward, vs {baseline}", *(times(column.activation_ratio) for column in columns)


def _waterfalls(comparison: Comparison) -> Iterator[tuple[int, Mark]]:
    """The waterfalls from the baseline to each other recording, except equal ones and the one in the verdict.

    Two peaks in different phases have no waterfall if the verdict has the end of forward instead.
    """
    if comparison.baseline is None:
        return
    told = verdict_of(comparison).answer
    for index, column in enumerate(comparison.columns):
        for mark in _WATERFALLS:
            live = [each.live(mark) for each in comparison.columns]
            if None in (live[comparison.baseline], live[index]):
                continue
            if live[index] in live[:index] or index == comparison.baseline:
                continue
            of_verdict = told is not None and column.entry.label == told.mixed.label
            if not of_verdict or (mark != Mark.PEAK and told is not None and not told.by_forward):
                yield index, mark


def difference_headline(comparison: Comparison, index: int) -> Headline | None:
    """The difference of the peak of the recording at ``index`` to the baseline's; ``None`` without a baseline."""
    column = comparison.columns[index]
    difference = column.peak_difference
    if comparison.baseline is None or index == comparison.baseline or difference is None:
        return None
    base = comparison.columns[comparison.baseline]
    baseline, which = base.entry.label, step_in_words((column, base))
    return Headline(
        label=f"Compared with {baseline}", value=signed(difference), detail=f"at the peak, {which}", bytes=difference
    )


ROWS = 2000
"""The most changes in a page."""
_BEFORE, _AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeView:
    """A row of the table: one change, or equal changes in several layers, of which ``largest`` is the largest.

    ``before`` and ``after`` are the bytes of all ``changes``; ``module`` and ``name`` have ``*`` for the layers.
    """

    largest: GroupChange
    kind: str
    what: str
    module: str
    name: str
    tensors: str
    changes: int
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesView:
    """The changes, the largest first; ``note`` says that they add up, and how many are left out."""

    note: str
    rows: tuple[ChangeView, ...]


def changes_view(found: Difference) -> ChangesView:
    """The section "What changed"."""
    folds = folded(found.changes)
    left = folds[ROWS:]
    more = f" {len(left):,} smaller changes, {signed(sum(fold.grown for fold in left))}, are left out." if left else ""
    return ChangesView(note=foot(found) + more, rows=tuple(map(_change_row, folds[:ROWS])))


def _change_row(fold: Fold) -> ChangeView:
    return like(
        ChangeView,
        fold,
        kind=fold.largest.kind,
        what=what(fold),
        module=fold.module or "",
        name=fold.name or "",
        tensors=tensor_in_words(fold.largest),
        changes=len(fold.changes),
    )


def difference_verdict(found: Difference) -> VerdictView:
    """The verdict at the top of the page of a difference."""
    before, after = found.categories_before, found.categories_after
    whole = max(sum(before.values()), sum(after.values()), 1)
    return VerdictView(
        headline=visible(headline(found), MAX_PROSE),
        why=visible(" ".join(remarks(found)), MAX_PROSE),
        more=visible(" ".join(f"Warning: {doubt}." for doubt in found.doubts), MAX_PROSE),
        when="of each, on one scale",
        bars=(_difference_bar(_BEFORE, before, after, whole), _difference_bar(_AFTER, after, before, whole)),
        legend=legend_of((before, after)),
        waterfall=None
        if before == after
        else waterfall(
            End(label=_BEFORE, bytes=sum(before.values()), parts=before),
            End(label=_AFTER, bytes=sum(after.values()), parts=after),
            "at the peak of each",
        ),
    )


def _difference_bar(name: str, mine: Breakdown, other: Breakdown, whole: int) -> Bar:
    size, beside = sum(mine.values()), sum(other.values())
    change = signed(size - beside) if name == _AFTER and size != beside else ""
    return Bar(label=name, value=format_apart(size, beside)[0], change=change, pieces=stacked(mine, whole))
