"""Recordings side by side: what leads from the baseline's bytes to another recording's, and what changed.

For two runs of changed code this is the verdict and a list of changes that can be sorted and searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ampmem.analysis.answer import verdict_of
from ampmem.analysis.comparison import Comparison, StepTime, step_in_words
from ampmem.analysis.difference.changes import Fold, WhichRun, folded
from ampmem.analysis.difference.difference import Difference
from ampmem.analysis.jsonable import named
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown
from ampmem.reporters.html.palette import label
from ampmem.reporters.html.run import Headline
from ampmem.reporters.html.safety import MAX_PROSE, visible
from ampmem.reporters.html.verdict import Bar, End, VerdictView, Waterfall, falls, paint, stacked, unchanged
from ampmem.reporters.text.difference import foot, headline, remarks, tensor_in_words, what
from ampmem.reporters.text.plain_text import IN_SHORT, percent, short, signed, times
from ampmem.units import format_apart, format_duration
from ampmem.vocabulary import Mark

_MARKS = (Mark.AFTER_FORWARD, Mark.AFTER_BACKWARD, Mark.AFTER_OPTIMIZER, Mark.PEAK)
_WATERFALLS = (Mark.AFTER_FORWARD, Mark.PEAK)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """The bytes of one category."""

    key: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """The bytes of one category, one cell per column."""

    key: str
    cells: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantView:
    """The categories at one instant, one cell per recording."""

    name: str
    rows: tuple[CellRow, ...]
    totals: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallView:
    """The steps from one recording's bytes to another's: ``start`` plus all ``terms`` is exactly ``end``."""

    source: str = field(metadata=named("from"))
    target: str = field(metadata=named("to"))
    instant: str
    start: int
    end: int
    terms: tuple[SizeRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeView:
    """The duration of a step without instrumentation; ``ratio_text`` is the ratio to the baseline."""

    median_ns: int
    min_ns: int
    max_ns: int
    text: str
    ratio_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossView:
    """The losses of one step."""

    step: int
    values: tuple[float | None, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureView:
    """Why a script failed."""

    label: str
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonView:
    """A comparison as data; tuples have one entry per recording, ``None`` or a dash for unknown values."""

    baseline: str | None
    labels: tuple[str, ...]
    steps: tuple[int | None, ...]
    instants: tuple[InstantView, ...]
    waterfall: tuple[WaterfallView, ...]
    peak_difference: tuple[int | None, ...]
    peak_reserved: tuple[int | None, ...]
    step_time: tuple[StepTimeView | None, ...]
    losses: tuple[LossView, ...]
    loss_difference: tuple[float | None, ...]
    loss_difference_texts: tuple[str, ...]
    activation_ratio: tuple[float | None, ...]
    activation_ratio_texts: tuple[str, ...]
    remarks: tuple[str, ...]
    failures: tuple[FailureView, ...]


def comparison_view(comparison: Comparison) -> ComparisonView:
    """The page's data from ``comparison``."""
    columns = comparison.columns
    labels = tuple(entry.label for entry in comparison.entries)
    return ComparisonView(
        baseline=None if comparison.baseline is None else labels[comparison.baseline],
        labels=labels,
        steps=tuple(None if column.step is None else column.step.index for column in columns),
        instants=tuple(_instant(comparison, mark) for mark in _MARKS),
        waterfall=tuple(_waterfalls(comparison, labels)),
        peak_difference=tuple(column.peak_difference for column in columns),
        peak_reserved=tuple(column.peak_reserved for column in columns),
        step_time=tuple(None if column.step_time is None else _step_time(column.step_time) for column in columns),
        losses=tuple(
            LossView(step=step, values=losses, texts=tuple(map(short, losses)))
            for step, losses in comparison.losses.items()
        ),
        loss_difference=tuple(column.loss_difference for column in columns),
        loss_difference_texts=tuple(percent(column.loss_difference) for column in columns),
        activation_ratio=tuple(column.activation_ratio for column in columns),
        activation_ratio_texts=tuple(times(column.activation_ratio) for column in columns),
        remarks=comparison.remarks,
        failures=tuple(
            FailureView(label=entry.label, failure=entry.failure)
            for entry in comparison.entries
            if entry.failure is not None
        ),
    )


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


def _instant(comparison: Comparison, mark: Mark) -> InstantView:
    each = [column.live(mark) for column in comparison.columns]
    rows = (
        CellRow(key=str(category), cells=tuple(None if live is None else live[category] for live in each))
        for category in CATEGORIES
    )
    return InstantView(
        name=IN_SHORT[mark],
        rows=tuple(row for row in rows if any(row.cells)),
        totals=tuple(column.total(mark) for column in comparison.columns),
    )


def _waterfalls(comparison: Comparison, labels: Sequence[str]) -> Iterator[WaterfallView]:
    """The waterfalls from the baseline to each other recording, except equal ones and the one in the verdict.

    Two peaks in different phases have no waterfall if the verdict has the end of forward instead.
    """
    if comparison.baseline is None:
        return
    told = verdict_of(comparison).answer
    for index, target in enumerate(labels):
        for name in _WATERFALLS:
            live = [column.live(name) for column in comparison.columns]
            start, end = live[comparison.baseline], live[index]
            if start is None or end is None or end in live[:index] or index == comparison.baseline:
                continue
            of_verdict = told is not None and target == told.mixed.label
            if not of_verdict or (name != Mark.PEAK and told is not None and not told.by_forward):
                yield _waterfall(labels[comparison.baseline], target, name, start, end)


def _waterfall(source: str, target: str, name: Mark, start: Breakdown, end: Breakdown) -> WaterfallView:
    terms = [SizeRow(key=str(category), bytes=end[category] - start[category]) for category in CATEGORIES]
    return WaterfallView(
        source=source,
        target=target,
        instant=IN_SHORT[name],
        start=sum(start.values()),
        end=sum(end.values()),
        terms=tuple(term for term in terms if term.bytes),
    )


def _step_time(time: StepTime) -> StepTimeView:
    return StepTimeView(
        median_ns=time.median_ns,
        min_ns=time.fastest_ns,
        max_ns=time.slowest_ns,
        text=format_duration(time.median_ns),
        ratio_text=times(time.ratio),
    )


ROWS = 2000
"""The most changes in a page."""
_BEFORE, _AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeView:
    """One change, or several alike in several layers; ``line_before`` says that the line is the run before's."""

    kind: str
    category: str
    what: str
    module: str
    name: str
    op: str
    source_line: str
    line_before: bool
    stack: tuple[str, ...]
    tensors: str
    changes: int
    before: int
    after: int
    grown: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesView:
    """The changes, the largest first; ``note`` says that they add up, and what is left out."""

    note: str
    rows: tuple[ChangeView, ...]


def changes_view(found: Difference) -> ChangesView:
    """The section "What changed"."""
    folds = folded(found.changes)
    left = folds[ROWS:]
    more = f" {len(left):,} smaller changes, {signed(sum(fold.grown for fold in left))}, are left out." if left else ""
    return ChangesView(note=foot(found) + more, rows=tuple(map(_change_row, folds[:ROWS])))


def _change_row(fold: Fold) -> ChangeView:
    change = fold.largest
    return ChangeView(
        kind=change.kind,
        category=change.category,
        what=what(fold),
        module=fold.module or "",
        name=fold.name or "",
        op=change.op or "",
        source_line=change.source_line or "",
        line_before=change.lines_of is WhichRun.BEFORE,
        stack=change.stack,
        tensors=tensor_in_words(change),
        changes=len(fold.changes),
        before=fold.before,
        after=fold.after,
        grown=fold.grown,
    )


def difference_verdict(found: Difference) -> VerdictView:
    """The verdict at the top of the page of a difference."""
    before, after = found.categories_before, found.categories_after
    whole = max(sum(before.values()), sum(after.values()), 1)
    shown = [category for category in CATEGORIES if before[category] or after[category]]
    return VerdictView(
        headline=visible(headline(found), MAX_PROSE),
        why=visible(" ".join(remarks(found)), MAX_PROSE),
        more=visible(" ".join(f"Warning: {doubt}." for doubt in found.doubts), MAX_PROSE),
        when="of each, on one scale",
        bars=(_difference_bar(_BEFORE, before, after, whole), _difference_bar(_AFTER, after, before, whole)),
        legend=tuple(Bar(label=label(category), paint=paint(category)) for category in shown),
        waterfall=_difference_waterfall(before, after) if before != after else None,
    )


def _difference_bar(name: str, mine: Breakdown, other: Breakdown, whole: int) -> Bar:
    size, beside = sum(mine.values()), sum(other.values())
    change = signed(size - beside) if name == _AFTER and size != beside else ""
    return Bar(label=name, value=format_apart(size, beside)[0], change=change, pieces=stacked(mine, whole))


def _difference_waterfall(before: Breakdown, after: Breakdown) -> Waterfall:
    same = {category: before[category] for category in CATEGORIES if before[category] == after[category] != 0}
    return Waterfall(
        title="From before to after",
        when="at the peak of each",
        rows=falls(
            End(label=_BEFORE, bytes=sum(before.values())),
            End(label=_AFTER, bytes=sum(after.values())),
            {category: after[category] - before[category] for category in CATEGORIES},
        ),
        unchanged=unchanged(same),
    )
