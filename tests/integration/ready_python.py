"""A Python that has torch imported already, for tests that start many processes.

Importing torch takes seconds; most tests ask for what comes after. :func:`ready_python` is the path of an executable
that takes ``-c CODE``, ``-m MODULE`` or a script, and arguments, as Python does. It asks a server, one for each process
of pytest, to fork: the child is a process of its own, with the caller's directory, environment and standard streams,
and ends as Python does. SIGINT and SIGTERM reach it through the caller. In it ``sys.executable`` is this one too.

Not for tests of what is decided while Python starts or torch is imported (the hash seed, ``-P``, the number of
threads, what is imported and from where), nor of process groups. They start ``sys.executable``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path

PRELOADED = (
    "numpy.random",
    "torch",
    "torch._dynamo",  # which the first optimizer imports, in as long as the rest of torch takes
    "torch.utils.data",
    "ampmem.cli.main",
    "ampmem.cli.compare",
    "ampmem.cli.fit",
    "ampmem.cli.profile",
    "ampmem.cli.report",
    "ampmem.cli.show",
    "ampmem.recorder.session",
    "ampmem.simulator.start",
    "ampmem.workloads.common",
)
SIZE = 8
"""Bytes of the number that says how long a request is."""

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[0], sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes({size}, "big")], [0, 1, 2])
server.sendall(request)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
status = int(server.recv(16) or b"9")
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


@functools.cache
def ready_python() -> str:
    """The executable's path. Its server starts with the first call, and ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="ready-python-")
    address, executable = str(Path(folder.name) / "socket"), Path(folder.name) / "python"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    executable.write_text(CLIENT.format(python=sys.executable, address=address, size=SIZE))
    executable.chmod(0o700)
    # A thread of numpy's library would not be there in the children.
    server = subprocess.Popen(
        [sys.executable, __file__, str(listener.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    listener.close()

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()  # what it ends by
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return str(executable)


def reap(*_: object) -> None:
    """Take leave of the children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(listener: socket.socket) -> socket.socket | None:
    """Fork for every caller: in the child the connection to it; ``None`` once whoever started the server is gone."""
    while True:
        there, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in there:
            return None
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return connection
        connection.close()


def keep(connection: socket.socket) -> list[str] | None:
    """Fork what was asked for: in that child its arguments; ``None`` when it has ended and the caller knows how."""
    head, streams, _, _ = socket.recv_fds(connection, SIZE, 3)
    request = b""
    while len(request) < int.from_bytes(head, "big"):
        request += connection.recv(1 << 20)
    executable, arguments, folder, environment = json.loads(request)
    child = os.fork()
    if child:
        for stream in streams:
            os.close(stream)
        connection.sendall(str(wait_for(child, connection)).encode())
        return None
    connection.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.executable = executable
    import_module("numpy").random.seed()  # Python's own random numbers begin anew in a fork
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
    first, *rest = arguments
    if first == "-c":
        code, *rest = rest
        sys.argv, sys.path[0] = ["-c", *rest], ""
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif first == "-m":
        name, *rest = rest
        sys.argv, sys.path[0] = ["-m", *rest], str(Path.cwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    """The server, and whatever it becomes in its children."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    connection = serve(listener)
    if connection is None:
        return
    arguments = keep(connection)
    if arguments is not None:
        run(arguments)


if __name__ == "__main__":
    main()
