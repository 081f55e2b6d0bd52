"""``ampmem fit``: the largest batch size that fits on a GPU, found by simulated runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from ampmem.allocator.gpus import GpuSpec, gpu_to_simulate
from ampmem.analysis.fit.document import document, fit_schema
from ampmem.analysis.fit.fit import FitResult, arm_fits, break_evens
from ampmem.analysis.fit.search import remaining, wanted
from ampmem.cli.options.schema import schema_option
from ampmem.cli.options.shared import ScriptCommand, ScriptOptions, settled, shared_options
from ampmem.cli.options.vary import OPTION, varied_arguments
from ampmem.cli.processes.children import chosen_arms
from ampmem.cli.processes.points import RunPlan, run_points
from ampmem.errors import UsageError
from ampmem.names import warning
from ampmem.output.files import check_output, say_written
from ampmem.reporters.text.fit import left, render
from ampmem.reporters.text.layout import layout_for
from ampmem.vocabulary import FORCED_ARMS, Arm, Device

STEPS = 2
"""The optimizer's state is there from the end of the first step on."""

JOBS = 8
"""No more runs at once than this by default: each takes some hundred MiB."""

_NOT_HERE = ("device", "synchronize", "stacks", "nproc_per_node")
"""Shared options that say nothing of a simulated run that only has to fit."""


@click.command(
    "fit", cls=ScriptCommand, context_settings={"allow_interspersed_args": False, "default_map": {"steps": STEPS}}
)
@click.option(
    OPTION,
    "specs",
    multiple=True,
    metavar="[ARG=]LOW:HIGH",
    help="The script's argument to vary and its smallest and largest value. Also among the script's arguments, where "
    "LOW:HIGH alone stands for a positional argument.",
)
@click.option(
    "--arms",
    default=",".join((*FORCED_ARMS, Arm.AS_IS)),
    show_default=True,
    metavar="PRECISION,...",
    help=f"Which precisions to run; {Arm.AS_IS} is the script's own.",
)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of every run's random numbers.")
@click.option(
    "--points",
    type=click.IntRange(min=0),
    metavar="N",
    default=5,
    show_default=True,
    help="Over how many values the curve is drawn; 0 makes no run but those of the search.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"How many runs to make at once.  [default: one for each CPU, at most {JOBS}]",
)
@click.option("--html", type=click.Path(path_type=Path), help="Also write a page with the curves here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables, schema ampmem.fit/1.")
@schema_option(fit_schema)
@click.option("--device", "device_option", default=Device.SIMULATED.value, hidden=True)
@shared_options
def fit(
    specs: tuple[str, ...],
    arms: str,
    seed: int,
    points: int,
    jobs: int | None,
    device_option: str,
    html: Path | None,
    as_json: bool,
    options: ScriptOptions,
) -> None:
    """Find the largest value of a script's argument, such as its batch size, that fits on a GPU.

    Every value that is tried is a run of the unmodified script on a simulated GPU, in a process of its own:
    no GPU is needed. Nothing is said of a value that was not run. With fp32 among the arms, the value is found
    too from which on each other arm allocates less. The tables go to stdout, a line for each run to stderr.

    The argument is whatever sets the size. --batch-size=1:64 is passed on as --batch-size=8,
    "--batch-size 1:64" as two arguments, batch_size=1:64 as batch_size=8, and 1:64 as 8, a positional argument.
    Without HIGH (1:) the value grows until it does not fit, to at most 65,536 times LOW. Ctrl-C prints the runs
    that have ended.

    \b
    ampmem fit --gpu h100 train.py --vary --batch-size=1:512
    ampmem fit --gpu h100 train.py data --vary 1:512 --epochs 1
    ampmem fit --gpu 24GiB --vary --batch-size=1:64 -m my_package.train
    """
    chosen = chosen_arms(arms, options.dtype)
    if device_option != Device.SIMULATED:
        raise UsageError(
            f"fit runs on a simulated GPU only; leave --device {device_option} out, or let it be the script's"
        )
    varied = varied_arguments(specs, options.arguments)
    if options.steps < STEPS:
        raise UsageError(f"--steps: at least {STEPS}, as the optimizer's state comes with the end of the first step")
    # Their recordings are thrown away: there is nothing that they could replace.
    script = settled(replace(options, device=Device.SIMULATED, stacks=False, force=False))
    gpu = gpu_to_simulate(options.gpu)
    options.find()
    if html is not None:
        check_output(html, force=options.force)
    runs = RunPlan(script=script, varied=varied, seed=seed, jobs=jobs or min(os.cpu_count() or 1, JOBS))
    found, interrupted = _search(runs, chosen, gpu, curve=points)
    if found.runs:
        click.echo(document(found).to_json() if as_json else render(found, layout_for(sys.stdout)))
    if interrupted:
        raise KeyboardInterrupt
    if html is not None:
        from ampmem.reporters.html.fit_page import write_fit

        write_fit(found, html, force=options.force)
        say_written(html)


fit.params = [param for param in fit.params if param.name not in _NOT_HERE]


def _search(runs: RunPlan, arms: Sequence[Arm], gpu: GpuSpec, *, curve: int) -> tuple[FitResult, bool]:
    """What the runs come to, and whether Ctrl-C ended the search before its end, which a warning says then."""
    varied = runs.varied
    following = partial(wanted, vary=varied.vary, total=gpu.total_memory, curve=curve)
    rest = partial(remaining, vary=varied.vary, total=gpu.total_memory, curve=curve)
    points, notes, interrupted = run_points(runs, arms, following, lambda points: left(rest(points)))
    if interrupted:
        notes = (warning(f"interrupted before the search had ended{left(rest(points))}"), *notes)
        points = {arm: found for arm, found in points.items() if found}
    result = FitResult(
        script=replace(runs.script, arguments=(*varied.before, *varied.after)).title,
        vary=varied.vary,
        gpu=gpu.name,
        total=gpu.total_memory,
        steps=runs.script.steps,
        arms=arm_fits(points),
        break_even=break_evens(points),
        notes=notes,
    )
    return result, interrupted
