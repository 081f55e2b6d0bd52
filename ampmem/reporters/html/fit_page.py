"""The page of ``ampmem fit``: the peak of each precision over the varied argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ampmem.analysis.fit import FitResult, PrecisionFit
from ampmem.analysis.timeline.categories import Category
from ampmem.output import write_text
from ampmem.reporters.html.page import ChartView, render_chart
from ampmem.reporters.html.palette import FILLS, Fill
from ampmem.reporters.text.fit import (
    break_even_lines,
    cells,
    different_precisions,
    facts,
    fitting_lines,
    headline,
    remarks,
    room,
    room_in_words,
    sizes_of,
)
from ampmem.units import format_count
from ampmem.vocabulary import Precision

_LOOKS: dict[Precision, tuple[Fill, str]] = {
    Precision.FP32: (FILLS[Category.PARAMETERS], "circle"),
    Precision.AMP: (FILLS[Category.ACTIVATIONS], "square"),
    Precision.AMP_NOCACHE: (FILLS[Category.BUFFERS], "diamond"),
    Precision.BF16: (FILLS[Category.INPUTS], "star"),
    Precision.AS_IS: (FILLS[Category.OPTIMIZER_STATE], "triangle-up"),
}
"""Colour and plotly symbol of each precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveView:
    """The words and the looks of the curve of one precision.

    ``label`` names the precision, and a precision before it with equal peaks. ``texts`` has lines of words for each run
    that fits or may fit.
    """

    label: str
    light: str
    dark: str
    symbol: str
    texts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitView(ChartView):
    """The data that the page is drawn from: the result as ``ampmem fit --json`` prints it, and the words about it.

    ``curves`` has one for each precision of ``fit``. ``capacity`` is the memory that the allocator can surely take of
    the device, in bytes, ``may`` its upper bound, and ``capacity_text`` and ``may_text`` are the same in words;
    ``room`` explains them.
    """

    fit: FitResult
    facts: tuple[tuple[str, str], ...]
    fitting: tuple[str, ...]
    break_even: tuple[str, ...]
    remarks: tuple[str, ...]
    capacity: int | None
    may: int | None
    capacity_text: str
    may_text: str
    room: str
    curves: tuple[CurveView, ...]
    columns: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]


def write_fit(fit: FitResult, output: Path, *, force: bool = False) -> None:
    """Write the page of ``fit``. Raises :class:`~ampmem.errors.UsageError` when ``output`` cannot be written."""
    write_text(output, render_chart("fit", fit_view(fit)), force=force)


def fit_view(fit: FitResult) -> FitView:
    """The page's data from ``fit``."""
    capacity, may = room(fit) or (None, None)
    shown = sizes_of(fit)
    different = different_precisions(fit)
    return FitView(
        fit=fit,
        title=headline(fit),
        facts=tuple(facts(fit)),
        fitting=tuple(fitting_lines(fit)),
        break_even=tuple(break_even_lines(fit)),
        remarks=tuple(remarks(fit)),
        capacity=capacity,
        may=may,
        capacity_text="" if capacity is None else f"below {shown(capacity)}: fits",
        may_text="" if may is None or may == capacity else f"above {shown(may)}: does not fit",
        room=room_in_words(fit),
        curves=tuple(_curve(fit, precision, shown) for precision in fit.precisions),
        columns=tuple(different),
        table=tuple(
            (str(value), *(_cell(precision, value, shown) for precision in different.values())) for value in fit.values
        ),
    )


def _curve(fit: FitResult, precision: PrecisionFit, shown: Callable[[int], str]) -> CurveView:
    fill, symbol = _LOOKS[precision.name]
    same = fit.same_as(precision)
    return CurveView(
        label=f"{precision.name}: the same as {same.name}" if same else precision.name,
        light=fill.light,
        dark=fill.dark,
        symbol=symbol,
        texts=tuple(
            (
                f"{precision.name}, {fit.vary.name} {format_count(value)}: {'fits' if memory.surely else 'may fit'}",
                f"{shown(memory.reserved)} reserved",
                f"{shown(memory.allocated)} allocated",
            )
            for value, memory in precision.memory.items()
            if memory is not None
        ),
    )


def _cell(precision: PrecisionFit, value: int, shown: Callable[[int], str]) -> str:
    allocated, reserved = cells(precision, value, shown)
    if value not in precision.memory:
        return "not run"
    return f"{reserved} ({allocated})" if reserved else allocated
