"""``ampmem fit``: the largest batch size that fits on a GPU, found by simulated runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, TypeAlias, TypeVar

import click

from ampmem.allocator.gpus import GpuSpec
from ampmem.analysis.fit import FitResult, Memory, Vary, fit_result, fit_schema, memory_of, remaining, wanted
from ampmem.cli.options import (
    ScriptCommand,
    ScriptOptions,
    layout_option,
    precisions_option,
    schema_option,
    seed_of_runs,
    shared_options_but,
)
from ampmem.cli.processes.children import (
    STEPS,
    ChildEnd,
    Children,
    CountedRuns,
    chosen_precisions,
    default_jobs,
    for_several_runs,
    jobs_option,
    misplaced,
    profile_arguments,
    run_at_once,
    run_child,
    say_context,
    say_protected,
)
from ampmem.cli.processes.starting import Warmed, warmed
from ampmem.errors import AmpmemError, RecordingError, UsageError
from ampmem.names import warning
from ampmem.output import check_output, say_written
from ampmem.recording import SUFFIX, read
from ampmem.reporters.text.fit import render_fit_result, what_follows
from ampmem.reporters.text.layout import Layout
from ampmem.units import format_bytes
from ampmem.vocabulary import FORCED_PRECISIONS, Device, Precision

OPTION = "--vary"

_SPEC = re.compile(r"(?P<name>[^\s=]+)(?P<separator>=|\s+)(?P<range>\S*)")
_POSITIONAL = re.compile(r"(?P<name>)(?P<range>\d+:\d*)", re.ASCII)
_RANGE = re.compile(r"(?P<low>\d{1,15}):(?P<high>\d{0,15})", re.ASCII)
_FORMS = (
    f"such as {OPTION} --batch-size=1:64, or --batch-size=1: to raise it until it does not fit, or {OPTION} 1:64 for "
    "a positional argument"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariedArguments:
    """The script's arguments, with a gap for the varied one."""

    vary: Vary
    before: tuple[str, ...]
    after: tuple[str, ...]

    def at(self, value: int) -> tuple[str, ...]:
        """The arguments of a run with ``value``."""
        return (*self.before, *self.vary.words(value), *self.after)


def varied_arguments(options: Sequence[str], arguments: Sequence[str]) -> VariedArguments:
    """The varied argument, from ampmem's own ``options`` or among the script's ``arguments``.

    Given among ampmem's options, it becomes the script's last argument. A positional argument takes the option's place.
    Raises :class:`UsageError`.
    """
    specs, before, after = list(options), tuple(arguments), tuple[str, ...]()
    for i, argument in enumerate(arguments):
        if argument == OPTION:
            specs.append(arguments[i + 1] if i + 1 < len(arguments) else "")
            before, after = tuple(arguments[:i]), tuple(arguments[i + 2 :])
            break
        if argument.startswith(f"{OPTION}="):
            specs.append(argument.removeprefix(f"{OPTION}="))
            before, after = tuple(arguments[:i]), tuple(arguments[i + 1 :])
            break
    if not specs:
        raise UsageError(f"give the script's argument to vary, {_FORMS}")
    if len(specs) > 1 or any(each == OPTION or each.startswith(f"{OPTION}=") for each in after):
        raise UsageError(f"only one argument can be varied, and {OPTION} is given more than once")
    vary = _parse(specs[0], len(before) + 1)
    for argument in (*before, *after):
        if argument == vary.name or argument.startswith(f"{vary.name}="):
            raise UsageError(f"{vary.name} is given twice: remove {argument} from the script's arguments")
    return VariedArguments(vary=vary, before=before, after=after)


def _parse(spec: str, position: int) -> Vary:
    """``spec`` parsed; ``position`` is its place among the script's arguments, from 1 on, if it has no name."""
    found = _POSITIONAL.fullmatch(spec.strip()) or _SPEC.fullmatch(spec.strip())
    if found is None:
        raise UsageError(f"{OPTION} needs an argument of the script with the values to try, {_FORMS}; not {spec!r}")
    numbers = _RANGE.fullmatch(found["range"])
    if numbers is None:
        raise UsageError(f"{OPTION}: give the values as whole numbers LOW:HIGH, {_FORMS}; not {found['range']!r}")
    low, high = int(numbers["low"]), int(numbers["high"]) if numbers["high"] else None
    if low < 1:
        raise UsageError(f"{OPTION}: LOW must be at least 1, not {low}")
    if high is not None and high < low:
        raise UsageError(f"{OPTION}: {low} is larger than {high}; give the smaller value first")
    if not found["name"]:
        return Vary(name=f"argument {position}", separator="", low=low, high=high)
    separator = "=" if found["separator"] == "=" else " "
    return Vary(name=found["name"], separator=separator, low=low, high=high)


_Key = TypeVar("_Key", bound=Hashable)
"""What is searched for each: a precision, in words by ``str``."""

Run: TypeAlias = tuple[_Key, int]
"""A run: a key and a value."""

Found: TypeAlias = Mapping[_Key, Mapping[int, Memory | None]]
"""The results of the runs so far."""


class RunFailed(AmpmemError):
    """A run failed for another reason than a full device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Generic[_Key]):
    """The script of each search, whose arguments are followed by the varied ones; ``jobs`` runs are made at once.

    The runs are forked from a process that has run ``imports``, the script's import statements.
    """

    scripts: Mapping[_Key, ScriptOptions]
    varied: VariedArguments
    jobs: int
    imports: str = ""

    def script(self, run: Run[_Key]) -> ScriptOptions:
        """The script of ``run``, with all its arguments."""
        key, value = run
        script = self.scripts[key]
        return replace(script, arguments=(*script.arguments, *self.varied.at(value)))

    def name(self, run: Run[_Key]) -> str:
        """The run in words: ``amp --batch-size=8``."""
        key, value = run
        return f"{key} {self.varied.vary.shown(value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """The result of a run. ``memory`` is ``None`` where it ran out; ``failure`` is another reason for ``None``."""

    memory: Memory | None
    notes: tuple[str, ...]
    failure: str | None
    ended: ChildEnd


_SIZES = re.compile(r"[0-9.,]+ (?:[KMGT]i)?B\b")


def run_points(
    plan: RunPlan[_Key], wanted: Callable[[Found[_Key]], list[Run[_Key]]], left: Callable[[Found[_Key]], str]
) -> tuple[dict[_Key, dict[int, Memory | None]], tuple[str, ...], bool]:
    """Make the runs that ``wanted`` names, given the results so far, until it names none.

    Returns the points of each search, all notes (of several that differ in sizes the first one), and whether Ctrl-C
    ended the search early; finished runs are kept then. ``left`` gives words for the work left. Raises
    :class:`RunFailed` if a script fails for another reason than memory. No process is left behind.
    """
    points: dict[_Key, dict[int, Memory | None]] = {key: {} for key in plan.scripts}
    notes: dict[str, str] = {}
    with (
        TemporaryDirectory(prefix="ampmem-fit-") as folder,
        _Counted(plan, left) as progress,
        warmed(Device.SIMULATED, plan.imports) as forking,
    ):

        def note_outcome(run: Run[_Key], outcome: _Point) -> None:
            points[run[0]][run[1]] = outcome.memory
            progress.ended(run, outcome, points)
            for note in outcome.notes:
                notes.setdefault(_SIZES.sub("", note), note)

        make = partial(_make, plan, Path(folder), progress, forking)
        try:
            run_at_once(plan.jobs, lambda: wanted(points), make, note_outcome)
        except KeyboardInterrupt:
            return points, tuple(notes.values()), True
        return points, tuple(notes.values()), False


class _Counted(CountedRuns, Generic[_Key]):
    """Counts the runs as they end; their total is not known before."""

    def __init__(self, plan: RunPlan[_Key], left: Callable[[Found[_Key]], str]) -> None:
        super().__init__()
        self._plan = plan
        self._left = left

    def ended(self, run: Run[_Key], outcome: _Point, found: Found[_Key]) -> None:
        """One line for a run that ended. Raises :class:`RunFailed` if it failed."""
        self._count += 1
        name = self._plan.name(run)
        if outcome.failure is not None:
            why = f"{outcome.failure}{misplaced(self._plan.script(run), outcome.ended)}"
            self.stay(f"run {self._count}: {name}: failed: {why}", tail=outcome.ended.tail)
            raise RunFailed(
                f"{name} failed, and not because memory ran out, so ampmem cannot say what fits: fix this error first"
            )
        self._rest = self._left(found)
        self.stay(f"run {self._count}: {name}: {_fits_text(outcome.memory)}", self._rest)


def _fits_text(memory: Memory | None) -> str:
    if memory is None:
        return "does not fit"
    fits = "fits" if memory.surely else "may fit"
    return f"{fits}, peak {format_bytes(memory.allocated)} allocated, {format_bytes(memory.reserved)} reserved"


def _make(
    plan: RunPlan[_Key],
    folder: Path,
    progress: _Counted[_Key],
    forking: Warmed | None,
    run: Run[_Key],
    children: Children,
) -> _Point:
    """Make one run, in a thread."""
    name, script = plan.name(run), plan.script(run)
    path = folder / f"{'.'.join(map(str, run))}{SUFFIX}"
    progress.doing(f"{name}: starting")
    ended = run_child(
        profile_arguments(script, "--quiet", "-o", str(path)),
        lambda step: progress.doing(f"{name}: step {step.done} of {step.wanted}"),
        children.started,
        warmed=forking,
    )
    try:
        return _outcome(path, ended, script.steps)
    finally:
        path.unlink(missing_ok=True)


def _outcome(path: Path, ended: ChildEnd, steps: int) -> _Point:
    memory, failure = None, ended.failure
    notes: tuple[str, ...] = ()
    if not path.exists():
        failure = failure or "its recording is missing"
    else:
        try:
            recording = read(path)
            notes = recording.remarks
            ended_steps = sum(step.finished for step in recording.steps)
            if recording.ooms:
                failure = None  # the run is out of memory, whatever the script made of it
            elif ended_steps >= steps:
                failure = None  # the script caught the stop, and failed afterwards because of what it missed
                memory = memory_of(recording)
            elif failure is None:
                failure = f"it ended after {ended_steps} of {steps} steps; let it train longer"
        except RecordingError as error:
            failure = failure or str(error)
    return _Point(memory=memory, notes=notes, failure=failure, ended=ended)


@click.command(
    "fit", cls=ScriptCommand, context_settings={"allow_interspersed_args": False, "default_map": {"steps": STEPS}}
)
@click.option(
    OPTION,
    "specs",
    multiple=True,
    metavar="[ARG=]LOW:HIGH",
    help="The script's argument to vary, with its smallest and largest value. --vary may stand among the script's "
    "arguments, too; there LOW:HIGH alone is a positional argument.",
)
@precisions_option(
    (*FORCED_PRECISIONS, Precision.AS_IS),
    f"Which precisions to run; {Precision.AS_IS} is the script as it is, {Precision.BF16} has weights in bfloat16.",
)
@seed_of_runs
@click.option(
    "--points",
    type=click.IntRange(min=0),
    metavar="N",
    default=5,
    show_default=True,
    help="The number of values on the curve; with 0 only the runs of the search are made.",
)
@jobs_option()
@click.option("--html", type=click.Path(path_type=Path), help="Also write an HTML page with the curves here.")
@layout_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables, schema ampmem.fit/1.")
@schema_option(fit_schema)
@click.option("--device", "device_option", default=Device.SIMULATED.value, hidden=True)
@shared_options_but("device", "synchronize", "stacks", "nproc_per_node")  # those have no effect here
def fit(
    specs: tuple[str, ...],
    precisions: str,
    points: int,
    jobs: int | None,
    device_option: str,
    html: Path | None,
    layout: Layout,
    as_json: bool,
    options: ScriptOptions,
) -> None:
    """Find the largest value of a script's argument, such as its batch size, that fits on a GPU.

    Each value is tried in a run of the unmodified script on a simulated GPU, in its own process: no GPU is needed.
    ampmem states nothing about values that were not run. If fp32 is among the precisions, ampmem also finds the value
    from which on each other precision allocates less. The tables go to stdout, a line for each run to stderr.

    The argument can be anything that sets the size. The script gets --batch-size=8 for --batch-size=1:64, two
    arguments for "--batch-size 1:64", batch_size=8 for batch_size=1:64, and the positional argument 8 for 1:64.
    Without HIGH (1:) the value grows until it does not fit, up to 65,536 times LOW. Ctrl-C prints the finished runs.

    \b
    ampmem fit --gpu h100 train.py --vary --batch-size=1:512
    ampmem fit --gpu h100 train.py data --vary 1:512 --epochs 1
    ampmem fit --gpu 24GiB --vary --batch-size=1:64 -m my_package.train
    """
    chosen = chosen_precisions(precisions, options)
    if device_option != Device.SIMULATED:
        raise UsageError(
            f"fit runs on a simulated GPU only; leave --device {device_option} out, or write it after the script if "
            "it is the script's option"
        )
    varied = varied_arguments(specs, options.arguments)
    if options.steps < STEPS:
        raise UsageError(
            f"--steps must be at least {STEPS}: the optimizer's state is created at the end of the first step"
        )
    # The recordings are deleted, so they cannot replace anything.
    script = for_several_runs(replace(options, device=Device.SIMULATED, stacks=False, force=False))
    gpu = options.gpu_or_default
    options.find()
    if html is not None:
        check_output(html, force=options.force)
    say_protected(script)
    say_context(gpu, gpu.total_memory)
    scripts = {precision: replace(script, precision=precision, arguments=()) for precision in chosen}
    runs = RunPlan(scripts=scripts, varied=varied, jobs=jobs or default_jobs())
    found, interrupted = _search(runs, script, gpu, curve=points)
    if found.runs:
        click.echo(found.to_json() if as_json else layout.shown(render_fit_result(found, layout)))
    if interrupted:
        raise KeyboardInterrupt
    if html is not None:
        from ampmem.reporters.html.fit_page import write_fit

        write_fit(found, html, force=options.force)
        say_written(html)


def _search(runs: RunPlan[Precision], script: ScriptOptions, gpu: GpuSpec, *, curve: int) -> tuple[FitResult, bool]:
    """The result of the search, and whether Ctrl-C ended it early, which is also a warning."""
    varied = runs.varied
    following = partial(wanted, vary=varied.vary, total=gpu.total_memory, curve=curve)
    rest = partial(remaining, vary=varied.vary, total=gpu.total_memory, curve=curve)
    points, notes, interrupted = run_points(runs, following, lambda points: what_follows(rest(points)))
    if interrupted:
        notes = (warning(f"interrupted before the search ended{what_follows(rest(points))}"), *notes)
        points = {precision: found for precision, found in points.items() if found}
    result = fit_result(
        points,
        script=replace(script, arguments=(*varied.before, *varied.after)).title,
        vary=varied.vary,
        gpu=gpu.name,
        total=gpu.total_memory,
        steps=script.steps,
        notes=notes,
    )
    return result, interrupted
