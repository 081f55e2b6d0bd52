"""Command lines, run as a user runs them: in a process and a directory of their own."""

import subprocess
import sys
from pathlib import Path

from support.ready_python import ready_for, ready_python

TIMEOUT_S = 600


def python(
    folder: Path, *arguments: str, fresh: bool = False, to_the_end: bool = False, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """``python`` with ``arguments``; ``fresh`` where it must start from nothing, which takes seconds longer.

    ``to_the_end`` where it is looked at how Python ends. ``given`` is what standard input has.
    """
    kind = ready_for(arguments if arguments[:2] == ("-m", "ampmem") else ())
    command = [sys.executable if fresh else ready_python(to_the_end=to_the_end, kind=kind), *arguments]
    return subprocess.run(
        command, cwd=folder, input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def ampmem(
    folder: Path, *arguments: str, fresh: bool = False, to_the_end: bool = False, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """``ampmem`` with ``arguments``, in the same way."""
    return python(folder, "-m", "ampmem", *arguments, fresh=fresh, to_the_end=to_the_end, given=given)
