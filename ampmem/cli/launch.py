"""Runs ``ampmem`` in a fresh process and follows what it says, without a word from its script on the terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

LINES = 10
"""How many of the last lines of a child's output are kept for people to read."""

_ROOT = str(Path(__file__).absolute().parents[2])
_STEP = re.compile(r"ampmem: step (\d+) of (\d+)$")
_OWN = "ampmem: "
_TRACEBACK = "Traceback (most recent call last):"
_SCRIPT_FAILED = _OWN + "the script failed"
_KEPT = 500
_LONGEST = 2000
_TAIL_BYTES = 65536
_LAST_WORDS_S = 2.0
"""A process that the script left behind may hold the pipe open: its end is not waited for any longer than this."""

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

    ``code`` is its exit code, negative for the signal that killed it; ``errors`` are the last lines of its
    standard error, ``tail`` the last :data:`LINES` lines of what the script printed, standard output first.
    """

    code: int
    errors: tuple[str, ...]
    tail: tuple[str, ...]

    @property
    def failure(self) -> str | None:
        """What went wrong, in one line: ``RuntimeError: out of memory``, ``killed by SIGKILL``, ``exit code 3``."""
        if self.code == 0:
            return None
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        # An exception that nobody caught gives 1, ampmem's own errors 1 or 2.
        return (_reason(self.errors) if self.code in (1, 2) else None) or f"exit code {self.code}"


def run(
    arguments: Sequence[str],
    on_step: Callable[[int, int], None],
    on_start: Callable[[subprocess.Popen[str]], None] = lambda child: None,
) -> Ended:
    """Run ``ampmem`` with ``arguments`` and wait for it; ``on_step`` is told of each step: which, and of how many.

    ``on_start`` is given the process, so that another thread can end it.
    The child reads nothing, and hashes as every other child does. Ctrl-C reaches it too, as it is in the
    same process group: it is waited for, and ``KeyboardInterrupt`` comes out. A second Ctrl-C kills it.
    """
    with TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-c", _START, _ROOT, *arguments],
            env={"PYTHONHASHSEED": "0"} | os.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        on_start(child)
        assert child.stderr is not None
        errors: deque[str] = deque(maxlen=_KEPT)
        reader = threading.Thread(target=_follow, args=(child.stderr, errors, on_step), daemon=True)
        reader.start()
        try:
            _wait(child)
        finally:
            reader.join(_LAST_WORDS_S)
        if not reader.is_alive():  # closing what another thread reads would wait for it
            child.stderr.close()
        kept = tuple(errors)
        said = [line for line in kept if not line.startswith(_OWN)]
        return Ended(code=child.returncode, errors=kept, tail=(*_last_lines(output), *said)[-LINES:])


def _wait(child: subprocess.Popen[str]) -> None:
    try:
        child.wait()
    except KeyboardInterrupt:
        try:
            child.wait()
        except KeyboardInterrupt:
            child.kill()
            child.wait()
        raise


def _follow(stream: IO[str], errors: deque[str], on_step: Callable[[int, int], None]) -> None:
    """Read ``stream`` to its end. Text mode ends lines at a carriage return too, as progress bars do."""
    for line in stream:
        step = _STEP.search(line.rstrip())
        if step is not None:
            with suppress(OSError):  # a terminal that is gone is no reason to stop reading
                on_step(int(step[1]), int(step[2]))
        elif line.strip():
            errors.append(line.rstrip()[:_LONGEST])


def _last_lines(output: IO[bytes]) -> list[str]:
    """The end of what the child wrote to its standard output."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    lines = output.read().decode("utf-8", errors="replace").splitlines()
    return [line.rstrip()[:_LONGEST] for line in lines if line.strip()][-LINES:]


def _reason(errors: Sequence[str]) -> str | None:
    """What the child's last words give as the reason: ampmem's own message, or an exception."""
    last = errors[-1] if errors else ""
    if last.startswith(_OWN) and not last.startswith(_SCRIPT_FAILED):
        return last.removeprefix(_OWN)
    if _TRACEBACK not in errors:
        return None
    start = len(errors) - tuple(reversed(errors)).index(_TRACEBACK)
    return next((line for line in errors[start:] if not line.startswith((" ", _OWN))), None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
