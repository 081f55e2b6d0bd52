"""What a notebook shows of each kind of value, as HTML and as text."""

from __future__ import annotations

from ampmem.analysis.budgets.check import CheckResult
from ampmem.analysis.comparison import Comparison, entry_of
from ampmem.analysis.difference.difference import Difference
from ampmem.analysis.ranks.ranks import Ranks
from ampmem.analysis.summary import Summary
from ampmem.errors import AmpmemError
from ampmem.events import Recording
from ampmem.output import Bundle, one_line
from ampmem.reporters.html.notebook.cards import Card, comparison_card, html_of, ranks_card, summary_card
from ampmem.reporters.html.notebook.changes import check_card, difference_card
from ampmem.reporters.text.check import render_check
from ampmem.reporters.text.common.layout import PLAIN
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.difference import render_difference
from ampmem.reporters.text.ranks.render import render_ranks
from ampmem.reporters.text.table import render as render_summary


def bundle_of(value: object) -> Bundle:
    """The tables of ``value``; the line that it is in short, where it has none."""
    if isinstance(value, Summary):
        return _bundle(summary_card(value), render_summary(value, ()))
    if isinstance(value, Comparison):
        return _bundle(comparison_card(value), render_comparison(value))
    if isinstance(value, Ranks):
        return _bundle(ranks_card(value), render_ranks(value))
    if isinstance(value, Difference):
        return _bundle(difference_card(value), render_difference(value, PLAIN))
    if isinstance(value, CheckResult):
        return _bundle(check_card(value), render_check(value))
    if isinstance(value, Recording):
        return _of_recording(value)
    return {"text/plain": repr(value)}


def _of_recording(recording: Recording) -> Bundle:
    """What the recording comes to; where it comes to nothing, why."""
    try:
        entry = entry_of(recording)
    except AmpmemError as error:
        card = Card(headline=str(error), facts=("ampmem", repr(recording)))
        return _bundle(card, f"{recording!r}\n{one_line(str(error))}")
    assert entry.summary is not None
    title = " ".join((recording.run.script, *recording.run.arguments))
    return _bundle(summary_card(entry.summary), render_summary(entry.summary, recording.remarks, title=title))


def _bundle(card: Card, text: str) -> Bundle:
    return {"text/plain": text, "text/html": html_of(card)}
