"""Gives the script the recursion depth that it has without ampmem: what ampmem's own frames take comes on top."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

from ampmem.patching import Undo, patch

_get, _set = sys.getrecursionlimit, sys.setrecursionlimit

_on_top: int | None = None
"""By how much the limit that Python has is above the script's, while a script runs."""
_room = 0
"""What of that is for a forward that runs now."""


def install(frames: int) -> Undo:
    """From now on the script runs, ``frames`` calls below the caller: its limit is the one that Python has now.

    It asks for the limit and sets it as before, but is not told of what is on top.
    """
    global _on_top
    _on_top = _depth() - 1 + frames  # but for the frame of this function
    _set(_get() + _on_top)
    with ExitStack() as undo:
        undo.callback(_uninstall)
        undo.callback(patch(sys, "getrecursionlimit", _asked_by_script))
        undo.callback(patch(sys, "setrecursionlimit", _set_by_script))
        return undo.pop_all().close


def _uninstall() -> None:
    global _on_top, _room
    limit = _script_limit()
    _on_top, _room = None, 0
    _set(limit)


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


def _asked_by_script(_: Callable[[], int]) -> Callable[[], int]:
    def getrecursionlimit() -> int:
        return _script_limit()

    return getrecursionlimit


def _set_by_script(original: Callable[[int], None]) -> Callable[[int], None]:
    def setrecursionlimit(limit: int, /) -> None:
        on_top = _on_top or 0
        if not isinstance(limit, int) or limit < 1:
            original(limit)  # which refuses it
        try:
            original(limit + on_top)
        except RecursionError:
            raise RecursionError(
                f"cannot set the recursion limit to {limit} at the recursion depth {_depth() - 1 - on_top}: "
                "the limit is too low"
            ) from None

    return setrecursionlimit


def _depth() -> int:
    """How deep the caller is, as Python counts: its refusal of a limit that is lower says so, and changes nothing."""
    try:
        _set(1)
    except RecursionError as error:
        found = [int(word) for word in str(error).replace(":", " ").split() if word.isdigit()]
        if len(found) == 2:
            return found[1] - 1
    return 0
