"""Starts processes of ``ampmem profile``: fresh ones, and simulated runs forked from a :class:`Warmed` process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import IO, Self, TypeAlias

from ampmem.vocabulary import Device

ROOT = str(Path(__file__).absolute().parents[3])
"""The folder from which ampmem was imported."""

# Not ``-m ampmem``: that puts the current directory first on the path, where a user's ``random.py`` or ``click.py``
# would shadow the real one. The recorder replaces the first entry by the script's own directory (unless Python adds
# none), so there must be one: nothing can be in /dev/null.
_PATH = f"""
import sys
root, safe = sys.argv.pop(1), sys.flags.safe_path
sys.path[: not safe] = [root] if root not in sys.path else [{os.devnull!r}] * (not safe)
"""
_START = f"{_PATH}from ampmem.cli.main import main\nmain()\n"
_SERVE = f"{_PATH}from ampmem.cli.warmed import serve_runs\nserve_runs()\n"


Streams = tuple[IO[bytes], IO[bytes], IO[bytes]]
"""The standard input, output and error of a process."""


def fresh(
    arguments: Sequence[str], streams: Streams, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    """Start ``ampmem profile`` with ``arguments`` in a new process, with ``variables`` added to its environment."""
    given, output, errors = streams
    command = [sys.executable, "-c", _START, ROOT, "profile", *arguments]
    return subprocess.Popen(command, env={**_environment(), **variables}, stdin=given, stdout=output, stderr=errors)


def worker_command(script: str, arguments: Sequence[str]) -> list[str]:
    """The command for ``ampmem profile`` with ``arguments`` in a launcher's process, in place of ``script``.

    torchrun's messages name a process by the first argument that is not an option.
    """
    start = f"import sys\ndel sys.argv[1]{_START}"
    return [sys.executable, "-u", f"-c{start}", script, ROOT, "profile", *arguments]


def _environment() -> dict[str, str]:
    """The environment of every run, with the same hash seed."""
    return {"PYTHONHASHSEED": "0", **os.environ}


def warmed(device: Device, imports: str = "") -> AbstractContextManager[Warmed | None]:
    """A warmed process for runs on ``device``, if it is simulated and the platform is Linux, where forking works.

    It also runs ``imports``, the import statements of a script of ampmem's own.
    """
    return Warmed(imports) if device is Device.SIMULATED and sys.platform == "linux" else nullcontext()


class Warmed:
    """A process that has imported torch and tried the simulation: runs forked from it start seconds sooner.

    Several threads may start runs. A forked run finds the same state as in a fresh process after ampmem's imports: the
    trial leaves nothing behind, and random numbers are seeded anew.
    """

    def __init__(self, imports: str = "") -> None:
        self._imports = imports
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None and self._process is not None:
            self._connection.close()
            if error is not None:  # it may not notice the closed connection while it is still starting
                self._process.kill()
            self._process.wait()

    def _connected(self) -> tuple[socket.socket, Running]:
        """The connection to the process, which starts with the first run, and the process."""
        with self._lock:
            if self._connection is None or self._process is None:
                # In packets: threads send at the same time, and each request must keep its own descriptors.
                self._connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with there:
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", _SERVE, ROOT, str(there.fileno()), self._imports],
                        env=_environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        pass_fds=[there.fileno()],
                    )
            return self._connection, self._process

    def start(
        self, arguments: Sequence[str], streams: Streams, on_wait: Callable[[Running], None] = lambda process: None
    ) -> Running | None:
        """Start a run as :func:`fresh` does; ``None`` if the process has ended, as when no GPU can be simulated.

        ``on_wait`` gets the warmed process before it is waited for, so that another thread can end it.
        """
        connection, process = self._connected()
        on_wait(process)
        here, there = Pipe(duplex=False)
        with TemporaryFile() as request, there:
            request.write(json.dumps(["profile", *arguments]).encode())
            request.seek(0)
            try:
                files = [each.fileno() for each in (request, *streams, there)]
                socket.send_fds(connection, [b"\0"], files)
            except OSError:
                return None
        try:
            return _Forked(here)
        except EOFError:
            return None


class _Forked:
    """A forked process; ``status`` sends its process id, and at its end the exit code."""

    def __init__(self, status: Connection) -> None:
        self._status = status
        self._number: int = status.recv()
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._status.poll(timeout):
                raise subprocess.TimeoutExpired("ampmem profile", timeout or 0)
            try:
                self.returncode = self._status.recv()
            except EOFError:  # the process that waited for it was killed, as the whole process group was
                self.returncode = -signal.SIGKILL
            self._status.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._number, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Running: TypeAlias = subprocess.Popen[bytes] | _Forked
"""A started process."""
