"""``ampmem show``: print recordings."""

from __future__ import annotations

from pathlib import Path

import click

from ampmem.analysis.summary import summarize
from ampmem.errors import NothingRecorded, RecordingError
from ampmem.recording import read
from ampmem.reporters.base import Report, Reporter
from ampmem.reporters.json import JsonReporter
from ampmem.reporters.table import TableReporter


@click.command("show", short_help="Print recordings as tables, or as JSON.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON; several files give an array.")
@click.option("--steps", "all_steps", is_flag=True, help="Break every step down, not only the last one.")
def show(files: tuple[Path, ...], as_json: bool, all_steps: bool) -> None:
    """Print what recordings come to: where the memory of each step went, and what is largest at the peak."""
    reporter: Reporter = JsonReporter() if as_json else TableReporter(all_steps=all_steps)
    click.echo(reporter.render([report_of(path) for path in files]))


def report_of(path: Path) -> Report:
    """What reporters need of the recording at ``path``."""
    recording = read(path)
    try:
        summary = summarize(recording)
    except (NothingRecorded, RecordingError) as error:
        raise type(error)(f"{path}: {error}") from error
    title = " ".join((recording.run.script, *recording.run.arguments))
    return Report(title=title, summary=summary, notes=recording.notes)
