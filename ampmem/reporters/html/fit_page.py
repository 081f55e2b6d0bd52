"""The page of ``ampmem fit``: the peak of each arm over the varied argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ampmem.analysis.fit import ArmFit, FitResult, SavingVerdict
from ampmem.analysis.timeline.categories import Category
from ampmem.output import open_output
from ampmem.reporters.html.page import PLOTLY_CONFIG, self_contained
from ampmem.reporters.html.palette import FILLS, Fill
from ampmem.reporters.text.fit import (
    break_even_lines,
    cells,
    facts,
    fitting_lines,
    headline,
    remarks,
    room,
    room_in_words,
    sizes_of,
)
from ampmem.units import format_count
from ampmem.version import __version__
from ampmem.vocabulary import Arm

_LOOKS: dict[Arm, tuple[Fill, str]] = {
    Arm.FP32: (FILLS[Category.PARAMETERS], "circle"),
    Arm.AMP: (FILLS[Category.ACTIVATIONS], "square"),
    Arm.AMP_NOCACHE: (FILLS[Category.BUFFERS], "diamond"),
    Arm.AS_IS: (FILLS[Category.OPTIMIZER_STATE], "triangle-up"),
}
"""Colour and plotly symbol of each arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveView:
    """The curve of one arm.

    ``reserved`` and ``allocated`` have the peaks for each of ``values`` in bytes, ``texts`` the same in lines of words,
    and ``surely`` whether the run surely fits or only may; ``failing`` has the values that do not fit. ``label`` names
    the arm, and other arms with equal peaks.
    """

    arm: str
    label: str
    light: str
    dark: str
    symbol: str
    values: tuple[int, ...]
    reserved: tuple[int, ...]
    allocated: tuple[int, ...]
    texts: tuple[tuple[str, ...], ...]
    surely: tuple[bool, ...]
    failing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingView:
    """The peak of ``arm`` falls below the baseline's between ``costs_at`` and ``saves_at``."""

    arm: str
    costs_at: int
    saves_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitView:
    """The data that the page is drawn from.

    ``capacity`` is the memory that the allocator can surely take of the device, in bytes, ``may`` its upper bound, and
    ``capacity_text`` and ``may_text`` are the same in words; ``room`` explains them.
    """

    ampmem: str
    config: dict[str, bool | str]
    title: str
    argument: str
    facts: tuple[tuple[str, str], ...]
    fitting: tuple[str, ...]
    break_even: tuple[str, ...]
    remarks: tuple[str, ...]
    capacity: int | None
    may: int | None
    capacity_text: str
    may_text: str
    room: str
    columns: tuple[str, ...]
    curves: tuple[CurveView, ...]
    crossings: tuple[CrossingView, ...]
    table: tuple[tuple[str, ...], ...]


def write_fit(fit: FitResult, output: Path, *, force: bool = False) -> None:
    """Write the page of ``fit``. Raises :class:`~ampmem.errors.UsageError` when ``output`` cannot be written."""
    page = render_fit(fit)
    with open_output(output, force=force) as stream:
        stream.write(page)


def render_fit(fit: FitResult) -> str:
    """The HTML of the whole page."""
    view = fit_view(fit)
    return self_contained("fit.html", "fit.js", view, title=view.title)


def fit_view(fit: FitResult) -> FitView:
    """The page's data from ``fit``."""
    capacity, may = room(fit) or (None, None)
    shown = sizes_of(fit)
    different = [arm for arm in fit.arms if fit.same_as(arm) is None]
    return FitView(
        ampmem=__version__,
        config=PLOTLY_CONFIG,
        title=headline(fit),
        argument=fit.vary.name,
        facts=tuple(facts(fit)),
        fitting=tuple(fitting_lines(fit)),
        break_even=tuple(break_even_lines(fit)),
        remarks=tuple(remarks(fit)),
        capacity=capacity,
        may=may,
        capacity_text="" if capacity is None else f"below {shown(capacity)}: fits",
        may_text="" if may is None or may == capacity else f"above {shown(may)}: does not fit",
        room=room_in_words(fit),
        columns=tuple(_alike(fit, arm) for arm in different),
        curves=tuple(_curve(fit, arm, shown) for arm in fit.arms),
        crossings=tuple(
            CrossingView(arm=each.arm, costs_at=each.costs_at, saves_at=each.saves_at)
            for each in fit.break_even
            if each.verdict is SavingVerdict.CROSSES and each.costs_at is not None and each.saves_at is not None
        ),
        table=tuple((str(value), *(_cell(arm, value, shown) for arm in different)) for value in fit.values),
    )


def _alike(fit: FitResult, arm: ArmFit) -> str:
    """The arm, and those with equal peaks: ``amp, amp-nocache``."""
    return ", ".join([arm.name, *(other.name for other in fit.arms if fit.same_as(other) is arm)])


def _curve(fit: FitResult, arm: ArmFit, shown: Callable[[int], str]) -> CurveView:
    fill, symbol = _LOOKS[arm.name]
    fitting = [(value, memory) for value, memory in arm.points.items() if memory is not None]
    same = fit.same_as(arm)
    return CurveView(
        arm=arm.name,
        label=f"{arm.name}: the same as {same.name}" if same else arm.name,
        light=fill.light,
        dark=fill.dark,
        symbol=symbol,
        values=tuple(value for value, _ in fitting),
        reserved=tuple(memory.reserved for _, memory in fitting),
        allocated=tuple(memory.allocated for _, memory in fitting),
        texts=tuple(
            (
                f"{arm.name}, {fit.vary.name} {format_count(value)}: {'fits' if memory.surely else 'may fit'}",
                f"{shown(memory.reserved)} reserved",
                f"{shown(memory.allocated)} allocated",
            )
            for value, memory in fitting
        ),
        surely=tuple(memory.surely for _, memory in fitting),
        failing=tuple(value for value, memory in arm.points.items() if memory is None),
    )


def _cell(arm: ArmFit, value: int, shown: Callable[[int], str]) -> str:
    allocated, reserved = cells(arm, value, shown)
    if value not in arm.points:
        return "not run"
    return f"{reserved} ({allocated} allocated)" if reserved else allocated
