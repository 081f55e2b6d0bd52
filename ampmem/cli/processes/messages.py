"""The audience of ``ampmem profile``: a person, a rank's terminal, or a file of JSON lines that ampmem itself reads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self, TextIO

import click

from ampmem.cli.processes.protection import UNPROTECTED, Protected
from ampmem.errors import AmpmemError, NothingRecorded, UsageError
from ampmem.failure import FailureKind, FailureRecord
from ampmem.output import Terminal
from ampmem.recorder.ranks.environment import Launched

# Taken now: a script may put others in their place.
_open, _write, _close, _dumps = os.open, os.write, os.close, json.dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A step was recorded, the ``done``-th of ``wanted`` steps.

    ``flops`` are those counted in the step, ``recomputed_flops`` activation checkpointing's part of them, and
    ``moved_bytes`` the bytes copied to and from the CPU; 0 without a simulated device. ``module_flops`` are those of
    each module's own code in forward, for all modules that ran so far.
    """

    done: int
    wanted: int
    flops: int = 0
    recomputed_flops: int = 0
    moved_bytes: int = 0
    module_flops: Mapping[str, int] = field(default_factory=dict)


class Audience:
    """The reader of ``ampmem profile``'s messages; a message that is not for this kind of reader is dropped."""

    @property
    def screen(self) -> TextIO | None:
        """The stream on which tables are read, for their width and colours; ``None`` if there is none."""
        return None

    def say(self, message: str) -> None:
        """Print a message in one line, for people only."""

    def complain(self, message: str) -> None:
        """Print a message about a problem in one line, for people only."""
        self.say(message)

    def show(self, text: str) -> None:
        """Print tables, for people only."""

    def step(self, ended: StepEnded) -> None:
        """Report a step, to show how far the script has got."""
        raise NotImplementedError

    protected = UNPROTECTED
    """The protection of files from the script, and the paths by which ampmem reaches them."""

    def reach(self, protected: Protected) -> None:
        """Use the user's names of files in messages: by now the files are ``protected`` and have other paths here."""
        self.protected = protected

    def failed(self, failure: FailureRecord) -> None:
        """Report the script's failure, or why it cannot be recorded, to a program; people see the traceback instead."""


class Person(Audience):
    """A person reading stderr; steps are shown on a terminal only."""

    def __init__(self) -> None:
        self._stream = sys.stderr  # the script may replace sys.stderr
        self._terminal = Terminal(self._stream)

    @property
    def screen(self) -> TextIO | None:
        """Standard error, as it was when the command began."""
        return self._stream

    def say(self, message: str) -> None:
        """Print a line."""
        self._terminal.say(self.protected.worded(message))

    def show(self, text: str) -> None:
        """Print the text between empty lines."""
        self._terminal.show_styled(f"\n{text}\n")

    def step(self, ended: StepEnded) -> None:
        """Print a line for steps 1, 2, 4, 8 and so on, and for the last.

        A line of the script's that has no end yet goes on below.
        """
        due = ended.done == ended.wanted or ended.done & (ended.done - 1) == 0
        if due and self._terminal.is_screen():
            self._terminal.say_above(f"step {ended.done} of {ended.wanted}")


class Parent(Audience):
    """The parent process, an ampmem that reads ``file`` and has its own words for people."""

    def __init__(self, file: Path) -> None:
        self._file = file.absolute()  # the script may change the directory

    def reach(self, protected: Protected) -> None:
        """Write to the same file by another path."""
        super().reach(protected)
        self._file = protected.real(self._file)

    def step(self, ended: StepEnded) -> None:
        """Append the step as a line of JSON."""
        self._append({"step": asdict(ended)})

    def failed(self, failure: FailureRecord) -> None:
        """Append the failure as a line of JSON."""
        self._append({"failure": asdict(failure)})

    def _append(self, message: dict[str, object]) -> None:
        with suppress(OSError):  # a missing file or a full disk must not affect the script
            # Opened for each line: the script must find no open descriptor of ours to close or inherit.
            descriptor = _open(self._file, os.O_WRONLY | os.O_APPEND)
            try:
                _write(descriptor, f"{_dumps(message)}\n".encode())
            finally:
                _close(descriptor)


class Inbox:
    """Reads the messages that a child appends to ``file``."""

    def __init__(self, file: Path) -> None:
        self.failure: FailureRecord | None = None
        """The reason that the child has given for its failure so far."""
        self._stream = file.open("rb")
        self._begun = b""
        """The start of an unfinished line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def steps(self) -> Iterator[StepEnded]:
        """The steps that have ended since the last call; also sets :attr:`failure`."""
        *lines, self._begun = (self._begun + self._stream.read()).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "step" in message:
                yield StepEnded(**message["step"])
            else:
                failure = message["failure"]
                self.failure = FailureRecord(**failure | {"kind": FailureKind(failure["kind"])})


class OfRank(Person):
    """Standard error for one rank: rank 0 speaks as a single process does, the others only complain."""

    def __init__(self, launched: Launched) -> None:
        super().__init__()
        self._launched = launched

    def say(self, message: str) -> None:
        """Print a line, on rank 0 only."""
        if self._launched.place.rank == 0:
            super().say(message)

    def complain(self, message: str) -> None:
        """Print a line with the rank's number."""
        super().say(f"rank {self._launched.place.rank}: {message}")

    def show(self, text: str) -> None:
        """Print nothing: the tables of several ranks would mix."""

    def refused(self, error: AmpmemError) -> None:
        """Report why this rank is not recorded; an error of all ranks is reported by each machine's first rank."""
        if not isinstance(error, UsageError):
            self.complain(str(error))
        elif self._launched.place.rank == self._launched.here[0]:
            Person.say(self, str(error))


def exit_of_rank(error: AmpmemError) -> click.exceptions.Exit:
    """The exit of a rank that is not recorded: 0 if there was nothing to record, as a launcher would end all ranks."""
    return click.exceptions.Exit(0 if isinstance(error, NothingRecorded) else error.exit_code)
