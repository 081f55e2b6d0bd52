"""Runs the script of ``ampmem profile``, and ends the process as the script would have ended it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from ampmem.cli.processes.messages import Audience
from ampmem.failure import failure_of
from ampmem.recorder import script
from ampmem.recorder.script import Target

if TYPE_CHECKING:
    from ampmem.recorder.session import Session
    from ampmem.recorder.steering.stopping import Stopper


def run_script(
    target: Target, arguments: tuple[str, ...], session: Session, stopper: Stopper, audience: Audience
) -> BaseException | None:
    """Run the script under ``session``; what ended it, unless that was its end or the stop of ``stopper``."""
    failure: BaseException | None = None
    try:
        script.run(target, arguments)
    except BaseException as error:  # whatever it is, it is the script's, and end_as passes it on
        finished = isinstance(error, SystemExit) and error.code in (None, 0)
        failure = None if finished or script.stops_in(error) else error
        stopper.ended(error)
    else:
        stopper.ended(None)
    if failure is not None and not session.forked():
        why = failure_of(failure)
        session.failed(why)
        audience.failed(why)
    session.close(failure)
    if failure is not None and not isinstance(failure, SystemExit):
        sys.excepthook(type(failure), failure.with_traceback(script.own_traceback(failure)), failure.__traceback__)
    return failure


def end_as(failure: BaseException | None) -> NoReturn:
    """End this process as the script would have ended without ampmem; its traceback is out already."""
    if isinstance(failure, SystemExit):
        raise failure
    if isinstance(failure, KeyboardInterrupt):
        _die_of_sigint()
    sys.exit(0 if failure is None else 1)


def _die_of_sigint() -> None:
    """Let the process end by SIGINT, as Python does, after the script's own exit handlers."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.kill(os.getpid(), signal.SIGINT)
