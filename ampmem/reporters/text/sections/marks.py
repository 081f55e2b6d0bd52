"""The categories at the marks of a step, and who holds what is in none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ampmem.analysis.summary import Step, Summary
from ampmem.analysis.timeline.categories import CATEGORIES, PRECISION_COPIES, Breakdown, Category
from ampmem.analysis.timeline.communication import ByPart
from ampmem.reporters.text.common.describe import counted
from ampmem.reporters.text.common.layout import Column, Layout, number, table, words
from ampmem.reporters.text.common.plain_text import shorten, wrapped
from ampmem.reporters.text.common.words import size_cells
from ampmem.units import format_bytes

HOLDERS = 4
TOTAL = "total"

_NARROW = 16
"""So much of a category's name is left at least."""
_HEADS = ("after\nforward", "after\nbackward", "after\nupdate", "peak")


def render_marks(step: Step, parameters: int, layout: Layout, *, casts: bool) -> str:
    """The categories at the three marks of a step and at its peak; ``casts`` says that the run is under autocast."""
    rows: list[list[str]] = []
    for key, sizes in breakdown_rows(step, casts=casts):
        cells = [cell for size in sizes for cell in size_cells(size, parameters)]
        rows.append([indented(key), *cells])
        if key == Category.TEMPORARIES:
            rows.extend(_split("in ", step.peak.temporaries_by_phase, parameters))
        if key == Category.COMMUNICATION:
            rows.extend(_split("", step.peak.communication_by_part, parameters))
    caption = layout.heading(f"step {step.index} at its marks, peak in {step.peak.phase}")
    return f"{caption}\n\n{table(_columns(bool(parameters)), rows, layout, strong=(TOTAL,))}"


def breakdown_rows(step: Step, *, casts: bool) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """Each row's name and its bytes at the marks of ``step`` and at its peak; ``casts`` as in :func:`render_marks`."""
    marks = step.marks
    instants = (marks.after_forward, marks.after_backward, marks.after_optimizer, step.peak.categories)
    for category in CATEGORIES:
        if category == PRECISION_COPIES[0] and (casts or has_copies(instants)):
            yield "precision_copies", _sums(instants, PRECISION_COPIES)
        if any(live is not None and live[category] for live in instants):
            yield category, _sums(instants, (category,))
    yield TOTAL, _sums(instants, CATEGORIES)


def _sums(instants: Sequence[Breakdown | None], categories: Sequence[Category]) -> tuple[int | None, ...]:
    return tuple(None if live is None else sum(live[category] for category in categories) for live in instants)


def has_copies(instants: Sequence[Breakdown | None]) -> bool:
    """Whether there is a precision copy at any of ``instants``."""
    return any(live is not None and live[copy] for live in instants for copy in PRECISION_COPIES)


def _columns(known: bool) -> list[Column]:
    """Where there is no room for all of them, the peak's bytes per parameter are the last to go below."""
    found = [words("", least=_NARROW)]
    for head in _HEADS:
        found.append(number(head))
        if known:
            found.append(number("B/\nparam", rank=1 if head == _HEADS[-1] else 2, of=head))
    return found


def indented(category: str) -> str:
    """Tabulate strips leading spaces, so a mark shows what belongs to the row above."""
    return f"└ {category}" if category in PRECISION_COPIES else str(category)


def _split(before: str, parts: Mapping[str, int] | ByPart, parameters: int) -> Iterator[list[str]]:
    """Rows under the temporaries and the communication, ``before`` each part's name; only the peak's are split."""
    for part, size in parts.items():
        if size:
            found = size_cells(size, parameters)
            yield [f"└ {before}{part}", *[""] * (3 * len(found)), *found]


def render_held(summary: Summary, layout: Layout) -> str:
    """Who holds what nothing else is known of; empty where that is known of nothing."""
    if not any(entry.holder for entry in summary.held):
        return ""
    parts = [
        f"{format_bytes(entry.bytes)} {_by(entry.holder)} ({counted(entry.tensors, 'tensor')})"
        for entry in summary.held[:HOLDERS]
    ]
    rest = summary.held[HOLDERS:]
    if rest:
        parts.append(f"{format_bytes(sum(entry.bytes for entry in rest))} by {counted(len(rest), 'other')}")
    text = f"other at the end of step {summary.steps[-1].index}: {', '.join(parts)}"
    return "\n".join(wrapped(text, layout.width))


def _by(holder: str | None) -> str:
    return "whose holder is not known" if holder is None else f"held by {shorten(holder, 40)}"
