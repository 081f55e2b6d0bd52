"""From recordings on disk to one page on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summary_of
from ampmem.errors import NothingRecorded, RecordingError
from ampmem.recording import check_output, read
from ampmem.reporters.base import Report, open_output
from ampmem.reporters.html.page import Section, render
from ampmem.reporters.html.sections import section_of


def write(recordings: Sequence[Path], output: Path, *, force: bool = False) -> None:
    """Write the page of ``recordings``, one section each in their order, to ``output``.

    Raises :class:`~ampmem.errors.UsageError` when a recording is missing or ``output`` cannot be
    written (it exists, without ``force``), and what reading and summing up a recording raises.
    """
    # Before the work, and not only when the page is there to be written.
    check_output(output, force=force)
    page = render([_section(number, path) for number, path in enumerate(recordings)])
    with open_output(output, force) as stream:
        stream.write(page)


def _section(number: int, path: Path) -> Section:
    recording = read(path)
    try:
        analysis = analyse(recording)
        summary = summary_of(analysis)
    except (NothingRecorded, RecordingError) as error:
        raise type(error)(f"{path}: {error}") from error
    title = " ".join((recording.run.script, *recording.run.arguments))
    return section_of(number, Report(title=title, summary=summary, notes=recording.notes), analysis)
