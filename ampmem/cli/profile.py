"""``ampmem profile``: run a script or module and record where its memory goes."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ampmem.cli.options import ARMS, assumed_fractions, shared_options, simulated_gpu
from ampmem.errors import AmpmemError, NothingRecorded, UsageError
from ampmem.recording import SUFFIX, add_plain_steps, check_output

if TYPE_CHECKING:
    from ampmem.recorder.options import Options
    from ampmem.recorder.script import Target
    from ampmem.recorder.session import Session
    from ampmem.recorder.sources.simulated import SimulatedSource
    from ampmem.simulator.start import Simulation


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--arm",
    type=click.Choice(("as-is", *ARMS)),
    default="as-is",
    show_default=True,
    help="Force a precision on the script: fp32 switches autocast and GradScaler off; amp switches autocast on, "
    "amp-nocache does so without its weight cache.",
)
@click.option("--seed", type=int, help="Seed Python's, numpy's and torch's random numbers before the script starts.")
@click.option("--run-to-end", is_flag=True, help="Let the script finish, uninstrumented, once the steps are recorded.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help=f"The recording to write.  [default: the script's name with {SUFFIX}, in this directory]",
)
@click.option("--html", type=click.Path(path_type=Path), help="Also write the HTML report here.")
@click.option("--quiet", is_flag=True, help="Print no tables.")
@click.option("--progress", is_flag=True, hidden=True, help="Say when each step ends, in a line of its own.")
@click.option(
    "--times-into", type=click.Path(path_type=Path), hidden=True, help="Record nothing; time the steps for this FILE."
)
@shared_options
def profile(arm: str, dtype: str | None, seed: int | None, times_into: Path | None, **rest: Any) -> None:
    """Run an unmodified training script and record its memory, step by step.

    The first --steps steps are recorded; then the script is stopped. What ampmem itself has to say,
    the tables too, goes to stderr; stdout is the script's alone. A script that fails keeps its own
    exit code, and the steps that had ended are kept; of one that runs out of memory all is kept.

    \b
    ampmem profile train.py --epochs 1
    ampmem profile --arm amp --dtype bf16 train.py
    ampmem profile --steps 5 -o run.ampmem -m ampmem.workloads.gpt --preset tiny
    """
    if dtype is not None and arm not in ("amp", "amp-nocache"):
        raise UsageError(f"--dtype is what autocast casts to, so it needs --arm amp or amp-nocache, not {arm}")
    plan = _Plan(arm=arm, dtype=dtype, **rest)
    simulated_gpu(plan.device, plan.gpu)
    assumed_fractions(plan.device, plan.assume)
    target = plan.find()
    if times_into is None:
        for file in (plan.path(target), plan.html):
            if file is not None:
                check_output(file, force=plan.force)
    if seed is not None:
        from ampmem.recorder.seed import seed_everything

        seed_everything(seed)
    if times_into is None:
        _record(plan, target)
    else:
        _time(plan, target, times_into)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The command line."""

    arm: str
    dtype: str | None
    device: str
    synchronize: bool
    gpu: str | None
    assume: tuple[str, ...]
    as_module: bool
    steps: int
    skip: int
    run_to_end: bool
    stacks: bool
    output: Path | None
    html: Path | None
    quiet: bool
    progress: bool
    force: bool
    script_or_module: str
    arguments: tuple[str, ...]

    def find(self) -> Target:
        """What to run."""
        from ampmem.recorder import script

        return (script.find_module if self.as_module else script.find_script)(self.script_or_module)

    def simulate(self) -> Simulation | None:
        """Put the device in place that is to be simulated, if there is one."""
        gpu = simulated_gpu(self.device, self.gpu)
        if gpu is None:
            return None
        try:
            from ampmem.simulator.start import Simulation
        except (ImportError, AttributeError) as error:  # a part of torch is not where it was
            from ampmem.simulator.refusal import refusal

            raise refusal(error) from error
        return Simulation(gpu, fractions=assumed_fractions(self.device, self.assume))

    def path(self, target: Target) -> Path:
        """The recording to write."""
        return self.output or Path(target.title + SUFFIX)

    def options(self, path: Path, *, timed: bool = False) -> Options:
        """What the recorder is told. Importing torch takes seconds: what is wrong is said before that."""
        from ampmem.recorder.options import DTYPES, Options

        return Options(
            path=path.absolute(),
            script=("-m " if self.as_module else "") + self.script_or_module,
            arguments=self.arguments,
            steps=self.steps,
            skip=self.skip,
            timed=timed,
            stacks=self.stacks,
            force=self.force,
            baseline=False,
            arm=self.arm,
            dtype=None if self.dtype is None else DTYPES[self.dtype],
            device=self.device,
            synchronize=self.synchronize,
        )


def _record(plan: _Plan, target: Target) -> None:
    from ampmem.recorder import script
    from ampmem.recorder.session import Session

    path = plan.path(target)
    options = plan.options(path)
    on_done = None if plan.run_to_end else script.stop
    simulation = plan.simulate()
    source = None if simulation is None else _source_of(simulation)
    session = Session(options, source=source, on_step=_progress(plan.steps, lines=plan.progress), on_done=on_done)
    page = None if plan.html is None else plan.html.absolute()  # the script may change the directory
    session.start()
    _say(f"recording to {path}")
    failure = _run(target, plan.arguments, session)
    if simulation is not None:
        _say(_predicted(simulation, failed=failure is not None))
    if failure is not None:
        if session.outcome.unfinished is not None:
            _show_failure(options.path, page, plan)
        _keep(session, path)
        _fail(failure)
    _finish(session, path, stopped=not plan.run_to_end)
    if not plan.quiet:
        _show(options.path)
    if page is not None:
        from ampmem.cli.report import write_report

        write_report([options.path], page, force=plan.force)


def _source_of(simulation: Simulation) -> SimulatedSource:
    """What records it."""
    from ampmem.recorder.sources.simulated import SimulatedSource

    return SimulatedSource(simulation.device)


def _predicted(simulation: Simulation, *, failed: bool) -> str:
    """What the run would have needed, in one line; a run that failed for other reasons neither fits nor not."""
    from ampmem.analysis.fit.estimate import prediction_of
    from ampmem.reporters.text.estimate import headline

    record, failure = simulation.end()
    stopped = "up to where the script failed" if failed else ""
    return headline(prediction_of(record), simulation.device.gpu.name, stopped=stopped, failure=failure)


def _time(plan: _Plan, target: Target, recording: Path) -> None:
    """Run the steps that ``recording`` has once more, without instrumentation, and add their durations to it."""
    from ampmem.recorder import script
    from ampmem.recorder.session import Session

    path = recording.absolute()
    session = Session(plan.options(path, timed=True), on_done=script.stop)
    session.start()
    failure = _run(target, plan.arguments, session)
    if failure is not None:
        _fail(failure)
    add_plain_steps(path, session.stopwatch.durations_ns[plan.skip :])


def _run(target: Target, arguments: tuple[str, ...], session: Session) -> BaseException | None:
    """Run the script under ``session``; what ended it, unless that was its end or our stop."""
    from ampmem.recorder import script

    failure: BaseException | None = None
    try:
        script.run(target, arguments)
    except BaseException as error:  # whatever it is, it is the script's, and _fail passes it on
        finished = isinstance(error, SystemExit) and error.code in (None, 0)
        failure = None if finished or script.was_stopped(error) else error
    if failure is not None:
        session.note(f"the script failed: {_described(failure)}")
    session.close(failure)
    if failure is not None and not isinstance(failure, SystemExit):
        sys.excepthook(type(failure), failure.with_traceback(script.own_traceback(failure)), failure.__traceback__)
    return failure


def _described(failure: BaseException) -> str:
    """``failure`` in one line."""
    if isinstance(failure, SystemExit):
        return f"it exited with {failure.code!r}"
    lines = str(failure).strip().splitlines()
    return type(failure).__name__ + (f": {lines[0]}" if lines else "")


def _finish(session: Session, path: Path, *, stopped: bool) -> None:
    """Say what was recorded; raises :class:`NothingRecorded` when that is nothing."""
    try:
        session.check()
    except NothingRecorded:
        if session.outcome.recorded == 0:
            session.options.path.unlink(missing_ok=True)
        raise
    message = f"recorded {_steps(session)} in {path}"
    if session.outcome.stopped_by:
        message += f"; then {session.outcome.stopped_by}"
    elif session.outcome.unfinished is not None:
        message += " and what there was when the device ran out of memory; then the script ended"
    elif session.outcome.recorded != session.options.steps:
        message += "; then the script ended"
    elif stopped:
        message += " and stopped the script (--run-to-end lets it finish)"
    _say(message)


def _keep(session: Session, path: Path) -> None:
    """The script failed: say what is left of it."""
    ended = f"{_steps(session)} that had ended"
    if session.outcome.unfinished is not None:
        kept = f"{ended}, and " if session.outcome.recorded else ""
        _say(f"the script failed: out of memory; {path} has {kept}what there was until then (ampmem show {path})")
    elif session.outcome.recorded:
        _say(f"the script failed; {ended} are in {path} (ampmem show {path})")
    else:
        session.options.path.unlink(missing_ok=True)
        _say("the script failed before a step had ended: nothing was recorded")


def _fail(failure: BaseException) -> NoReturn:
    """End this process as the script would have ended without ampmem; its traceback is out already."""
    if isinstance(failure, SystemExit):
        raise failure
    if isinstance(failure, KeyboardInterrupt):
        _die_of_sigint()
    sys.exit(1)


def _die_of_sigint() -> None:
    """Let the process end by SIGINT, as Python does, after the script's own exit handlers."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.kill(os.getpid(), signal.SIGINT)


def _show(recording: Path) -> None:
    """Print the tables to stderr."""
    from ampmem.cli.show import report_of
    from ampmem.reporters.text.table import TableReporter

    click.echo("\n" + TableReporter().render([report_of(recording)]), err=True)


def _show_failure(recording: Path, page: Path | None, plan: _Plan) -> None:
    """Say what the run died of that ran out of memory; the exit code stays the script's, come what may."""
    from ampmem.cli.report import write_report
    from ampmem.cli.show import report_of
    from ampmem.reporters.text.out_of_memory import render_out_of_memory

    try:
        if not plan.quiet:
            click.echo(f"\n{render_out_of_memory(report_of(recording).summary)}\n", err=True)
        if page is not None:
            write_report([recording], page, force=plan.force)
    except AmpmemError as error:
        _say(str(error))


def _progress(wanted: int, *, lines: bool) -> Callable[[int], None] | None:
    """Shows each step as it ends: on a terminal in one line that changes, or else when ``lines`` are wanted."""
    if not lines and not sys.stderr.isatty():
        return None

    def show(done: int) -> None:
        start, end = ("", "\n") if lines else ("\r", "\n" if done == wanted else "")
        print(f"{start}ampmem: step {done} of {wanted}", end=end, file=sys.stderr, flush=True)

    return show


def _steps(session: Session) -> str:
    count = session.outcome.recorded
    return f"{count} step{'' if count == 1 else 's'}"


def _say(message: str) -> None:
    print(f"ampmem: {message}", file=sys.stderr)
