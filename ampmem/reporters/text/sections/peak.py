"""What the peak is made of: the table of the first screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown, Category
from ampmem.reporters.text.layout import Layout, number, table, words
from ampmem.reporters.text.plain_text import per_parameter
from ampmem.reporters.text.words import share
from ampmem.units import format_bytes

TOTAL = "total"


def render_peak(summary: Summary, layout: Layout) -> str:
    """The categories at the run's peak; empty where memory ran out in that step: what was alive then says it all."""
    peak, last = summary.peak, summary.steps[-1]
    if summary.out_of_memory is not None and not last.finished and last.index == peak.step:
        return ""
    caption = f"the peak by category: step {peak.step}, in {peak.phase}"
    body = render_categories(peak.categories, peak.temporaries_by_phase, summary.parameters.known_count, layout)
    return f"{layout.strong(caption)}\n\n{body}"


def render_categories(live: Breakdown, temporaries: Mapping[str, int], parameters: int, layout: Layout) -> str:
    """What is alive at one instant, by category, the largest first; ``temporaries`` by the phase they are born in."""
    total = sum(live.values())
    rows = [
        [name, format_bytes(size), share(size, total), *([per_parameter(size, parameters)] if parameters else [])]
        for name, size in [*_sizes(live, temporaries), (TOTAL, total)]
    ]
    columns = [words("category"), number("bytes"), number("share"), *([number("B/param")] if parameters else [])]
    return table(columns, rows, layout, strong=(TOTAL,))


def _sizes(live: Breakdown, temporaries: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    phases = {phase: size for phase, size in temporaries.items() if size}
    for category in sorted(CATEGORIES, key=lambda category: -live[category]):
        if not live[category]:
            continue
        split = phases if category == Category.TEMPORARIES else {}
        yield (f"{category}, in {next(iter(split))}" if len(split) == 1 else str(category)), live[category]
        if len(split) > 1:
            yield from ((f"└ in {phase}", size) for phase, size in split.items())
