"""The line of the script that runs, for messages about what cannot be simulated."""

from __future__ import annotations

from ampmem.own_code import script_line


class NotSimulated(RuntimeError):
    """The script does something that the simulated device cannot do."""


_stops: list[str] = []


def stop(why: str) -> NotSimulated:
    """The error for the running line: ``why`` it cannot be simulated, and what to do."""
    # Kept, because the script may catch the error.
    _stops.append(f"{script_line()}: {why}")
    return NotSimulated(_stops[-1])


def take_stops() -> list[str]:
    """The stops since the last call: if the script reached a step's end, it has caught them."""
    taken = list(dict.fromkeys(_stops))
    _stops.clear()
    return taken
