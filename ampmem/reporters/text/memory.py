"""The tables of a run's memory: at its peak and at the marks of a step, by module, activation and cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TypeAlias

from ampmem.allocator.trace import WhatIf
from ampmem.analysis.activations import savings
from ampmem.analysis.casts import CopyCount, ParameterCasts, StepCasts
from ampmem.analysis.largest import HELD_BY, MOST, LargeAllocation
from ampmem.analysis.modules import ModuleMemory
from ampmem.analysis.ops import plain_op, result_of, user_frame
from ampmem.analysis.summary import Peak, Step, Summary
from ampmem.analysis.timeline.categories import CATEGORIES, PRECISION_COPIES, Breakdown, Category
from ampmem.names import casts_compiled, layers, layers_named, natural, of_all_layers, shape_text
from ampmem.reporters.text.layout import Layout, narrowest, number, table, table_with_lines, words
from ampmem.reporters.text.plain_text import ABSENT, per_parameter, share, shorten, signed, size_cells, wrapped
from ampmem.reporters.text.plain_text import columns as columns_of
from ampmem.units import counted, format_bytes, format_count, format_peak
from ampmem.vocabulary import LOW_PRECISION, SourceKind

TOTAL = "total"
ALLOCATED = "allocated"
_NAME = 20
"""The least width of the name of a category or part."""

Parts: TypeAlias = Mapping[str, Mapping[str, int]]
"""The bytes of a category's parts by name, for categories that have parts."""


def render_peak(summary: Summary, layout: Layout) -> str:
    """The categories at the run's peak; empty if memory ran out in that step, as the failure's table says it all."""
    peak, last = summary.peak, summary.steps[-1]
    if summary.out_of_memory is not None and not last.finished and last.index == peak.step:
        return ""
    caption = f"the peak by category: step {peak.step}, in {peak.phase}"
    known = summary.parameters.known_count
    body = render_categories(peak.categories, parts_of(peak), known, layout, peak.allocated)
    return f"{layout.heading(caption)}\n\n{body}"


def render_categories(
    live: Breakdown, parts: Parts, parameters: int, layout: Layout, allocated: int | None = None
) -> str:
    """The live bytes at one instant by category, the largest first, with the ``parts`` of those that have some.

    ``allocated`` are the allocated bytes, with the allocator's rounding.
    """
    total = sum(live.values())
    rows = [
        [name, format_peak(size), share(size, total), *([per_parameter(size, parameters)] if parameters else [])]
        for name, size in [*_sizes(live, parts), (TOTAL, total)]
    ]
    above = [] if allocated is None else [("rounding", allocated - total), (ALLOCATED, allocated)]
    rows += [[name, format_peak(size), *[""] * (len(rows[0]) - 2)] for name, size in above]
    columns = [words("category", least=_NAME), number("bytes"), number("share")]
    columns += [number("B/param", rank=1)] if parameters else []
    bars = [bar_of(size, total) for _, size in _sizes(live, parts)]
    with_bars = [*columns, words("")], [[*row, each] for row, each in zip_longest(rows, bars, fillvalue="")]
    if layout.screen and narrowest(*with_bars) <= layout.width:
        columns, rows = with_bars
    return table(columns, rows, layout, strong=(TOTAL, ALLOCATED))


BAR = 20
"""The characters of a whole bar."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar_of(size: int, total: int) -> str:
    """A bar for the share of ``size`` in ``total``, to an eighth of a character."""
    whole, eighths = divmod(round(8 * BAR * min(size, total) / total) if total else 0, 8)
    return f"{'█' * whole}{_EIGHTHS[eighths]}".rstrip()


def _sizes(live: Breakdown, parts: Parts) -> Iterator[tuple[str, int]]:
    for category in sorted(CATEGORIES, key=lambda category: -live[category]):
        if not live[category]:
            continue
        split = {part: size for part, size in parts.get(category, {}).items() if size}
        alone = len(split) == 1 and sum(split.values()) == live[category]
        yield (f"{category}, {next(iter(split))}" if alone else str(category)), live[category]
        if not alone:
            yield from ((f"└ {part}", size) for part, size in split.items())


HOLDERS = 4
_NARROW = 16
"""The least width of a category's name."""
_HEADS = ("after\nforward", "after\nbackward", "after\nupdate", "peak")


def render_marks(step: Step, parameters: int, layout: Layout, *, casts: bool) -> str:
    """The categories at the three marks of a step and at its peak; ``casts`` says that the run was under autocast."""
    rows: list[list[str]] = []
    parts = parts_of(step.peak)
    for key, sizes in breakdown_rows(step, casts=casts):
        rows.append([indented(key), *(cell for size in sizes for cell in size_cells(size, parameters))])
        for part, size in parts.get(key, {}).items():
            if size:  # only the peak's are split
                found = size_cells(size, parameters)
                rows.append([f"└ {part}", *[""] * (3 * len(found)), *found])
    columns = [words("", least=_NARROW)]
    for head in _HEADS:
        # If there is not enough room, the peak's bytes per parameter are the last to move below.
        beside = number("B/\nparam", rank=1 if head == _HEADS[-1] else 2, of=head)
        columns += [number(head), *([beside] if parameters else [])]
    caption = layout.heading(f"step {step.index} at its marks, peak in {step.peak.phase}")
    return f"{caption}\n\n{table(columns, rows, layout, strong=(TOTAL,))}"


def parts_of(peak: Peak) -> Parts:
    """The bytes at ``peak`` of the parts of temporaries, and of communication."""
    return {
        Category.TEMPORARIES: in_phases(peak.temporaries_by_phase),
        Category.COMMUNICATION: {part.value: size for part, size in peak.communication_by_part.items()},
    }


def in_phases(temporaries: Mapping[str, int]) -> Mapping[str, int]:
    """The bytes of temporaries by phase of birth, with the names of their rows."""
    return {f"in {phase}": size for phase, size in temporaries.items()}


def breakdown_rows(step: Step, *, casts: bool) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """Each row's name and its bytes at the marks and the peak of ``step``; ``casts`` as in :func:`render_marks`."""
    marks = step.marks
    instants = (marks.after_forward, marks.after_backward, marks.after_optimizer, step.peak.categories)
    for category in CATEGORIES:
        if category == PRECISION_COPIES[0] and (casts or any(_sums(instants, PRECISION_COPIES))):
            yield "precision_copies", _sums(instants, PRECISION_COPIES)
        if any(sizes := _sums(instants, (category,))):
            yield category, sizes
    yield TOTAL, _sums(instants, CATEGORIES)


def _sums(instants: Sequence[Breakdown | None], categories: Sequence[Category]) -> tuple[int | None, ...]:
    return tuple(None if live is None else sum(live[category] for category in categories) for live in instants)


def indented(category: str) -> str:
    """A row that belongs to the row above: a mark, since tabulate strips leading spaces."""
    return f"└ {category}" if category in PRECISION_COPIES else str(category)


def render_held(summary: Summary, layout: Layout) -> str:
    """The holders of memory that is not otherwise known; empty if no holder is known."""
    if not any(entry.holder for entry in summary.held):
        return ""
    parts = []
    for entry in summary.held[:HOLDERS]:
        by = "whose holder is not known" if entry.holder is None else f"held by {shorten(entry.holder, 40)}"
        parts.append(f"{format_bytes(entry.bytes)} {by} ({counted(entry.tensors, 'tensor')})")
    rest = summary.held[HOLDERS:]
    if rest:
        parts.append(f"{format_bytes(sum(entry.bytes for entry in rest))} by {counted(len(rest), 'other')}")
    text = f"other at the end of step {summary.steps[-1].index}: {', '.join(parts)}"
    return "\n".join(wrapped(text, layout.width))


MODULES = 15
ALLOCATIONS = 10

_MODULES_NAME, _SHORT = 24, 16
"""The least width of a name: with less, names that end alike would read the same."""
_INDENT = 4


def render_modules(summary: Summary, layout: Layout) -> str:
    """The modules with the most bytes in the model's order, equal layers as one; empty if there are none.

    Layers that differ, such as the last of a checkpointed model, are next to the others, not below their parts.
    """
    modules = summary.modules
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
        words("module and\nits submodules", least=_MODULES_NAME),
        number("parameters"),
        number("activations"),
        number("cast\ncopies", rank=1),
        number("gradients", rank=2),
    ]
    left_out = len(modules) - sum(len(groups[i]) for i in chosen)
    more = f"\n… and {counted(left_out, 'smaller module')}" if left_out else ""
    return f"{layout.strong('modules')}\n\n{table(columns, rows, layout)}{more}"


def _figures(module: ModuleMemory) -> tuple[int, ...]:
    return module.parameters, module.activations, module.cast_copies, module.gradients


def render_largest(summary: Summary, layout: Layout) -> str:
    """The largest allocations at the peak, each with the script's line; empty if there are none.

    Equal layers are one row, with the size of the largest and their sum. If memory ran out and the run ended, the
    instant is the failure.
    """
    ended = summary.ended_by
    if ended is not None and not ended.later:
        top, when = ended.largest, f"the failure ({ended.where}, {format_bytes(sum(ended.alive.values()))})"
    else:
        top, when = summary.top, f"the peak (step {summary.peak.step}, {format_peak(summary.peak.said)})"
    groups = layers(top, what=_alike, sizes=lambda item: (item.bytes,))
    shown = sorted(groups, key=lambda group: -max(item.bytes for item in group))[:ALLOCATIONS]
    if not shown:
        return ""
    # The summary's list ends with these: there may be more like them.
    last = top[-1] if len(top) >= MOST else None
    rows = [_row(group, more=last is not None and last in group) for group in shown]
    columns = [
        number("bytes"),
        number("total"),
        words("category", rank=1),
        words("name", least=_MODULES_NAME),
        words("module", least=_SHORT, rank=2),
        words("op", least=_SHORT, rank=3),
    ]
    if all(len(group) == 1 for group in shown):  # each total is the size itself
        columns, rows = [columns[0], *columns[2:]], [[row[0], *row[2:]] for row in rows]
    # A frame is wider than any column could be, so it has a line of its own.
    lines = table_with_lines(columns, rows, [_below(group[0], layout) for group in shown], layout)
    return "\n".join([layout.heading(f"largest allocations at {when}"), "", *lines])


def _alike(item: LargeAllocation) -> tuple[str | None, ...]:
    """The properties that equal layers share, apart from the numbers in their names."""
    return item.name, item.module, item.op, item.category, item.dtype, user_frame(item.stack)


def _row(group: Sequence[LargeAllocation], *, more: bool) -> list[str]:
    """The row of a group; ``more`` says that there may be others like these."""
    names, modules = [_name(item) for item in group], [item.module for item in group]
    # The number is in one place only.
    module = ABSENT if modules[0] is None else modules[0] if len(set(modules)) == 1 else of_all_layers(modules[0])
    sizes = format_bytes(max(item.bytes for item in group)), format_bytes(sum(item.bytes for item in group))
    name = ABSENT if len(group) == 1 else f"{ABSENT} ({format_count(len(group))})"
    if names[0]:
        name = layers_named([name for name in names if name], more=more)
    return [*sizes, str(group[0].category), name, module, group[0].op or ABSENT]


def _name(item: LargeAllocation) -> str | None:
    """The tensor's name; an activation's name in the recording is only the op that saved it."""
    if item.category not in (Category.ACTIVATIONS, Category.TEMPORARIES):
        return item.name
    if item.op is None:
        return item.dtype and f"{item.dtype} {shape_text(item.shape or ())}".strip()
    return result_of(item.op, item.dtype, "" if item.shape is None else shape_text(item.shape))


def _below(item: LargeAllocation, layout: Layout) -> list[str]:
    """The script's own line; for an activation also the op that saved it, if another made it, or its holder."""
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


ACTIVATIONS = 10
"""The number of groups of activations that are shown."""

_ACTIVATIONS_NAME = 16
"""The least width of an op's name."""


def render_activations(summary: Summary, layout: Layout) -> str:
    """The activations at the end of forward by kind and type; empty unless the run was under autocast.

    If no forward ended before memory ran out, the instant is the failure.
    """
    groups, pairs = summary.activations, savings(summary.activations)
    total = sum(group.bytes for group in groups)
    if summary.precision.dtype is None or not total:
        return ""
    low = sum(group.bytes for group in groups if group.dtype in LOW_PRECISION)
    unknown = sum(group.bytes for group in groups if group.dtype is None)
    rows = [
        [
            each.saved_for or ABSENT,
            each.made_by or ABSENT,
            each.dtype or "unknown",
            format_count(each.tensors),
            format_bytes(each.bytes),
            share(each.bytes, total),
        ]
        for each in pairs[:ACTIVATIONS]
    ]
    columns = [
        words("saved for", least=_ACTIVATIONS_NAME),
        words("made by", least=_ACTIVATIONS_NAME, rank=2),
        words("type"),
        number("tensors", rank=1),
        number("bytes"),
        number("share"),
    ]
    left_out = len(pairs) - len(rows)
    more = f"\n… and {counted(left_out, 'smaller group')}" if left_out else ""
    when = "at the end of forward" if summary.last_step.marks.after_forward else "when memory ran out"
    types = f"{share(low, total)} are in low precision"
    types += f", the type of {share(unknown, total)} is unknown" if unknown else ""
    types = "their types are unknown" if unknown == total else types
    caption = f"activations {when}, {format_bytes(total)}: {types}"
    return f"{layout.heading(caption)}\n\n{table(columns, rows, layout)}{more}"


PARAMETERS = 20
"""The number of parameters that are shown."""

_CASTS_NAME = 24
"""The least width of a parameter's name."""


def render_casts(summary: Summary, layout: Layout) -> str:
    """The cast copies of each step and of each parameter, and their holders.

    A snapshot has neither uses nor holders of copies; only the releases of autocast's cache are seen.
    """
    casts = summary.casts
    if not casts.copies:
        unseen = " was seen; casts inside compiled code cannot be seen"
        return f"cast copies: none{unseen * casts_compiled(summary.notes)}"
    seen = summary.source is not SourceKind.SNAPSHOT
    served = f"; {format_count(casts.cache_hits or 0)} cache hits" if seen else ""
    caption = layout.heading(
        f"cast copies: {format_count(casts.copies)} made, {format_bytes(casts.bytes)}{served}; "
        f"at most {format_bytes(casts.peak_bytes)} at once"
    )
    made = _copies_by_phase(casts.steps, layout, uses=seen)
    held, parameters = (
        _copies_by_holder(casts.steps, layout, all_holders=seen),
        _parameters(casts.by_parameter, layout, uses=seen),
    )
    return "\n\n".join([caption, made, held, parameters])


def _copies_by_phase(steps: Sequence[StepCasts], layout: Layout, *, uses: bool) -> str:
    columns = [number("step"), words("made in"), number("copies"), number("bytes")]
    columns += [number("cache hits")] if uses else []
    rows = []
    for index, phase, made in ((step.index, *each) for step in steps for each in step.phases.items()):
        hits = [format_count(made.cache_hits or 0)] if uses else []
        rows.append([str(index), phase, format_count(made.copies), format_bytes(made.bytes), *hits])
    return table(columns, rows, layout)


def _copies_by_holder(steps: Sequence[StepCasts], layout: Layout, *, all_holders: bool) -> str:
    """The cast copies at the end of forward by holder; without ``all_holders`` only copies in the cache."""
    rows = []
    for step in steps:
        held = step.after_forward
        counts = [None] * 4 if held is None else [held.cache, held.autograd, held.both, held.neither]
        # The cache may have had copies that it was not seen to release.
        holders = map(_count, counts if all_holders else counts[:1])
        rows.append([str(step.index), *holders, format_bytes(step.peak_bytes), _count(step.surviving)])
    others = [number("by\nautograd"), number("by\nboth"), number("by\nneither", rank=2)]
    columns = [number("step"), number("held by the\ncache"), *(others if all_holders else [])]
    columns += [number("peak", rank=1), number("alive at\nstep end", rank=3)]
    caption = layout.heading("who holds the copies at the end of forward")
    return f"{caption}\n\n{table(columns, rows, layout)}{_kinds(steps, layout)}"


def _kinds(steps: Sequence[StepCasts], layout: Layout) -> str:
    """The lines about copies that are not the first copy of a parameter: made again, of views, of other tensors."""
    kinds = {
        "made again in backward (recomputation)": [step.recomputed for step in steps],
        "of views of parameters, which are never cached": [step.views for step in steps if step.views is not None],
        "of tensors that are not parameters, not counted above": [step.others for step in steps],
    }
    lines: list[str] = []
    for kind, counts in kinds.items():
        together = CopyCount(copies=sum(c.copies for c in counts), bytes=sum(c.bytes for c in counts))
        if together.copies:
            lines += wrapped(f"copies {kind}: {_count(together)}", layout.width)
    return "\n\n" + "\n".join(lines) if lines else ""


def _count(count: CopyCount | None) -> str:
    if count is None:
        return ABSENT
    return f"{format_count(count.copies)}: {format_bytes(count.bytes)}" if count.copies else "0"


def parameters_in_layers(parameters: Sequence[ParameterCasts]) -> list[tuple[int, ParameterCasts]]:
    """The number of parameters in each row and their copies, equal layers together; the most bytes first."""

    def counts(item: ParameterCasts) -> tuple[int, ...]:
        return tuple(getattr(item, key) or 0 for key in _COUNTS)

    groups = layers(parameters, what=lambda item: (item.name,), sizes=counts)
    found = []
    for group in groups:
        sums = dict(zip(_COUNTS, map(sum, zip(*map(counts, group), strict=True)), strict=True))
        known = {key: size for key, size in sums.items() if getattr(group[0], key) is not None}
        found.append((len(group), replace(group[0], name=layers_named([item.name for item in group]), **known)))
    return sorted(found, key=lambda each: (-each[1].bytes, natural(each[1].name)))


_USES_AND_HOLDERS = ("cache_hits", "held_by_cache", "held_by_autograd", "held_by_both")
_COUNTS = ("bytes", "copies", *_USES_AND_HOLDERS)


def _parameters(parameters: Sequence[ParameterCasts], layout: Layout, *, uses: bool) -> str:
    groups = parameters_in_layers(parameters)
    rows = [
        [
            item.name,
            format_count(item.copies),
            *(format_count(getattr(item, key) or 0) for key in _USES_AND_HOLDERS if uses),
            format_bytes(item.bytes),
        ]
        for _, item in groups[:PARAMETERS]
    ]
    of_uses = [
        number("cache\nhits", rank=1),
        number("in cache\nonly", rank=3),
        number("autograd\nonly", rank=3),
        number("both", rank=2),
    ]
    columns = [words("parameter", least=_CASTS_NAME), number("copies"), *(of_uses if uses else []), number("bytes")]
    left_out = sum(count for count, _ in groups[PARAMETERS:])
    more = f"\n… and {format_count(left_out)} parameters with fewer bytes" if left_out else ""
    return table(columns, rows, layout) + more


_HOW = (
    "Both peaks are from ampmem's model of the allocator, run on the recorded allocations from an empty start: "
    "compare them with each other, not with a measured peak."
)


def render_what_if(found: Sequence[tuple[str, WhatIf]], layout: Layout) -> str:
    """One row per setting: the peak of reserved memory with the default settings, and with that one."""
    rows = []
    for setting, each in found:
        before, peak = each.before.counters.reserved_peak, each.after.counters.reserved_peak
        after = format_bytes(peak) if each.after.out_of_memory is None else "out of memory"
        rows.append([setting, format_bytes(before), after, signed(peak - before)])
    columns = [words("setting", least=12), number("peak reserved"), number("with it"), number("difference")]
    return "\n".join([table(columns, rows, layout), "", *wrapped(_HOW, layout.width, indent="")])
