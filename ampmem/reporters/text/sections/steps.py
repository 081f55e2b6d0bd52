"""The steps of a run, a row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampmem.analysis.summary import Step, Summary
from ampmem.names import has_times
from ampmem.reporters.text.common.describe import describe_loss, describe_update
from ampmem.reporters.text.common.layout import Column, Layout, number, table, words
from ampmem.reporters.text.common.plain_text import ABSENT
from ampmem.units import format_duration, format_peak
from ampmem.vocabulary import SourceKind


@dataclass(frozen=True, slots=True)
class _Figure:
    """A column, what is in it, and whether it says anything of these steps."""

    column: Column
    cell: Callable[[Step], str]
    said: bool = True


def render_steps(summary: Summary, notes: Sequence[str], layout: Layout) -> str:
    """One row for each step; what is not known of any of them has no column."""
    steps = summary.steps
    timed = has_times(notes) and summary.source is not SourceKind.SIMULATED
    updated = any(not step.finished or step.skipped_update or step.marks.after_optimizer is not None for step in steps)
    figures = [
        _Figure(number("step"), lambda step: str(step.index)),
        _Figure(number("loss", rank=2), describe_loss, any(step.loss is not None for step in steps)),
        _Figure(number("loss\nscale", rank=3), _scale, any(step.loss_scale is not None for step in steps)),
        _Figure(words("update"), describe_update, updated),
        _Figure(number("peak"), lambda step: format_peak(step.peak.said)),
        _Figure(words("in"), lambda step: step.peak.phase),
        _Figure(number("peak\nreserved", rank=1), _reserved, any(step.peak_reserved is not None for step in steps)),
        _Figure(number("took", rank=4), lambda step: format_duration(step.duration_ns), timed),
    ]
    shown = [figure for figure in figures if figure.said]
    rows = [[figure.cell(step) for figure in shown] for step in steps]
    return f"{layout.strong('steps')}\n\n{table([figure.column for figure in shown], rows, layout)}"


def _scale(step: Step) -> str:
    return ABSENT if step.loss_scale is None else f"{step.loss_scale:.6g}"


def _reserved(step: Step) -> str:
    return ABSENT if step.peak_reserved is None else format_peak(step.peak_reserved)
