"""Recordings side by side, and how one gets from the baseline's bytes to another's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ampmem.analysis.comparison.answer import verdict_of
from ampmem.analysis.comparison.compare import Comparison, Instant, StepTime
from ampmem.analysis.json.jsonable import named
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown
from ampmem.reporters.html.run import Headline
from ampmem.reporters.text.words import IN_SHORT, percent, short, signed, times
from ampmem.units import format_duration
from ampmem.vocabulary import Mark

_WATERFALLS = (Mark.AFTER_FORWARD, Mark.PEAK)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """Bytes of one category."""

    key: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """Bytes of one category, one cell per column."""

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
    """What leads from one recording's bytes to another's: ``start`` and all ``terms`` make ``end``, exactly."""

    source: str = field(metadata=named("from"))
    target: str = field(metadata=named("to"))
    instant: str
    start: int
    end: int
    terms: tuple[SizeRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeView:
    """How long a step takes without instrumentation; ``ratio_text`` is to the baseline."""

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
    """Why a script did not get to its end."""

    label: str
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonView:
    """All of it; tuples have one entry per recording, ``None`` or a dash for what is not known."""

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
    """What the page says of ``comparison``."""
    labels = tuple(entry.label for entry in comparison.entries)
    return ComparisonView(
        baseline=None if comparison.baseline is None else labels[comparison.baseline],
        labels=labels,
        steps=comparison.steps,
        instants=tuple(map(_instant, comparison.instants)),
        waterfall=tuple(_waterfalls(comparison, labels)),
        peak_difference=comparison.peak_difference,
        peak_reserved=comparison.peak_reserved,
        step_time=tuple(None if time is None else _step_time(time) for time in comparison.step_time),
        losses=tuple(
            LossView(step=row.step, values=row.losses, texts=tuple(map(short, row.losses))) for row in comparison.losses
        ),
        loss_difference=comparison.loss_difference,
        loss_difference_texts=tuple(map(percent, comparison.loss_difference)),
        activation_ratio=comparison.activation_ratio,
        activation_ratio_texts=tuple(map(times, comparison.activation_ratio)),
        remarks=comparison.remarks,
        failures=tuple(
            FailureView(label=entry.label, failure=entry.failure)
            for entry in comparison.entries
            if entry.failure is not None
        ),
    )


def difference_headline(comparison: Comparison, index: int) -> Headline | None:
    """How the peak of the recording at ``index`` differs from the baseline's; ``None`` without that."""
    difference = comparison.peak_difference[index]
    if comparison.baseline is None or index == comparison.baseline or difference is None:
        return None
    baseline = comparison.entries[comparison.baseline].label
    steps = {comparison.steps[index], comparison.steps[comparison.baseline]}
    which = f"step {comparison.steps[index]}" if len(steps) == 1 else "the last step of each"
    return Headline(
        label=f"Against {baseline}", value=signed(difference), detail=f"at the peak, {which}", bytes=difference
    )


def _instant(instant: Instant) -> InstantView:
    rows = (
        CellRow(key=str(category), cells=tuple(None if live is None else live[category] for live in instant.live))
        for category in CATEGORIES
    )
    return InstantView(
        name=IN_SHORT[instant.name], rows=tuple(row for row in rows if any(row.cells)), totals=instant.total
    )


def _waterfalls(comparison: Comparison, labels: Sequence[str]) -> Iterator[WaterfallView]:
    """From the baseline to each other recording, unless another is the same, or the verdict has it.

    A way between two peaks in different phases is not shown where the verdict has the end of forward instead.
    """
    if comparison.baseline is None:
        return
    told = verdict_of(comparison).answer
    for index, label in enumerate(labels):
        for name in _WATERFALLS:
            live = comparison.instant(name).live
            start, end = live[comparison.baseline], live[index]
            if start is None or end is None or end in live[:index] or index == comparison.baseline:
                continue
            of_verdict = told is not None and label == told.mixed.label
            if not of_verdict or (name != Mark.PEAK and told is not None and not told.by_forward):
                yield _waterfall(labels[comparison.baseline], label, name, start, end)


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
