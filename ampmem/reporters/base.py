"""What reporters share: what they are given, what they look like, and the one way to write a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from ampmem.analysis.summary import Summary
from ampmem.errors import UsageError
from ampmem.recording import check_output


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One recording, ready to be shown. ``title`` is the script and its arguments."""

    title: str
    summary: Summary
    notes: tuple[str, ...]


class Reporter(Protocol):
    """Turns reports into text."""

    def render(self, reports: Sequence[Report]) -> str:
        """All of ``reports`` as one text, without a newline at its end."""
        ...


@contextmanager
def open_output(path: Path, force: bool) -> Iterator[TextIO]:
    """Open ``path`` for text; it appears, whole, when the block ends well, and not at all otherwise.

    Raises :class:`UsageError` when ``path`` exists and ``force`` is not set, or cannot be written.
    """
    check_output(path, force=force)
    target = path.resolve()
    if target.exists() and not target.is_file():  # a device or a pipe: never replaced by a file
        with target.open("w", encoding="utf-8") as stream:
            yield stream
        return
    half_written = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with half_written.open("x", encoding="utf-8") as stream:
            yield stream
        half_written.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error
    finally:
        half_written.unlink(missing_ok=True)
