"""The line of the script that runs, for messages about what cannot be simulated."""

from __future__ import annotations

from ampmem.own_code import script_line


class NotSimulated(RuntimeError):
    """The script does what the simulated device cannot do."""


def stop(why: str) -> NotSimulated:
    """The error for the line that runs: ``why`` it cannot be simulated, and what to do."""
    return NotSimulated(f"{script_line()}: {why}")
