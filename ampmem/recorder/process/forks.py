"""A child that the script forks: nothing of the recording goes on in it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def forked_since() -> Callable[[], bool]:
    """What says whether it is called in a child that was forked after this."""
    process = os.getpid()
    return lambda: os.getpid() != process


def leave_to_parent(writer: object, path: Path) -> None:
    """In the child: ``writer`` has the SQLite file at ``path`` open, and must neither use it nor close it.

    SQLite would roll back what the parent has begun, and that even when the child ends; so the object lives for ever.
    Its descriptors are closed: the child may outlive the parent.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(writer))
    files = [found for name in (path, path.with_name(f"{path.name}-journal")) if (found := _identity(name))]
    for descriptor in _descriptors():
        with suppress(OSError):  # the one that listed them
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) in files:
                os.close(descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _descriptors() -> list[int]:
    """Those that are open in this process."""
    with suppress(OSError):
        return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return []
