"""What the activations are, and in which type."""

from __future__ import annotations

from ampmem.analysis.activations import LOW_PRECISION, savings
from ampmem.analysis.summary import Summary
from ampmem.reporters.text.common.layout import Layout, number, table, words
from ampmem.reporters.text.common.plain_text import ABSENT
from ampmem.reporters.text.common.words import share
from ampmem.units import format_bytes, format_count

ACTIVATIONS = 10
"""Groups of activations that are shown."""

_NAME = 16
"""So much of an op's name is left at least."""


def render_activations(summary: Summary, layout: Layout) -> str:
    """What the activations at the end of forward are and in which type; empty unless the run is under autocast.

    Where no forward came to its end before memory ran out, they are those of then.
    """
    groups, pairs = summary.activations, savings(summary.activations)
    total = sum(group.bytes for group in groups)
    if summary.arm.dtype is None or not total:
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
        words("saved for", least=_NAME),
        words("made by", least=_NAME, rank=2),
        words("type"),
        number("tensors", rank=1),
        number("bytes"),
        number("share"),
    ]
    text = table(columns, rows, layout)
    left_out = len(pairs) - len(rows)
    more = f"\n… and {format_count(left_out)} smaller group{'s' if left_out > 1 else ''}" if left_out else ""
    when = "at the end of forward" if summary.last_step.marks.after_forward else "when memory ran out"
    caption = f"activations {when}, {format_bytes(total)}: {_types(low, unknown, total)}"
    return f"{layout.heading(caption)}\n\n{text}{more}"


def _types(low: int, unknown: int, total: int) -> str:
    """How much is in low precision, as far as the types are known."""
    if unknown == total:
        return "their types are unknown"
    known = f"{share(low, total)} are in low precision"
    return f"{known}, of {share(unknown, total)} the type is unknown" if unknown else known
