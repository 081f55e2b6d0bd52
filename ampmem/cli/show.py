"""``ampmem show``: print recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from ampmem.allocator.settings import parse_settings
from ampmem.allocator.trace import WhatIf, trace_of_events, what_if
from ampmem.analysis.advised import read_advised
from ampmem.analysis.comparison import compare, distinct
from ampmem.analysis.difference.sides import is_json
from ampmem.analysis.jsonable import one_or_several
from ampmem.analysis.ranks.jobs import RankRun, are_ranks, rank_run, ranks_beside, read_runs
from ampmem.analysis.ranks.merge import Jobs, merge_all
from ampmem.analysis.ranks.ranks import Ranks, ranks_schema
from ampmem.analysis.soundness import faults, soundness
from ampmem.analysis.summary import Summary, summary_schema
from ampmem.analysis.watched import WatchedSummary, full_recording, watched_run, watched_schema
from ampmem.cli.options import advised_option, layout_option, schema_option
from ampmem.errors import AmpmemError, UsageError
from ampmem.recording import is_watched, rank_of, rank_pattern, read, without_journals
from ampmem.recording.watched_file import read_watched
from ampmem.reporters.base import EVERYTHING, WHAT, Detail, Report, object_or_array
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.layout import Layout
from ampmem.reporters.text.memory import render_what_if
from ampmem.reporters.text.ranks import render_jobs
from ampmem.reporters.text.table import render_reports, separator
from ampmem.reporters.text.watched import render_watched, render_watched_ranks
from ampmem.vocabulary import SourceKind

_OF_EACH = frozenset({Detail.ACTIVATIONS, Detail.CASTS, Detail.MODULES, Detail.LARGEST})
"""Details that exist for single recordings only, not side by side."""


def _detail_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each detail, and one for all of them."""
    for detail in reversed(Detail):
        command = click.option(f"--{detail}", is_flag=True, help=f"Add {WHAT[detail]}.")(command)
    return command


@click.command("show", short_help="Print recordings as tables, or as JSON.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@layout_option
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON; several files give an array.")
@schema_option(lambda: one_or_several(Summary, summary_schema()))
@click.option(
    "--full",
    type=click.IntRange(min=0),
    metavar="N",
    help="Show full recording N of a watched run, like any other recording.",
)
@schema_option(lambda: one_or_several(WatchedSummary, watched_schema()), "--watch-schema", of="a watched run's --json")
@click.option(
    "--ranks",
    "as_ranks",
    is_flag=True,
    help="Print only the merged view of a job's ranks, even if there is only one rank; with --json as JSON, as an "
    "array if there are several precisions.",
)
@schema_option(lambda: one_or_several(Ranks, ranks_schema()), "--ranks-schema", of="--ranks --json")
@_detail_options
@click.option("--all", "everything", is_flag=True, help="Add all of these tables.")
@click.option("--steps", "all_steps", is_flag=True, help="Show the categories of every step, not only of the last one.")
@click.option("--each", is_flag=True, help="If several files are given, also print the tables of each.")
@click.option(
    "--what-if",
    "settings",
    multiple=True,
    metavar="SETTING[=VALUE]",
    help="For recordings of a GPU: show what the caching allocator would have reserved with this setting of "
    "PYTORCH_ALLOC_CONF, such as expandable_segments or max_split_size_mb=128. May be given several times.",
)
@advised_option
@click.option(
    "--check",
    "checking",
    is_flag=True,
    help="Print one line per file, which also says whether the static model holds, and exit with 1 unless in each file "
    "the categories add up to the allocator's total. ampmem check FILE without a budget does the same.",
)
@click.pass_context
def show(
    context: click.Context,
    /,
    files: tuple[Path, ...],
    layout: Layout,
    as_json: bool,
    as_ranks: bool,
    full: int | None,
    each: bool,
    everything: bool,
    settings: tuple[str, ...],
    advised: Path | None,
    checking: bool,
    all_steps: bool,
    **chosen: bool,
) -> None:
    """Print recordings as tables: what the peak consists of, what to change, and the steps.

    Several recordings are compared side by side. The recordings of one job's ranks are merged: which rank is the
    worst, and how it differs from the others. Ranks in several precisions are merged for each precision, and the worst
    ranks are compared. The options below add more tables; for a job they show the worst rank, unless --each is given.

    The tables are as wide as the terminal, from 40 to 160 columns; in a pipe or a file, 100. In a table that is too
    wide, names are cut in the middle; if that is not enough, columns are moved below the others, and then recordings
    below one another. Equal layers are one row: blocks.*.mlp (24). Colors are used on a terminal only, and not if
    NO_COLOR is set or TERM is dumb.
    """
    details = EVERYTHING if everything else frozenset(detail for detail in Detail if chosen[detail.replace("-", "_")])
    files = tuple(without_journals(files))
    if printed := [path for path in files if is_json(path)]:
        raise UsageError(f"{printed[0]} is JSON that a command printed: ampmem report {printed[0]} makes a page of it")
    watched = [path for path in files if is_watched(path)]
    if full is not None:
        with TemporaryDirectory(prefix="ampmem-") as folder:
            taken_out = {"files": (_taken_out(files, full, Path(folder)),), "full": None}
            context.invoke(show, **context.params | taken_out)
        return
    if watched:
        _show_watched(files, watched, as_json=as_json, layout=layout)
        return
    if checking:
        context.exit(1 if [path for path in files if not is_sound(path)] else 0)
    if settings:
        texts = [f"{path}\n\n{render_what_if(what_ifs(path, settings), layout)}" for path in files]
        click.echo(layout.shown("\n\n".join(texts)))
        return
    runs = read_runs(files)
    if advised is not None:
        runs = list(map(read_advised(advised).rank_without_disproved, runs))
    if as_json:
        shown = merge_all(_of_jobs(runs)).jobs if as_ranks else [_report(run).summary for run in runs]
        click.echo(object_or_array([each.to_json() for each in shown]))
        return
    tables = partial(render_reports, details=details, all_steps=all_steps, layout=layout)
    if len(runs) == 1 and not as_ranks:
        click.echo(layout.shown(tables([_report(runs[0], alone=True)])))
        return
    jobs = merge_all(_of_jobs(runs)) if as_ranks or are_ranks(runs) else None
    text = _together(runs, jobs, details, layout)
    after = [] if as_ranks else runs if each or all_steps else _with_tables(runs, jobs, details)
    if after:
        text += f"\n\n{separator(layout)}\n\n{tables(list(map(_report, after)))}"
    click.echo(layout.shown(text))


def _taken_out(files: Sequence[Path], number: int, folder: Path) -> Path:
    """The full recording ``number`` of the one watched run in ``files``, as a file in ``folder``."""
    if len(files) != 1 or not is_watched(files[0]):
        raise UsageError("--full needs one watched run: ampmem show FILE --full N")
    into = folder / f"{files[0].stem}-{number}{files[0].suffix}"
    full_recording(read_watched(files[0]), number, into)
    return into


def _show_watched(files: Sequence[Path], watched: Sequence[Path], *, as_json: bool, layout: Layout) -> None:
    """Print watched runs one after the other; for the ranks of one job first a row for each."""
    others = [path for path in files if path not in watched]
    if others:
        raise UsageError(f"{watched[0]} is a watched run and {others[0]} is not: show them separately")
    found = [watched_run(read_watched(path)) for path in watched]
    if as_json:
        click.echo(object_or_array([each.to_json() for each in found]))
        return
    parts = [render_watched(each, layout) for each in found]
    if len(found) > 1:
        parts = [render_watched_ranks(found, layout), *parts]
    click.echo(layout.shown(f"\n\n{separator(layout)}\n\n".join(parts)))


def _together(runs: Sequence[RankRun], jobs: Jobs | None, details: frozenset[Detail], layout: Layout) -> str:
    """The merged view of ``jobs``, or ``runs`` side by side."""
    files = [str(run.path) for run in runs]
    if jobs is not None:
        return render_jobs(jobs, details=details, files=files, layout=layout)
    entries = distinct([run.column for run in runs], [run.path.name for run in runs])
    return render_comparison(compare(entries), details=details, files=files, layout=layout)


def _with_tables(runs: Sequence[RankRun], jobs: Jobs | None, details: frozenset[Detail]) -> Sequence[RankRun]:
    """The runs whose own tables follow, for details that only single recordings have; of a job its worst rank."""
    wanted = frozenset() if details == EVERYTHING else details & _OF_EACH
    if jobs is None:
        return runs if wanted else []
    if jobs.comparison is None:
        wanted = details  # the merged view has none of these tables
    worst = {Path(job.rank(job.worst.rank).file) for job in jobs.jobs if job.worst is not None}
    return [run for run in runs if wanted and run.path in worst]


def _of_jobs(runs: Sequence[RankRun]) -> Sequence[RankRun]:
    """``runs`` as ranks. Raises :class:`UsageError` if one of them is not one of several ranks."""
    for run in runs:
        if run.world_size == 1:
            raise UsageError(
                f"{run.path} is a recording of a single process, not of one of several ranks; show it separately"
            )
    return runs


def _report(run: RankRun, *, alone: bool = False) -> Report:
    """The report of a recording; if it is shown ``alone``, with the other files of its job."""
    summary = run.column.summary
    assert run.run is not None and summary is not None
    title = " ".join((run.run.script, *run.run.arguments))
    notes = (*run.notes, *_files_of_other_ranks(run)) if alone else run.notes
    return Report(title=title, summary=summary, notes=notes, file=str(run.path))


def _files_of_other_ranks(run: RankRun) -> Iterator[str]:
    """The note about the files of the job's other ranks; none for a simulated rank, which runs without others."""
    if run.world_size == 1 or (run.run is not None and run.run.source == SourceKind.SIMULATED):
        return
    there, others = len(ranks_beside([run])), run.world_size - 1
    said = f"this is rank {run.rank} of {run.world_size}, "
    if not there:
        yield f"{said}and no file of the {'other' if others == 1 else f'{others} others'} is next to it"
    else:
        named = rank_of(run.path)
        pattern = run.path.name if named is None else rank_pattern(Path(named.job.name), run.world_size)
        count = f"{there} of the {others} others" if there < others else "all others" if others > 1 else "the other"
        yield (
            f"{said}and the file{'' if there == 1 else 's'} of {count} {'is' if there == 1 else 'are'} next to it: "
            f"{pattern}"
        )


def is_sound(path: Path) -> bool:
    """Whether the recording at ``path`` can be trusted; also prints the result, with the reasons if it cannot."""
    try:
        run = rank_run(path)
        summary = _report(run).summary
        found = faults(summary)
    except AmpmemError as error:
        click.echo(str(error))
        return False
    not_ended = ", not ended" * (run.ended is False)
    click.echo(f"{path}: {'; '.join(found)}{not_ended}" if found else f"{path}: ok, {soundness(summary)}{not_ended}")
    return not found


def report_of(path: Path) -> Report:
    """The report of the recording at ``path``."""
    return _report(rank_run(path))


def what_ifs(path: Path, settings: Sequence[str]) -> list[tuple[str, WhatIf]]:
    """The effect of each of ``settings`` on the recording at ``path``.

    Raises :class:`UsageError` for an unknown setting, and for a recording of another allocator.
    """
    asked = [parse_settings(_as_configured(setting)) for setting in settings]
    recording = read(path)
    if recording.run.source == SourceKind.CPU:
        raise UsageError(f"{path} was recorded on the CPU, whose allocator has no such settings; record on a GPU")
    trace = trace_of_events(recording.events, recording.segments)
    return [(text, what_if(trace, chosen)) for text, chosen in zip(settings, asked, strict=True)]


def _as_configured(setting: str) -> str:
    """``setting`` as in PYTORCH_ALLOC_CONF: a name alone switches it on."""
    name, equals, value = setting.partition("=")
    return f"{name}:{value}" if equals else setting if ":" in setting else f"{setting}:True"
