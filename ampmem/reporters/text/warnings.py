"""What must be said before any number of a run: that its sums are wrong, or what they stand on doubtful."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.analyse import doubts_of
from ampmem.analysis.summary import Summary
from ampmem.reporters.text.common.layout import PLAIN, Layout
from ampmem.reporters.text.common.plain_text import wrapped

_WORD = "WARNING"
_INDENT = " " * 9


def warnings(summary: Summary, notes: Sequence[str] = ()) -> tuple[str, ...]:
    """Why the numbers of this run prove nothing, or less, a sentence each; empty where they add up.

    ``notes`` are what else is known of the run, of which some are warnings, beside those that the summary has.
    """
    found = doubts_of(summary.conservation, summary.static_problem, notes)
    return tuple(dict.fromkeys((*found, *summary.warnings)))


def render_warnings(summary: Summary, notes: Sequence[str] = (), *, of: str = "", layout: Layout = PLAIN) -> str:
    """The :func:`warnings` as lines; ``of`` is which of several runs it is. Empty where there are none."""
    label = f"{of}: " if of else ""
    return "\n".join(line for text in warnings(summary, notes) for line in warning_lines(f"{label}{text}", layout))


def warning_lines(text: str, layout: Layout) -> list[str]:
    """``text`` under the word that nobody should miss."""
    first, *others = wrapped(f"{_WORD:<{len(_INDENT)}}{text}", layout.width, indent=_INDENT)
    return [first.replace(_WORD, layout.alarm(_WORD), 1), *others]
