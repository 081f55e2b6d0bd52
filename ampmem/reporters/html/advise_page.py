"""The page of ``ampmem advise``: each run's memory over its recomputation, and the best change in code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampmem.analysis.advise import AdviceDocument, AdvisedRun
from ampmem.analysis.changes import CHANGES
from ampmem.analysis.jsonable import like
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.html.page import ChartView
from ampmem.reporters.html.palette import FILLS
from ampmem.reporters.text.advise import (
    COLUMNS_OF_BLOCKS,
    best_change,
    columns_of,
    computed_lines,
    headline,
    proof_lines,
    ranks_line,
    refused_lines,
    rows_of,
    rows_of_blocks,
)
from ampmem.reporters.text.fit import simulated_gpu
from ampmem.units import format_bytes, format_count
from ampmem.vocabulary import Device, forced_options

_UNBEATEN = "no other run beats it"
_COMPUTES = frozenset(forced_options()[change.field].words[0] for change in CHANGES if change.computes)
"""The options of ``ampmem profile`` that change what the script computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvicePoint:
    """A run as a point.

    ``cost`` is its place on the cost axis, ``most`` the peak of the device's memory (on the CPU the allocated peak) in
    bytes, ``allocated`` the allocated peak in bytes; ``text`` has lines of words. ``unbeaten``: no other run is better
    in memory or cost without being worse in the other.
    """

    cost: float
    most: int
    allocated: int
    meets: bool
    unbeaten: bool
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceSeries:
    """The runs drawn alike; a line joins them if ``joined``."""

    name: str
    joined: bool
    light: str
    dark: str
    symbol: str
    points: tuple[AdvicePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceView(ChartView):
    """The data that the page is drawn from. ``limit`` is the most device memory allowed in bytes, if known."""

    facts: tuple[tuple[str, str], ...]
    change: str
    code: tuple[str, ...]
    pages: tuple[tuple[str, str], ...]
    axis: str
    series: tuple[AdviceSeries, ...]
    limit: int | None
    limit_text: str
    columns: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    refused: tuple[str, ...]
    proven: tuple[str, ...]
    computed: tuple[str, ...]
    block_columns: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]


def advice_view(found: AdviceDocument, pages: tuple[tuple[str, str], ...] = ()) -> AdviceView:
    """The page's data from ``found``; ``pages`` are links to the recordings' pages."""
    best, simulated = best_change(found), found.device is Device.SIMULATED
    what, limit = "budget", found.budget_bytes
    if limit is None:
        what, limit = "GPU's memory", found.gpu_bytes
    return AdviceView(
        title=headline(found),
        facts=_facts(found),
        change="" if best is None else best.change,
        code=() if best is None else best.code,
        pages=pages,
        axis="recomputed FLOPs, % of the step's others" if simulated else "step time, in ms",
        series=_series(found),
        limit=limit,
        limit_text="" if limit is None else f"the {what}: {format_bytes(limit)}",
        columns=_in_line(columns_of(found)),
        table=tuple(map(tuple, rows_of(found))),
        refused=tuple(refused_lines(found)),
        proven=tuple(proof_lines(found)),
        computed=tuple(computed_lines(found)),
        block_columns=_in_line(COLUMNS_OF_BLOCKS),
        blocks=tuple(map(tuple, rows_of_blocks(found))),
    )


def _in_line(heads: Sequence[str]) -> tuple[str, ...]:
    return tuple(head.replace("\n", " ") for head in heads)


def _facts(found: AdviceDocument) -> tuple[tuple[str, str], ...]:
    return (
        ("script", found.script),
        ("device", found.gpu if found.gpu_bytes is None else simulated_gpu(found.gpu, found.gpu_bytes)),
        ("budget", "none" if found.budget_bytes is None else format_bytes(found.budget_bytes)),
        *([("ranks", ranks_line(found))] if found.ranks else []),
        ("runs", f"{format_count(len(found.runs))}, each of {format_count(found.steps)} steps"),
    )


_LOOKS = (
    ("activation checkpointing alone", True, Category.PARAMETERS, "circle"),
    ("other changes", False, Category.ACTIVATIONS, "square"),
    ("changes of what is computed", False, Category.OPTIMIZER_STATE, "diamond"),
)
"""For each series its name, whether a line joins its runs, the category whose colour it has, and plotly's symbol."""


def _series(found: AdviceDocument) -> tuple[AdviceSeries, ...]:
    """The series that have runs, each with its points from the largest memory down."""
    runs: list[list[AdvicePoint]] = [[] for _ in _LOOKS]
    for run in found.runs:
        point = _point(run, found.device)
        if point is not None:
            runs[_look(run)].append(point)
    return tuple(
        like(
            AdviceSeries,
            FILLS[category],
            name=name,
            joined=joined,
            symbol=symbol,
            points=tuple(sorted(points, key=lambda point: (-point.most, point.cost))),
        )
        for (name, joined, category, symbol), points in zip(_LOOKS, runs, strict=True)
        if points
    )


def _look(run: AdvisedRun) -> int:
    """The index in :data:`_LOOKS` for the run."""
    names = {option for option in run.options if option.startswith("--")}
    if names & _COMPUTES:
        return 2
    return int(not names <= {"--force-checkpoint"})


def _point(run: AdvisedRun, device: Device) -> AdvicePoint | None:
    """The run as a point; ``None`` if it has no peak or no known cost."""
    most, cost = run.limited_bytes, _cost(run, device)
    if run.allocated_bytes is None or most is None or cost is None:
        return None
    in_use = () if device is Device.CPU else (f"{format_bytes(most)} in use at most",)
    words = (run.cost,) if run.cost else ()
    beaten_by_none = (_UNBEATEN,) if run.unbeaten else ()
    return like(
        AdvicePoint,
        run,
        cost=cost,
        most=most,
        allocated=run.allocated_bytes,
        text=(run.change, *in_use, f"{format_bytes(run.allocated_bytes)} allocated", *words, *beaten_by_none),
    )


def _cost(run: AdvisedRun, device: Device) -> float | None:
    """The cost: on a real device the step time in ms, else the recomputed FLOPs in percent of the step's others."""
    if device is not Device.SIMULATED:
        return None if run.step_ns is None else run.step_ns / 1e6
    if run.step_flops is None or run.recomputed_flops is None:
        return None
    return 100 * run.recomputed_flops / max(run.step_flops - run.recomputed_flops, 1)
