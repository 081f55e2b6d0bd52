"""Gives the script the recursion depth that it has without ampmem: what ampmem's own frames take comes on top."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from ampmem.patching import Undo, replace_all

_get, _set = sys.getrecursionlimit, sys.setrecursionlimit

_on_top: int | None = None
"""By how much the limit that Python has is above the script's, while a script runs."""
_room = 0
"""What of that is for a forward that runs now."""
_at_start = 0
"""The limit that there was before the script."""


def install(frames: int) -> Undo:
    """From now on the script runs, ``frames`` calls below the caller: its limit is the one that Python has now.

    It asks for the limit and sets it as before, but is not told of what is on top.
    """
    global _on_top, _at_start
    _at_start = _get()
    _on_top = _depth() - 1 + frames  # but for the frame of this function
    _set(_at_start + _on_top)
    with ExitStack() as undo:
        undo.callback(_uninstall)
        undo.callback(replace_all((sys,), {each.__name__: each for each in (getrecursionlimit, setrecursionlimit)}))
        return undo.pop_all().close


def _uninstall() -> None:
    global _on_top, _room
    limit = _script_limit()
    _on_top, _room = None, 0
    _set(max(limit, _at_start))  # what is left to do must not fail for want of depth


def make_room() -> None:
    """A forward begins: with hooks on modules torch takes one call more for each module, and the hooks need some."""
    global _on_top, _room
    if _on_top is not None and _room == 0:
        limit = _script_limit()
        _room = limit // 3 + 100  # torch takes three calls for a module at least
        _on_top += _room
        _set(limit + _on_top)


def take_room() -> None:
    """The forward is over. Where the script is too deep for its own limit already, that has to wait."""
    global _on_top, _room
    if _on_top is not None and _room:
        try:
            _set(_get() - _room)
        except RecursionError:
            return
        _on_top, _room = _on_top - _room, 0


def _script_limit() -> int:
    return _get() - (_on_top or 0)


def getrecursionlimit() -> int:
    """The script's, as it asks for it."""
    return _script_limit()


def setrecursionlimit(limit: int, /) -> None:
    """The script's, as it sets it. Raises as Python does."""
    on_top = _on_top or 0
    if not isinstance(limit, int) or limit < 1:
        _set(limit)  # which refuses it
    try:
        _set(limit + on_top)
    except RecursionError:
        at = _depth() - 1 - on_top
        raise RecursionError(
            f"cannot set the recursion limit to {limit} at the recursion depth {at}: the limit is too low"
        ) from None


def _depth() -> int:
    """How deep the caller is, as Python counts: its refusal of a limit that is lower says so, and changes nothing."""
    try:
        _set(1)
    except RecursionError as error:
        found = [int(word) for word in str(error).replace(":", " ").split() if word.isdigit()]
        if len(found) == 2:
            return found[1] - 1
    return 0
