"""The line of the script that runs, for messages about what cannot be simulated."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from ampmem.own_code import OWN_FOLDERS

_TORCH = str(Path("site-packages", "torch")) + "/"


class NotSimulated(RuntimeError):
    """The script does what the simulated device cannot do."""


def script_line() -> str:
    """``FILE:LINE`` of the nearest frame that is neither torch's nor ampmem's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _TORCH not in file and not file.startswith((*OWN_FOLDERS, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "the script"


def stop(why: str) -> NotSimulated:
    """The error for the line that runs: ``why`` it cannot be simulated, and what to do."""
    return NotSimulated(f"{script_line()}: {why}")
