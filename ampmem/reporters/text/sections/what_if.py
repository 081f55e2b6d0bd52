"""What other allocator settings would have reserved, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.allocator.oom import OutOfMemoryReport
from ampmem.allocator.trace import TraceRun, WhatIf
from ampmem.reporters.text.common.layout import Layout, number, table, words
from ampmem.reporters.text.common.plain_text import wrapped
from ampmem.reporters.text.common.words import signed
from ampmem.units import format_bytes

_HOW = (
    "Both from ampmem's model of the allocator, run on the recorded allocations from an empty start, so they compare "
    "with each other, and not with a peak that was measured."
)


def render_what_if(found: Sequence[tuple[str, WhatIf]], layout: Layout) -> str:
    """One row per setting: the peak of reserved memory with the default settings, and with it."""
    rows = [
        [
            setting,
            format_bytes(each.peak_reserved_before),
            _after(each.after),
            signed(each.peak_reserved_after - each.peak_reserved_before),
        ]
        for setting, each in found
    ]
    columns = [words("setting", least=12), number("peak reserved"), number("with it"), number("difference")]
    said = wrapped(_HOW, layout.width, indent="")
    return "\n".join([table(columns, rows, layout), "", *said])


def _after(run: TraceRun) -> str:
    failure: OutOfMemoryReport | None = run.out_of_memory
    return format_bytes(run.statistics.reserved_bytes.peak) if failure is None else "out of memory"
