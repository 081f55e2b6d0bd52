"""The difference between two runs of changed code, as text: the answer first, then the changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampmem.analysis.difference.difference import Difference, Fold, GroupChange, Tensor, WhichRun, folded
from ampmem.analysis.difference.matching import Renamed
from ampmem.analysis.difference.sides import Moment
from ampmem.analysis.ops import plain_op
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.names import shape_text
from ampmem.reporters.text.answer import capital, in_phase, name
from ampmem.reporters.text.layout import Layout, number, table, table_with_lines, words
from ampmem.reporters.text.plain_text import ABSENT, shorten, signed, wrapped
from ampmem.reporters.text.plain_text import columns as columns_of
from ampmem.units import counted, format_apart, format_bytes, format_count, format_peak, listed, peaks_apart

CHANGES = 10
"""The number of changes shown by default."""
_PARTS, _NAMES = 3, 3
_SHARE = 0.02
"""Changes below this share of the largest are not in the headline, only in the table."""
_INDENT = 4
_NAMED_BY_OPS = (Category.ACTIVATIONS, Category.TEMPORARIES)
"""Categories whose name is an op's, such as the op that saved an activation."""
_WHAT = 18
"""The least width of what a change is about."""


def render_difference(found: Difference, layout: Layout, *, most: int | None = CHANGES) -> str:
    """The text of a difference; ``most`` is the number of changes shown, all if ``None``."""
    listed_too = found.changes and not found.without_groups
    table_of_changes = f"{layout.strong('what changed')}\n\n{changes_table(found.changes, layout, most=most)}"
    sections = [
        "\n".join(_head_lines(found, layout)),
        "" if found.category is not None or not found.changes else _categories(found, layout),
        table_of_changes if listed_too else "",
        "\n".join(wrapped(foot(found), layout.width)),
    ]
    return "\n\n".join(section for section in sections if section)


def headline(found: Difference) -> str:
    """The answer in one sentence."""
    what = "peak" if found.category is None else f"maximum of {name(found.category)}"
    before, after = (peaks_apart if found.category is None else format_apart)(*found.peaks)
    if not found.changes:
        same = "" if found.without_groups else "; the allocations are the same"
        if found.grown:
            return f"The {what} goes from {before} to {after} only by the rounding of blocks{same}."
        return f"No difference: the {what} is {before} in both{same}."
    if not found.grown:
        added = sum(change.grown for change in found.changes if change.grown > 0)
        return f"The {what} is {before} in both: {format_bytes(added)} were added, and as much went away."
    grew = "grew" if found.grown > 0 else "fell"
    return f"The {what} {grew} from {before} to {after}, {signed(found.grown)}{_parts(found)}."


def _parts(found: Difference) -> str:
    """The categories of the difference: `` of activations``, ``: activations +1.0 GiB, gradients -0.2 GiB``.

    Changes that are small beside the largest are left out: 128 KiB of inputs do not explain 2.3 GiB.
    """
    if found.category is not None:
        return ""
    parts = [(name(each), found.categories_after[each] - found.categories_before[each]) for each in CATEGORIES]
    parts.append(("rounding of blocks", found.rounding))
    sizes = sorted((part for part in parts if part[1]), key=lambda part: -abs(part[1]))
    if len(sizes) == 1:
        return f" of {sizes[0][0]}"
    least = _SHARE * abs(sizes[0][1]) if sizes else 0
    notable = [(part, size) for part, size in sizes if abs(size) >= least]
    shown = notable if len(notable) == _PARTS + 1 else notable[:_PARTS]
    rest = sum(size for _, size in sizes[len(shown) :])
    if len(shown) == 1 and abs(rest) < least:
        return f", nearly all of it {shown[0][0]}"
    words = [f"{part} {signed(size)}" for part, size in shown]
    return f": {', '.join([*words, *([f'all else {signed(rest)}'] if abs(rest) >= least and rest else [])])}"


def remarks(found: Difference) -> Iterator[str]:
    """The sentences after the answer: differing conditions, summaries, renamed modules, and other instants."""
    if found.conditions:
        differ = [f"{each.what} {each.after}, was {each.before}" for each in found.conditions]
        yield f"Not only the code differs: {listed(differ)}."
    if distinct := [*dict.fromkeys(found.without_groups)]:
        are = "are summaries" if len(distinct) > 1 else "is a summary"
        yield f"{listed(distinct)} {are}, without single allocations: the changes are those of whole categories."
    if found.renamed:
        yield renamed_in_words(found.renamed)
    if found.elsewhere_in_run:
        yield f"{capital(listed(found.elsewhere_in_run))}; the peaks of the recorded steps are compared."
    if found.changes and found.elsewhere and found.moment_before is not None and found.moment_after is not None:
        what = "peak" if found.category is None else "maximum"
        yield elsewhere(what, found.moment_before, found.moment_after)


def elsewhere(what: str, before: Moment, after: Moment) -> str:
    """The sentence that two runs are not compared at the same instant."""
    return f"The {what} is at another instant: {_moment(after)}; it was {_moment(before)}."


def _moment(moment: Moment) -> str:
    where = f" in {moment.module}" if moment.module else ""
    made = f", at {plain_op(moment.op)}{where}" if moment.op else ""
    return f"{in_phase(moment.phase, f'step {moment.step}')}{made}"


def _head_lines(found: Difference, layout: Layout) -> list[str]:
    lines = [layout.strong(line) for line in wrapped(headline(found), layout.width, indent="")]
    for doubt in found.doubts:
        lines += map(layout.alarm, wrapped(f"warning: {doubt}", layout.width))
    for remark in remarks(found):
        lines += wrapped(remark, layout.width, indent="")
    return lines


def _categories(found: Difference, layout: Layout) -> str:
    before, after = found.categories_before, found.categories_after
    sizes = {str(each): (before[each], after[each]) for each in CATEGORIES if before[each] or after[each]}
    sizes = dict(sorted(sizes.items(), key=lambda each: -max(each[1])))
    sizes["total"] = found.before, found.after
    if found.peaks != sizes["total"]:
        sizes["rounding"] = found.peaks[0] - found.before, found.peaks[1] - found.after
        sizes["allocated"] = found.peaks
    rows = [
        [name, format_peak(old), format_peak(new), signed(new - old) if old != new else ABSENT]
        for name, (old, new) in sizes.items()
    ]
    columns = [words("at the peak"), number("before"), number("after"), number("change")]
    return table(columns, rows, layout, strong=("total", "allocated"))


def changes_table(changes: Sequence[GroupChange], layout: Layout, *, most: int | None = CHANGES) -> str:
    """The changes, the largest first, with bytes before and after and, below each, the script's own line.

    Equal changes in several layers are one row: ``blocks.*.mlp (12)``. ``most`` is the number of rows, ``None`` for
    all.
    """
    folds = folded(changes)
    shown = folds[:most]
    columns = [
        number("change"),
        words("", rank=4),
        number("before", rank=3),
        number("after", rank=1),
        words("category", rank=2),
        words("what", least=_WHAT),
    ]
    below = [[layout.faint(f"{'':{_INDENT}}{each}") for each in _below(fold, layout.width - _INDENT)] for fold in shown]
    lines = table_with_lines(columns, list(map(cells, shown)), below, layout)
    grown = [fold.grown for fold in folds[len(shown) :]]
    if grown:
        came, went = sum(size for size in grown if size > 0), sum(size for size in grown if size < 0)
        parts = " and ".join(signed(size) for size in (came, went) if size)
        lines.append(f"… and {format_count(len(grown))} smaller: {parts}")
    return "\n".join(lines)


def cells(fold: Fold) -> list[str]:
    """The row of a change: its size and kind, the bytes before and after, its category and its subject."""
    sizes = [signed(fold.grown), str(fold.largest.kind), format_bytes(fold.before), format_bytes(fold.after)]
    return [*sizes, str(fold.largest.category), what(fold)]


def compiling_title(found: Difference) -> str:
    """The title of what compiling changes in one precision, the first word of either label."""
    return f"what compiling changes: {found.label_after.partition(' ')[0]}"


def what(fold: Fold) -> str:
    """The subject of a change: a tensor's name, or its op and module; and the number of equal layers."""
    change = fold.largest
    several = f" ({len(fold.changes)})" if len(fold.changes) > 1 else ""
    if fold.name is not None and change.category not in _NAMED_BY_OPS:
        return f"{fold.name}{several}"
    made = [plain_op(change.op)] if change.op else [f"saved for {plain_op(fold.name)}"] if fold.name else []
    return f"{' in '.join([*made, *([fold.module] if fold.module else [])]) or 'not known'}{several}"


def _below(fold: Fold, room: int) -> list[str]:
    """The script's own line, and each tensor's type and shape; in two lines if one is too short for both."""
    change = fold.largest
    parts = [f"{'was ' * (change.lines_of is WhichRun.BEFORE)}at {change.source_line}"] if change.source_line else []
    tensors = {tensor_in_words(each) for each in fold.changes}
    if len(tensors) == 1 and (said := tensors.pop()):
        parts.append(f"each {said}" if len(fold.changes) > 1 else said)
    together = "; ".join(parts)
    return [shorten(each, room) for each in ([together] if columns_of(together) <= room else parts) if each]


def tensor_in_words(change: GroupChange) -> str:
    """Type, shape and number of the tensors after and before, if known: ``2 x float32 [8], was float32 [4]``.

    Empty for a single allocation of unknown type and shape.
    """
    after = _tensors(change.tensor_after, change.count_after)
    before = _tensors(change.tensor_before, change.count_before)
    if not change.count_after or not change.count_before or after == before:
        return after if change.count_after else before
    return f"{after or '1 allocation'}, was {before or '1 allocation'}"


def _tensors(tensor: Tensor, count: int) -> str:
    known = " ".join(filter(None, (tensor.dtype, None if tensor.shape is None else shape_text(tensor.shape))))
    if not known:
        return "" if count == 1 else f"{format_count(count)} allocations"
    return known if count == 1 else f"{format_count(count)} x {known}"


def foot(found: Difference) -> str:
    """The sentence that all changes add up to the difference."""
    count = len(found.changes)
    if not count:
        return ""
    changes = f"The {counted(count, 'change')} add{'s' if count == 1 else ''} up to"
    rounding = f", and rounding to {signed(found.rounding)};" if found.rounding else ";"
    return f"{changes} {signed(found.after - found.before)}{rounding} residual {format_bytes(found.residual)}."


def renamed_in_words(renamed: Sequence[Renamed]) -> str:
    """The modules that were compared under different names; empty if there are none."""
    if not renamed:
        return ""
    whole = "the whole model"
    named = [f"{each.after or whole}, was {each.before or whole}" for each in renamed[:_NAMES]]
    named += [f"and {format_count(len(renamed) - _NAMES)} more"] if len(renamed) > _NAMES else []
    return f"Treated as renamed, as the parameters below agree in names, types and shapes: {'; '.join(named)}."
