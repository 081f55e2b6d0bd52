"""What a process that a script spawns is told, and the folder through which it and the script's own process talk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampmem.cli.processes.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """What a spawned process is told: the command line, the name of what is run, and a ``folder`` to talk through."""

    plan: Plan
    title: str
    job: str
    folder: Path
    directory: Path
    """Where the recordings are written; the script may change its own."""

    @property
    def names(self) -> Path:
        """The file in which each rank says where it records."""
        return self.folder / "names"

    @property
    def joining(self) -> Path:
        """There while the script's own process waits for the ends of those that it spawned, and for nothing else."""
        return self.folder / "joining"

    @property
    def stopped(self) -> Path:
        """There once ranks were stopped."""
        return self.folder / "stopped"
