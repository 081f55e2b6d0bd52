"""``%load_ext ampmem``: puts the magics into the shell, and takes them out again."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from ampmem.errors import AmpmemError, UsageError
from ampmem.integrations.notebook.recorded import CellOptions, Notebook, RecordedCell, compare_cell, help_text, parse
from ampmem.integrations.notebook.shell import Shell, display, shell_error
from ampmem.output import Bundle

MAGIC = "ampmem"
LAST = "_ampmem"
"""The notebook's name for the last recording."""

_FIRST_LINE = re.compile(r"%%ampmem(?=\s)(.*)", re.DOTALL)


class _Depth(threading.local):
    """The number of cells that run inside of each other on this thread."""

    cells = 0


class Extension:
    """The magics of one shell.

    A cell under ``%%ampmem`` runs like any other: its first line becomes ``%ampmem``, which starts the recording, and
    the end of the cell ends it. So tracebacks, names, the last value and ``await`` work as without it.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._depth = _Depth()
        self._running: tuple[RecordedCell, int, int] | None = None
        """The current recording, with its thread and depth."""
        self._last: Callable[[], Bundle] | None = None
        """A function that shows the last recording or comparison again."""
        self._failed: set[int] = set()
        """The numbers of cells that raised an exception."""

    def load(self) -> None:
        """Put the magics into the shell."""
        self._shell.input_transformers_cleanup.append(self.as_line)
        self._shell.events.register("pre_run_cell", self._cell_begins)
        self._shell.events.register("post_run_cell", self._cell_ended)
        for kind, function in (("cell", self.cell_magic), ("line", self.line_magic)):
            self._shell.register_magic_function(function, kind, MAGIC)

    def unload(self) -> None:
        """Take the magics out, and end a running recording."""
        if self._running is not None:
            self._end(None)
        self._shell.input_transformers_cleanup.remove(self.as_line)
        self._shell.events.unregister("pre_run_cell", self._cell_begins)
        self._shell.events.unregister("post_run_cell", self._cell_ended)
        for kind in ("cell", "line"):
            self._shell.magics_manager.magics[kind].pop(MAGIC, None)

    def as_line(self, lines: list[str]) -> list[str]:
        """``%%ampmem`` replaced by ``%ampmem``, if the cell is to run here; the magic reports errors in its line."""
        found = _FIRST_LINE.match(lines[0]) if lines else None
        if found is None:
            return lines
        try:
            options = parse(found[1])
        except UsageError:
            return lines
        if options.compare:
            return lines
        # A cell with these options records nothing, so it must not run; nor would IPython have them without one.
        return [f"%ampmem{found[1]}", *([] if options.help or options.last else lines[1:])]

    # In a terminal a cell magic goes on until an empty line, so completeness is asked about the cell as written.
    as_line.has_side_effects = True  # type: ignore[attr-defined]

    def line_magic(self, line: str) -> None:
        """Record the steps of the rest of this cell; ``%ampmem --help`` says how."""
        try:
            self._line(parse(line))
        except AmpmemError as error:
            raise shell_error(str(error)) from None

    def cell_magic(self, line: str, code: str) -> None:
        """Record the steps of this cell, or compare it in every precision; ``%%ampmem --help`` says how."""
        try:
            self._compare(parse(line), code)  # only comparisons and wrong lines come here
        except AmpmemError as error:
            raise shell_error(str(error)) from None

    def _line(self, options: CellOptions) -> None:
        if options.help:
            print(help_text())
        elif options.compare:
            raise UsageError("--compare is for a whole cell: write %%ampmem --compare as its first line")
        elif options.last:
            if self._last is None:
                raise UsageError(
                    "nothing has been recorded yet: write %%ampmem as the first line of a cell that trains"
                )
            display(self._last())
        elif self._running is not None:
            raise UsageError("this cell is already being recorded")
        else:
            recorded = RecordedCell(options, f"In [{self._number()}]")
            self._running = recorded, threading.get_ident(), self._depth.cells

    def _number(self) -> int:
        """The number of the running cell; if it has none, as nested cells, that of the last numbered cell."""
        return max(len(self._shell.user_ns.get("In", ())) - 1, 1)

    def _compare(self, options: CellOptions, code: str) -> None:
        before = {number: cell for number, cell in enumerate(self._shell.user_ns.get("In", ())) if cell.strip()}
        before.pop(self._number(), None)
        compared, shown = compare_cell(
            options,
            self._shell.transform_cell(code),
            Notebook(before=before, failed=frozenset(self._failed), known=tuple(self._shell.user_ns)),
            f"In [{self._number()}]",
        )
        self._shell.user_ns[LAST] = compared
        self._last = lambda: shown

    def _cell_begins(self, _: Any) -> None:
        self._depth.cells += 1

    def _cell_ended(self, result: Any) -> None:
        depth, self._depth.cells = self._depth.cells, max(0, self._depth.cells - 1)
        (self._failed.add if result.error_in_exec else self._failed.discard)(result.execution_count)
        if self._running is not None and self._running[1:] == (threading.get_ident(), depth):
            self._end(result.error_before_exec or result.error_in_exec)

    def _end(self, error: BaseException | None) -> None:
        assert self._running is not None
        recorded, self._running = self._running[0], None
        if recorded.end(error):
            self._last = recorded.bundle
            self._shell.user_ns[LAST] = recorded.profile


_loaded: dict[int, Extension] = {}
"""The loaded extensions, by the identity of their shells."""


def load_extension(shell: Shell) -> None:
    """Load the magics into ``shell``; a second call does nothing."""
    if id(shell) not in _loaded:
        extension = _loaded[id(shell)] = Extension(shell)
        extension.load()


def unload_extension(shell: Shell) -> None:
    """Unload the magics from ``shell``."""
    extension = _loaded.pop(id(shell), None)
    if extension is not None:
        extension.unload()
