"""Summaries as plain tables, never wider than :data:`~ampmem.reporters.text.plain_text.WIDTH` columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ampmem.analysis.largest import LargeAllocation
from ampmem.analysis.modules import ModuleMemory
from ampmem.analysis.summary import Peak, Step, Summary
from ampmem.analysis.timeline.categories import CATEGORIES, PRECISION_COPIES, Breakdown, Category
from ampmem.events import AllocatorRecord
from ampmem.reporters.base import Report
from ampmem.reporters.text.casts import render_casts
from ampmem.reporters.text.estimate import other_notes, render_prediction
from ampmem.reporters.text.findings import render_findings
from ampmem.reporters.text.frames import user_frame
from ampmem.reporters.text.out_of_memory import render_out_of_memory
from ampmem.reporters.text.plain_text import ABSENT, WIDTH, per_parameter, shorten, table, wrapped
from ampmem.reporters.text.static_model import render_activations, render_static_model
from ampmem.reporters.text.warnings import render_warnings
from ampmem.units import format_bytes, format_count, format_duration

MODULES = 15
ALLOCATIONS = 10


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
    shown = summary.steps if all_steps else tuple(_shown_steps(summary))
    sections = [
        render_warnings(summary, notes),
        _run(summary, title),
        render_out_of_memory(summary),
        render_prediction(summary.prediction, summary.device.name),
        _steps(summary.steps),
        *(_breakdown(step, summary.parameters.count) for step in shown),
        render_static_model(summary),
        render_activations(summary),
        *([render_casts(summary)] if ledger else []),
        render_findings(summary.findings),
        _modules(summary.modules),
        _largest(summary),
        _foot(summary, other_notes(summary.prediction, notes)),
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
    if summary.caching_allocator is not None:
        devices = describe_devices(summary.caching_allocator)
        rows[2:2] = [
            ("allocator", describe_allocator(summary.caching_allocator)),
            *([("devices", devices)] * bool(devices)),
        ]
    if summary.world_size > 1:
        rows.insert(2, ("rank", f"{summary.rank} of {summary.world_size}"))
    return "\n".join(f"{key:<12}{shorten(value, WIDTH - 12)}" for key, value in rows)


def describe_arm(summary: Summary) -> str:
    """The arm in words: ``amp, bfloat16, cache on``."""
    arm = summary.arm
    words: list[str] = [arm.name]
    if arm.dtype is not None:
        words.append(arm.dtype)
    if arm.cache is not None:
        words.append("cache on" if arm.cache else "cache off")
    if arm.scaler:
        words.append("loss scaling")
    if arm.forced:
        words.append("forced, in regions that ampmem opened" if arm.wrapped else "forced")
    return ", ".join(words)


def describe_allocator(allocator: AllocatorRecord) -> str:
    """How the caching allocator was set and used: ``PYTORCH_ALLOC_CONF=max_split_size_mb:64, 2 streams``."""
    variable = f"{allocator.variable}=" if allocator.variable else ""
    words = [f"{variable}{allocator.settings}" if allocator.settings else "default settings"]
    if allocator.expandable_segments and "expandable_segments" not in allocator.settings:
        words.append("expandable segments")
    words.append(_counted(allocator.streams, "stream"))
    if allocator.private_pools:
        words.append(_counted(allocator.private_pools, "private pool"))
    return ", ".join(words)


def describe_devices(allocator: AllocatorRecord) -> str:
    """The devices that had memory, with their peaks; empty where that is the first one alone."""
    used = [device for device, peak in enumerate(allocator.peaks) if peak]
    if used in ([], [0]) and allocator.device == 0:
        return ""
    shown = used or [allocator.device]
    return "; ".join(
        f"{device}{' (recorded)' * (device == allocator.device)}"
        + (f" peak {format_bytes(allocator.peaks[device])}" if used else "")
        for device in shown
    )


def _counted(count: int, what: str) -> str:
    return f"{format_count(count)} {what}{'' if count == 1 else 's'}"


def describe_optimizers(summary: Summary) -> str:
    """The optimizers that stepped, in words; empty when none did."""
    return ", ".join(f"{item.class_name} ({item.implementation})" for item in summary.optimizer)


def _steps(steps: Sequence[Step]) -> str:
    reserving = any(step.peak_reserved is not None for step in steps)
    rows = [
        [
            str(step.index),
            describe_loss(step),
            ABSENT if step.loss_scale is None else f"{step.loss_scale:.6g}",
            describe_update(step),
            format_bytes(step.peak.bytes),
            step.peak.phase,
            *([format_bytes(step.peak_reserved)] if reserving else []),
            format_duration(step.duration_ns),
        ]
        for step in steps
    ]
    reserved = ["peak\nreserved"] if reserving else []
    headers = ["step", "loss", "loss scale", "update", "peak", "in", *reserved, "took"]
    return table(rows, headers, ["right", "right", "right", "left", "right", "left", *["right"] * (len(reserved) + 1)])


def _shown_steps(summary: Summary) -> Iterator[Step]:
    """The last step that ended, and the one in which memory ran out if more is known of it than what was alive then."""
    last, oom = summary.steps[-1], summary.out_of_memory
    if summary.last_step.finished:
        yield summary.last_step
    if not last.finished and (last.marks.after_forward or oom is None or last.peak.categories != oom.alive):
        yield last


def describe_loss(step: Step) -> str:
    """The loss of the step's last backward, and of how many: ``0.6931 (last of 4)``."""
    if step.loss is None:
        return ABSENT
    return f"{step.loss:.6g}" if step.backwards <= 1 else f"{step.loss:.6g} (last of {step.backwards})"


def describe_update(step: Step) -> str:
    """What became of the step's update, in words."""
    if not step.finished:
        return "out of memory"
    if step.skipped_update:
        return "skipped"
    return "done" if step.marks.after_optimizer is not None else "none seen"


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


def conserved(summary: Summary) -> str:
    """How many events there were, and how far our sums were from the allocator's."""
    conservation = summary.conservation
    residual, reserved = conservation.residual_bytes, conservation.reserved_residual_bytes
    words = [f"{format_count(conservation.events)} events"]
    words.append("no total to check against" if residual is None else f"residual {format_bytes(residual)}")
    if reserved is not None:
        words.append(f"of reserved memory {format_bytes(reserved)}")
    if conservation.other_threads_bytes:
        words.append(f"other threads held up to {format_bytes(conservation.other_threads_bytes)}")
    return ", ".join(words)


def _foot(summary: Summary, notes: Sequence[str]) -> str:
    lines = [f"conservation: {conserved(summary)}"]
    layers = summary.allocator
    if layers.reserved is not None:
        parts = " + ".join(
            f"{name} {format_bytes(getattr(layers, name))}" for name in ("requested", "rounding", "cached")
        )
        outside = "" if layers.outside is None else f", outside {format_bytes(layers.outside)}"
        if layers.outside_process is not None:
            outside += f", of which this process {format_bytes(layers.outside_process)}"
        lines += wrapped(f"allocator at the peak: {parts} = reserved {format_bytes(layers.reserved)}{outside}")
    for note in notes:
        lines.extend(wrapped(f"note: {note}"))
    return "\n".join(lines)
