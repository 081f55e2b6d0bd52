"""What a file is that was taken for another: told by how it begins."""

from __future__ import annotations

import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

from ampmem.errors import RecordingError, UsageError
from ampmem.output import being_written
from ampmem.recording.layout import SUFFIX
from ampmem.recording.rank_files import claimed_for

_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_DATABASE = b"SQLite format 3\0"
_STEPS = 1_000_000
"""Of SQLite's own: a thousand times what it takes to look into a recording's header."""


def taken_for_recording(path: Path) -> str | None:
    """What to do with a pickle, perhaps a memory snapshot of PyTorch's; ``None`` for any other file."""
    if not _begins(path).startswith(_PICKLES):
        return None
    command = f"ampmem import {shlex.quote(str(path))} -o {shlex.quote(str(path.with_suffix(SUFFIX)))}"
    return f"{path} is a pickle, and no recording; of a memory snapshot of PyTorch's this makes one: {command}"


def check_recording(path: Path) -> None:
    """Raise what reading ``path`` would, where its first bytes are enough to tell that it is no recording."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if path.is_dir():
        raise UsageError(f"{path} is a directory, not a recording")
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    mistaken = taken_for_recording(path)
    if mistaken is not None:
        raise RecordingError(mistaken)
    claimed = claimed_for(path) is not None
    if (claimed or path.stat().st_size == 0) and being_written(path):
        raise RecordingError(f"{path} is being written, and nothing is recorded in it yet; try again")
    if claimed:
        raise RecordingError(
            f"{path} has no recording, only the claim of its name: the rank was killed before it recorded anything; "
            "remove the file, or leave that to the next run"
        )
    if _begins(path) not in (_DATABASE, b""):  # a file that cannot be opened is told of when it is read
        raise RecordingError(f"{path} is not an ampmem recording, or it is damaged (file is not a database)")


def taken_for_script(path: Path) -> str | None:
    """What to do with a recording or a pickle; ``None`` for any other file."""
    if _begins(path) == _DATABASE:
        return f"{path} is a recording, and no script; this shows it: ampmem show {shlex.quote(str(path))}"
    return taken_for_recording(path)


def is_recording(path: Path) -> bool:
    """Whether ``path`` is a recording of this version of ampmem or of another one, however damaged its steps are."""
    if _begins(path) != _DATABASE:
        return False
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            # The file may be anybody's, and what is called meta a view without an end.
            connection.set_progress_handler(lambda: True, _STEPS)
            return connection.execute("SELECT 1 FROM meta WHERE key = 'format_version'").fetchone() is not None
    except sqlite3.Error:
        return False


def _begins(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(len(_DATABASE))
    except OSError:
        return b""
