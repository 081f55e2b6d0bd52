"""``ampmem watch``: keep a whole run, a row for each step, until its end or until memory runs out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ampmem.cli.options import ScriptCommand, ScriptOptions, script_options, settled
from ampmem.cli.processes import end_messages
from ampmem.cli.processes.messages import Audience, OfRank, Person, exit_of_rank
from ampmem.cli.processes.plan import Plan, forget
from ampmem.cli.processes.script_run import end_as, failure_in_words, run_script
from ampmem.errors import AmpmemError
from ampmem.output import sized
from ampmem.recorder.ranks.environment import launched
from ampmem.recording.bounds import MOST_KEPT
from ampmem.recording.watched_file import read_watched
from ampmem.units import counted

if TYPE_CHECKING:
    from ampmem.recorder.watch.watcher import Watcher


@click.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--every",
    type=click.IntRange(min=10),
    metavar="N",
    default=500,
    show_default=True,
    help="Record 3 steps in full after every N steps.",
)
@click.option(
    "--keep",
    type=click.IntRange(1, MOST_KEPT),
    metavar="N",
    default=3,
    show_default=True,
    help="Keep the last N of these full recordings. Those of the start, of the highest peak and of growth are kept, "
    "too.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The file to write.  [default: train-watch.ampmem for train.py, in this directory]",
)
@click.option("--quiet", is_flag=True, help="Print no tables.")
@script_options(
    "as_module",
    "device",
    "gpu",
    "assume",
    "world_size",
    "rank",
    "step_on",
    "stacks",
    "force",
    "files",
    "keep_files",
    "files_limit",
)
def watch(every: int, keep: int, output: Path | None, quiet: bool, options: ScriptOptions) -> None:
    """Run an unmodified training script to completion, and record one row per step.

    A row has the step's peak and its phase, the memory allocated and reserved at the end of the step, the shapes of
    the batch and the memory of the process. Three steps are recorded in full, as by ampmem profile, at the start,
    after every --every steps, after a new highest peak, and when memory grows. The file can be read at any time, while
    the script runs and after it was killed: ampmem show FILE. The exit code is the script's.

    When memory runs out, the file has the size of the failed request, its line, its batch, and what was in memory.

    \b
    ampmem watch train.py --epochs 10
    ampmem watch --every 200 -o run.ampmem -m mypackage.train
    """
    known = launched()
    plan = Plan(script=options, run_to_end=True, output=output, quiet=quiet, launched=known)
    audience: Audience = Person() if known is None else OfRank(known)
    try:
        _watch(plan, audience, every, keep)
    except AmpmemError as error:
        error.args = (audience.protected.worded(str(error)),)
        if isinstance(audience, OfRank):
            audience.refused(error)
            raise exit_of_rank(error) from error
        raise


def _watch(plan: Plan, audience: Audience, every: int, keep: int) -> None:
    plan = replace(plan, script=settled(plan.script))
    target, title = plan.find("-watch")
    from ampmem.recorder.steering.stopping import Stopper
    from ampmem.recorder.watch.watcher import Watcher

    end_messages.say_if_on_the_cpu(plan.script, target.code, audience.say)
    path, greeting = plan.place(title)
    try:
        plan = plan.protect(path)
        audience.reach(plan.protected)
        if plan.protected.limits:
            audience.complain(plan.protected.limits)
        simulation = plan.simulate()
        watcher = Watcher(
            plan.options(path),
            every=every,
            keep=keep,
            simulated=None if simulation is None else simulation.device,
            say=audience.complain,
        )
        ended = run_script(target, plan.script.arguments, watcher, Stopper(), audience, greeting)
    except BaseException:
        forget(plan, path)
        raise
    if watcher.forked():
        end_as(ended.failure)
    end_messages.say_of_files(plan, ended.failure, audience)
    if ended.trouble is not None:
        audience.complain(failure_in_words(ended.trouble))
    else:
        if simulation is not None:
            for doubt in simulation.device.doubts(failed=isinstance(ended.failure, Exception)):
                audience.say(doubt)
        interrupted = isinstance(ended.failure, KeyboardInterrupt)
        _tell(watcher, path, audience, quiet=plan.quiet or plan.launched is not None, interrupted=interrupted)
    end_as(ended.failure)


def _tell(watcher: Watcher, named: Path, audience: Audience, *, quiet: bool, interrupted: bool) -> None:
    """Print the number of recorded steps, and the tables."""
    file, rows = watcher.options.path, watcher.rows
    if not file.exists():
        return
    kept = "" if watcher.written == rows else f", of which the first {watcher.written:,} are kept"
    ended = "interrupted after" if interrupted and rows else "watched"
    audience.say(f"{ended} {counted(rows, 'step')}{kept} in {sized(named, file)}")
    if not quiet:
        from ampmem.analysis.watched import watched_run
        from ampmem.reporters.text.layout import layout_for
        from ampmem.reporters.text.watched import render_watched

        audience.show(render_watched(watched_run(read_watched(file), named), layout_for(audience.screen)))
