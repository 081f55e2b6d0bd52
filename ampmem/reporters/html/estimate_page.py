"""The page of ``ampmem estimate``: what each method takes of the GPU, in each precision."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from ampmem.analysis.fine_tuning import Estimate, Estimated
from ampmem.analysis.timeline.categories import Category
from ampmem.names import is_warning
from ampmem.reporters.html.page import self_contained
from ampmem.reporters.html.palette import LAYERS
from ampmem.reporters.html.verdict import Bar, BarPiece, Paint, paint, painted, piece
from ampmem.reporters.text.fine_tuning import COLUMNS, facts, headline, rows_of, title, what_is_trained
from ampmem.units import format_bytes


def render_estimate_page(found: Estimate) -> str:
    """The HTML of the page of ``found``."""
    whole = max(found.total, *(sum(size for _, size, _ in _layers(cell)) for cell in found.cells))
    return self_contained(
        "estimate.html",
        "document.js",
        None,
        title=headline(found),
        facts=facts(found),
        caption=title(found),
        columns=[head.replace("\n", " ") for head in COLUMNS],
        rows=rows_of(found),
        bars=[_bar(cell, whole, found.total) for cell in found.cells],
        legend=[Bar(label=name, paint=look) for name, _, look in _layers(found.cells[0])],
        limit=format_bytes(found.total),
        notes=[note for note in found.notes if not is_warning(note)],
    )


def _layers(cell: Estimated) -> Iterator[tuple[str, int, Paint]]:
    """The memory of the asked run, from the tensors up: name, bytes and look of each layer."""
    point = cell.asked
    allocated, reserved, used = point.allocated or 0, point.reserved or 0, point.used or 0
    yield "Allocated", allocated, paint(Category.PARAMETERS)
    yield "Cached", reserved - allocated, painted(LAYERS["cached"])
    yield "Outside of the allocator", used - reserved, paint(Category.WORKSPACE)
    yield "Not known, at most", max((point.highest or used) - used, 0), painted(LAYERS["rounding"])


def _bar(cell: Estimated, whole: int, total: int) -> Bar:
    """The asked run of ``cell`` in a bar of ``whole`` bytes, with a line at the GPU's memory of ``total`` bytes."""
    layers = list(_layers(cell))
    starts = list(accumulate((size for _, size, _ in layers), initial=0))
    shown = zip(starts, layers, strict=False)
    pieces = [piece(start, size, whole, name, look) for start, (name, size, look) in shown if size]
    pieces.append(BarPiece(left=100 * total / whole, width=0, title="the GPU's memory", name="less"))
    return Bar(label=what_is_trained(cell), value=f"up to {format_bytes(starts[-1])}", pieces=tuple(pieces))
