"""From recordings on disk to one page on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ampmem.analysis.comparison.answer import verdict_of, verdict_of_one
from ampmem.analysis.comparison.compare import Entry, compare, distinct
from ampmem.analysis.comparison.judged import judged_findings
from ampmem.analysis.difference.difference import Difference, Side
from ampmem.analysis.difference.reading import is_json
from ampmem.analysis.ranks.jobs import are_ranks
from ampmem.analysis.ranks.reading import read_runs
from ampmem.errors import UsageError
from ampmem.output.files import check_output, open_output
from ampmem.recording import check_recording, rank_of, world_size_of
from ampmem.reporters.html.difference_page import difference_page
from ampmem.reporters.html.job_page import job_page
from ampmem.reporters.html.page.page import PageView, page_view, render
from ampmem.reporters.html.progress import Progress
from ampmem.reporters.html.run import RunView, column, packed_words, said_of
from ampmem.reporters.html.views.comparison import ComparisonView, comparison_view, difference_headline
from ampmem.reporters.html.views.verdict import VerdictView, verdict_view

STREAM_LIMIT = 8_000_000
"""Bytes of the page that the events of one recording may take."""

STREAMS_LIMIT = 24_000_000
"""Bytes that those of all recordings may take together."""


def write(recordings: Sequence[Path], output: Path, *, force: bool = False) -> None:
    """Write the page of ``recordings``, or of the JSON of their summaries, to ``output``.

    Several of them are compared, and ranks of one job merged.

    Raises :class:`~ampmem.errors.UsageError` when there is no recording, one is missing or ``output``
    cannot be written (it exists, without ``force``, or is one of the recordings), and what reading and summing up a
    recording raises.
    """
    if not recordings:
        raise UsageError("there is nothing to report on: give at least one recording")
    # Before the work, and not only when the page is there to be written.
    for path in recordings:
        if (rank_of(path) is None or len(recordings) == 1) and not is_json(path):  # a rank may be missing
            check_recording(path)
    for path in recordings:
        check_output(output, force=force, source=path)
    with Progress() as progress:
        view = _view(recordings, STREAMS_LIMIT, progress)
        progress.say(f"writing {output.name}")
        page = render(view)
        with open_output(output, force=force) as stream:
            stream.write(page)


def write_difference(before: Side, after: Side, found: Difference, output: Path, *, force: bool = False) -> None:
    """Write the page of what was ``found`` between two sides, and of the two, to ``output``.

    Raises :class:`~ampmem.errors.UsageError` when ``output`` cannot be written (it exists, without ``force``).
    """
    check_output(output, force=force)
    with Progress() as progress:
        view = difference_page(before, after, found, _limit(STREAMS_LIMIT, 2), progress)
        progress.say(f"writing {output.name}")
        page = render(view)
        with open_output(output, force=force) as stream:
            stream.write(page)


def page_of(recordings: Sequence[Path], room: int) -> str:
    """The page of ``recordings`` as text, in which the events of all take at most ``room`` bytes, but for reduced ones.

    Raises what :func:`write` raises of recordings.
    """
    with Progress() as progress:
        return render(_view(recordings, room, progress))


def _view(recordings: Sequence[Path], room: int, progress: Progress) -> PageView:
    limit = partial(_limit, room)
    return _of_ranks(recordings, limit, progress) or _of_each(recordings, limit, progress)


def _limit(room: int, runs: int) -> int:
    """Bytes of the page for the events of each of so many, which have ``room`` together."""
    return min(STREAM_LIMIT, room // runs)


def _of_ranks(recordings: Sequence[Path], limit: Callable[[int], int], progress: Progress) -> PageView | None:
    """The page of the job whose ranks these are; ``None`` where they are not."""
    if len(recordings) < 2 or all(world_size_of(path) == 1 for path in recordings):
        return None
    progress.say(f"reading {len(recordings)} recordings")
    runs = read_runs(recordings)
    return job_page(runs, limit, progress) if are_ranks(runs) else None


def _of_each(recordings: Sequence[Path], limit: Callable[[int], int], progress: Progress) -> PageView:
    """The page of all of them, side by side."""
    columns = [column(path, limit(len(recordings)), progress) for path in recordings]
    entries = distinct([entry for entry, _ in columns], [path.name for path in recordings])
    return page_view(*_side_by_side(entries, [run for _, run in columns]))


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
            said = said_of(entry.summary, judged[index], against)
            named.append(replace(run, label=entry.label, packed=packed_words(entry.summary, said)))
    return tuple(named), comparison_view(comparison), verdict_view(verdict_of(comparison))
