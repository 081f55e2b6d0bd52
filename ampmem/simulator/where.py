"""The line of the script that runs, for messages about what cannot be simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampmem.own_code import script_line


class NotSimulated(RuntimeError):
    """The script does something that the simulated device cannot do."""


_stops: list[str] = []


def stop(why: str) -> NotSimulated:
    """The error for the running line: ``why`` it cannot be simulated, and what to do."""
    # Kept, because the script may catch the error.
    _stops.append(f"{script_line()}: {why}")
    return NotSimulated(_stops[-1])


def stopping(why: str) -> Callable[..., Any]:
    """A function that raises the error of :func:`stop` when it is called."""

    def stopped(*_: Any, **__: Any) -> Any:
        raise stop(why)

    return stopped


def take_stops() -> list[str]:
    """The messages of :func:`stop` since the last call; at the end of a step the script has caught their errors."""
    taken = list(dict.fromkeys(_stops))
    _stops.clear()
    return taken
