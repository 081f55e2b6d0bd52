"""Summaries as plain tables, never wider than :data:`~ampmem.reporters.text.WIDTH` columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampmem.analysis.categories import CATEGORIES, PRECISION_COPIES, Breakdown, Category
from ampmem.analysis.largest import LargeAllocation
from ampmem.analysis.modules import ModuleMemory
from ampmem.analysis.summary import Peak, Step, Summary
from ampmem.reporters.base import Report
from ampmem.reporters.casts import render_casts
from ampmem.reporters.findings import render_findings
from ampmem.reporters.static_model import render_activations, render_static_model
from ampmem.reporters.text import ABSENT, WIDTH, per_parameter, shorten, table, wrapped
from ampmem.units import format_bytes, format_count, format_duration

MODULES = 15
ALLOCATIONS = 10

_TORCH = ("/torch/", "<frozen ")
_LIBRARIES = ("/site-packages/", "/dist-packages/", *_TORCH)


class TableReporter:
    """Tables for a terminal; ``all_steps`` breaks every step down and not only the last, ``ledger`` adds the casts."""

    def __init__(self, *, all_steps: bool = False, ledger: bool = False) -> None:
        self._all_steps = all_steps
        self._ledger = ledger

    def render(self, reports: Sequence[Report]) -> str:
        """The reports one after the other, with a line between them."""
        separator = f"\n\n{'=' * WIDTH}\n\n"
        return separator.join(
            render(report.summary, report.notes, title=report.title, all_steps=self._all_steps, ledger=self._ledger)
            for report in reports
        )


def render(
    summary: Summary, notes: Sequence[str], *, title: str = "", all_steps: bool = False, ledger: bool = False
) -> str:
    """One summary as text. ``title`` says what was run; ``notes`` are the recorder's remarks."""
    shown = summary.steps if all_steps else summary.steps[-1:]
    sections = [
        _run(summary, title),
        _steps(summary.steps),
        *(_breakdown(step, summary.parameters.count) for step in shown),
        render_static_model(summary),
        render_activations(summary),
        *([render_casts(summary)] if ledger else []),
        render_findings(summary.findings),
        _modules(summary.modules),
        _largest(summary),
        _foot(summary, notes),
    ]
    return "\n\n".join(section for section in sections if section)


def _run(summary: Summary, title: str) -> str:
    device = summary.device
    parameters = summary.parameters
    amount = f"{format_count(parameters.count)} in {format_bytes(parameters.bytes)}"
    if parameters.trainable != parameters.count:
        amount += f", {format_count(parameters.trainable)} trainable"
    if parameters.cast_eligible is not None:
        amount += f", {format_count(parameters.cast_eligible)} cast by autocast"
    rows = [
        ("script", title or "?"),
        ("device", f"{device.name} ({device.type}), events from {summary.source}"),
        ("arm", describe_arm(summary)),
        ("torch", f"{summary.torch}, ampmem {summary.ampmem}"),
        ("parameters", amount),
        ("optimizer", describe_optimizers(summary) or "none stepped"),
    ]
    if summary.world_size > 1:
        rows.insert(2, ("rank", f"{summary.rank} of {summary.world_size}"))
    return "\n".join(f"{key:<12}{shorten(value, WIDTH - 12)}" for key, value in rows)


def describe_arm(summary: Summary) -> str:
    """The arm in words: ``amp, bfloat16, cache on``."""
    arm = summary.arm
    words = [arm.name]
    if arm.dtype is not None:
        words.append(arm.dtype)
    if arm.cache is not None:
        words.append("cache on" if arm.cache else "cache off")
    if arm.scaler:
        words.append("loss scaling")
    if arm.forced:
        words.append("forced, in regions that ampmem opened" if arm.wrapped else "forced")
    return ", ".join(words)


def describe_optimizers(summary: Summary) -> str:
    """The optimizers that stepped, in words; empty when none did."""
    return ", ".join(f"{item.class_name} ({item.implementation})" for item in summary.optimizer)


def _steps(steps: Sequence[Step]) -> str:
    rows = [
        [
            str(step.index),
            ABSENT if step.loss is None else f"{step.loss:.6g}",
            ABSENT if step.loss_scale is None else f"{step.loss_scale:.6g}",
            "skipped" if step.skipped_update else "done",
            format_bytes(step.peak.bytes),
            step.peak.phase,
            format_duration(step.duration_ns),
        ]
        for step in steps
    ]
    headers = ["step", "loss", "loss scale", "update", "peak", "in", "took"]
    return table(rows, headers, ["right", "right", "right", "left", "right", "left", "right"])


def _breakdown(step: Step, parameters: int) -> str:
    marks = step.marks
    columns = [marks.after_forward, marks.after_backward, marks.after_optimizer, step.peak.categories]
    cells = _cells(columns, parameters)
    rows: list[list[str]] = []
    for category in CATEGORIES:
        if category == PRECISION_COPIES[0]:
            rows.append(["precision_copies", *cells(lambda live: sum(live[copy] for copy in PRECISION_COPIES))])
        if any(live is not None and live[category] for live in columns):
            rows.append([indented(category), *cells(lambda live, key=category: live[key])])  # type: ignore[misc]
            if category == Category.TEMPORARIES:
                rows.extend(_by_phase(step.peak, parameters))
    rows.append(["total", *cells(lambda live: sum(live.values()))])
    headers = ["", *(word for mark in _HEADERS for word in (mark, "B/\nparam"))]
    caption = f"step {step.index}, peak in {step.peak.phase}"
    return f"{caption}\n\n{table(rows, headers, ['left'] + ['right'] * 8)}"


_HEADERS = ("after\nforward", "after\nbackward", "after\nupdate", "peak")


def _cells(columns: Sequence[Breakdown | None], parameters: int) -> Callable[[Callable[[Breakdown], int]], list[str]]:
    """A function that makes a row's cells: for each column the bytes and the bytes per parameter."""

    def cells(size: Callable[[Breakdown], int]) -> list[str]:
        row: list[str] = []
        for live in columns:
            row += [ABSENT, ABSENT] if live is None else size_cells(size(live), parameters)
        return row

    return cells


def size_cells(size: int, parameters: int) -> list[str]:
    """Bytes, and bytes per parameter."""
    return [format_bytes(size), per_parameter(size, parameters)]


def indented(category: Category) -> str:
    """Tabulate strips leading spaces, so a mark shows what belongs to the row above."""
    return f"└ {category}" if category in PRECISION_COPIES else str(category)


def _by_phase(peak: Peak, parameters: int) -> list[list[str]]:
    """Rows under the temporaries; only the peak's are split."""
    return [
        [f"└ in {phase}", *[""] * 6, *size_cells(size, parameters)]
        for phase, size in peak.temporaries_by_phase.items()
        if size
    ]


def _modules(modules: Sequence[ModuleMemory]) -> str:
    if not modules:
        return ""
    ranked = sorted(modules, key=_sum, reverse=True)[:MODULES]
    chosen = {module.name for module in ranked}
    rows = [
        [
            shorten(module.name, 42),
            *map(format_bytes, (module.parameters, module.activations, module.cast_copies, module.gradients)),
        ]
        for module in modules
        if module.name in chosen
    ]
    left_out = len(modules) - len(rows)
    headers = ["module, with all below it", "parameters", "activations", "cast copies", "gradients"]
    text = table(rows, headers, ["left"] + ["right"] * 4)
    return text + (f"\n… and {format_count(left_out)} smaller modules" if left_out else "")


def _sum(module: ModuleMemory) -> int:
    return module.parameters + module.activations + module.cast_copies + module.gradients


def _largest(summary: Summary) -> str:
    shown = summary.top[:ALLOCATIONS]
    if not shown:
        return ""
    rows = [
        [
            format_bytes(item.bytes),
            str(item.category),
            shorten(item.name or ABSENT, 27),
            shorten(item.module or ABSENT, 20),
            shorten(item.op or ABSENT, 20),
        ]
        for item in shown
    ]
    headers = ["bytes", "category", "name", "module", "op"]
    head, rule, *lines = table(rows, headers, ["right", "left", "left", "left", "left"]).splitlines()
    # A frame is wider than any column could be: it has a line of its own.
    for line, item in zip(lines, shown, strict=True):
        head_and_frame = [line, *_frame_line(item)]
        rule += "\n" + "\n".join(head_and_frame)
    caption = f"largest allocations at the peak (step {summary.peak.step}, {format_bytes(summary.peak.bytes)})"
    return f"{caption}\n\n{head}\n{rule}"


def _frame_line(item: LargeAllocation) -> list[str]:
    frame = user_frame(item.stack)
    return [] if frame is None else [" " * 12 + "at " + shorten(frame, WIDTH - 15)]


def user_frame(stack: Sequence[str]) -> str | None:
    """The innermost frame outside the libraries, else outside torch (a script may be installed), else of all."""
    for hidden in (_LIBRARIES, _TORCH):
        for frame in reversed(stack):
            if not any(part in frame for part in hidden):
                return frame
    return stack[-1] if stack else None


_LAYERS = ("requested", "rounding", "cached", "outside")


def _foot(summary: Summary, notes: Sequence[str]) -> str:
    events = format_count(summary.conservation.events)
    residual = summary.conservation.residual_bytes
    verdict = "no total to check against" if residual is None else f"residual {format_bytes(residual)}"
    lines = [f"conservation: {events} events, {verdict}"]
    layers = summary.allocator
    if layers.reserved is not None:
        shown = (f"{name} {format_bytes(getattr(layers, name))}" for name in _LAYERS)
        lines.append(f"allocator at the peak: {', '.join(shown)}")
    for note in notes:
        lines.extend(wrapped(f"note: {note}"))
    return "\n".join(lines)
