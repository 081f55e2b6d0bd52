"""Why a script did not get to its end, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

LONGEST = 10_000
"""Characters of a message that are kept; of one that fills a disk the beginning says enough."""


class FailureKind(StrEnum):
    """What ended a script before its time."""

    RAISED = "raised"
    """An exception that nobody caught."""
    EXITED = "exited"
    """It exited, and not with success."""
    REFUSED = "refused"
    """ampmem itself: the command cannot be carried out."""
    UNKNOWN = "unknown"
    """An older recording, which has the words only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """Why a script failed.

    ``error`` is the class of what it raised as tracebacks name it, with its module, and empty for other kinds.
    ``message`` is the first line of what that said, what the script exited with, or ampmem's own message.
    """

    kind: FailureKind
    message: str
    error: str = ""

    @property
    def line(self) -> str:
        """The failure in one line: ``OutOfMemoryError: CUDA out of memory``, ``it exited with 3``."""
        if self.kind is FailureKind.EXITED:
            return f"it exited with {self.message}"
        return _joined(self.error.rpartition(".")[2], self.message)

    @property
    def traceback_line(self) -> str:
        """The same as the last line of a traceback has it: ``torch.OutOfMemoryError: CUDA out of memory``."""
        return _joined(self.error, self.message)

    @property
    def note(self) -> str:
        """The note on it that a recording has for people."""
        return f"{_NOTE}{self.line}"


_NOTE = "the script failed: "


def failure_of(error: BaseException) -> FailureRecord:
    """What ``error`` says of the script that raised it, however it is made: nothing is raised here."""
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
    """The first line of a text that code of the script's makes: no more than a person reads, and all of it UTF-8."""
    try:
        text = text_of()
        # As str itself does it: the text may be of a class of the script's.
        start = str.__getitem__(text, slice(LONGEST)) if isinstance(text, str) else ""
    except BaseException:  # Python's own traceback prints it as that, too
        return "<exception str() failed>"
    clean = start.encode("utf-8", "replace").decode("utf-8")
    return next(iter(clean.strip().splitlines()), "")


def failure_in(notes: Sequence[str]) -> FailureRecord | None:
    """What the notes of an older recording, which has nothing else, say of its script's failure, if anything."""
    said = next((note for note in notes if note.startswith(_NOTE)), None)
    return None if said is None else FailureRecord(kind=FailureKind.UNKNOWN, message=said.removeprefix(_NOTE))


def _joined(error: str, message: str) -> str:
    return ": ".join(filter(None, (error, message)))
