"""Runs ``ampmem profile`` in a fresh process and follows it, without a word from its script on the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO

from ampmem.cli.processes.messages import Inbox, StepEnded
from ampmem.failure import FailureKind, FailureRecord
from ampmem.recorder.script import STDIN, standard_input

LINES = 10
"""How many of the last lines of a child's output are kept for people to read."""

_ROOT = str(Path(__file__).absolute().parents[3])
_LONGEST = 2000
_TAIL_BYTES = 65536
_POLL_S = 0.1
"""How often a child's messages are looked at."""

# Not ``-m ampmem``: that puts the current directory first on the path, where a user's ``random.py`` or
# ``click.py`` would be imported for the standard library's or click's. The first entry is what the
# recorder replaces by the script's own directory (but where Python adds none); nothing can be in /dev/null.
_START = f"""
import sys
root, safe = sys.argv.pop(1), sys.flags.safe_path
sys.path[: not safe] = [root] if root not in sys.path else [{os.devnull!r}] * (not safe)
from ampmem.cli.main import main
main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended.

    ``code`` is its exit code, negative for the signal that killed it; ``said`` is what it gave as the reason of its
    failure, if it came to that; ``tail`` are the last :data:`LINES` lines that were printed, standard output first.
    """

    code: int
    said: FailureRecord | None
    tail: tuple[str, ...]

    @property
    def failure(self) -> str | None:
        """What went wrong, in one line: ``RuntimeError: out of memory``, ``killed by SIGKILL``, ``exit code 3``."""
        if self.code == 0:
            return None
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        if self.said is None or self.said.kind is FailureKind.EXITED:
            return f"exit code {self.code}"
        return self.said.traceback_line[:_LONGEST]


def run(
    arguments: Sequence[str],
    on_step: Callable[[StepEnded], None] = lambda ended: None,
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda child: None,
) -> Ended:
    """Run ``ampmem profile`` with ``arguments`` and wait for it; ``on_step`` is told of each step that ends.

    ``on_start`` is given the process, so that another thread can end it.
    The child reads nothing but a script from standard input, and hashes as every other child does. Ctrl-C reaches it
    too, as it is in the same process group: it is waited for, and ``KeyboardInterrupt`` comes out. A second Ctrl-C
    kills it.
    """
    with (
        TemporaryFile() as given,
        TemporaryFile() as output,
        TemporaryFile() as errors,
        NamedTemporaryFile(prefix="ampmem-") as messages,
        Inbox(Path(messages.name)) as inbox,
    ):
        if "--" in arguments and arguments[arguments.index("--") + 1] == STDIN:
            given.write(standard_input())
            given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-c", _START, _ROOT, "profile", "--report-to", messages.name, *arguments],
            env={"PYTHONHASHSEED": "0"} | os.environ,
            stdin=given,
            stdout=output,
            stderr=errors,
        )
        on_start(child)
        _wait(child, inbox, on_step)
        tail = (*_last_lines(output), *_last_lines(errors))[-LINES:]
        return Ended(code=child.returncode, said=inbox.failure, tail=tail)


def worker_command(script: str, arguments: Sequence[str]) -> list[str]:
    """What runs ``ampmem profile`` with ``arguments`` in a process of a launcher's, as torchrun would run ``script``.

    In its messages torchrun calls a process by the first argument that is no option.
    """
    start = f"import sys\ndel sys.argv[1]{_START}"
    return [sys.executable, "-u", f"-c{start}", script, _ROOT, "profile", *arguments]


def _wait(child: subprocess.Popen[bytes], inbox: Inbox, on_step: Callable[[StepEnded], None]) -> None:
    """Wait for ``child``, and pass on what it says meanwhile."""
    try:
        while child.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
            for ended in inbox.steps():
                with suppress(OSError):  # a terminal that is gone is no reason to stop
                    on_step(ended)
    except KeyboardInterrupt:
        try:
            child.wait()
        except KeyboardInterrupt:
            child.kill()
            child.wait()
        raise


def _last_lines(output: IO[bytes]) -> list[str]:
    """The end of what the child wrote to ``output``."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    lines = output.read().decode("utf-8", errors="replace").splitlines()
    return [line.rstrip()[:_LONGEST] for line in lines if line.strip()][-LINES:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
