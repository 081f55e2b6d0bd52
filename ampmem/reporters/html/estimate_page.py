"""The page of ``ampmem estimate``: what each method takes of the GPU, in each precision."""

from __future__ import annotations

from collections.abc import Iterator

from ampmem.analysis.fine_tuning import Estimate, Estimated
from ampmem.analysis.timeline.categories import Category
from ampmem.names import is_warning
from ampmem.reporters.html.page import self_contained
from ampmem.reporters.html.palette import LAYERS
from ampmem.reporters.html.verdict import Bar, BarPiece, Paint, beside, paint, painted
from ampmem.reporters.text.fine_tuning import COLUMNS, facts, headline, rows_of, title, what_is_trained
from ampmem.units import format_bytes


def render_estimate_page(found: Estimate) -> str:
    """The HTML of the page of ``found``."""
    layers = [list(_layers(cell)) for cell in found.cells]
    most = [sum(size for _, size, _ in each) for each in layers]
    whole = max(found.total, *most)
    limit = BarPiece(left=100 * found.total / whole, width=0, title="the GPU's memory", name="less")
    bars = [
        Bar(label=what_is_trained(cell), value=f"up to {format_bytes(size)}", pieces=(*beside(each, whole), limit))
        for cell, each, size in zip(found.cells, layers, most, strict=True)
    ]
    return self_contained(
        "estimate.html",
        "document.js",
        None,
        title=headline(found),
        facts=facts(found),
        caption=title(found),
        columns=[head.replace("\n", " ") for head in COLUMNS],
        rows=rows_of(found),
        bars=bars,
        layers=[Bar(label=name, paint=look) for name, _, look in layers[0]],
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
