"""The folder with a summary of each test, which later runs are compared with."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

from ampmem.analysis.budgets.budget import Allowance, parse_allowance
from ampmem.analysis.budgets.run import is_same, require_replaceable
from ampmem.analysis.difference.sides import Side, read_side
from ampmem.errors import AmpmemError, UsageError
from ampmem.output.files import open_output

_SAFE = re.compile(r"[A-Za-z0-9_.]+")
_LONGEST = 100
"""Characters of a file's name before what tells it from others."""


class Baselines:
    """One file for each recorded block of a test, in ``folder``, which the user has ``named``.

    ``allow`` is how much more than the baseline is no failure; with ``update`` the files are written, and nothing is
    compared. Raises :class:`UsageError` for an ``allow`` that is neither a share nor a size, and for a folder that is
    not there to compare with.
    """

    def __init__(self, folder: Path, *, named: Path, allow: str, update: bool) -> None:
        self._folder = folder
        self.named = named
        self.allow: Allowance = parse_allowance(allow)
        self.update = update
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--ampmem-baseline {named}: it is not a directory")
        if not update and not folder.is_dir():
            raise UsageError(f"--ampmem-baseline {named}: no such directory; --ampmem-update makes it")

    def read(self, test: str, block: int) -> Side:
        """The baseline of a test's block.

        Raises :class:`UsageError` where there is none, and :class:`~ampmem.errors.RecordingError` for another file.
        """
        path = self._folder / file_of(test, block)
        if not path.is_file():
            raise UsageError(f"baseline not found: {self.named / file_of(test, block)}; --ampmem-update writes it")
        return replace(read_side(path), label=str(self.named / file_of(test, block)))

    def write(self, test: str, block: int, side: Side) -> bool:
        """Make ``side`` the baseline of that block, unless it is; returns whether it was not.

        What is only to be read, and has paths of this machine in it, is left out: the largest allocations and findings.
        Raises :class:`UsageError` where another file has its name, and where it cannot be written.
        """
        if self._has(test, block, side):
            return False
        path = self._folder / file_of(test, block)
        require_replaceable(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write {self.named / file_of(test, block)}: {error}") from None
        with open_output(path, force=True) as stream:
            stream.write(replace(side.summary, top=(), findings=()).to_json() + "\n")
        return True

    def _has(self, test: str, block: int, side: Side) -> bool:
        """Whether nothing that is compared has changed: times and losses always do."""
        try:
            return is_same(self.read(test, block), side)
        except AmpmemError:
            return False


def file_of(test: str, block: int) -> Path:
    """The file of a test's block, from 1 on: ``tests/test_a.py::TestB::test_c`` has ``tests/test_a/TestB.test_c.json``.

    A name with more than letters, digits, dots and underscores in it, such as that of a parametrized test, ends with
    a part that no other test has.
    """
    module, *names = test.split("::")
    folders = [part.replace("..", "__") for part in Path(module).with_suffix("").parts if part != "/"]
    name = ".".join(names)
    if not _SAFE.fullmatch(name) or len(name) > _LONGEST or name.startswith("."):
        told_apart = hashlib.sha256(test.encode()).hexdigest()[:8]
        name = f"{re.sub('[^A-Za-z0-9_.]+', '-', name)[:_LONGEST].strip('.-')}-{told_apart}"
    return Path(*folders, f"{name}.json" if block == 1 else f"{name}-block{block}.json")
