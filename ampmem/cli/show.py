"""``ampmem show``: print recordings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
from ampmem.reporters.text.plain_text import WIDTH
from ampmem.reporters.text.table import TableReporter
from ampmem.reporters.text.what_if import render_what_if
from ampmem.vocabulary import SourceKind


@click.command("show", short_help="Print recordings as tables, or as JSON.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON; several files give an array.")
@schema_option(summary_schema)
@click.option("--each", is_flag=True, help="Of several files, print the tables of each too.")
@click.option("--casts", "ledger", is_flag=True, help="Add the ledger of the copies that autocast makes.")
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
@click.option("--steps", "all_steps", is_flag=True, help="Break every step down, not only the last one.")
@click.pass_context
def show(
    context: click.Context,
    files: tuple[Path, ...],
    as_json: bool,
    each: bool,
    ledger: bool,
    settings: tuple[str, ...],
    checking: bool,
    all_steps: bool,
) -> None:
    """Print what recordings come to: where the memory of each step went, and what is largest at the peak.

    Several recordings are laid side by side.
    """
    if checking:
        context.exit(1 if [path for path in files if not _is_sound(path)] else 0)
    if settings:
        click.echo("\n\n".join(f"{path}\n\n{render_what_if(what_ifs(path, settings))}" for path in files))
        return
    if not as_json and len(files) > 1:
        entries = distinct([entry_at(path) for path in files], [path.name for path in files])
        click.echo(render_comparison(compare(entries)))
        if not (each or ledger or all_steps):
            return
        click.echo(f"\n{'=' * WIDTH}\n")
    reporter: Reporter = JsonReporter() if as_json else TableReporter(all_steps=all_steps, ledger=ledger)
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
    return Report(title=title, summary=summary, notes=recording.notes)


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
