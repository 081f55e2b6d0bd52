"""A value as a small table inside another page: without scripts, style sheets or anything loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ampmem.analysis.answer import verdict_of, verdict_of_one
from ampmem.analysis.budgets.check import CheckResult, Judged
from ampmem.analysis.comparison import Comparison, entry_of
from ampmem.analysis.difference.difference import Difference, Fold, WhichRun, folded
from ampmem.analysis.ranks.ranks import Ranks
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown, Category
from ampmem.errors import AmpmemError
from ampmem.events import Recording
from ampmem.output import Bundle, one_line
from ampmem.reporters.html.palette import FILLS, label
from ampmem.reporters.html.safety import MAX_PROSE, filled_template
from ampmem.reporters.html.write import page_of
from ampmem.reporters.text.answer import capital, in_phase, wording
from ampmem.reporters.text.check import answer, remarks, render_check
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.difference import CHANGES, headline, render_difference, what
from ampmem.reporters.text.difference import remarks as remarks_on
from ampmem.reporters.text.layout import PLAIN
from ampmem.reporters.text.memory import breakdown_rows
from ampmem.reporters.text.plain_text import ABSENT, AT_MARK, IN_SHORT, or_absent, per_parameter, signed
from ampmem.reporters.text.ranks import absences, doubts, instants_of, ranks_wording, render_ranks
from ampmem.reporters.text.run import (
    change_of,
    describe_optimizers,
    describe_precision,
    parameters_in_short,
    precision_in_words,
    warnings,
)
from ampmem.reporters.text.table import render as render_summary
from ampmem.units import counted, format_bytes, format_peak
from ampmem.vocabulary import AUTOCAST_PRECISIONS, Mark

MOST_RANKS = 16
"""The most ranks that have a row each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRow:
    """One row of the table; ``colour`` is empty if the row is not a category."""

    label: str
    cells: tuple[str, ...]
    colour: str = ""
    sum: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The parts of a value in a notebook: the answer, facts, a table, and remarks, each a word and a sentence."""

    headline: str
    facts: Sequence[str]
    alarms: Sequence[str] = ()
    caption: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[CardRow] = ()
    remarks: Sequence[tuple[str, str]] = ()


def html_of(card: Card) -> str:
    """The card as HTML that depends on nothing in the page around it; all text is escaped."""
    return filled_template("card.html", card=card, prose=MAX_PROSE)


def summary_card(summary: Summary) -> Card:
    """The verdict, the last step's breakdown and the findings."""
    step, known = summary.last_step, summary.parameters.known_count
    rows = []
    for key, sizes in breakdown_rows(step, casts=summary.precision.name in AUTOCAST_PRECISIONS):
        cells = [(or_absent(size), ABSENT if size is None else per_parameter(size, known)) for size in sizes]
        rows.append(_row(key, list(chain.from_iterable(cells))))
    return Card(
        headline=wording(verdict_of_one(summary)).text,
        alarms=warnings(summary),
        facts=(
            "ampmem",
            parameters_in_short(summary),
            describe_optimizers(summary) or "no optimizer",
            f"{summary.device.name} ({summary.device.type}{', simulated' * (summary.prediction is not None)})",
            f"precision {describe_precision(summary)}",
            counted(len(summary.steps), "step"),
        ),
        caption=f"step {step.index}, peak {in_phase(step.peak.phase)}",
        columns=[text for column in IN_SHORT.values() for text in (column, "B/param")],
        rows=rows,
        remarks=[
            (finding.severity, f"{finding.message} {capital(change_of(finding))}") for finding in summary.findings
        ],
    )


def comparison_card(comparison: Comparison) -> Card:
    """The verdict, and the categories of each recording at the peak of the compared step."""
    columns, entries = comparison.columns, comparison.entries
    live = [column.live(Mark.PEAK) for column in columns]
    known = [(entry.label, entry.summary, entry.notes) for entry in entries if entry.summary is not None]
    doubted = [f"{label}: {text}" for label, summary, notes in known for text in warnings(summary, notes)]
    failed = [f"{entry.label} failed: {entry.failure}" for entry in entries if entry.failure is not None]
    beside = []
    if comparison.baseline is not None:
        cells = [signed(column.peak_difference) for column in columns]
        cells[comparison.baseline] = ABSENT
        beside = [CardRow(label=f"Difference to {entries[comparison.baseline].label}", cells=tuple(cells))]
    return Card(
        headline=wording(verdict_of(comparison)).text,
        alarms=[*failed, *doubted],
        facts=("ampmem", *dict.fromkeys(entry.script for entry in entries if entry.script)),
        caption=f"{AT_MARK[Mark.PEAK]}, {comparison.which_step}",
        columns=[entry.label for entry in entries],
        rows=[*_by_category(live, [column.peak for column in columns]), *beside],
        remarks=[("note", remark) for remark in comparison.remarks],
    )


def ranks_card(ranks: Ranks) -> Card:
    """The verdict, the missing ranks, and the categories of each rank at its own peak, the largest first."""
    job = ranks.job
    largest = sorted(ranks.compared, key=lambda rank: -rank.peak_bytes)
    shown = largest[:MOST_RANKS]
    live = [None if rank.peak is None else rank.peak.categories for rank in shown]
    left_out = len(largest) - len(shown)
    return Card(
        headline=ranks_wording(ranks).text,
        alarms=[*doubts(ranks), *absences(ranks)],
        facts=(
            "ampmem",
            job.script,
            f"{len(ranks.ranks)} of {job.world_size} ranks",
            f"{job.device.name} ({job.device.type})",
            f"precision {precision_in_words(job.precision, job.source)}",
        ),
        caption=instants_of(ranks),
        columns=[f"rank {rank.rank}" for rank in shown],
        rows=list(_by_category(live, [rank.peak_bytes for rank in shown])) if shown else [],
        remarks=[("", f"{left_out} ranks with smaller peaks are not shown")] if left_out else [],
    )


def _by_category(live: Sequence[Breakdown | None], peaks: Sequence[int | None]) -> Iterator[CardRow]:
    """A row for each category that any entry has, for their sums, and for the ``peaks`` if these are others."""
    for category in CATEGORIES:
        if any(one is not None and one[category] for one in live):
            yield _row(category, [or_absent(None if one is None else one[category]) for one in live])
    sums = [None if one is None else sum(one.values()) for one in live]
    yield CardRow(label="Total", cells=tuple(or_absent(size, format_peak) for size in sums), sum=True)
    if list(peaks) != sums:
        cells = tuple(or_absent(size, format_peak) for size in peaks)
        yield CardRow(label="Allocated (the peak)", cells=cells, sum=True)


def _row(key: str, cells: Sequence[str]) -> CardRow:
    if key not in FILLS:
        return CardRow(label=key.replace("_", " ").capitalize(), cells=tuple(cells), sum=key == "total")
    category = Category(key)
    return CardRow(label=label(category), cells=tuple(cells), colour=FILLS[category].light)


def difference_card(found: Difference) -> Card:
    """The answer, and the largest changes."""
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
            *(("", text) for text in remarks_on(found)),
            *([("", f"{more} smaller changes are not shown")] if more > 0 else []),
        ],
    )


def _change(fold: Fold) -> CardRow:
    change = fold.largest
    line = f"{'was at ' * (change.lines_of is WhichRun.BEFORE)}{change.source_line}" if change.source_line else ABSENT
    cells = (format_bytes(fold.before), format_bytes(fold.after), signed(fold.grown), line)
    return CardRow(label=f"{change.category}, {what(fold)}", colour=FILLS[change.category].light, cells=cells)


def check_card(result: CheckResult) -> Card:
    """The answer, and every limit."""
    said = answer(result)
    return Card(
        headline=said if result.ok else "",
        alarms=() if result.ok else (said,),
        facts=("ampmem", *([] if result.baseline is None else [f"baseline {result.baseline.label}"])),
        caption="the limits",
        columns=("limit", "measured", "before", "source", ""),
        rows=[_limit(judged) for judged in result.judged],
        remarks=[("", text) for text in remarks(result)],
    )


def _limit(judged: Judged) -> CardRow:
    sizes = map(or_absent, (judged.limit, judged.after, judged.before))
    said = judged.unknown or ("broken" if judged.over else "kept" if judged.kept else "not judged")
    return CardRow(label=judged.key, cells=(*sizes, judged.limit_of, said))


def bundle_of(value: object) -> Bundle:
    """The tables of ``value``; its one line if it has none."""
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
    """The summary of the recording, or why there is none."""
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


MOST = 2_000_000
"""Bytes of a frame. A notebook stores its outputs, and Jupyter's server drops output above 1 MB/s, averaged over three
seconds."""

STREAM_ROOM = 600_000
"""Bytes of the frame for events; without them a page has 0.8 MB, three quarters of which is the drawing library."""

HEIGHT = 720
"""Pixels: a frame in a sandbox cannot tell its own height."""


def frame(recordings: Sequence[Path], title: str) -> str | None:
    """The page of ``recordings`` in a frame; ``None`` if it is larger than :data:`MOST`.

    Raises what reading and summing up a recording raises.
    """
    framed = filled_template("frame.html", page=page_of(recordings, STREAM_ROOM), title=title, height=HEIGHT)
    return framed if len(framed.encode()) <= MOST else None
