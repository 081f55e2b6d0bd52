"""What hooks could not look at: objects of the script's whose own code fails, and faults of ours.

Hooks run in the middle of the script, so nothing that goes wrong in them may come out there. What is not seen is not in
the recording, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ampmem.own_code import OWN_FOLDERS

_MOST = 10
"""So many are told apart."""

seen: list[BaseException] = []
"""All of this process, the oldest first, no more than :data:`_MOST`: for tests, which know what they expect."""


class Misses:
    """Says of each what it was and where, once. ``note`` is told."""

    def __init__(self) -> None:
        self.note: Callable[[str], None] | None = None
        self._said: set[str] = set()

    def add(self, error: BaseException) -> None:
        """``error`` was raised where something of the script's was looked at."""
        text = f"{_kind(error)} at {_where(error.__traceback__)}"
        if text in self._said or len(self._said) == _MOST:
            return
        self._said.add(text)
        seen.append(error.with_traceback(None))
        if self.note is not None:
            self.note(f"something in the script could not be looked at, and is not in this recording: {text}")


def _kind(error: BaseException) -> str:
    return type(error).__name__


def _where(traceback: TracebackType | None) -> str:
    """The line of ours that looked, and the one that failed where that is another."""
    ours = last = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        last = f"{Path(file).name}:{traceback.tb_lineno}"
        if file.startswith(OWN_FOLDERS):
            ours = last
        traceback = traceback.tb_next
    return ours if ours == last else f"{ours} ({last})"
