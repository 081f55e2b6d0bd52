"""``ampmem export``: recordings for other tools."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import click

from ampmem.analysis.analyse import analyse
from ampmem.errors import RecordingError, UsageError
from ampmem.output import check_output, say_written
from ampmem.recording import check_recording, read, without_journals
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
"""The function that writes each format."""

PICTURES = ("svg", "png")
FIGURES = ("verdict", "timeline", "curve", "activations", "peak", "comparison")
"""The sections of a page that have a figure; ``curve`` is the chart of a page that has no timeline."""


@click.command("export", short_help="Write a recording in a format that other tools read, or a picture.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "name",
    required=True,
    type=click.Choice((*FORMATS, *PICTURES)),
    help="snapshot: for pytorch.org/memory_viz; it contains the recording, which ampmem import restores. perfetto: a "
    ".pftrace for ui.perfetto.dev (not chrome://tracing). csv: one row for each allocation, for pandas.read_csv and "
    "spreadsheets; an apostrophe precedes text that they would read as a formula, a number or a missing value. "
    "plotly: the timeline as a figure in JSON, for plotly.io.read_json. svg, png: a figure of the page of the files, "
    "which may be several, or JSON that ampmem printed; needs Chromium, Chrome or Edge.",
)
@click.option(
    "--figure",
    type=click.Choice(FIGURES),
    help="The figure to draw: verdict is the peaks as bars and the steps between them, curve that of fit, advise and "
    "watch.  [default: the timeline, or the curve; the verdict of several files]",
)
@click.option(
    "-o", "--output", required=True, metavar="OUT", type=click.Path(path_type=Path), help="The file to write."
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def export(files: tuple[Path, ...], name: str, figure: str | None, output: Path, force: bool) -> None:
    """Write a recording, with ampmem's categories, in a format that other tools read, or as a picture."""
    file, *others = given = without_journals(files)
    if name in PICTURES:
        from ampmem.reporters.export.picture import write_picture

        shown = "verdict" if others and figure is None else (figure or "").removeprefix("curve")
        write_picture(given, output, kind=name, figure=shown, force=force)
        say_written(output)
        return
    if figure is not None:
        raise UsageError(f"--figure is for --format svg and png; {name} has one form")
    if others:
        raise UsageError(
            f"export takes one recording, and {1 + len(others)} are given: export each to its own file, such as "
            f"ampmem export {shlex.quote(str(file))} --format {name} -o "
            f"{shlex.quote(str(file.with_suffix(_ENDINGS[name])))}"
        )
    check_recording(file)
    check_output(output, force=force, source=file)
    recording = read(file)
    try:
        FORMATS[name](analyse(recording), output, force=force)
    except RecordingError as error:
        raise RecordingError(f"{file}: {error}") from error
    say_written(output)


_ENDINGS = {"snapshot": ".pickle", "perfetto": ".pftrace", "csv": ".csv", "plotly": ".json"}
