"""Modules and allocations, the largest of each."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.largest import HELD_BY, LARGEST, LargeAllocation
from ampmem.analysis.modules import ModuleMemory
from ampmem.analysis.ops import plain_op, result_of, user_frame
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import Category
from ampmem.names import layers, layers_named, of_all_layers, shape_text
from ampmem.reporters.text.common.layout import Layout, number, table, table_lines, words
from ampmem.reporters.text.common.plain_text import ABSENT, shorten
from ampmem.reporters.text.common.plain_text import columns as columns_of
from ampmem.units import format_bytes, format_count, format_peak

MODULES = 15
ALLOCATIONS = 10

_NAME, _SHORT = 24, 16
"""So much of a name is left at least: of names that end alike, less would be the same for all."""
_INDENT = 4


def render_modules(modules: Sequence[ModuleMemory], layout: Layout) -> str:
    """The modules with the most bytes, in the order of the model, equal layers as one; empty where there are none.

    Layers that differ, such as the last one of a checkpointed model, stand beside the others and not below their parts.
    """
    if not modules:
        return ""
    groups = layers(modules, what=lambda module: (module.name,), sizes=_figures)
    sums = [tuple(map(sum, zip(*map(_figures, group), strict=True))) for group in groups]
    chosen = sorted(range(len(groups)), key=lambda i: -sum(sums[i]))[:MODULES]
    patterns = [of_all_layers(group[0].name) for group in groups]
    place = list(map(patterns.index, patterns))
    chosen.sort(key=lambda i: (place[i], i))
    rows = [[layers_named([module.name for module in groups[i]]), *map(format_bytes, sums[i])] for i in chosen]
    columns = [
        words("module, with\nall below it", least=_NAME),
        number("parameters"),
        number("activations"),
        number("cast\ncopies", rank=1),
        number("gradients", rank=2),
    ]
    left_out = len(modules) - sum(len(groups[i]) for i in chosen)
    more = f"\n… and {format_count(left_out)} smaller module{'' if left_out == 1 else 's'}" if left_out else ""
    return f"{layout.strong('modules')}\n\n{table(columns, rows, layout)}{more}"


def _figures(module: ModuleMemory) -> tuple[int, ...]:
    return module.parameters, module.activations, module.cast_copies, module.gradients


def render_largest(summary: Summary, layout: Layout) -> str:
    """The largest allocations at the peak, each with the line of the script that asked; empty where there are none.

    Those of equal layers are one row, with the size of the largest and their sum. Of a run that ended where memory ran
    out they are those of that instant.
    """
    ended = summary.ended_by
    if ended is not None and not ended.later:
        top, when = ended.largest, f"the failure ({ended.where}, {format_bytes(sum(ended.alive.values()))})"
    else:
        top, when = summary.top, f"the peak (step {summary.peak.step}, {format_peak(summary.peak.said)})"
    groups = layers(top, what=_what, sizes=lambda item: (item.bytes,))
    shown = sorted(groups, key=lambda group: -_largest(group))[:ALLOCATIONS]
    if not shown:
        return ""
    # The summary ends with these: there may be more like them.
    last = top[-1] if len(top) >= LARGEST else None
    rows = [_row(group, more=last is not None and last in group) for group in shown]
    several = any(len(group) > 1 for group in shown)
    columns = [
        number("bytes"),
        number("in all"),
        words("category", rank=1),
        words("name", least=_NAME),
        words("module", least=_SHORT, rank=2),
        words("op", least=_SHORT, rank=3),
    ]
    kept = [i for i in range(len(columns)) if i != 1 or several]
    lines, body = table_lines([columns[i] for i in kept], [[row[i] for i in kept] for row in rows], layout)
    # A frame is wider than any column could be: it has a line of its own.
    for row, group in zip(body, shown, strict=True):
        lines += [*row, *_below(group[0], layout)]
    return "\n".join([layout.heading(f"largest allocations at {when}"), "", *lines])


def _what(item: LargeAllocation) -> tuple[str | None, ...]:
    """What equal layers have in common but for their numbers; the line is the same, too."""
    return item.name, item.module, item.op, item.category, item.dtype, user_frame(item.stack)


def _largest(group: Sequence[LargeAllocation]) -> int:
    return max(item.bytes for item in group)


def _row(group: Sequence[LargeAllocation], *, more: bool) -> list[str]:
    """``more`` says that there may be others like these."""

    def named(names: Sequence[str | None]) -> str:
        known = [name for name in names if name]
        return layers_named(known, more=more) if known else ABSENT

    names, modules = [_name(item) for item in group], [item.module for item in group]
    # How many there are is said once.
    module = ABSENT if modules[0] is None else modules[0] if len(set(modules)) == 1 else of_all_layers(modules[0])
    sizes = format_bytes(_largest(group)), format_bytes(sum(item.bytes for item in group))
    said = named(names) if names[0] else ABSENT if len(group) == 1 else f"{ABSENT} ({format_count(len(group))})"
    return [*sizes, str(group[0].category), said, module, group[0].op or ABSENT]


def _name(item: LargeAllocation) -> str | None:
    """What the tensor is; of an activation the name in the recording is only the op that saved it."""
    if item.category not in (Category.ACTIVATIONS, Category.TEMPORARIES):
        return item.name
    if item.op is None:
        return item.dtype and f"{item.dtype} {shape_text(item.shape or ())}".strip()
    return result_of(item.op, item.dtype, "" if item.shape is None else shape_text(item.shape))


def _below(item: LargeAllocation, layout: Layout) -> list[str]:
    """The script's own line, and of an activation the op that saved it, if another made it, or who holds it."""
    frame, room = user_frame(item.stack), layout.width - _INDENT
    parts = [] if frame is None else [f"at {shorten(frame, room - 3)}"]
    if item.category is Category.ACTIVATIONS and item.name not in (None, item.op):
        name = item.name or ""
        parts.append(name if name.startswith(HELD_BY) else f"saved for {plain_op(name)}")
    together = ", ".join(parts)
    return [
        layout.faint(f"{'':{_INDENT}}{shorten(each, room)}")
        for each in ([together] if columns_of(together) <= room else parts)
        if each
    ]
