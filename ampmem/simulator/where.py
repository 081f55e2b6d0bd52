"""The line of the script that runs, for messages about what cannot be simulated."""

from __future__ import annotations

from ampmem.own_code import script_line


class NotSimulated(RuntimeError):
    """The script does what the simulated device cannot do."""


_stops: list[str] = []


def stop(why: str) -> NotSimulated:
    """The error for the line that runs: ``why`` it cannot be simulated, and what to do."""
    _stops.append(f"{script_line()}: {why}")
    return NotSimulated(_stops[-1])


def take_stops() -> list[str]:
    """What could not be simulated since the last call: a script that has got to a step's end has caught that."""
    taken = list(dict.fromkeys(_stops))
    _stops.clear()
    return taken
