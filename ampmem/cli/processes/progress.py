"""What a command says that makes several runs: how far it has got, and what came of each."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from threading import Lock
from types import TracebackType
from typing import Self

from ampmem.output.terminal import Terminal, printable
from ampmem.reporters.text.plain_text import shorten


class Progress:
    """On a terminal one line that changes, gone at the end, below lines that stay; elsewhere these alone.

    Runs may be followed by threads.
    """

    def __init__(self) -> None:
        self._terminal = Terminal(sys.stderr)
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.now("")

    def now(self, text: str) -> None:
        """What is being done."""
        with self._lock:
            self._terminal.replace(shorten(text, shutil.get_terminal_size().columns - 1))

    def stay(self, text: str, left: str = "", *, tail: Sequence[str] = ()) -> None:
        """A line that stays, and below it the last lines that a child printed.

        What is ``left`` to do is said with it where there is no line that changes.
        """
        said = text if self._terminal.is_screen() else text + left
        lines = [
            *self._terminal.broken(printable(said)),
            *(f"    {shorten(line.expandtabs(), len(line) * 8)}" for line in tail),
        ]
        with self._lock:
            self._terminal.replace("")
            self._terminal.show("\n".join(lines))


class Course:
    """How far ``count`` runs have got that are made one after the other, and when they will have been made.

    That goes by the runs before: each is of the same script. ``clock`` gives seconds.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._taken: list[float] = []
        self._begun = 0.0

    def begin(self) -> str:
        """The next run starts: ``2 of 3``."""
        self._begun = self._clock()
        return f"{len(self._taken) + 1} of {self._count}"

    def end(self) -> None:
        """It has ended."""
        self._taken.append(self._clock() - self._begun)
        self._begun = self._clock()

    def left(self) -> str:
        """``, about 40 s left``; empty before a run has ended, and where less than a second seems to be left."""
        if not self._taken:
            return ""
        each = sum(self._taken) / len(self._taken)
        running = min(each, self._clock() - self._begun)
        seconds = each * (self._count - len(self._taken)) - running
        if seconds < 1:
            return ""
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"
