"""The cards of two runs' difference, and of a check against budgets."""

from __future__ import annotations

from ampmem.analysis.budgets.check import CheckResult, Judged
from ampmem.analysis.difference.changes import Fold, WhichRun, folded
from ampmem.analysis.difference.difference import Difference
from ampmem.reporters.html.notebook.cards import Card, Remark, Row
from ampmem.reporters.html.palette import FILLS
from ampmem.reporters.text.check import answer, remarks
from ampmem.reporters.text.common.plain_text import ABSENT
from ampmem.reporters.text.common.words import signed
from ampmem.reporters.text.difference import CHANGES, headline, what
from ampmem.reporters.text.difference import remarks as remarks_on
from ampmem.units import format_bytes


def difference_card(found: Difference) -> Card:
    """The answer, and what changed most."""
    folds = folded(found.changes)
    more = len(folds) - CHANGES
    return Card(
        headline=headline(found),
        alarms=found.doubts,
        facts=("ampmem", f"{found.label_before} to {found.label_after}"),
        caption="what changed, the largest first",
        columns=("before", "after", "change", "source line"),
        rows=[_change(fold) for fold in folds[:CHANGES]],
        remarks=[
            *(Remark(text=text) for text in remarks_on(found)),
            *([Remark(text=f"{more} smaller changes are not shown")] if more > 0 else []),
        ],
    )


def _change(fold: Fold) -> Row:
    change = fold.largest
    line = f"{'was at ' * (change.lines_of is WhichRun.BEFORE)}{change.source_line}" if change.source_line else ABSENT
    return Row(
        label=f"{change.category}, {what(fold)}",
        colour=FILLS[change.category].light,
        cells=(
            format_bytes(fold.before),
            format_bytes(fold.after),
            signed(fold.grown),
            line,
        ),
    )


def check_card(result: CheckResult) -> Card:
    """The answer, and every limit."""
    said = answer(result)
    return Card(
        headline=said if result.ok else "",
        alarms=() if result.ok else (said,),
        facts=("ampmem", *([] if result.baseline is None else [f"baseline {result.baseline.label}"])),
        caption="the limits",
        columns=("limit", "there is", "before", "of", ""),
        rows=[_limit(judged) for judged in result.judged],
        remarks=[Remark(text=text) for text in remarks(result)],
    )


def _limit(judged: Judged) -> Row:
    sizes = [format_bytes(judged.limit)]
    sizes += [ABSENT if size is None else format_bytes(size) for size in (judged.after, judged.before)]
    said = judged.unknown or ("broken" if judged.over else "kept" if judged.kept else "not judged")
    return Row(label=judged.key, cells=(*sizes, judged.limit_of, said))
