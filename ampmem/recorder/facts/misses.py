"""What hooks could not look at: objects of the script's whose own code fails, and faults of ours.

Hooks run in the middle of the script, so nothing that goes wrong in them may come out there. What is not seen is not in
the recording, and a note says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from ampmem.names import warning
from ampmem.own_code import OWN_FOLDERS
from ampmem.recorder.torch_private.general import never_compiled, untraced, without_functions

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MOST = 10
"""So many are told apart."""

seen: list[str] = []
"""What all recordings of this process could not look at, the oldest first: tests know what they expect."""


class Misses:
    """Says of each what it was and where, once. ``note`` is told."""

    def __init__(self) -> None:
        self.note: Callable[[str], None] | None = None
        self._said: dict[str, None] = {}

    def add(self, error: BaseException) -> None:
        """``error`` was raised where something of the script's was looked at."""
        text = f"{_kind(error)} at {_where(error.__traceback__)}"
        if text in self._said or len(self._said) == _MOST:
            return
        self._said[text] = None
        seen.append(text)
        self.say(warning(f"something in the script could not be looked at, and is not in this recording: {text}"))

    def say(self, message: str) -> None:
        """A reader of the recording must know ``message``."""
        if self.note is not None:
            self.note(message)

    def why(self) -> str:
        """What to add to a message that something was not seen at all."""
        return f" ({'; '.join(self._said)})" if self._said else ""

    def guarded(self, look: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """``look``, but nothing that goes wrong in it comes out: ``None`` does.

        It is ``Exception`` that is kept: what stops the script on purpose is none. No handler of a signal runs
        meanwhile (``ampmem.signals``).
        """

        @functools.wraps(look)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
            try:
                with without_functions():
                    return look(*args, **kwargs)
            except Exception as error:
                self.add(error)
                return None

        return never_compiled(untraced(run))


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
