"""Tables and headings as a terminal shows them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Literal, TextIO

import click
from tabulate import tabulate

from ampmem.reporters.text.plain_text import ABSENT, FILLER, WIDTH, filled, shorten, wrapped
from ampmem.reporters.text.plain_text import columns as columns_of

NARROWEST, WIDEST = 40, 160
"""No text is laid out for fewer columns, nor for more."""

_GAP = 2
"""What tabulate puts between two columns."""
_BELOW = 4
"""How far cells below their row are indented."""


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

    def heading(self, text: str) -> str:
        """What a table or a section is of, in as many lines as that takes."""
        return "\n".join(map(self.strong, wrapped(text, self.width)))

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
    characters, or broken into lines where the column ``wraps``. Then columns move to another table below, those with
    the highest ``rank`` first and those whose rank is 0 last; ``of`` is what then stands above ``head``, so that it
    can be understood without the column before.
    """

    head: str
    align: Literal["left", "right"] = "right"
    least: int | None = None
    rank: int = 0
    wraps: bool = False
    of: str = ""

    @property
    def alone(self) -> str:
        """The head for a place where the column before is missing."""
        own = self.head.strip().replace("/\n", "/").replace("-\n", "").replace("\n", " ")
        return f"{self.of}\n{own}" if self.of else self.head


def number(head: str, *, rank: int = 0, of: str = "") -> Column:
    """A column of figures, which are never cut."""
    return Column(head=head, rank=rank, of=of)


def words(head: str, *, least: int | None = None, rank: int = 0, wraps: bool = False) -> Column:
    """A column of words; names may be cut down to ``least`` characters, and other texts broken into lines."""
    return Column(head=head, align="left", least=least, rank=rank, wraps=wraps)


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], layout: Layout, *, strong: Collection[str] = ()
) -> str:
    """A table with a rule under its head, no wider than the layout allows.

    Columns that there is no room for follow in further tables, each with the first column again; where that does not
    tell the rows apart, below each row. Rows whose first cell is in ``strong`` stand out.
    """
    left = list(range(1, len(columns)))
    if len({row[0] for row in rows}) < len(rows) and _kept(columns, rows, [0, *left], layout.width) != [0, *left]:
        # Further tables would not say which of the rows with one name is which.
        head, body = table_lines(columns, rows, layout, strong=strong)
        return "\n".join([*head, *(line for lines in body for line in lines)])
    texts: list[str] = []
    while left or not texts:
        shown = _kept(columns, rows, [0, *left], layout.width)
        left = [i for i in left if i not in shown]
        # What has something in the first table only is not repeated without it.
        said = [row for row in rows if not texts or any(row[i] for i in shown[1:])]
        head, body = _laid([*_heads_of(columns, shown)], [[row[i] for i in shown] for row in said], layout, strong)
        texts.append("\n".join([*head, *(line for lines in body for line in lines)]))
    return "\n\n".join(texts)


def table_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], layout: Layout, *, strong: Collection[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """The lines of the table's head, with the rule under it, and the lines of each row.

    Cells that there is no room for stand below their row.
    """
    shown = _kept(columns, rows, list(range(len(columns))), layout.width)
    head, body = _laid(_heads_of(columns, shown), [[row[i] for i in shown] for row in rows], layout, strong)
    left = [i for i in range(len(columns)) if i not in shown]
    for lines, row in zip(body, rows, strict=True):
        cells = [" ".join([*columns[i].alone.split(), row[i]]) for i in left if row[i] not in ("", ABSENT)]
        if cells:
            below = wrapped(", ".join(cells), layout.width - _BELOW, indent="")
            lines += [layout.faint(f"{'':{_BELOW}}{line}") for line in below]
    return head, body


def _heads_of(columns: Sequence[Column], shown: Sequence[int]) -> list[Column]:
    """The columns that are ``shown``; one without that before it has its head for that."""
    return [
        replace(columns[i], head=columns[i].alone) if i and i - 1 not in shown[1:] and columns[i].of else columns[i]
        for i in shown
    ]


def _laid(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], layout: Layout, strong: Collection[str]
) -> tuple[list[str], list[list[str]]]:
    """The lines of the head and of each row, of columns that there is room for."""
    widths = _shared(columns, natural_widths(columns, rows), layout.width)
    heads = _heads([column.head for column in columns])
    sizes = list(zip(columns, widths, strict=True))
    broken = [
        _lines([_fitted(cell, column, width) for cell, (column, width) in zip(row, sizes, strict=True)]) for row in rows
    ]
    texts = [*heads, *(line for lines in broken for line in lines)]
    cells = [[filled(cell) for cell in line] for line in texts]
    # The heads are rows too: a head of tabulate's own makes its column two characters wider than it is.
    text = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=[column.align for column in columns])
    lines = iter([line.replace(FILLER, "").rstrip() for line in text.split("\n")] if cells else [])
    head = [next(lines) for _ in heads]
    # A text that is broken into lines may take less than there is room for.
    taken = [max(map(columns_of, cells_of)) for cells_of in zip(*texts, strict=True)]
    rule = (" " * _GAP).join("-" * width for width in taken)
    body = []
    for row, parts in zip(rows, broken, strict=True):
        mine = [next(lines) for _ in parts]
        body.append([layout.strong(line) for line in mine] if row[0] in strong else mine)
    return [*head, rule], body


def _fitted(cell: str, column: Column, width: int) -> list[str]:
    return wrapped(cell, width, indent="") if column.wraps else [shorten(cell, width)]


def _lines(cells: Sequence[Sequence[str]]) -> list[list[str]]:
    """The lines of a row, from the top."""
    return [list(line) for line in zip_longest(*cells, fillvalue="")]


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
    """How wide a table is whose columns with a rank stand below it, and whose cells are cut as far as they may be."""
    natural = natural_widths(columns, rows)
    return _together(_least(column, size) for column, size in zip(columns, natural, strict=True) if not column.rank)


def _together(widths: Iterable[int]) -> int:
    sizes = list(widths)
    return sum(sizes) + _GAP * (len(sizes) - 1)


def _least(column: Column, natural: int) -> int:
    if column.least is None:
        return natural
    return min(natural, max(column.least, *map(columns_of, column.head.split("\n"))))


def _kept(columns: Sequence[Column], rows: Sequence[Sequence[str]], left: Sequence[int], width: int) -> list[int]:
    """Those of the columns that are ``left`` for which there is room beside the first of them; always one at least."""

    def fits(kept: Sequence[int]) -> bool:
        heads = _heads_of(columns, kept)
        natural = natural_widths(heads, [[row[i] for i in kept] for row in rows])
        return _together(map(_least, heads, natural)) <= width

    kept = list(left)
    for rank in sorted({columns[i].rank for i in kept[1:] if columns[i].rank}, reverse=True):
        fewer = [i for i in kept if i == kept[0] or columns[i].rank != rank]
        if fits(kept) or len(fewer) == 1:
            break
        kept = fewer
    while len(kept) > 2 and not fits(kept):
        kept.pop()
    return kept


def _shared(columns: Sequence[Column], natural: Sequence[int], width: int) -> list[int]:
    """How wide each column is: of those that may be cut always the widest gives way."""
    widths = list(natural)
    while _together(widths) > width:
        wide = [i for i, column in enumerate(columns) if widths[i] > _least(column, natural[i])]
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
    Columns with a rank stand in a table of their own below before the recordings are parted.
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
