"""A Python that has torch imported already, for tests that start many processes.

Importing torch takes seconds; most tests ask for what comes after. Only what a script has by then is imported
(:data:`BESIDE`); ``tests/cold/`` has commands in bare interpreters. :func:`ready_python` is the path of an executable
that takes ``-c CODE``, ``-m MODULE`` or a script, and arguments, as Python does, and ``-u`` first; ``-X`` comes too
late. It asks a server, one for all processes of pytest (:func:`share`) or one for each interpreter, to fork: the child
is a process of its own, with the caller's directory, environment, PYTHONPATH and open files (the standard streams, and
what ``pass_fds`` names). SIGINT and SIGTERM reach it through the caller. In it ``sys.executable`` is this one too. For
simulated runs there are executables that have the simulation imported as well (:class:`Kind`); their servers are forked
from the first one when they are first asked.

When the program has ended, or exits with a number, the child waits for threads, calls what is registered with atexit,
flushes the streams and is gone: taking Python and torch apart takes longer than most programs of tests. Where a test is
about how programs end, ``to_the_end`` has it end as Python does.

Not for tests of what is decided while Python starts or torch is imported (the hash seed, ``-P``, the number of
threads, what is imported and from where), nor of process groups. They start ``sys.executable``.
"""

import atexit
import fcntl
import functools
import gc
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from importlib import import_module
from io import FileIO, TextIOWrapper
from pathlib import Path
from types import ModuleType

import torch

BEFORE_THE_SCRIPT = (
    *("torch", "torch.utils.data", "ampmem.cli.main", "ampmem.cli.profile", "ampmem.recorder.session"),
    *("ampmem.recorder.comparable", "ampmem.recorder.ranks.together", "ampmem.recorder.steering.stopping"),
)
"""What ``ampmem profile`` has imported itself when the script's first line runs."""
BESIDE: Mapping[str, str] = {
    "torch._dynamo": "the first optimizer imports it, in as long as the rest of torch takes; so does a simulated GPU",
    "ampmem.cli.show": "the tables that profile prints after the script, and what they stand on; no torch is in them",
    "ampmem.cli.check": "a command of its own; no torch is in it",
    "ampmem.cli.compare": "likewise",
    "ampmem.cli.diff": "likewise",
    "ampmem.cli.fit": "likewise",
    "ampmem.cli.report": "likewise",
    "ampmem.cli.advise": "likewise",
    "ampmem.reporters.html.write": "the page that a command writes after the script; no torch is in it",
    "numpy.ma": "numpy imports it for the first np.unique",
}
"""What is imported here although ``ampmem profile`` has not yet imported it then, and why that hides nothing.

Where ampmem relies on an import that a script need not make, such as of a part of torch.distributed, a program here is
to fail as it does in a bare interpreter: ``test_ready_python.py`` holds both lists against one.
"""
PRELOADED = (*BEFORE_THE_SCRIPT, *BESIDE)


class Kind(StrEnum):
    """What a program finds imported. Each kind has what the ones before it have."""

    PLAIN = "python"
    SIMULATED = "python-simulated"
    """… and what a simulated GPU has imported when the script starts, after one was simulated on trial."""
    SIMULATED_RANKS = "python-simulated-ranks"
    """… and what ``--world-size`` imports before the script starts."""


IMPORTS: Mapping[Kind, Sequence[str]] = {
    Kind.PLAIN: PRELOADED,
    Kind.SIMULATED: ("ampmem.simulator.start", "ampmem.recorder.sources.simulated"),
    Kind.SIMULATED_RANKS: ("ampmem.simulator.communication", "torch.distributed.checkpoint"),
}
SIZE = 8
"""Bytes of the number that says how long a request is."""
FILES = 64
"""How many open files a program may be given."""
TO_THE_END = "-to-the-end"
"""Suffix of the executables whose programs end as with Python."""

SHARED = "AMPMEM_READY_PYTHON"
"""The variable with the interpreter and the folder of :func:`share`."""

CLIENT = """#!{python} -IS
# Of json, signal and socket only what is written in C: to import the rest takes longer than all else here.
import _signal, _socket, marshal, os, sys
server = _socket.socket(_socket.AF_UNIX)
server.connect({address!r})
def inherited(number):
    try:
        return os.get_inheritable(number)
    except OSError: # the folder that was listed
        return False
numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if inherited(number)]
request = marshal.dumps([sys.argv[0], sys.argv[1:], os.getcwd(), dict(os.environ), numbers])
files = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
server.sendmsg([len(request).to_bytes({size}, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
server.sendall(request)
for number in (_signal.SIGINT, _signal.SIGTERM):
    _signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
status = int(server.recv(16) or b"9")
if os.WIFSIGNALED(status):
    number = os.WTERMSIG(status)
    _signal.signal(number, _signal.SIG_DFL) if number != _signal.SIGKILL else None
    os.kill(os.getpid(), number)
os._exit(os.waitstatus_to_exitcode(status))
"""


def ready_python(*, to_the_end: bool = False, kind: Kind = Kind.PLAIN, interpreter: str = sys.executable) -> str:
    """The executable's path. Its server, an ``interpreter``, starts with the first call, and ends with this process."""
    return str(_started(interpreter) / (kind + TO_THE_END if to_the_end else kind))


def ready_for(arguments: Sequence[str]) -> Kind:
    """The kind for a command of ampmem's: what it imports before the script starts is imported already.

    On a CUDA build the trial starts autograd's threads of devices, after which torch refuses a backward in a fork.
    """
    if torch.version.cuda or not {"sim", "--gpu", "fit"}.intersection(arguments) or "cpu" in arguments:
        return Kind.PLAIN
    return Kind.SIMULATED_RANKS if "--world-size" in arguments else Kind.SIMULATED


def share(interpreter: str) -> None:
    """Start the server of ``interpreter`` for this process and all that it starts, which ends with this process."""
    os.environ[SHARED] = f"{interpreter}={_started(interpreter)}"


@functools.cache
def _started(interpreter: str) -> Path:
    """The folder of the executables, once there is a server."""
    shared, _, there = os.environ.get(SHARED, "").rpartition("=")
    if shared == interpreter:
        return Path(there)
    folder = tempfile.TemporaryDirectory(prefix="ready-python-")
    listeners = []
    for kind in Kind:
        address = str(Path(folder.name) / f"{kind}.socket")
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(address)
        listeners[-1].listen(64)
        for name in (kind, kind + TO_THE_END):
            executable = Path(folder.name) / name
            executable.write_text(CLIENT.format(python=interpreter, address=address, size=SIZE))
            executable.chmod(0o700)
    numbers = [listener.fileno() for listener in listeners]
    # A thread of numpy's library would not be there in the children.
    server = subprocess.Popen(
        [interpreter, __file__, *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=numbers,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    for listener in listeners:
        listener.close()

    def end() -> None:
        server.stdin.close()  # what it ends by
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return Path(folder.name)


def reap(*_: object) -> None:
    """Take leave of the children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def prepare(kind: Kind) -> None:
    """Import what programs of ``kind`` have imported beside that of the kinds before."""
    for name in IMPORTS[kind]:
        import_module(name)
    if kind is Kind.PLAIN:
        assert len(list(Path("/proc/self/task").iterdir())) == 1
    if kind is Kind.SIMULATED:  # as ampmem's own warmed process does before it forks runs
        gpus = import_module("ampmem.allocator.gpus")
        import_module("ampmem.simulator.start").Simulation(gpus.find_gpu(gpus.DEFAULT_GPU)).end()
    gc.collect()
    gc.freeze()


def serve(listeners: list[socket.socket]) -> socket.socket | None:
    """Fork for every caller: in the child the connection to it; ``None`` once whoever started the server is gone.

    There is a listener for each kind. The first caller of a further kind has this server fork the one of that kind.
    """
    kinds = iter(Kind)
    prepare(next(kinds))
    while True:
        there, _, _ = select.select([*listeners, sys.stdin], [], [])
        if sys.stdin in there:
            return None
        if listeners[0] in there:
            connection, _ = listeners[0].accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for listener in listeners:
                    listener.close()
                return connection
            connection.close()
        elif os.fork() == 0:
            listeners.pop(0).close()
            prepare(next(kinds))
        else:
            while len(listeners) > 1:
                listeners.pop().close()


def keep(connection: socket.socket) -> list[str] | None:
    """Fork what was asked for: in that child its arguments; ``None`` when it has ended and the caller knows how."""
    head, files, _, _ = socket.recv_fds(connection, SIZE, FILES)
    request = b""
    while len(request) < int.from_bytes(head, "big"):
        request += connection.recv(1 << 20)
    executable, arguments, folder, environment, numbers = marshal.loads(request)
    child = os.fork()
    if child:
        for file in files:
            os.close(file)
        status = wait_for(child, connection)
        with suppress(BrokenPipeError):  # the caller was killed
            connection.sendall(str(status).encode())
        return None
    connection.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, max(*numbers, *files) + 1) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(numbers, apart, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.executable, sys.orig_argv, tempfile.tempdir = executable, [executable, *arguments], None
    import_module("numpy.random").seed()  # Python's own random numbers begin anew in a fork
    return list(arguments)


def wait_for(child: int, connection: socket.socket) -> int:
    """How ``child`` ended. Hands it the signals that its caller got; it is killed when the caller has died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = os.pidfd_open(child)
    while True:
        there, _, _ = select.select([connection, ended], [], [])
        if ended in there:
            return os.waitpid(child, 0)[1]
        numbers = connection.recv(16)
        for number in numbers or [signal.SIGKILL]:
            os.kill(child, number)


def run(arguments: list[str]) -> None:
    """Do what ``python`` does with ``arguments``."""
    while arguments[0] == "-u" or arguments[0].startswith("-X"):
        if arguments[0] == "-u":
            sys.stdout = TextIOWrapper(FileIO(1, "wb", closefd=False), write_through=True)
        arguments = arguments[1:]
    first, *rest = arguments
    if first.startswith(("-c", "-m")) and first[2:]:
        first, rest = first[:2], [first[2:], *rest]
    if first == "-c":
        code, *rest = rest
        sys.argv, sys.path[0] = ["-c", *rest], ""
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif first == "-m":
        name, *rest = rest
        sys.argv, sys.path[0] = ["-m", *rest], str(Path.cwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def run_and_leave(arguments: list[str], before: list[weakref.finalize]) -> None:
    """:func:`run`, and then be gone, without the finalizers ``before`` the fork. Where that fails, end as Python."""
    code = 0
    try:
        run(arguments)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    for finalizer in before:
        finalizer.atexit = False
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def main() -> None:
    """The server, and whatever it becomes in its children."""
    listeners = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    signal.signal(signal.SIGCHLD, reap)
    connection = serve(listeners)
    if "triton" in sys.modules:  # CUDA builds import it, and it says on stderr what was not collected at the end
        atexit.register(gc.unfreeze)
    finalizers = list(weakref.finalize._registry)  # type: ignore[attr-defined]
    arguments = keep(connection) if connection is not None else None
    if arguments is None:
        os._exit(0)
    if sys.executable.endswith(TO_THE_END):
        run(arguments)
    else:
        run_and_leave(arguments, finalizers)


if __name__ == "__main__":
    main()
