"""What changed from one run to another of changed code, for the page: the verdict, and a list to sort and to search."""

from __future__ import annotations

from dataclasses import dataclass

from ampmem.analysis.difference.changes import Fold, WhichRun, folded
from ampmem.analysis.difference.difference import Difference
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown
from ampmem.reporters.html.palette import label
from ampmem.reporters.html.safety import MAX_PROSE, visible
from ampmem.reporters.html.verdict import Bar, End, VerdictView, Waterfall, falls, paint, stacked, unchanged
from ampmem.reporters.text.difference import foot, headline, remarks, tensor_in_words, what
from ampmem.reporters.text.words import signed
from ampmem.units import format_apart

ROWS = 2000
"""So many changes are in a page."""
_BEFORE, _AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeView:
    """One change, or several that are alike in as many layers; ``line_before`` says that it is of the run before."""

    kind: str
    category: str
    what: str
    module: str
    name: str
    op: str
    source_line: str
    line_before: bool
    stack: tuple[str, ...]
    tensors: str
    changes: int
    before: int
    after: int
    grown: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesView:
    """All of them, the largest first; ``note`` says that they add up, and what is left out."""

    note: str
    rows: tuple[ChangeView, ...]


def changes_view(found: Difference) -> ChangesView:
    """The section "What changed"."""
    folds = folded(found.changes)
    left = folds[ROWS:]
    more = f" {len(left):,} smaller ones, {signed(sum(fold.grown for fold in left))}, are left out." if left else ""
    return ChangesView(note=foot(found) + more, rows=tuple(map(_row, folds[:ROWS])))


def _row(fold: Fold) -> ChangeView:
    change = fold.largest
    return ChangeView(
        kind=change.kind,
        category=change.category,
        what=what(fold),
        module=fold.module or "",
        name=fold.name or "",
        op=change.op or "",
        source_line=change.source_line or "",
        line_before=change.lines_of is WhichRun.BEFORE,
        stack=change.stack,
        tensors=tensor_in_words(change),
        changes=len(fold.changes),
        before=fold.before,
        after=fold.after,
        grown=fold.grown,
    )


def difference_verdict(found: Difference) -> VerdictView:
    """What the page of a difference opens with."""
    before, after = found.categories_before, found.categories_after
    whole = max(sum(before.values()), sum(after.values()), 1)
    shown = [category for category in CATEGORIES if before[category] or after[category]]
    return VerdictView(
        headline=visible(headline(found), MAX_PROSE),
        why=visible(" ".join(remarks(found)), MAX_PROSE),
        more=visible(" ".join(f"Warning: {doubt}." for doubt in found.doubts), MAX_PROSE),
        when="of each, on one scale",
        bars=(_bar(_BEFORE, before, after, whole), _bar(_AFTER, after, before, whole)),
        legend=tuple(Bar(label=label(category), paint=paint(category)) for category in shown),
        waterfall=_waterfall(before, after) if before != after else None,
    )


def _bar(name: str, mine: Breakdown, other: Breakdown, whole: int) -> Bar:
    size, beside = sum(mine.values()), sum(other.values())
    change = signed(size - beside) if name == _AFTER and size != beside else ""
    return Bar(label=name, value=format_apart(size, beside)[0], change=change, pieces=stacked(mine, whole))


def _waterfall(before: Breakdown, after: Breakdown) -> Waterfall:
    same = {category: before[category] for category in CATEGORIES if before[category] == after[category] != 0}
    return Waterfall(
        title="From before to after",
        when="at the peak of each",
        rows=falls(
            End(label=_BEFORE, bytes=sum(before.values())),
            End(label=_AFTER, bytes=sum(after.values())),
            {category: after[category] - before[category] for category in CATEGORIES},
        ),
        unchanged=unchanged(same),
    )
