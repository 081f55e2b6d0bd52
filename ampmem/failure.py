"""Why a script failed, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

LONGEST = 10_000
"""Characters of a message that are kept; the beginning of a longer one says enough, and the rest could fill a disk."""


class FailureKind(StrEnum):
    """The way in which a script ended early."""

    RAISED = "raised"
    """An uncaught exception."""
    EXITED = "exited"
    """An exit with another code than success."""
    REFUSED = "refused"
    """ampmem itself: the command cannot be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """Why a script failed.

    ``error`` is the exception's class as tracebacks name it, with its module, and empty for other kinds. ``message`` is
    the first line of the exception's text, the exit code, or ampmem's own message.
    """

    kind: FailureKind
    message: str
    error: str = ""

    @property
    def line(self) -> str:
        """The failure in one line: ``OutOfMemoryError: CUDA out of memory``, ``it exited with 3``."""
        if self.kind is FailureKind.EXITED:
            return f"it exited with {self.message}"
        return _failure_text(self.error.rpartition(".")[2], self.message)

    @property
    def traceback_line(self) -> str:
        """The failure as the last line of a traceback: ``torch.OutOfMemoryError: CUDA out of memory``."""
        return _failure_text(self.error, self.message)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the script."""
        return self.error == KeyboardInterrupt.__name__

    @property
    def note(self) -> str:
        """The recording's note about the failure, for people."""
        return "the script was interrupted" if self.interrupted else f"the script failed: {self.line}"


def failure_of(error: BaseException) -> FailureRecord:
    """The record of ``error``, which the script raised; never raises, whatever the exception's class does."""
    if isinstance(error, SystemExit):
        return FailureRecord(kind=FailureKind.EXITED, message=_first_line(lambda: repr(error.code)))
    kind = type(error)
    place = _first_line(lambda: kind.__module__)
    name = _first_line(lambda: kind.__qualname__)
    return FailureRecord(
        kind=FailureKind.RAISED,
        error=name if place in ("__main__", "builtins", "") else f"{place}.{name}",
        message=_first_line(lambda: str(error)),
    )


def _first_line(text_of: Callable[[], object]) -> str:
    """The first line of a text made by the script's code, at most as long as people read, and valid UTF-8."""
    try:
        text = text_of()
        # As str itself does: the text may be of a class of the script's.
        start = str.__getitem__(text, slice(LONGEST)) if isinstance(text, str) else ""
    except BaseException:  # Python's own traceback prints the same then
        return "<exception str() failed>"
    clean = start.encode("utf-8", "replace").decode("utf-8")
    return next(iter(clean.strip().splitlines()), "")


def _failure_text(error: str, message: str) -> str:
    return ": ".join(filter(None, (error, message)))
