"""The active session of this process: it ends with its thread or with the process.

A child that the script forks does not continue the recording.
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
from ampmem.recording.database import identity_of
from ampmem.signals import SIGNALS


class ActiveSession(Protocol):
    """The part of a session that this module needs."""

    def close(self) -> None:
        """End the session, on its own thread or on another."""

    @property
    def forked_child(self) -> Callable[[], None]:
        """Called in the parent when it has forked a child."""

    def forget(self) -> None:
        """Forget the session: this process is a forked child."""


_sessions: dict[str, ActiveSession] = {}
"""The active session, if any. ``setdefault`` is atomic: of several threads only one is first."""
_ACTIVE = "active"


class _Ending:
    """A thread-local object that closes the session when its thread ends."""

    def __init__(self, session: ActiveSession) -> None:
        self._session = session

    def __del__(self) -> None:
        # Called when the thread's local data is freed, on the thread that ends.
        if _sessions and active() is self._session:  # globals are gone when the interpreter shuts down
            self._session.close()


_thread = threading.local()


def active() -> ActiveSession | None:
    """The session that is recording in this process, if any."""
    return _sessions.get(_ACTIVE)


def become_active(session: ActiveSession) -> None:
    """Make ``session`` the active one. Raises :class:`UsageError` if there is one already."""
    if _sessions.setdefault(_ACTIVE, session) is not session:
        raise _nested()
    _thread.ending = _Ending(session)
    atexit.register(session.close)


def check_none() -> None:
    """Raise :class:`UsageError` if there is an active session."""
    if active() is not None:
        raise _nested()


def _nested() -> UsageError:
    return UsageError(
        "ampmem.profile() is active already and cannot be nested; leave the outer one first, "
        "or call ampmem.profile() only once"
    )


def release(session: ActiveSession) -> None:
    """Forget ``session``, which has ended."""
    # atexit holds the bound method, and so the session with all that it knows.
    atexit.unregister(session.close)
    _sessions.pop(_ACTIVE, None)
    # Of the calling thread: on any other there is none.
    vars(_thread).pop("ending", None)


def _after_fork_in_parent() -> None:
    if (session := active()) is not None:
        session.forked_child()


def _after_fork_in_child() -> None:
    SIGNALS.forget()
    if (session := active()) is not None:
        session.forget()


# Python has no way to take these back: they are registered once, and ask which session is active at each fork.
os.register_at_fork(after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def forked_since() -> Callable[[], bool]:
    """A function that returns whether it is called in a child forked after this call."""
    process = os.getpid()
    return lambda: os.getpid() != process


def leave_to_parent(writer: object, path: Path) -> None:
    """In a forked child: abandon ``writer``, which has the SQLite file at ``path`` open.

    Using or closing it, even at the child's end, would make SQLite roll back the parent's open transaction; so the
    object is kept forever. Its descriptors are closed: the child may outlive the parent.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(writer))
    # While a transaction is open SQLite has its rollback journal open, too: a child that held it would keep a deleted
    # file.
    files = [found for name in (path, path.with_name(f"{path.name}-journal")) if (found := identity_of(name))]
    for descriptor in _descriptors():
        with suppress(OSError):  # the descriptor that listed the others is closed already
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) in files:
                os.close(descriptor)


def _descriptors() -> list[int]:
    """The open file descriptors of this process."""
    with suppress(OSError):
        return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return []
