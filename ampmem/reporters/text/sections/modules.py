"""Modules and allocations, the largest of each."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.frames import user_frame
from ampmem.analysis.largest import LargeAllocation
from ampmem.analysis.modules import ModuleMemory
from ampmem.analysis.summary import Summary
from ampmem.reporters.text.common.layout import Layout, number, table, table_lines, words
from ampmem.reporters.text.common.plain_text import ABSENT, shorten
from ampmem.units import format_bytes, format_count

MODULES = 15
ALLOCATIONS = 10

_NAME, _SHORT = 28, 16
"""So much of a name is left at least: of names that end alike, less would be the same for all."""
_INDENT = 12


def render_modules(modules: Sequence[ModuleMemory], layout: Layout) -> str:
    """The modules with the most bytes, in the order of the model; empty where there are none."""
    if not modules:
        return ""
    ranked = sorted(modules, key=_sum, reverse=True)[:MODULES]
    chosen = {module.name for module in ranked}
    rows = [
        [module.name, *map(format_bytes, (module.parameters, module.activations, module.cast_copies, module.gradients))]
        for module in modules
        if module.name in chosen
    ]
    columns = [
        words("module, with\nall below it", least=_NAME),
        number("parameters"),
        number("activations"),
        number("cast\ncopies", rank=1),
        number("gradients", rank=2),
    ]
    left_out = len(modules) - len(rows)
    more = f"\n… and {format_count(left_out)} smaller module{'' if left_out == 1 else 's'}" if left_out else ""
    return f"{layout.strong('modules')}\n\n{table(columns, rows, layout)}{more}"


def _sum(module: ModuleMemory) -> int:
    return module.parameters + module.activations + module.cast_copies + module.gradients


def render_largest(summary: Summary, layout: Layout) -> str:
    """The largest allocations at the peak, each with the line of the script that asked; empty where there are none."""
    shown = summary.top[:ALLOCATIONS]
    if not shown:
        return ""
    rows = [
        [format_bytes(item.bytes), str(item.category), item.name or ABSENT, item.module or ABSENT, item.op or ABSENT]
        for item in shown
    ]
    columns = [
        number("bytes"),
        words("category"),
        words("name", least=_NAME),
        words("module", least=_SHORT, rank=1),
        words("op", least=_SHORT, rank=2),
    ]
    lines, body = table_lines(columns, rows, layout)
    # A frame is wider than any column could be: it has a line of its own.
    for line, item in zip(body, shown, strict=True):
        lines += [line, *_frame_line(item, layout)]
    caption = f"largest allocations at the peak (step {summary.peak.step}, {format_bytes(summary.peak.bytes)})"
    return "\n".join([layout.strong(caption), "", *lines])


def _frame_line(item: LargeAllocation, layout: Layout) -> list[str]:
    frame = user_frame(item.stack)
    if frame is None:
        return []
    return [layout.faint(f"{'':{_INDENT}}at {shorten(frame, layout.width - _INDENT - 3)}")]
