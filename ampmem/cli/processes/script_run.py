"""Runs the script of ``ampmem profile``, and ends the process as the script alone would have ended it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, NoReturn

from ampmem.cli.processes.children import USAGE
from ampmem.cli.processes.messages import Audience
from ampmem.errors import AmpmemError
from ampmem.failure import failure_of
from ampmem.recorder import script
from ampmem.recorder.script import Target
from ampmem.recorder.steering import depth

if TYPE_CHECKING:
    from ampmem.recorder.evaluation import ThenEvaluation
    from ampmem.recorder.session import Session
    from ampmem.recorder.steering.stopping import Stopper
    from ampmem.recorder.watch.watcher import Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnd:
    """The end of a run of the script.

    ``failure`` is the exception that ended the script; ``None`` if it ended normally or ampmem stopped it. ``trouble``
    is an error inside ampmem since the script started.
    """

    failure: BaseException | None
    trouble: BaseException | None = None


def run_script(
    target: Target,
    arguments: tuple[str, ...],
    session: Session | ThenEvaluation | Watcher,
    stopper: Stopper,
    audience: Audience,
    greeting: str,
    on_end: Callable[[], None] = lambda: None,
) -> ScriptEnd:
    """Run the script under ``session``, which is started before and always closed after it.

    ``greeting`` is printed once everything is in place, ``on_end`` called if the script ended well. Raises only what
    keeps the script from starting.
    """
    failure: BaseException | None = None
    started = False
    try:
        try:
            session.start()
            audience.say(greeting)
            started = True
            failure = _run_target(target, arguments, stopper)
            if failure is None:
                on_end()
            elif not session.forked():
                why = failure_of(failure)
                audience.failed(why)
                session.failed(why)
        finally:
            session.close(failure)
    except BaseException as trouble:
        if not started:
            raise
        return ScriptEnd(failure=_report_uncaught(failure), trouble=trouble)
    return ScriptEnd(failure=_report_uncaught(failure))


def run_plainly(target: Target, arguments: tuple[str, ...]) -> BaseException | None:
    """Run a script without recording it, such as a launcher; returns the exception for :func:`end_as`."""
    main = script.prepare(target, arguments)
    try:
        script.execute(target.code, main)
    except BaseException as error:
        return None if _exits_well(error) else _report_uncaught(error)
    return None


def _run_target(target: Target, arguments: tuple[str, ...], stopper: Stopper) -> BaseException | None:
    """Run the script; returns the exception that it failed with."""
    main = script.prepare(target, arguments)
    # ampmem's own frames are below the script's: without this it would reach the recursion limit earlier.
    as_deep = depth.install(frames=1 - target.calls_below)
    try:
        script.execute(target.code, main)
    except BaseException as error:  # any exception is the script's, and end_as passes it on
        stopper.ended(error)
        return None if script.stops_in(error) or _exits_well(error) else stop_of_simulation(error) or error
    finally:
        as_deep()
    stopper.ended(None)
    return None


def _exits_well(error: BaseException) -> bool:
    """Whether Python exits with 0 for ``error``: a ``SystemExit`` with 0 or ``None``; other codes are 1, or printed."""
    if not isinstance(error, SystemExit):
        return False
    try:
        code = error.code
    except BaseException:  # a class of the script's may raise anything
        return False
    return code is None or (isinstance(code, int) and int.__eq__(code, 0))


def _report_uncaught(failure: BaseException | None) -> BaseException | None:
    """Handle an uncaught exception as Python does: debuggers first, then the script's excepthook.

    Returns the exception to end the process with: an excepthook may exit.
    """
    if failure is None or isinstance(failure, SystemExit):
        return failure
    stopped = stop_of_simulation(failure) is failure
    trace = script.script_alone(failure) if stopped else script.own_traceback(failure)
    sys.last_type, sys.last_value, sys.last_traceback = type(failure), failure, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = failure
    try:
        sys.excepthook(type(failure), failure, trace)
    except SystemExit as exits:
        return exits
    except BaseException as second:
        with suppress(Exception):
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(type(second), second, script.own_traceback(second))
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(type(failure), failure, trace)
    return failure


def stop_of_simulation(failure: BaseException) -> BaseException | None:
    """The simulation's own error that caused the script's ``failure``; ``None`` if there is none.

    Its message says what to do. When torch moves a parameter, it replaces the error by one that says less.
    """
    where = sys.modules.get("ampmem.simulator.where")
    if where is None or isinstance(failure, where.NotSimulated):
        return None if where is None else failure
    cause = script.cause_of(failure)
    return cause.with_traceback(failure.__traceback__) if isinstance(cause, where.NotSimulated) else None


def usage_error(failure: BaseException | None) -> str:
    """The reason that argparse or click gave for exit code 2; empty if the script ended for another one.

    argparse has printed it and keeps it in a local of ``ArgumentParser.error``; click exits while it handles its error,
    or, since 8.5, later, with the error's ``show`` in a local of ``Command.main``.
    """
    # A script may exit with anything, such as a tensor, so the code is not compared with a number.
    if not isinstance(failure, SystemExit) or type(failure.code) is not int or failure.code != USAGE:
        return ""
    trace = failure.__traceback__
    while trace is not None:
        message = trace.tb_frame.f_locals.get("message") if trace.tb_frame.f_code.co_name == "error" else None
        if type(message) is str:
            return message
        report = trace.tb_frame.f_locals.get("report") if trace.tb_frame.f_code.co_name == "main" else None
        if type(report) is MethodType and isinstance(report.__self__, BaseException):
            return failure_of(report.__self__).message
        trace = trace.tb_next
    return "" if failure.__context__ is None else failure_of(failure.__context__).message


def failure_in_words(trouble: BaseException) -> str:
    """The message about an error inside ampmem; the exit code stays the script's."""
    if isinstance(trouble, AmpmemError):
        return str(trouble)
    if isinstance(trouble, KeyboardInterrupt):
        return "interrupted"
    return f"an error inside ampmem, not in the script: {failure_of(trouble).line}"


def end_as(failure: BaseException | None) -> NoReturn:
    """End this process as the script alone would have ended it; its traceback was printed already."""
    if failure is None:
        raise SystemExit(0)
    if isinstance(failure, SystemExit):
        raise failure
    if type(failure) is KeyboardInterrupt:  # Python ends by the signal, after the script's threads and exit handlers
        _finish()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1)


def end_at_once(code: int) -> NoReturn:
    """End this process with ``code`` without tearing down Python, which takes as long as a short simulated run."""
    _finish()
    os._exit(code & 0xFF)


def _finish() -> None:
    """Take the first steps of Python's own exit: join threads, call exit handlers, flush streams."""
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
