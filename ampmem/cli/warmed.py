"""The process that :class:`~ampmem.cli.processes.starting.Warmed` starts, from which simulated runs are forked."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from ampmem.allocator.gpus import DEFAULT_GPU, find_gpu
from ampmem.cli.main import main
from ampmem.cli.processes.script_run import end_at_once

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def serve_runs() -> None:
    """Fork a process for each request, which carries it out and does not return; runs in the warmed process."""
    connection = socket.socket(fileno=int(sys.argv.pop(1)))
    _warm_up(sys.argv.pop(1))
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runs
    while files := socket.recv_fds(connection, 1, 5)[1]:
        if os.fork() == 0:
            connection.close()
            _fork(*files)
            signal.signal(signal.SIGINT, interrupted)
            _run_command_line()
        for file in files:
            os.close(file)
    with suppress(ChildProcessError):
        while True:  # the children's CPU time then counts for the command
            os.wait()
    os._exit(0)


def _fork(request: int, given: int, output: int, errors: int, status: int) -> None:
    """Fork the run and return in it; the process between waits for the run and reports to ``status``."""
    # The warmed process must not wait for a run, or runs would follow each other.
    number = os.fork()
    if number:
        with Connection(status, readable=False) as said:
            said.send(number)
            said.send(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
        os._exit(0)
    os.close(status)
    for stream, file in enumerate((given, output, errors)):
        os.dup2(file, stream)
        os.close(file)
    from ampmem.recorder.comparable import seed_anew

    seed_anew()
    with open(request, "rb") as asked:
        sys.argv[1:] = json.load(asked)


def _run_command_line() -> NoReturn:
    """Run the command line in ``sys.argv``, and end."""
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            end_at_once(ended.code or 0)
        raise


def _warm_up(imports: str) -> None:
    """Import the modules of a run, and start the simulation once, as a run does, with the script's own ``imports``.

    Real GPUs are hidden meanwhile: the trial's backward would start autograd's thread for each, and after that torch
    refuses a backward in every fork.
    """
    visible = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ""
    import ampmem.cli.profile
    import ampmem.recorder.session  # noqa: F401
    from ampmem.simulator.start import Simulation

    simulation = Simulation(find_gpu(DEFAULT_GPU))
    with suppress(Exception):  # a run imports it again, and says what is wrong
        exec(imports, {})  # on a simulated GPU: bitsandbytes, for one, asks for a GPU only when it is imported
    simulation.end()
    if visible is None:
        del os.environ[_VISIBLE]
    else:
        os.environ[_VISIBLE] = visible
    gc.collect()
