"""How a text fits where it is read: its width, its colours, and tables that are no wider than that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TextIO

import click
from tabulate import tabulate

from ampmem.reporters.text.common.plain_text import FILLER, WIDTH, filled, shorten
from ampmem.reporters.text.common.plain_text import columns as columns_of

NARROWEST, WIDEST = 60, 160
"""No text is laid out for fewer columns, nor for more."""

_GAP = 2
"""What tabulate puts between two columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a text is read: no line of it is longer than ``width``; ``colour`` says whether it may be styled.

    A text is styled last, a line at a time: what is wrapped, cut or counted has no escape codes in it yet.
    """

    width: int = WIDTH
    colour: bool = False

    def strong(self, line: str) -> str:
        """A heading or a total."""
        return click.style(line, bold=True) if self.colour and line else line

    def alarm(self, line: str) -> str:
        """A warning: its numbers are not to be trusted, or something is badly wrong."""
        return click.style(line, fg="red", bold=True) if self.colour and line else line

    def advice(self, line: str) -> str:
        """Something that could be better."""
        return click.style(line, fg="yellow", bold=True) if self.colour and line else line

    def faint(self, line: str) -> str:
        """What is there for those who look for it."""
        return click.style(line, dim=True) if self.colour and line else line


PLAIN = Layout()
"""For a file, a pipe, or another program."""


def layout_for(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> Layout:
    """How to write on ``stream``: as wide as the terminal, with colours unless NO_COLOR or TERM=dumb; else plain."""
    if not _is_terminal(stream):
        return PLAIN
    assert stream is not None
    # Of standard output, and where that is a file, of the stream itself; COLUMNS is asked first.
    columns = shutil.get_terminal_size(fallback=(_columns(stream), 0)).columns
    colour = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return Layout(width=min(max(columns, NARROWEST), WIDEST), colour=colour)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):  # it is closed
        return False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError):
        return WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Where the table is too wide, first the cells of columns with a ``least`` are cut in the middle, down to that many
    characters; then columns are left out, those with the highest ``rank`` first. One whose rank is 0 stays.
    """

    head: str
    align: Literal["left", "right"] = "right"
    least: int | None = None
    rank: int = 0


def number(head: str, *, rank: int = 0) -> Column:
    """A column of figures, which are never cut."""
    return Column(head=head, rank=rank)


def words(head: str, *, least: int | None = None, rank: int = 0) -> Column:
    """A column of words; names may be cut down to ``least`` characters."""
    return Column(head=head, align="left", least=least, rank=rank)


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], layout: Layout, *, strong: Collection[str] = ()
) -> str:
    """A table with a rule under its head, no wider than the layout allows.

    Rows whose first cell is in ``strong`` stand out.
    """
    head, lines = table_lines(columns, rows, layout, strong=strong)
    return "\n".join([*head, *lines])


def table_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], layout: Layout, *, strong: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """The lines of the table's head, with the rule under it, and a line for each row."""
    natural = natural_widths(columns, rows)
    shown = _kept(columns, natural, layout.width)
    widths = _shared(columns, natural, shown, layout.width)
    heads = _heads([columns[i].head for i in shown])
    cells = [*heads, *([row[i] for i in shown] for row in rows)]
    fitting = [[filled(shorten(cell, widths[i])) for i, cell in zip(shown, line, strict=True)] for line in cells]
    align = [columns[i].align for i in shown]
    # The heads are rows too: a head of tabulate's own makes its column two characters wider than it is.
    text = tabulate(fitting, tablefmt="plain", disable_numparse=True, colalign=align)
    lines = [line.replace(FILLER, "").rstrip() for line in text.split("\n")]
    rule = (" " * _GAP).join("-" * widths[i] for i in shown)
    body = [
        layout.strong(line) if row[0] in strong else line for line, row in zip(lines[len(heads) :], rows, strict=True)
    ]
    return [*lines[: len(heads)], rule], body


def _heads(texts: Sequence[str]) -> list[list[str]]:
    """The lines of the head, from the top; what has fewer lines than others stands on the rule."""
    split = [text.split("\n") for text in texts]
    most = max(map(len, split))
    padded = [[""] * (most - len(lines)) + lines for lines in split]
    return [list(line) for line in zip(*padded, strict=True)]


def natural_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """How wide each column is that nothing is cut of."""
    return [
        max(map(columns_of, (*column.head.split("\n"), *(row[i] for row in rows)))) for i, column in enumerate(columns)
    ]


def narrowest(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """How wide a table is of which all is left out and cut that may be."""
    natural = natural_widths(columns, rows)
    return _together(_least(column, size) for column, size in zip(columns, natural, strict=True) if not column.rank)


def _together(widths: Iterable[int]) -> int:
    sizes = list(widths)
    return sum(sizes) + _GAP * (len(sizes) - 1)


def _least(column: Column, natural: int) -> int:
    if column.least is None:
        return natural
    return min(natural, max(column.least, *map(columns_of, column.head.split("\n"))))


def _kept(columns: Sequence[Column], natural: Sequence[int], width: int) -> list[int]:
    """The columns that there is room for."""
    kept = list(range(len(columns)))
    for rank in sorted({column.rank for column in columns if column.rank}, reverse=True):
        if _together(_least(columns[i], natural[i]) for i in kept) <= width:
            break
        kept = [i for i in kept if columns[i].rank != rank]
    return kept


def _shared(columns: Sequence[Column], natural: Sequence[int], shown: Sequence[int], width: int) -> list[int]:
    """How wide each column is: of those that may be cut always the widest gives way."""
    widths = list(natural)
    while _together(widths[i] for i in shown) > width:
        wide = [i for i in shown if widths[i] > _least(columns[i], natural[i])]
        if not wide:
            break
        widths[max(wide, key=lambda i: widths[i])] -= 1
    return widths


def side_by_side(
    first: Column,
    names: Sequence[str],
    groups: Sequence[Sequence[Column]],
    cells: Sequence[Sequence[Sequence[str]]],
    layout: Layout,
    *,
    strong: Collection[str] = (),
) -> list[str]:
    """Recordings beside one another, a group of columns for each, in as few tables as the width allows.

    ``names`` are the cells of the first column; ``cells`` has for each group, and for each row, the group's cells.
    Columns with a rank are left out before a second table is begun.
    """

    def laid(chunk: range) -> tuple[list[Column], list[list[str]]]:
        rows = [[name, *(cell for i in chunk for cell in cells[i][row])] for row, name in enumerate(names)]
        return [first, *(column for i in chunk for column in groups[i])], rows

    for tables in range(1, len(groups) + 1):
        parts = [laid(chunk) for chunk in _even(len(groups), tables)]
        if tables == len(groups) or all(narrowest(*part) <= layout.width for part in parts):
            return [table(*part, layout, strong=strong) for part in parts]
    return []


def _even(count: int, parts: int) -> list[range]:
    """The indices of ``count`` things in so many runs, as even as can be."""
    bounds = [count * i // parts for i in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]
