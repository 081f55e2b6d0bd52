"""What becomes of a file that may be hostile: a right answer, or a clear line."""

import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import jsonschema

import ampmem
from ampmem.analysis.analyse import analyse
from ampmem.analysis.answer import judged_findings, verdict_of
from ampmem.analysis.comparison import compare, distinct, entry_of
from ampmem.analysis.soundness import faults
from ampmem.analysis.summary import Summary, summary_of, summary_schema
from ampmem.analysis.watched import full_recording, watched_run, watched_schema
from ampmem.cli.show import what_ifs
from ampmem.errors import AmpmemError, NothingRecorded, RecordingError, UsageError
from ampmem.recording import is_watched, read
from ampmem.recording.watched_file import read_watched
from ampmem.reporters.base import EVERYTHING, Report
from ampmem.reporters.export.csv import write_csv
from ampmem.reporters.export.perfetto import write_perfetto
from ampmem.reporters.export.snapshot import write_snapshot
from ampmem.reporters.html.comparison import compared_runs
from ampmem.reporters.html.page import page_view, render, self_contained
from ampmem.reporters.html.run import run_view
from ampmem.reporters.html.verdict import verdict_view
from ampmem.reporters.html.watched_page import watched_view
from ampmem.reporters.html.write import STREAM_LIMIT
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.table import render_reports
from ampmem.reporters.text.watched import render_live, render_watched, render_watched_ranks

SECONDS = 10.0
"""Of the processor, for everything that is made of one file."""

_WATCHED = tuple(f"{Path(ampmem.__file__).parent / folder}/" for folder in ("recording", "analysis"))


class TooSlow(BaseException):
    """It took more than :data:`SECONDS`."""


def outcome(path: Path) -> str | None:
    """What is wrong with what ampmem makes of the file at ``path``; ``None`` for a right answer or a clear line."""
    try:
        with _limited():
            return _use(path)
    except TooSlow:
        return f"more than {SECONDS:.0f} seconds"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"


def _use(path: Path) -> str | None:
    """Everything that can be made of a recording, each alone: one may refuse what another can do."""
    if is_watched(path):
        return _use_watched(path)
    try:
        recording = read(path)
    except (RecordingError, UsageError) as error:
        return _unclear(str(error), path)
    try:
        analysis = analyse(recording)
    except RecordingError as error:
        return _unclear(str(error), None)
    with tempfile.TemporaryDirectory() as folder:
        for write in (write_csv, write_perfetto, write_snapshot):
            write(analysis, Path(folder) / "out")
            (Path(folder) / "out").unlink()
        try:
            summary = summary_of(analysis)
        except (NothingRecorded, RecordingError) as error:
            return _unclear(str(error), None)
    faults(summary)
    report = Report(title=recording.run.script, summary=summary, notes=recording.notes)
    render_reports([report], all_steps=True, details=EVERYTHING)
    entry = entry_of(recording, summary=summary)
    comparison = compare(distinct([entry, entry], [path.name] * 2))
    render_comparison(comparison, details=EVERYTHING)
    run = run_view(entry, summary, analysis, STREAM_LIMIT)
    render(page_view((run, run), compared_runs(comparison), verdict_view(verdict_of(comparison))))
    judged_findings(comparison)
    try:
        what_ifs(path, ["expandable_segments"])
    except AmpmemError as error:
        return _unclear(str(error), None) or _wrong(summary)
    return _wrong(summary)


def _use_watched(path: Path) -> str | None:
    """Everything that can be made of a watched run."""
    try:
        run = read_watched(path)
        found = watched_run(run)
    except RecordingError as error:
        return _unclear(str(error), path)
    texts = [render_watched(found), render_live([found]), render_live([found] * 2), render_watched_ranks([found] * 2)]
    for text in texts:
        if len(text) > 200_000 or not all(line.isprintable() for line in text.split("\n")):
            return f"no text for a terminal: {text[:300]!r}"
    view = watched_view(found, run.rows, {})
    self_contained("watched.html", "watched.js", view, title=view.title)
    with tempfile.TemporaryDirectory() as folder:
        for full in run.full:
            full_recording(run, full.number, Path(folder) / "full.ampmem")
    return _against_schema(found.to_json(), _watched_schema())


def _against_schema(text: str, schema: Any) -> str | None:
    problem = next(schema.iter_errors(json.loads(text)), None)
    return None if problem is None else f"JSON: {problem.json_path}: {problem.message[:200]}"


def _wrong(summary: Summary) -> str | None:
    """Why ``summary`` cannot be right, whatever the recording says."""
    problem = _against_schema(summary.to_json(), _schema())
    if problem is not None:
        return problem
    for step in summary.steps:
        if sum(step.peak.categories.values()) != step.peak.bytes:
            return f"the categories of step {step.index} do not add up"
    return None


def _unclear(line: str, path: Path | None) -> str | None:
    """Why ``line`` is no clear message."""
    if "\n" in line or not line.isprintable() or len(line) > 700:
        return f"no line for a terminal: {line!r:.300}"
    return None if path is None or str(path) in line else f"which file? {line}"


@cache
def _schema() -> Any:
    return jsonschema.Draft202012Validator(summary_schema())


@cache
def _watched_schema() -> Any:
    return jsonschema.Draft202012Validator(watched_schema())


@contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Reached:
    """The lines of reading and analysis that were ever run while it was on."""

    def __init__(self) -> None:
        self._left: dict[Any, set[int]] = {}
        """Of each function that is not whole yet, the lines that nothing has reached."""
        self.lines = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the lines that the block runs."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        left = self._left.get(code)
        if left is None:
            ours = code.co_filename.startswith(_WATCHED)
            left = {line for _, _, line in code.co_lines() if line is not None} if ours else set()
            self._left[code] = left
        return self._line if left else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        left = self._left[frame.f_code]
        if event == "line" and frame.f_lineno in left:
            left.discard(frame.f_lineno)
            self.lines += 1
        return self._line
