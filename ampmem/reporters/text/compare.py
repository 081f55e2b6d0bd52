"""A comparison as text: the answer first, then what is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampmem.analysis.answer import shared_findings, verdict_of
from ampmem.analysis.comparison import Comparison, Entry
from ampmem.analysis.summary import Summary
from ampmem.names import is_warning
from ampmem.reporters.text.answer import Wording, wording
from ampmem.reporters.text.common.describe import conserved, describe_arm, optimizers_or_none
from ampmem.reporters.text.common.layout import PLAIN, Layout
from ampmem.reporters.text.common.plain_text import shorten, wrapped
from ampmem.reporters.text.comparison.figures import render_figures, render_instant, render_losses
from ampmem.reporters.text.comparison.static_models import render_static_models
from ampmem.reporters.text.details import EVERYTHING, NOTHING, Detail
from ampmem.reporters.text.next_steps import render_next
from ampmem.reporters.text.out_of_memory import in_short
from ampmem.reporters.text.sections.findings import render_labelled
from ampmem.reporters.text.sections.run import describe_parameters, describe_untrained, keyed
from ampmem.reporters.text.sections.verdict import wording_lines
from ampmem.reporters.text.warnings import render_warnings
from ampmem.vocabulary import Mark

_LABEL = 40


def render(
    comparison: Comparison,
    *,
    details: frozenset[Detail] = NOTHING,
    files: Sequence[str] = (),
    layout: Layout = PLAIN,
    said: Wording | None = None,
) -> str:
    """The comparison as text, without a newline at its end: what fits a first screen, the figures, then ``details``.

    ``files`` are the recordings, for what to do next; ``said`` is what stands first, the verdict by default.
    """
    entries = comparison.entries
    sections = [
        "\n".join(wording_lines(said or wording(verdict_of(comparison)), layout)),
        *(render_warnings(summary, entry.notes, of=_label(entry), layout=layout) for entry, summary in _known(entries)),
        _troubles(comparison, layout),
        *_measured(comparison, details, layout),
        _head(comparison, layout),
        *_chosen(comparison, details, layout),
        _foot(comparison, layout),
        render_next(files, layout, more=details != EVERYTHING),
    ]
    return "\n\n".join(section for section in sections if section)


def _known(entries: Sequence[Entry]) -> list[tuple[Entry, Summary]]:
    """Those that left something to sum up."""
    return [(entry, entry.summary) for entry in entries if entry.summary is not None]


def _label(entry: Entry) -> str:
    return shorten(entry.label, _LABEL)


def _troubles(comparison: Comparison, layout: Layout) -> str:
    """What failed, and why the recordings may not be comparable: to be read before any figure."""
    lines: list[str] = []
    for entry in comparison.entries:
        if entry.failure is not None:
            kept = "" if entry.summary is None else f"; it has {_steps(entry.summary)}"
            lines += wrapped(f"{_label(entry)} failed: {entry.failure}{kept}", layout.width)
        elif entry.summary is None:
            lines += wrapped(f"{_label(entry)}: nothing was recorded", layout.width)
        if entry.summary is not None and entry.summary.out_of_memory is not None:
            text = f"{_label(entry)} ran out of memory in {in_short(entry.summary.out_of_memory)}"
            lines += wrapped(text, layout.width)
    for remark in comparison.remarks:
        lines += wrapped(f"note: {remark}", layout.width)
    return "\n".join(map(layout.alarm, lines))


def _steps(summary: Summary) -> str:
    count = sum(step.finished for step in summary.steps)
    return f"{count} step{'' if count == 1 else 's'}" + ("" if summary.steps[-1].finished else " that ended")


def _measured(comparison: Comparison, details: frozenset[Detail], layout: Layout) -> Iterator[str]:
    """What is said of recordings that have something: the peak, the findings, the figures."""
    if not _known(comparison.entries):
        return
    yield render_instant(comparison, Mark.PEAK, layout)
    found = [(shared.finding, shared.labels) for shared in shared_findings(comparison)]
    yield render_labelled(found, layout, evidence=Detail.EVIDENCE in details)
    yield render_figures(comparison, layout)


def _head(comparison: Comparison, layout: Layout) -> str:
    """What was run, and the precision of each; of runs that differ in more than that, only what they share."""
    known = [[("script", entry.script or "?"), *_run(summary)] for entry, summary in _known(comparison.entries)]
    first, *others = known or [[("script", comparison.entries[0].script or "?")]]
    rows = [row for row in first if not comparison.remarks or all(row in other for other in others)]
    rows += [
        ("precision" if i == 0 else "", _described(entry, baseline=i == comparison.baseline))
        for i, entry in enumerate(comparison.entries)
    ]
    return "\n".join([layout.strong("the runs"), *keyed(rows, layout)])


def _run(summary: Summary) -> list[tuple[str, str]]:
    return [
        ("device", f"{summary.device.name} ({summary.device.type}), events from {summary.source}"),
        ("torch", f"{summary.torch}, ampmem {summary.ampmem}"),
        ("parameters", describe_parameters(summary)),
        *([("untrained", untrained)] if (untrained := describe_untrained(summary)) else []),
        ("optimizer", optimizers_or_none(summary)),
    ]


def _described(entry: Entry, *, baseline: bool) -> str:
    words = [_label(entry)]
    if entry.summary is not None:
        arm = describe_arm(entry.summary)
        words = [arm if entry.label == entry.summary.arm.name else f"{_label(entry)}: {arm}"]
    if entry.failure is not None:
        words.append("(failed)")
    if baseline:
        words.append("(what the others are compared with)")
    return " ".join(words)


def _chosen(comparison: Comparison, details: frozenset[Detail], layout: Layout) -> Iterator[str]:
    """The details that are asked for."""
    if not _known(comparison.entries):
        return
    if Detail.MARKS in details:
        for mark in (Mark.AFTER_FORWARD, Mark.AFTER_BACKWARD, Mark.AFTER_OPTIMIZER):
            if any(column.live(mark) for column in comparison.columns):
                yield render_instant(comparison, mark, layout)
    if Detail.STATIC_MODEL in details:
        yield render_static_models(comparison.entries, layout)
    if Detail.LOSSES in details:
        yield render_losses(comparison, layout)


def _foot(comparison: Comparison, layout: Layout) -> str:
    lines: list[str] = []
    for entry, summary in _known(comparison.entries):
        lines += wrapped(f"conservation: {_label(entry)}: {conserved(summary)}", layout.width)
    for note, labels in _notes(comparison.entries).items():
        if not is_warning(note):  # those are said at the start
            said = f"note ({', '.join(shorten(label, _LABEL) for label in labels)}): {note}"
            lines += wrapped(said, layout.width)
    return "\n".join(lines)


def _notes(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """What the recordings have to say, and which of them say it."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        for note in entry.notes:
            found.setdefault(note, []).append(entry.label)
    return found
