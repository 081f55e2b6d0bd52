"""From recordings on disk to one page on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ampmem.analysis.analyse import analyse
from ampmem.analysis.answer import verdict_of, verdict_of_one
from ampmem.analysis.compare import Entry, compare, distinct, entry_of
from ampmem.analysis.judged import judged_findings
from ampmem.analysis.summary import summary_of
from ampmem.errors import NothingRecorded, RecordingError, UsageError
from ampmem.outputs import check_output, open_output
from ampmem.recording import check_recording, read
from ampmem.reporters.html.data import RunView
from ampmem.reporters.html.page.page import page_view, render
from ampmem.reporters.html.progress import Progress
from ampmem.reporters.html.views.comparison import ComparisonView, comparison_view, difference_headline
from ampmem.reporters.html.views.run import findings_view, headlines, run_view
from ampmem.reporters.html.views.verdict import VerdictView, verdict_view

STREAM_LIMIT = 8_000_000
"""Bytes of the page that the events of one recording may take."""

STREAMS_LIMIT = 24_000_000
"""Bytes that those of all recordings may take together."""


def write(recordings: Sequence[Path], output: Path, *, force: bool = False) -> None:
    """Write the page of ``recordings`` to ``output``; several of them are compared.

    Raises :class:`~ampmem.errors.UsageError` when there is no recording, one is missing or ``output``
    cannot be written (it exists, without ``force``), and what reading and summing up a recording raises.
    """
    if not recordings:
        raise UsageError("there is nothing to report on: give at least one recording")
    # Before the work, and not only when the page is there to be written.
    for path in recordings:
        check_recording(path)
    check_output(output, force=force)
    with Progress() as progress:
        limit = min(STREAM_LIMIT, STREAMS_LIMIT // len(recordings))
        columns = [_column(path, limit, progress) for path in recordings]
        progress.say(f"writing {output.name}")
        entries = distinct([entry for entry, _ in columns], [path.name for path in recordings])
        page = render(page_view(*_side_by_side(entries, [run for _, run in columns])))
        with open_output(output, force=force) as stream:
            stream.write(page)


def _column(path: Path, limit: int, progress: Progress) -> tuple[Entry, RunView]:
    """One recording; only what the page needs of it is kept."""
    progress.say(f"reading {path.name}")
    recording = read(path)
    try:
        analysis = analyse(recording)
        summary = summary_of(analysis)
    except (NothingRecorded, RecordingError) as error:
        raise type(error)(f"{path}: {error}") from error
    entry = entry_of(recording, summary=summary)
    return entry, run_view(entry, summary, analysis, limit)


def _side_by_side(
    entries: Sequence[Entry], runs: Sequence[RunView]
) -> tuple[tuple[RunView, ...], ComparisonView | None, VerdictView]:
    """The runs under the labels of the comparison, the comparison, ``None`` for a single one, and the verdict."""
    if len(runs) == 1:
        (entry,) = entries
        verdict = verdict_of_one(entry.summary, label=entry.label, failed=entry.failure is not None)
        return tuple(runs), None, verdict_view(verdict)
    comparison = compare(entries)
    judged = judged_findings(comparison)
    named = []
    for index, (entry, run) in enumerate(zip(entries, runs, strict=True)):
        if entry.summary is not None:
            against = difference_headline(comparison, index)
            told = findings_view(entry.summary, judged[index])
            named.append(replace(run, label=entry.label, headlines=headlines(entry.summary, against), findings=told))
    return tuple(named), comparison_view(comparison), verdict_view(verdict_of(comparison))
