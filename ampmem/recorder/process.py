"""The one session of this process: it ends with its thread or with the process, and is forgotten in a child.

In a child that the script forks nothing of the recording goes on.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ampmem.errors import UsageError
from ampmem.signals import SIGNALS


class ActiveSession(Protocol):
    """A session, as far as it matters here."""

    def close(self) -> None:
        """End it, on its own thread or on another."""

    @property
    def forked_child(self) -> Callable[[], None]:
        """Called when this process has forked a child."""

    def forget(self) -> None:
        """This process is such a child."""


_sessions: dict[str, ActiveSession] = {}
"""The active one, or none. Of several threads that call ``setdefault`` at once, one is first."""
_ACTIVE = "active"


class _Ending:
    """Closes a session when the thread that made this ends, of which it is a local."""

    def __init__(self, session: ActiveSession) -> None:
        self._session = session

    def __del__(self) -> None:
        if _sessions and active() is self._session:  # at the very end of Python there are no globals
            self._session.close()


_thread = threading.local()


def active() -> ActiveSession | None:
    """The session that is recording in this process."""
    return _sessions.get(_ACTIVE)


def become_active(session: ActiveSession) -> None:
    """From now on ``session`` is the active one. Raises :class:`UsageError` where there is one already."""
    if _sessions.setdefault(_ACTIVE, session) is not session:
        raise _nested()
    _thread.ending = _Ending(session)
    atexit.register(session.close)


def check_none() -> None:
    """Raises :class:`UsageError` where there is an active one."""
    if active() is not None:
        raise _nested()


def _nested() -> UsageError:
    return UsageError(
        "ampmem.profile() is active already and cannot be nested; leave the outer one first, "
        "or call ampmem.profile() only once"
    )


def release(session: ActiveSession) -> None:
    """It has ended, and nothing holds it here any longer."""
    atexit.unregister(session.close)
    _sessions.pop(_ACTIVE, None)
    vars(_thread).pop("ending", None)


def _after_fork_in_parent() -> None:
    if (session := active()) is not None:
        session.forked_child()


def _after_fork_in_child() -> None:
    SIGNALS.forget()
    if (session := active()) is not None:
        session.forget()


os.register_at_fork(after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


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
