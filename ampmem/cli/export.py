"""``ampmem export``: recordings for other tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ampmem.analysis.analyse import analyse
from ampmem.errors import RecordingError
from ampmem.output.files import check_output, say_written
from ampmem.recording import check_recording, read
from ampmem.reporters.export.csv import write_csv
from ampmem.reporters.export.figure import write_figure
from ampmem.reporters.export.perfetto import write_perfetto
from ampmem.reporters.export.snapshot import write_snapshot

FORMATS: dict[str, Callable[..., None]] = {
    "snapshot": write_snapshot,
    "perfetto": write_perfetto,
    "csv": write_csv,
    "plotly": write_figure,
}
"""What writes each format."""


@click.command("export", short_help="Write a recording in a format that other tools read.")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "name",
    required=True,
    type=click.Choice(tuple(FORMATS)),
    help="snapshot: for pytorch.org/memory_viz; perfetto: a .pftrace for ui.perfetto.dev (not chrome://tracing); "
    "csv: one row per allocation; a text that a spreadsheet would take for a formula (it begins with = + - @) has an "
    "apostrophe before it; plotly: the timeline as a figure in JSON, for plotly.io.read_json.",
)
@click.option("-o", "--output", required=True, metavar="OUT", type=click.Path(path_type=Path), help="The new file.")
@click.option("--force", is_flag=True, help="Replace the file when it exists already.")
def export(file: Path, name: str, output: Path, force: bool) -> None:
    """Write a recording in a format that other tools read, with ampmem's categories in it."""
    check_recording(file)
    check_output(output, force=force)
    recording = read(file)
    try:
        FORMATS[name](analyse(recording), output, force=force)
    except RecordingError as error:
        raise RecordingError(f"{file}: {error}") from error
    say_written(output)
