"""Adds ampmem's own frames to Python's recursion limit, so the script has the depth that it has without ampmem."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from ampmem.patching import Undo, replace_all

_get, _set = sys.getrecursionlimit, sys.setrecursionlimit

_on_top: int | None = None
"""Python's limit minus the script's, while a script runs."""
_room = 0
"""The part of ``_on_top`` for the forward that runs now."""
_at_start = 0
"""Python's limit before the script."""


def install(frames: int) -> Undo:
    """Raise the limit by the depth of the caller plus ``frames``, the number of calls down to the script.

    The script reads and sets its own limit as before, without what was added.
    """
    global _on_top, _at_start
    _at_start = _get()
    _on_top = _depth() - 1 + frames  # without the frame of this function
    _set(_at_start + _on_top)
    with ExitStack() as undo:
        undo.callback(_uninstall)
        undo.callback(replace_all((sys,), {each.__name__: each for each in (getrecursionlimit, setrecursionlimit)}))
        return undo.pop_all().close


def _uninstall() -> None:
    global _on_top, _room
    limit = getrecursionlimit()
    _on_top, _room = None, 0
    _set(max(limit, _at_start))  # the rest must not fail with RecursionError


def make_room() -> None:
    """Raise the limit for a forward: with hooks torch makes one more call per module, and the hooks need some."""
    global _on_top, _room
    if _on_top is not None and _room == 0:
        limit = getrecursionlimit()
        _room = limit // 3 + 100  # without hooks torch makes at least three calls per module
        _on_top += _room
        _set(limit + _on_top)


def take_room() -> None:
    """Lower the limit after the forward, or later if the script is already deeper than its own limit."""
    global _on_top, _room
    if _on_top is not None and _room:
        try:
            _set(_get() - _room)
        except RecursionError:
            return
        _on_top, _room = _on_top - _room, 0


def getrecursionlimit() -> int:
    """The limit that the script sees."""
    return _get() - (_on_top or 0)


def setrecursionlimit(limit: int, /) -> None:
    """Set the script's limit. Raises as Python does."""
    on_top = _on_top or 0
    if not isinstance(limit, int) or limit < 1:
        _set(limit)  # raises
    try:
        _set(limit + on_top)
    except RecursionError:
        at = _depth() - 1 - on_top
        raise RecursionError(
            f"cannot set the recursion limit to {limit} at the recursion depth {at}: the limit is too low"
        ) from None


def _depth() -> int:
    """Depth of the caller by Python's count, from the error for a limit that is too low; changes nothing."""
    try:
        _set(1)
    except RecursionError as error:
        found = [int(word) for word in str(error).replace(":", " ").split() if word.isdigit()]
        if len(found) == 2:
            return found[1] - 1
    return 0
