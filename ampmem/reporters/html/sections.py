"""What the page says about one recording: the same numbers as ``ampmem show``, and the timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.categories import CATEGORIES, PRECISION_COPIES, Breakdown, Category
from ampmem.analysis.modules import ModuleMemory
from ampmem.analysis.summary import Peak, Step, Summary
from ampmem.reporters.base import Report
from ampmem.reporters.html.page import Headline, Section, Table, element_id
from ampmem.reporters.html.timeline_view import TimelineView, timeline_view
from ampmem.reporters.table import MODULES, describe_arm, describe_optimizers, per_parameter, user_frame
from ampmem.units import format_bytes, format_count, format_duration

UNKNOWN = "-"
"""In a cell: this could not be measured, or there is nothing to say."""

MARKS = ("after forward", "after backward", "after optimizer", "at the peak")


def section_of(number: int, report: Report, analysis: Analysis) -> Section:
    """Section ``number`` of the page. ``report`` and ``analysis`` are of the same recording."""
    summary = report.summary
    return Section(
        title=report.title,
        facts=tuple(_facts(summary)),
        notes=report.notes,
        headlines=tuple(_headlines(summary)),
        timeline=_timeline(number, summary, analysis),
        tables=(
            steps_table(summary.steps),
            breakdown_table(summary.steps[-1], summary.parameters.count),
            modules_table(summary.modules),
            largest_table(summary),
        ),
    )


def _facts(summary: Summary) -> Iterator[str]:
    yield f"{format_count(summary.parameters.count)} parameters in {format_bytes(summary.parameters.bytes)}"
    yield describe_optimizers(summary) or "no optimizer"
    yield f"{summary.device.name} ({summary.device.type}), events from {summary.source}"
    if summary.world_size > 1:
        yield f"rank {summary.rank} of {summary.world_size}"
    yield f"arm {describe_arm(summary)}"
    yield f"torch {summary.torch}, ampmem {summary.ampmem}"


def _headlines(summary: Summary) -> Iterator[Headline]:
    peak, count = summary.peak, summary.parameters.count
    precision_copies = sum(peak.categories[category] for category in PRECISION_COPIES)
    yield Headline(label="Peak", value=format_bytes(peak.bytes), detail=f"step {peak.step}, in {peak.phase}")
    yield Headline(label="Bytes per parameter", value=per_parameter(peak.bytes, count), detail="at the peak")
    yield Headline(label="Activations", value=format_bytes(peak.categories[Category.ACTIVATIONS]), detail="at the peak")
    yield Headline(label="Precision copies", value=format_bytes(precision_copies), detail="at the peak")
    if summary.allocator.reserved is not None:
        yield Headline(label="Reserved", value=format_bytes(summary.allocator.reserved), detail="at the peak")
    conservation = summary.conservation
    yield Headline(
        label="Residual",
        value=format_bytes(conservation.residual_bytes),
        detail=f"categories against the allocator, {format_count(conservation.events)} events",
    )


def _timeline(number: int, summary: Summary, analysis: Analysis) -> TimelineView | None:
    peak_step = next(step for step in analysis.recording.steps if step.index == summary.peak.step)
    return timeline_view(
        element_id(number),
        {str(category): analysis.timeline.series(category) for category in CATEGORIES},
        analysis.recording.events.phase,
        analysis.timeline.peak_between(peak_step.start_ns, peak_step.end_ns),
    )


def steps_table(steps: Sequence[Step]) -> Table:
    """One row per step."""
    return Table(
        title="Steps",
        columns=("step", "loss", "loss scale", "update", "peak", "in", "took"),
        rows=tuple(
            (
                str(step.index),
                UNKNOWN if step.loss is None else f"{step.loss:.6g}",
                UNKNOWN if step.loss_scale is None else f"{step.loss_scale:.6g}",
                "skipped" if step.skipped_update else "done",
                format_bytes(step.peak.bytes),
                step.peak.phase,
                format_duration(step.duration_ns),
            )
            for step in steps
        ),
        numeric=frozenset({0, 1, 2, 4, 6}),
    )


def breakdown_table(step: Step, parameters: int) -> Table:
    """Live bytes of every category at the marks of ``step`` and at its peak, and the same per parameter."""
    columns = ["category"]
    for mark in MARKS:
        columns += [mark, "B/param"]
    return Table(
        title=f"Breakdown of step {step.index}, with the peak in {step.peak.phase}",
        columns=tuple(columns),
        rows=tuple(_breakdown_rows(step, parameters)),
        numeric=frozenset(range(1, len(columns))),
        swatch=0,
    )


def _breakdown_rows(step: Step, parameters: int) -> Iterator[tuple[str, ...]]:
    marks = step.marks
    instants = (marks.after_forward, marks.after_backward, marks.after_optimizer, step.peak.categories)

    def cells(size: Callable[[Breakdown], int]) -> Iterator[str]:
        for live in instants:
            yield from (UNKNOWN, UNKNOWN) if live is None else _sizes(size(live), parameters)

    for category in CATEGORIES:
        if category == PRECISION_COPIES[0]:
            yield "precision_copies", *cells(lambda live: sum(live[copy] for copy in PRECISION_COPIES))
        if any(live is not None and live[category] for live in instants):
            yield str(category), *cells(lambda live, key=category: live[key])  # type: ignore[misc]
            if category == Category.TEMPORARIES:
                yield from _temporaries_rows(step.peak, parameters, blanks=2 * (len(instants) - 1))
    yield "total", *cells(lambda live: sum(live.values()))


def _temporaries_rows(peak: Peak, parameters: int, *, blanks: int) -> Iterator[tuple[str, ...]]:
    """Only the peak's temporaries are split by the phase of their birth."""
    for phase, size in peak.temporaries_by_phase.items():
        if size:
            yield f"… born in {phase}", *[""] * blanks, *_sizes(size, parameters)


def _sizes(size: int, parameters: int) -> tuple[str, str]:
    return format_bytes(size), per_parameter(size, parameters)


def modules_table(modules: Sequence[ModuleMemory]) -> Table:
    """The modules with most memory, each with all that is below it, in the order of the model."""
    chosen = {module.name for module in sorted(modules, key=_module_bytes, reverse=True)[:MODULES]}
    title = "Modules, each with all below it"
    if len(modules) > len(chosen):
        title += f"; {format_count(len(modules) - len(chosen))} smaller ones are left out"
    return Table(
        title=title,
        columns=("module", "parameters", "activations", "cast copies", "gradients"),
        rows=tuple(
            (
                module.name,
                *map(format_bytes, (module.parameters, module.activations, module.cast_copies, module.gradients)),
            )
            for module in modules
            if module.name in chosen
        ),
        numeric=frozenset({1, 2, 3, 4}),
    )


def _module_bytes(module: ModuleMemory) -> int:
    return module.parameters + module.activations + module.cast_copies + module.gradients


def largest_table(summary: Summary) -> Table:
    """The largest allocations at the peak, and the line of the script that made each."""
    return Table(
        title=f"Largest allocations at the peak of step {summary.peak.step}",
        columns=("bytes", "category", "name", "module", "op", "at"),
        rows=tuple(
            (
                format_bytes(item.bytes),
                str(item.category),
                item.name or UNKNOWN,
                item.module or UNKNOWN,
                item.op or UNKNOWN,
                user_frame(item.stack) or UNKNOWN,
            )
            for item in summary.top
        ),
        numeric=frozenset({0}),
        swatch=1,
    )
