"""``ampmem compare``: record a script in each precision, one process after the other, and compare the recordings."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import click

from ampmem.analysis.comparison import Entry, entry_of
from ampmem.analysis.comparison import compare as compare_entries
from ampmem.analysis.difference.difference import Difference, by_module, difference
from ampmem.analysis.difference.sides import read_side
from ampmem.analysis.ranks.jobs import read_runs
from ampmem.analysis.ranks.merge import merge_all
from ampmem.cli.options import (
    ScriptCommand,
    ScriptOptions,
    layout_option,
    precisions_option,
    seed_of_runs,
    shared_options,
)
from ampmem.cli.processes.children import (
    ProgressLine,
    TimeLeft,
    chosen_precisions,
    for_several_runs,
    misplaced,
    profile_arguments,
    run_child,
    say_protected,
)
from ampmem.cli.processes.end_messages import say_if_on_the_cpu
from ampmem.cli.processes.launcher import check_processes
from ampmem.cli.processes.starting import Warmed, warmed
from ampmem.cli.show import report_of
from ampmem.errors import NothingRecorded, RecordingError, UsageError
from ampmem.names import trains_compiled
from ampmem.output import Terminal, check_output, claim, remove, remove_empty, say_written, sized
from ampmem.recording import SUFFIX, rank_file, read
from ampmem.reporters.base import object_or_array
from ampmem.reporters.text.compare import render
from ampmem.reporters.text.difference import compiling_title, render_difference
from ampmem.reporters.text.layout import Layout
from ampmem.reporters.text.ranks import render_jobs
from ampmem.units import format_peak
from ampmem.vocabulary import FORCED_PRECISIONS, Device, Forced, Precision


@click.command("compare", cls=ScriptCommand, context_settings={"allow_interspersed_args": False})
@precisions_option(
    FORCED_PRECISIONS,
    f"The precisions to run, in this order: {', '.join(FORCED_PRECISIONS)}, {Precision.BF16} for weights in bfloat16, "
    f"or {Precision.AS_IS} for the script as it is.",
)
@seed_of_runs
@click.option(
    "--compile",
    "compiles",
    is_flag=True,
    help="Run each precision also with torch.compile left out, or, if the script compiles nothing, with the outermost "
    "model compiled, and show what compiling changes.",
)
@click.option("--times/--no-times", default=True, show_default=True, help="Run each precision again to time its steps.")
@click.option(
    "-o",
    "--output",
    metavar="PREFIX",
    help=f"The recordings are written to PREFIX.PRECISION{SUFFIX}.  [default: the script's name, in this directory; "
    "if such recordings exist, with the next free number: train.2]",
)
@click.option("--html", type=click.Path(path_type=Path), help="Also write an HTML report of all recordings here.")
@layout_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the recordings' summaries as JSON, as ampmem show --json does, instead of the tables; and what "
    "--compile changes, as ampmem diff --json does.",
)
@shared_options
def compare(
    precisions: str,
    compiles: bool,
    times: bool,
    output: str | None,
    html: Path | None,
    layout: Layout,
    as_json: bool,
    options: ScriptOptions,
) -> None:
    """Run an unmodified training script once in each precision, and compare the recordings side by side.

    Each precision runs in its own process, with the same seed: first recorded, then, for the step times, once more
    without instrumentation. The script's output is hidden; if the script fails, its last lines are shown. The
    comparison goes to stdout, the progress to stderr. Your files stay as they are: what the script writes
    is gone after each run (--files).

    \b
    ampmem compare train.py --epochs 1
    ampmem compare --precision fp32,amp --dtype fp16 -o run -m my_package.train
    ampmem compare --gpu h100 --precision amp --compile train.py
    """
    chosen = chosen_precisions(precisions, options)
    options = for_several_runs(options)
    check_processes(options, "compare")
    target = options.find()
    prefix = (output or target.title).removesuffix(SUFFIX)
    if compiles and (options.nproc_per_node or 1) > 1:
        raise UsageError("--compile compares runs in one process: leave --nproc-per-node out")
    plan = _Plan(script=options, precisions=chosen, compiles=compiles, times=times, prefix=prefix, html=html)
    numbered = output is None and not options.force
    for path in plan.paths:
        check_output(path, force=options.force or numbered)
    if html is not None:
        check_output(html, force=options.force)
    say_protected(options)
    say_if_on_the_cpu(options, target.code, Terminal(sys.stderr).say, "compare")
    with _numbered(plan) if numbered else nullcontext(plan) as named, ProgressLine() as progress:
        outcomes = _run_all(named, progress)
    recorded = [
        path for outcome in outcomes if outcome.entry.summary is not None for path in _existing(named, outcome.run)
    ]
    changes = _compiling(named, outcomes)
    if not as_json:
        texts = [_rendered(outcomes, recorded, layout, ranks=(options.nproc_per_node or 1) > 1)]
        texts += [f"{layout.strong(compiling_title(each))}\n\n{render_difference(each, layout)}" for each in changes]
        click.echo(layout.shown("\n\n".join(texts)))
    elif recorded:
        summaries = [report_of(path).summary.to_json() for path in recorded]
        click.echo(object_or_array([*summaries, *(found.to_json() for found in changes)]))
    _write_html(named, recorded, changes)
    if not all(outcome.worked for outcome in outcomes):
        raise click.exceptions.Exit(1)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run in ``precision``: of the script as it is, or ``compiled`` or not by force."""

    precision: Precision
    compiled: bool | None = None

    @property
    def label(self) -> str:
        """The heading of its column: ``amp``, ``amp compiled``, ``amp uncompiled``."""
        return self.precision if self.compiled is None else f"{self.precision} {'' if self.compiled else 'un'}compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The command line. ``claimed``: the recordings exist already, empty, to be replaced."""

    script: ScriptOptions
    precisions: tuple[Precision, ...]
    compiles: bool
    times: bool
    prefix: str
    html: Path | None
    claimed: bool = False

    def path(self, run: _Run) -> Path:
        """The path of the recording of ``run``."""
        return Path(f"{self.prefix}.{run.label.replace(' ', '-')}{SUFFIX}")

    def files(self, run: _Run) -> tuple[Path, ...]:
        """The paths of the recordings of ``run``, one per rank."""
        size = self.script.nproc_per_node or 1
        return tuple(rank_file(self.path(run), rank, size) for rank in range(size)) if size > 1 else (self.path(run),)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of the recordings of all runs; which way a script is run again is known after its first run."""
        kinds = (None, True, False) if self.compiles else (None,)
        return tuple(
            path for precision in self.precisions for kind in kinds for path in self.files(_Run(precision, kind))
        )

    def numbered(self, number: int) -> _Plan:
        """The plan with a number in the recordings' names, from the second number on: ``train.2.amp.ampmem``."""
        return self if number == 1 else replace(self, prefix=f"{self.prefix}.{number}")


@contextmanager
def _numbered(plan: _Plan) -> Iterator[_Plan]:
    """``plan`` with the first unused number; claimed recordings that are not written are deleted afterwards."""
    number = claim(lambda number: plan.numbered(number).paths)
    named = replace(plan.numbered(number), claimed=True)
    if number > 1:
        there = next((path for path in plan.paths if path.exists()), plan.paths[0])
        names = ", ".join(map(str, named.paths))
        Terminal(sys.stderr).say(f"recording to {names}; {there} exists already (--force replaces it)")
    try:
        yield named
    finally:
        remove_empty(named.paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The result of one run. ``worked``: its script got through it, and was timed."""

    run: _Run
    entry: Entry
    worked: bool


def _run_all(plan: _Plan, progress: ProgressLine) -> list[_Outcome]:
    """Run the precisions one after the other."""
    outcomes: list[_Outcome] = []
    course = TimeLeft(len(plan.precisions) * (1 + plan.compiles))
    started: list[_Run] = []
    try:
        with warmed(plan.script.device) as forking:
            for precision in plan.precisions:
                for _ in range(1 + plan.compiles):
                    started.append(
                        _Run(precision, _other_way(plan, precision) if started[-1:] == [_Run(precision)] else None)
                    )
                    outcomes.append(_record_and_time(plan, started[-1], course, progress, forking))
    except KeyboardInterrupt:
        remove_empty(plan.paths)
        there = [str(path) for run in started for path in _existing(plan, run)]
        progress.stay(f"ampmem: recordings that exist: {', '.join(there) or 'none'}")
        raise
    return outcomes


def _other_way(plan: _Plan, precision: Precision) -> bool:
    """Whether the script is compiled when it is run again: unless it compiles itself, or nothing was recorded."""
    for path in _existing(plan, _Run(precision)):
        with suppress(RecordingError):
            return not trains_compiled(read(path).texts)
    return False


def _record_and_time(
    plan: _Plan, run: _Run, course: TimeLeft, progress: ProgressLine, forking: Warmed | None
) -> _Outcome:
    """Record ``run``, then time its steps."""
    path, precision = plan.path(run), run.precision
    for file in plan.files(run) if plan.script.force else ():
        remove(file)  # a run that fails early must not leave an older recording that looks like its own
    forced = Forced(compile=run.compiled)
    script = replace(plan.script, precision=precision, force=plan.script.force or plan.claimed, forced=forced)
    name = f"{course.begin()}: {run.label}"
    progress.now(f"{name}: starting{course.left()}")
    ended = run_child(
        profile_arguments(script, "--quiet", "-o", str(path)),
        lambda step: progress.now(f"{name}: step {step.done} of {step.wanted}{course.left()}"),
        warmed=forking,
    )
    timed = None
    if ended.failure is None and plan.times and script.device is not Device.SIMULATED:
        progress.now(f"{name}: timing{course.left()}")
        timed = run_child(profile_arguments(script, "--times-into", str(path)))
    if plan.claimed:
        remove_empty(plan.files(run))
    course.end()
    entry = _entry(plan, run, ended.failure)
    said = f"{_result_text(entry, _existing(plan, run))}{misplaced(script, ended)}"
    progress.stay(f"{name}: {said}", course.left(), tail=() if ended.failure is None else ended.tail)
    if timed is not None and timed.failure is not None:
        progress.stay(f"{name}: the timing run failed: {timed.failure}", tail=timed.tail)
    worked = entry.failure is None and (timed is None or timed.failure is None)
    return _Outcome(run=run, entry=entry, worked=worked)


def _entry(plan: _Plan, run: _Run, failure: str | None) -> Entry:
    """The column of ``run``, from its recording if there is one; of several ranks, the one with the largest peak."""
    found: list[tuple[int, Entry]] = []
    for path in _existing(plan, run):
        try:
            entry = entry_of(read(path), label=run.label)
        except (NothingRecorded, RecordingError) as error:
            failure = failure or str(error)
        else:
            found.append((0 if entry.summary is None else entry.summary.whole.bytes, entry))
    if found:
        return replace(max(found, key=lambda each: each[0])[1], failure=failure)
    return Entry(label=run.label, summary=None, failure=failure or "it left no recording", script=plan.script.title)


def _existing(plan: _Plan, run: _Run) -> list[Path]:
    """The recordings of ``run`` that exist."""
    return [path for path in plan.files(run) if path.exists()]


def _compiling(plan: _Plan, outcomes: Sequence[_Outcome]) -> list[Difference]:
    """What compiling changes in each precision, by category and by module."""
    recorded = [outcome.run for outcome in outcomes if outcome.entry.summary is not None]
    changes = []
    for run in [run for run in recorded if run.compiled is not None and _Run(run.precision) in recorded]:
        sides = [replace(read_side(plan.path(each)), label=each.label) for each in (_Run(run.precision), run)]
        found = difference(*sides if run.compiled else reversed(sides))
        changes.append(replace(found, changes=by_module(found.changes)))
    return changes


def _rendered(outcomes: list[_Outcome], recorded: list[Path], layout: Layout, *, ranks: bool) -> str:
    """The recordings side by side as text; with several ranks, the worst rank of each precision."""
    files = list(map(str, recorded))
    if ranks and recorded:
        return render_jobs(merge_all(read_runs(recorded)), files=files, layout=layout)
    return render(compare_entries([outcome.entry for outcome in outcomes]), files=files, layout=layout)


def _result_text(entry: Entry, paths: list[Path]) -> str:
    """The result of a precision in one line."""
    words = [] if entry.failure is None else [f"failed: {entry.failure}"]
    if entry.summary is not None:
        count = sum(step.finished for step in entry.summary.steps)
        peak = format_peak(entry.summary.whole.bytes)
        worst = f" on rank {entry.summary.rank}" if len(paths) > 1 else ""
        where = ", ".join(map(sized, paths))
        words.append(f"{count} step{'' if count == 1 else 's'}, peak {peak}{worst}, in {where}")
    return "; ".join(words)


def _write_html(plan: _Plan, recorded: list[Path], changes: Sequence[Difference]) -> None:
    if plan.html is None:
        return
    if not recorded:
        Terminal(sys.stderr).say(f"{plan.html} was not written: there is no recording to show")
        return
    from ampmem.reporters.html import write

    write(recorded, plan.html, force=plan.script.force, compiling=changes)
    say_written(plan.html)
