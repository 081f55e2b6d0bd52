"""Whom ``ampmem profile`` speaks to: a person, a rank's terminal, or a file of JSON lines that ampmem itself reads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TextIO

import click

from ampmem.errors import AmpmemError, NothingRecorded, UsageError
from ampmem.failure import FailureKind, FailureRecord
from ampmem.output import Terminal
from ampmem.recorder.ranks.environment import Launched

# Taken now: a script may put others in their place.
_open, _write, _close, _dumps = os.open, os.write, os.close, json.dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A step was recorded, the ``done``-th of those ``wanted``.

    ``flops`` are those that were counted in it, of which ``recomputed_flops`` are activation checkpointing's, and
    ``moved_bytes`` went to the CPU or came from there; 0 where no simulated device counts them. ``module_flops`` are
    what each module's own code computed in forward, of all modules that ran so far.
    """

    done: int
    wanted: int
    flops: int = 0
    recomputed_flops: int = 0
    moved_bytes: int = 0
    module_flops: Mapping[str, int] = field(default_factory=dict)


class Audience(Protocol):
    """Whom ``ampmem profile`` speaks to."""

    @property
    def screen(self) -> TextIO | None:
        """Where tables are read: it says how wide they may be, and whether they may have colours."""

    def say(self, message: str) -> None:
        """Something for people only, in one line."""

    def complain(self, message: str) -> None:
        """The same, of what went wrong."""

    def show(self, text: str) -> None:
        """Tables, for people only."""

    def step(self, ended: StepEnded) -> None:
        """How far the script has got."""

    def failed(self, failure: FailureRecord) -> None:
        """What ended the script, or why it cannot be recorded."""


class Person:
    """Reads standard error; steps are shown on a terminal only, in one line that changes."""

    def __init__(self) -> None:
        self._stream = sys.stderr  # the script may put another in its place
        self._terminal = Terminal(self._stream)

    @property
    def screen(self) -> TextIO | None:
        """Standard error, as it was when the command began."""
        return self._stream

    def say(self, message: str) -> None:
        """A line of its own."""
        self._terminal.say(message)

    def complain(self, message: str) -> None:
        """A line like any other."""
        self.say(message)

    def show(self, text: str) -> None:
        """All of it, between empty lines."""
        self._terminal.show_styled(f"\n{text}\n")

    def step(self, ended: StepEnded) -> None:
        """Over the line before."""
        last = ended.done == ended.wanted
        self._terminal.step(f"step {ended.done} of {ended.wanted}", last=last)

    def failed(self, failure: FailureRecord) -> None:
        """Nothing: a person has the traceback, or gets ampmem's own message when the command ends."""


class Parent:
    """The ampmem that started this one; it reads ``file``, and has words of its own for people."""

    def __init__(self, file: Path) -> None:
        self._file = file.absolute()  # the script may change the directory

    @property
    def screen(self) -> TextIO | None:
        """None: no table is read there."""
        return None

    def say(self, message: str) -> None:
        """Nothing."""

    def complain(self, message: str) -> None:
        """Nothing."""

    def show(self, text: str) -> None:
        """Nothing."""

    def step(self, ended: StepEnded) -> None:
        """One line."""
        self._append({"step": asdict(ended)})

    def failed(self, failure: FailureRecord) -> None:
        """One line."""
        self._append({"failure": asdict(failure)})

    def _append(self, message: dict[str, object]) -> None:
        with suppress(OSError):  # a file that is gone or a full disk is none of the script's business
            # Opened for each line: no descriptor of ours is open for the script to close or to hand on.
            descriptor = _open(self._file, os.O_WRONLY | os.O_APPEND)
            try:
                _write(descriptor, f"{_dumps(message)}\n".encode())
            finally:
                _close(descriptor)


class Inbox:
    """Reads what a child appends to ``file``."""

    def __init__(self, file: Path) -> None:
        self.failure: FailureRecord | None = None
        """What the child has given as the reason of its failure so far."""
        self._stream = file.open("rb")
        self._begun = b""
        """The start of a line whose end is not there yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def steps(self) -> Iterator[StepEnded]:
        """The steps that have ended since the last call; sets :attr:`failure` too."""
        *lines, self._begun = (self._begun + self._stream.read()).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "step" in message:
                yield StepEnded(**message["step"])
            else:
                failure = message["failure"]
                self.failure = FailureRecord(**failure | {"kind": FailureKind(failure["kind"])})


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
