"""What the peak is made of: the table of the first screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown, Category
from ampmem.reporters.text.common.layout import Layout, number, table, words
from ampmem.reporters.text.common.plain_text import per_parameter
from ampmem.reporters.text.common.words import share
from ampmem.units import format_peak

TOTAL = "total"
_ROUNDING, ALLOCATED = "rounding", "allocated"
_NAME = 20
"""So much of a category's name and its part's is left at least."""

Parts: TypeAlias = Mapping[Category, Mapping[str, int]]
"""Bytes of the parts of those categories that have some, by name."""


def render_peak(summary: Summary, layout: Layout) -> str:
    """The categories at the run's peak; empty where memory ran out in that step: what was alive then says it all."""
    peak, last = summary.peak, summary.steps[-1]
    if summary.out_of_memory is not None and not last.finished and last.index == peak.step:
        return ""
    caption = f"the peak by category: step {peak.step}, in {peak.phase}"
    parts = {
        Category.TEMPORARIES: {f"in {phase}": size for phase, size in peak.temporaries_by_phase.items()},
        Category.COMMUNICATION: {part.value: size for part, size in peak.communication_by_part.items()},
    }
    body = render_categories(peak.categories, parts, summary.parameters.known_count, layout, peak.allocated)
    return f"{layout.heading(caption)}\n\n{body}"


def render_categories(
    live: Breakdown, parts: Parts, parameters: int, layout: Layout, allocated: int | None = None
) -> str:
    """What is alive at one instant, by category, the largest first; those that have ``parts`` by those, too.

    ``allocated`` is what the allocator has handed out for it, with its rounding.
    """
    total = sum(live.values())
    rows = [
        [name, format_peak(size), share(size, total), *([per_parameter(size, parameters)] if parameters else [])]
        for name, size in [*_sizes(live, parts), (TOTAL, total)]
    ]
    if allocated is not None:
        rows.append([_ROUNDING, format_peak(allocated - total), *[""] * (len(rows[0]) - 2)])
        rows.append([ALLOCATED, format_peak(allocated), *[""] * (len(rows[0]) - 2)])
    columns = [
        words("category", least=_NAME),
        number("bytes"),
        number("share"),
        *([number("B/param", rank=1)] if parameters else []),
    ]
    return table(columns, rows, layout, strong=(TOTAL, ALLOCATED))


def _sizes(live: Breakdown, parts: Parts) -> Iterator[tuple[str, int]]:
    for category in sorted(CATEGORIES, key=lambda category: -live[category]):
        if not live[category]:
            continue
        split = {part: size for part, size in parts.get(category, {}).items() if size}
        alone = len(split) == 1 and sum(split.values()) == live[category]
        yield (f"{category}, {next(iter(split))}" if alone else str(category)), live[category]
        if not alone:
            yield from ((f"└ {part}", size) for part, size in split.items())
