"""What the ranks of a job say: one of them speaks, the others only of what went wrong."""

from __future__ import annotations

import click

from ampmem.cli.processes.messages import Person
from ampmem.errors import AmpmemError, NothingRecorded, UsageError
from ampmem.failure import FailureRecord
from ampmem.recorder.ranks.environment import Launched


class OfRank(Person):
    """Standard error, for one rank: rank 0 speaks as a process alone does, the others complain only."""

    def __init__(self, launched: Launched) -> None:
        super().__init__()
        self._launched = launched

    def say(self, message: str) -> None:
        """A line of its own, if this is rank 0."""
        if self._launched.place.rank == 0:
            super().say(message)

    def complain(self, message: str) -> None:
        """A line of its own, which says whose it is."""
        super().say(f"rank {self._launched.place.rank}: {message}")

    def show(self, text: str) -> None:
        """Nothing: so many tables would be in each other."""

    def failed(self, failure: FailureRecord) -> None:
        """Nothing: a person has the traceback, or the complaint."""

    def refused(self, error: AmpmemError) -> None:
        """Why this rank is not recorded: what all ranks were told wrongly, the first of each machine says."""
        if not isinstance(error, UsageError):
            self.complain(str(error))
        elif self._launched.place.rank == self._launched.here[0]:
            Person.say(self, str(error))


def exit_of_rank(error: AmpmemError) -> click.exceptions.Exit:
    """How a rank ends: one that had nothing to show has a script that ended well, and must not end the others'."""
    return click.exceptions.Exit(0 if isinstance(error, NothingRecorded) else error.exit_code)
