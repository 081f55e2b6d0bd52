"""Which code running beside a script is ampmem's own, and so not the script's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).parent

_ALONE = tuple(str(_PACKAGE / name) for name in ("signals.py", "additions.py", "patching.py"))
_IN_SCRIPT = tuple(str(_PACKAGE / name) + os.sep for name in ("recorder", "simulator"))

RECORDING_CODE = (*_IN_SCRIPT, *_ALONE, str(_PACKAGE / "block.py"))
"""The beginnings of the file names of ampmem's frames in the middle of a script."""

_TRACED = tuple(_PACKAGE / "recorder" / name for name in ("steering", "hooks/modules.py"))


def untraced_code() -> list[str]:
    """:data:`RECORDING_CODE` without the code of forced changes, which is a part of what the script does.

    Nor are module hooks in it, which do nothing in compiled code: left out, they would end a graph at each module.
    """
    recorder = _PACKAGE / "recorder"
    beside = (each for folder in (recorder, recorder / "hooks") for each in folder.iterdir())
    left = [str(each) for each in beside if each not in _TRACED and each != recorder / "hooks"]
    return [*(each for each in RECORDING_CODE if each != f"{recorder}{os.sep}"), *left]


OWN_FOLDERS = (*(str(_PACKAGE / name) + os.sep for name in ("cli", "integrations")), *_IN_SCRIPT, *_ALONE)
"""The beginnings of the file names of all of ampmem's own frames; ``ampmem.workloads`` are scripts like any other."""

RUNNER, RUNNER_LINE = ("sys", 1) if sys.version_info < (3, 13) else ("<sys>", 0)
"""File and line of the frame that runs the script: those that Python reports if a script has no caller."""

_PYTHON = str(Path(os.__file__).parent) + os.sep
_TORCH, *_OTHERS = (str(Path("site-packages", name)) + os.sep for name in ("torch", "numpy", "safetensors"))
_WRAPPERS = str(Path("site-packages", "typing_extensions.py"))
"""The file whose frames wrap torch's deprecated functions."""

_COMPILED = "torch._inductor.runtime.compile_tasks."
"""How the names of the modules begin whose code ``torch.compile`` has made."""
OP_CALLER = str(Path("torch", "_ops.py"))
"""The file with torch's frame for an op that a dispatch mode calls."""


def is_torch(file: str) -> bool:
    """Whether ``file`` is one of torch's, or wraps its functions."""
    return _TORCH in file or file.endswith(_WRAPPERS)


def is_library(file: str) -> bool:
    """Whether ``file`` is one of torch's, or of Python's own library."""
    return is_torch(file) or (file.startswith(_PYTHON) and "site-packages" not in file)


def is_running(file: str) -> bool:
    """Whether a function of ``file`` is on the Python stack of the calling thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def is_only_thread() -> bool:
    """Whether no other thread runs Python. If one does, torch's objects may change while they are looked at."""
    return len(sys._current_frames()) == 1


def _is_compiled(frame: FrameType) -> bool:
    """Whether ``frame`` runs code that ``torch.compile`` has made, whose files are in a cache folder."""
    return str(frame.f_globals.get("__name__", "")).startswith(_COMPILED)


def script_line() -> str:
    """``FILE:LINE`` of the nearest frame that is neither ampmem's nor torch's, numpy's or safetensors'."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        library = is_torch(file) or any(folder in file for folder in _OTHERS) or _is_compiled(frame)
        if not library and not file.startswith((*OWN_FOLDERS, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "the script"
