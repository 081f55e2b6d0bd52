"""``ampmem compare``: record a script in each precision arm, one process after the other, and lay them side by side."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import click

from ampmem.analysis.compare import Entry, entry_of
from ampmem.analysis.compare import compare as compare_entries
from ampmem.cli.assume import assumed_data
from ampmem.cli.options import ScriptOptions, shared_options, simulated_gpu
from ampmem.cli.processes import launch
from ampmem.cli.processes.children import chosen_arms, profile_arguments, progress_line, say_tail
from ampmem.errors import NothingRecorded, RecordingError
from ampmem.outputs import check_output, remove
from ampmem.recording import SUFFIX, read
from ampmem.reporters.text.compare import render
from ampmem.reporters.text.layout import layout_for
from ampmem.units import format_bytes
from ampmem.vocabulary import FORCED_ARMS, Arm, Device


@click.command("compare", context_settings={"allow_interspersed_args": False})
@click.option(
    "--arms",
    default=",".join(FORCED_ARMS),
    show_default=True,
    metavar="ARM,...",
    help=f"Which arms to run, in this order: {', '.join(FORCED_ARMS)}, or {Arm.AS_IS} for the script as it is.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of every arm's random numbers.")
@click.option("--times/--no-times", default=True, show_default=True, help="Run each arm again to time its steps.")
@click.option(
    "-o",
    "--output",
    metavar="PREFIX",
    help=f"The recordings are PREFIX.ARM{SUFFIX}.  [default: the script's name, in this directory]",
)
@click.option("--html", type=click.Path(path_type=Path), help="Also write an HTML report of all recordings here.")
@shared_options
def compare(arms: str, seed: int, times: bool, output: str | None, html: Path | None, options: ScriptOptions) -> None:
    """Run an unmodified training script once in each precision arm, and lay the recordings side by side.

    Each arm is a process of its own, started with the same seed: first recorded, then, for the step
    times, run once more without instrumentation. What the script prints is not shown, but for the
    last lines of one that fails. The comparison goes to stdout.

    \b
    ampmem compare train.py --epochs 1
    ampmem compare --arms fp32,amp --dtype fp16 -o run -m my_package.train
    """
    chosen = chosen_arms(arms, options.dtype)
    simulated_gpu(options.device, options.gpu)
    assumed_data(options.device, options.assume)
    target = options.find()
    prefix = (output or target.title).removesuffix(SUFFIX)
    plan = _Plan(script=options, arms=chosen, seed=seed, times=times, prefix=prefix, html=html)
    for file in (*map(plan.path, chosen), html):
        if file is not None:
            check_output(file, force=options.force)
    outcomes = _run_all(plan)
    recorded = [str(plan.path(outcome.arm)) for outcome in outcomes if outcome.entry.summary is not None]
    comparison = compare_entries([outcome.entry for outcome in outcomes])
    click.echo(render(comparison, files=recorded, layout=layout_for(sys.stdout)))
    _write_html(plan, outcomes)
    if not all(outcome.worked for outcome in outcomes):
        raise click.exceptions.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The command line."""

    script: ScriptOptions
    arms: tuple[Arm, ...]
    seed: int
    times: bool
    prefix: str
    html: Path | None

    def path(self, arm: Arm) -> Path:
        """The recording of ``arm``."""
        return Path(f"{self.prefix}.{arm}{SUFFIX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What came of one arm. ``worked`` when its script got through every run."""

    arm: Arm
    entry: Entry
    worked: bool


def _run_all(plan: _Plan) -> list[_Outcome]:
    """Run the arms one after the other."""
    outcomes: list[_Outcome] = []
    try:
        for arm in plan.arms:
            outcomes.append(_run(plan, arm))
    except KeyboardInterrupt:
        started = plan.arms[: len(outcomes) + 1]
        there = [str(plan.path(arm)) for arm in started if plan.path(arm).exists()]
        progress_line(f"ampmem: recordings that are there: {', '.join(there) or 'none'}", last=True)
        raise
    return outcomes


def _run(plan: _Plan, arm: Arm) -> _Outcome:
    """Record ``arm``, then time it."""
    path = plan.path(arm)
    if plan.script.force:
        remove(path)  # an arm that fails before it records must not be taken for the one before it
    progress_line(f"{arm}: starting")
    ended = launch.run(
        profile_arguments(plan.script, arm, plan.seed, "--quiet", "-o", str(path)),
        lambda step: progress_line(f"{arm}: step {step.done} of {step.wanted}"),
    )
    timed = None
    if ended.failure is None and plan.times and plan.script.device is not Device.SIMULATED:
        progress_line(f"{arm}: timing")
        timed = launch.run(profile_arguments(plan.script, arm, plan.seed, "--times-into", str(path)))
    entry = _entry(plan, arm, ended.failure)
    progress_line(f"{arm}: {_said(entry, path)}", last=True)
    if ended.failure is not None:
        say_tail(ended)
    if timed is not None and timed.failure is not None:
        progress_line(f"{arm}: the run that times its steps failed: {timed.failure}", last=True)
        say_tail(timed)
    worked = entry.failure is None and (timed is None or timed.failure is None)
    return _Outcome(arm=arm, entry=entry, worked=worked)


def _entry(plan: _Plan, arm: Arm, failure: str | None) -> Entry:
    """The column of ``arm``, with what its recording has, if there is one."""
    path = plan.path(arm)
    if path.exists():
        try:
            return replace(entry_of(read(path), label=arm), failure=failure)
        except (NothingRecorded, RecordingError) as error:
            failure = failure or str(error)
    return Entry(label=arm, summary=None, failure=failure or "it left no recording", script=plan.script.title)


def _said(entry: Entry, path: Path) -> str:
    """What came of an arm, in one line."""
    words = [] if entry.failure is None else [f"failed: {entry.failure}"]
    if entry.summary is not None:
        count = sum(step.finished for step in entry.summary.steps)
        words.append(
            f"{count} step{'' if count == 1 else 's'}, peak {format_bytes(entry.summary.peak.bytes)}, in {path}"
        )
    return "; ".join(words)


def _write_html(plan: _Plan, outcomes: list[_Outcome]) -> None:
    recorded = [plan.path(outcome.arm) for outcome in outcomes if outcome.entry.summary is not None]
    if plan.html is None:
        return
    if not recorded:
        progress_line(f"ampmem: {plan.html} is not written: there is no recording to show", last=True)
        return
    from ampmem.cli.report import write_report

    write_report(recorded, plan.html, force=plan.script.force)
