"""One recording on disk as a column of a comparison, and as a run of the page."""

from __future__ import annotations

from pathlib import Path

from ampmem.analysis.analyse import analyse
from ampmem.analysis.comparison import Entry, entry_of
from ampmem.analysis.summary import summary_of
from ampmem.errors import NothingRecorded, RecordingError
from ampmem.recording import read
from ampmem.reporters.html.data import RunView
from ampmem.reporters.html.progress import Progress
from ampmem.reporters.html.views.run import run_view


def column(path: Path, limit: int, progress: Progress) -> tuple[Entry, RunView]:
    """The recording at ``path``, whose events may take ``limit`` bytes of the page; only what that needs is kept."""
    progress.say(f"reading {path.name}")
    recording = read(path)
    try:
        analysis = analyse(recording)
        summary = summary_of(analysis)
    except (NothingRecorded, RecordingError) as error:
        raise type(error)(f"{path}: {error}") from error
    entry = entry_of(recording, summary=summary)
    return entry, run_view(entry, summary, analysis, limit)
