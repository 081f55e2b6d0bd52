"""``ampmem profile``: run a script or module and record where its memory goes."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ampmem.errors import NothingRecorded
from ampmem.recording import SUFFIX, check_output

if TYPE_CHECKING:
    from ampmem.recorder.script import Target
    from ampmem.recorder.session import Session


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-m", "as_module", is_flag=True, help="Run a module, as python -m does.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="How many steps to record.")
@click.option("--skip", type=click.IntRange(min=0), default=0, show_default=True, help="Steps to let pass before.")
@click.option("--run-to-end", is_flag=True, help="Let the script finish, uninstrumented, once the steps are recorded.")
@click.option("--stacks/--no-stacks", default=True, show_default=True, help="Record the Python stack of every op.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help=f"The recording to write. [default: the script's name with {SUFFIX}, in this directory]",
)
@click.option("--html", type=click.Path(path_type=Path), help="Also write the HTML report here.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.argument("script_or_module", metavar="SCRIPT|-m MODULE")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def profile(
    as_module: bool,
    steps: int,
    skip: int,
    run_to_end: bool,
    stacks: bool,
    output: Path | None,
    html: Path | None,
    force: bool,
    script_or_module: str,
    arguments: tuple[str, ...],
) -> None:
    """Run an unmodified training script and record its memory, step by step.

    The first --steps steps are recorded; then the script is stopped. What ampmem itself has to say,
    the tables too, goes to stderr; stdout is the script's alone. A script that fails keeps its own
    exit code, and the steps that had ended are kept.

    \b
    ampmem profile train.py --epochs 1
    ampmem profile --steps 5 -o run.ampmem -m ampmem.workloads.gpt --preset tiny
    """
    from ampmem.recorder import script

    target = script.find_module(script_or_module) if as_module else script.find_script(script_or_module)
    path = output or Path(target.title + SUFFIX)
    for file in (path, html):
        if file is not None:
            check_output(file, force=force)
    # Only now: importing torch takes seconds, and what is wrong with the command is said before that.
    from ampmem.recorder.session import Options, Session

    options = Options(
        path=path.absolute(),
        script=("-m " if as_module else "") + script_or_module,
        arguments=arguments,
        steps=steps,
        skip=skip,
        stacks=stacks,
        force=force,
        baseline=False,
    )
    session = Session(options, on_step=_progress(steps), on_done=None if run_to_end else script.stop)
    page = None if html is None else html.absolute()  # the script may change the directory
    session.start()
    _say(f"recording to {path}")
    failure = _run(target, arguments, session)
    if failure is not None:
        _keep(session, path)
        _fail(failure)
    _finish(session, path, stopped=not run_to_end)
    _show(options.path, page, force=force)


def _run(target: Target, arguments: tuple[str, ...], session: Session) -> BaseException | None:
    """Run the script under ``session``; what ended it, unless that was its end or our stop."""
    from ampmem.recorder import script

    failure: BaseException | None = None
    try:
        script.run(target, arguments)
    except BaseException as error:  # whatever it is, it is the script's, and _fail passes it on
        finished = isinstance(error, SystemExit) and error.code in (None, 0)
        failure = None if finished or script.was_stopped(error) else error
    session.close()
    if failure is not None and not isinstance(failure, SystemExit):
        sys.excepthook(type(failure), failure.with_traceback(script.own_traceback(failure)), failure.__traceback__)
    return failure


def _finish(session: Session, path: Path, *, stopped: bool) -> None:
    """Say what was recorded; raises :class:`NothingRecorded` when that is nothing."""
    try:
        session.check()
    except NothingRecorded:
        if session.steps_recorded == 0:
            session.options.path.unlink(missing_ok=True)
        raise
    message = f"recorded {_steps(session)} in {path}"
    if session.stopped_by:
        message += f"; then {session.stopped_by}"
    elif session.steps_recorded != session.options.steps:
        message += "; then the script ended"
    elif stopped:
        message += " and stopped the script (--run-to-end lets it finish)"
    _say(message)


def _keep(session: Session, path: Path) -> None:
    """The script failed: say what is left of it."""
    if session.steps_recorded:
        _say(f"the script failed; {_steps(session)} that had ended are in {path} (ampmem show {path})")
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


def _show(recording: Path, html: Path | None, *, force: bool) -> None:
    """Print the tables to stderr, and write the page when it is wanted."""
    from ampmem.cli.show import report_of
    from ampmem.reporters.table import TableReporter

    click.echo("\n" + TableReporter().render([report_of(recording)]), err=True)
    if html is not None:
        from ampmem.cli.report import write_report

        write_report([recording], html, force=force)


def _progress(wanted: int) -> Callable[[int], None] | None:
    """Shows each step as it ends, on a terminal only."""
    if not sys.stderr.isatty():
        return None

    def show(done: int) -> None:
        end = "\n" if done == wanted else ""
        print(f"\rampmem: step {done} of {wanted}", end=end, file=sys.stderr, flush=True)

    return show


def _steps(session: Session) -> str:
    count = session.steps_recorded
    return f"{count} step{'' if count == 1 else 's'}"


def _say(message: str) -> None:
    print(f"ampmem: {message}", file=sys.stderr)
