"""Processes that are started, listened to, and ended with all that they have started when they take too long."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic
from types import FrameType
from typing import IO

GRACE = 3
"""Seconds that a process has to end its own children, once it is told to end."""
ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended: its exit code, ``None`` where it took too long, and the lines that it printed."""

    code: int | None
    seconds: float
    lines: tuple[str, ...]

    @property
    def how(self) -> str:
        """In a word or two."""
        return "timed out" if self.code is None else f"exit code {self.code}"


def environment(**more: str) -> dict[str, str]:
    """That of a child: the checkout in the path, since ampmem need not be installed, and what is printed at once."""
    path = os.pathsep.join(each for each in (str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")) if each)
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | more


def follow(
    arguments: Sequence[str],
    seconds: float,
    *,
    folder: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Ended:
    """Run Python with ``arguments`` in ``folder`` for at most ``seconds``; ``say`` gets each line as it is printed."""
    began = monotonic()
    child = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(**(variables or {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that what it has started ends with it
        text=True,
        errors="replace",
    )
    _running.add(child)
    assert child.stdout is not None
    lines: list[str] = []
    reader = Thread(target=_listen, args=(child.stdout, lines, say), daemon=True)
    reader.start()
    code: int | None
    try:
        code = child.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(child)
    reader.join(5)  # not for ever: something may have left the session, and holds the pipe
    return Ended(code=code, seconds=monotonic() - began, lines=tuple(lines))


def _listen(stream: IO[str], lines: list[str], say: Callable[[str], None]) -> None:
    for line in stream:
        lines.append(line.rstrip("\n"))
        say(lines[-1])


def _end(child: subprocess.Popen[str]) -> None:
    """Nothing of it stays, whether it has ended or not."""
    if child.poll() is None:
        _signal(child, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    _signal(child, signal.SIGKILL)
    child.wait()
    _running.discard(child)


def _signal(child: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def end_all() -> None:
    """End what still runs, at once: sessions of their own are out of the reach of whoever ends this process."""
    for child in list(_running):
        _signal(child, signal.SIGKILL)


def end_with_us() -> None:
    """Have the children of this process end with it when it is told to end."""

    def end(number: int, frame: FrameType | None) -> None:
        end_all()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
