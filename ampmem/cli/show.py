"""``ampmem show``: print recordings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ampmem.allocator.settings import parse_settings
from ampmem.allocator.trace import WhatIf, trace_of_events, what_if
from ampmem.analysis.compare import Entry, compare, distinct, entry_of
from ampmem.analysis.soundness import faults, soundness
from ampmem.analysis.summary import summarize, summary_schema
from ampmem.cli.schema import schema_option
from ampmem.errors import AmpmemError, NothingRecorded, RecordingError, UsageError
from ampmem.recording import read
from ampmem.reporters.base import Report, Reporter
from ampmem.reporters.export.json import JsonReporter
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.details import EVERYTHING, WHAT, Detail
from ampmem.reporters.text.layout import layout_for
from ampmem.reporters.text.sections.what_if import render_what_if
from ampmem.reporters.text.table import TableReporter, separator
from ampmem.vocabulary import SourceKind

_OF_EACH = frozenset({Detail.ACTIVATIONS, Detail.CASTS, Detail.MODULES, Detail.LARGEST})
"""What has no table of several recordings side by side."""


def _detail_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each detail, and one for all of them."""
    for detail in reversed(Detail):
        command = click.option(f"--{detail}", is_flag=True, help=f"Add {WHAT[detail]}.")(command)
    return command


@click.command("show", short_help="Print recordings as tables, or as JSON.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON; several files give an array.")
@schema_option(summary_schema)
@_detail_options
@click.option("--all", "everything", is_flag=True, help="Add all of these.")
@click.option("--steps", "all_steps", is_flag=True, help="Break every step down, not only the last one.")
@click.option("--each", is_flag=True, help="Of several files, print the tables of each too.")
@click.option(
    "--what-if",
    "settings",
    multiple=True,
    metavar="SETTING[=VALUE]",
    help="For recordings of a GPU: what the caching allocator would have reserved with this setting of "
    "PYTORCH_ALLOC_CONF, such as expandable_segments or max_split_size_mb=128; may be given several times.",
)
@click.option(
    "--check",
    "checking",
    is_flag=True,
    help="Print one line per file, and exit with 1 unless in each the sums are the allocator's own and the static "
    "model holds.",
)
@click.pass_context
def show(
    context: click.Context,
    /,
    files: tuple[Path, ...],
    as_json: bool,
    each: bool,
    everything: bool,
    settings: tuple[str, ...],
    checking: bool,
    all_steps: bool,
    **chosen: bool,
) -> None:
    """Print what recordings come to: what the peak is made of, what to change, and the steps.

    Several recordings are laid side by side. What else there is to see, the options below add.

    On a terminal the tables are as wide as it is, from 60 columns to 160; in a pipe or a file, 100. What is too wide
    gives way in this order: names are cut in the middle; columns are left out; recordings that were side by side
    follow one another. There is colour on a terminal only, unless NO_COLOR is set or TERM is dumb.
    """
    details = EVERYTHING if everything else frozenset(detail for detail in Detail if chosen[detail.replace("-", "_")])
    layout = layout_for(sys.stdout)
    if checking:
        context.exit(1 if [path for path in files if not _is_sound(path)] else 0)
    if settings:
        click.echo("\n\n".join(f"{path}\n\n{render_what_if(what_ifs(path, settings), layout)}" for path in files))
        return
    if not as_json and len(files) > 1:
        entries = distinct([entry_at(path) for path in files], [path.name for path in files])
        files_given = [str(path) for path in files]
        click.echo(render_comparison(compare(entries), details=details, files=files_given, layout=layout))
        if not (each or all_steps or (not everything and details & _OF_EACH)):
            return
        click.echo(f"\n{separator(layout)}\n")
    reporter: Reporter = TableReporter(details=details, all_steps=all_steps, layout=layout)
    if as_json:
        reporter = JsonReporter()
    click.echo(reporter.render([report_of(path) for path in files]))


def _is_sound(path: Path) -> bool:
    """Whether the recording at ``path`` may be trusted; says so, or what speaks against it."""
    try:
        summary = report_of(path).summary
        found = faults(summary)
    except AmpmemError as error:
        click.echo(str(error))
        return False
    click.echo(f"{path}: {'; '.join(found)}" if found else f"{path}: ok, {soundness(summary)}")
    return not found


def entry_at(path: Path) -> Entry:
    """The recording at ``path`` as a column of a comparison."""
    recording = read(path)
    try:
        return entry_of(recording)
    except (NothingRecorded, RecordingError) as error:
        raise type(error)(f"{path}: {error}") from error


def report_of(path: Path) -> Report:
    """What reporters need of the recording at ``path``."""
    recording = read(path)
    try:
        summary = summarize(recording)
    except (NothingRecorded, RecordingError) as error:
        raise type(error)(f"{path}: {error}") from error
    title = " ".join((recording.run.script, *recording.run.arguments))
    return Report(title=title, summary=summary, notes=recording.notes, file=str(path))


def what_ifs(path: Path, settings: Sequence[str]) -> list[tuple[str, WhatIf]]:
    """What each of ``settings`` would change in the recording at ``path``.

    Raises :class:`UsageError` for a setting that is none, and for a recording of another allocator.
    """
    asked = [parse_settings(_as_configured(setting)) for setting in settings]
    recording = read(path)
    if recording.run.source == SourceKind.CPU:
        raise UsageError(f"{path} has the events of the CPU's allocator, which has no such settings; record on a GPU")
    trace = trace_of_events(recording.events)
    return [(text, what_if(trace, chosen)) for text, chosen in zip(settings, asked, strict=True)]


def _as_configured(setting: str) -> str:
    """``setting`` as PYTORCH_ALLOC_CONF has it: a name alone switches it on."""
    name, equals, value = setting.partition("=")
    return f"{name}:{value}" if equals else setting if ":" in setting else f"{setting}:True"
