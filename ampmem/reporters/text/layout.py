"""Tables and headings as a terminal shows them."""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import pairwise, zip_longest
from typing import Literal, TextIO

import click
from tabulate import tabulate

from ampmem.reporters.text.plain_text import ABSENT, FILLER, WIDTH, filled, shorten, wrapped
from ampmem.reporters.text.plain_text import columns as columns_of
from ampmem.vocabulary import Form

NARROWEST, WIDEST = 40, 160
"""The least and the largest number of columns that a text is laid out for."""

_UNLIMITED = 10_000
"""The width of text of which only the tables are shown."""

_GAP = 2
"""The number of columns that tabulate puts between two columns."""
_BELOW = 4
"""The indent of cells below their row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a text: no line is longer than ``width``; with ``colour`` lines may be styled.

    Styles come last, line by line: text that is wrapped, cut or counted has no escape codes yet. ``screen`` says that
    there is a terminal, where shares are drawn as bars, too. In another ``form`` than text, ``tables`` collects each
    heading, and each table in that form.
    """

    width: int = WIDTH
    colour: bool = False
    screen: bool = False
    form: Form = Form.TEXT
    tables: list[tuple[str, str]] = field(default_factory=list)

    def shown(self, text: str) -> str:
        """``text``; in another form the tables that were laid out so far, each after its heading."""
        if self.form is Form.TEXT:
            return text
        before = [("", ""), *self.tables]
        return "\n\n".join(
            f"{_CAPTIONS[self.form].format(caption)}{made}" if caption else made
            for (caption, _), (_, made) in zip(before, self.tables, strict=False)
            if made
        )

    def note(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Collect a table, unless the form is text."""
        if self.form is Form.TEXT or not rows:
            return
        lines = [[column.on_a_line for column in columns], *rows]
        if self.form is Form.CSV:
            text = StringIO()
            csv.writer(text, lineterminator="\n").writerows(lines)
            self.tables.append(("", text.getvalue().rstrip("\n")))
            return
        kind = "latex_booktabs"  # tabulate escapes what would be markup in LaTeX itself
        if self.form is Form.MARKDOWN:
            kind, lines = "pipe", [[_MARKUP.sub(r"\\\g<0>", cell) for cell in line] for line in lines]
        align = [column.align for column in columns]
        self.tables.append(("", tabulate(lines[1:], lines[0], tablefmt=kind, disable_numparse=True, colalign=align)))

    def strong(self, line: str) -> str:
        """``line`` as a heading."""
        if self.form is not Form.TEXT:
            self.tables.append((line, ""))
        return self.bold(line)

    def bold(self, line: str) -> str:
        """``line`` as the row of a total."""
        return click.style(line, bold=True) if self.colour and line else line

    def heading(self, text: str, *, indent: str = "  ") -> str:
        """The title of a table or a section, in as many lines as it needs, all but the first indented."""
        return "\n".join(map(self.strong, wrapped(text, self.width, indent=indent)))

    def alarm(self, line: str) -> str:
        """``line`` as a warning: the numbers cannot be trusted, or something is badly wrong."""
        return click.style(line, fg="red", bold=True) if self.colour and line else line

    def advice(self, line: str) -> str:
        """``line`` as advice: something could be better."""
        return click.style(line, fg="yellow", bold=True) if self.colour and line else line

    def faint(self, line: str) -> str:
        """``line`` in a faint style, for details."""
        return click.style(line, dim=True) if self.colour and line else line


PLAIN = Layout()
"""The layout for a file, a pipe, or another program."""

_CAPTIONS = {Form.MARKDOWN: "**{}**\n\n", Form.LATEX: "% {}\n", Form.CSV: "# {}\n"}
_MARKUP = re.compile(r"[\\`*|\[]|<(?=[A-Za-z/!])")
"""What would be markup in a cell of a Markdown table."""


def layout_for(stream: TextIO | None, environment: Mapping[str, str] = os.environ, form: Form = Form.TEXT) -> Layout:
    """The layout for ``stream``: as wide as COLUMNS says, else as the terminal, else plain.

    Text is coloured on a terminal only, unless NO_COLOR or TERM=dumb. Tables in another ``form`` than text are as wide
    as they are.
    """
    if form is not Form.TEXT:
        return Layout(width=_UNLIMITED, form=form)
    columns, colour, screen = _columns_of_environment(environment), False, False
    with suppress(OSError, ValueError):  # the stream is closed
        if stream is not None and stream.isatty():
            screen = True
            colour = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
            # The width of standard output, or of the stream itself if that is a file; COLUMNS comes first.
            columns = shutil.get_terminal_size(fallback=(WIDTH, 0)).columns
            own = os.get_terminal_size(stream.fileno()).columns or WIDTH  # raises if the stream has no descriptor
            columns = shutil.get_terminal_size(fallback=(own, 0)).columns
    return Layout(width=min(max(columns, NARROWEST), WIDEST), colour=colour, screen=screen)


def _columns_of_environment(environment: Mapping[str, str]) -> int:
    """The width in COLUMNS, read as by :func:`shutil.get_terminal_size`."""
    try:
        columns = int(environment.get("COLUMNS", ""))
    except ValueError:
        columns = 0
    return columns if columns > 0 else WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    In a table that is too wide, first the cells of columns with a ``least`` are cut in the middle, down to that many
    characters, or broken into lines if the column ``wraps``. Then columns move to another table below, those with the
    highest ``rank`` first and those with rank 0 last; ``of`` then stands above ``head``, so that it makes sense without
    the column before.
    """

    head: str
    align: Literal["left", "right"] = "right"
    least: int | None = None
    rank: int = 0
    wraps: bool = False
    of: str = ""

    @property
    def alone(self) -> str:
        """The head for a table in which the column before this one is missing."""
        return f"{self.of}\n{self.on_a_line}" if self.of else self.head

    @property
    def on_a_line(self) -> str:
        """The head without its line breaks."""
        return self.head.strip().replace("/\n", "/").replace("-\n", "").replace("\n", " ")


def number(head: str, *, rank: int = 0, of: str = "") -> Column:
    """A column of figures, which are never cut."""
    return Column(head=head, rank=rank, of=of)


def words(head: str, *, least: int | None = None, rank: int = 0, wraps: bool = False) -> Column:
    """A column of words; names may be cut down to ``least`` characters, and other texts broken into lines."""
    return Column(head=head, align="left", least=least, rank=rank, wraps=wraps)


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], layout: Layout, *, strong: Collection[str] = ()
) -> str:
    """A table with a rule under its head, at most as wide as the layout.

    Columns without room follow in further tables, each with the first column again, or below each row if the first
    column does not distinguish the rows. Rows whose first cell is in ``strong`` are bold.
    """
    layout.note(columns, rows)
    left = list(range(1, len(columns)))
    if len({row[0] for row in rows}) < len(rows) and _columns_that_fit(columns, rows, [0, *left], layout.width) != [
        0,
        *left,
    ]:
        # In further tables, rows with the same name could not be distinguished.
        head, body = table_lines(columns, rows, layout, strong=strong)
        return "\n".join([*head, *(line for lines in body for line in lines)])
    texts: list[str] = []
    while left or not texts:
        shown = _columns_that_fit(columns, rows, [0, *left], layout.width)
        left = [i for i in left if i not in shown]
        # A row with cells in the first table only is not repeated without them.
        said = [row for row in rows if not texts or any(row[i] for i in shown[1:])]
        head, body = _cells_of_lines(
            [*_heads_of(columns, shown)], [[row[i] for i in shown] for row in said], layout, strong
        )
        texts.append("\n".join([*head, *(line for lines in body for line in lines)]))
    return "\n\n".join(texts)


def table_with_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], below: Sequence[Sequence[str]], layout: Layout
) -> list[str]:
    """The lines of a table, with the lines of text ``below`` each row; a column in another form than text."""
    texts = [" ".join(map(str.strip, lines)) for lines in below]
    layout.note([*columns, words("")], [[*row, text] for row, text in zip(rows, texts, strict=True)])
    head, body = table_lines(columns, rows, layout)
    return [*head, *(line for row, lines in zip(body, below, strict=True) for line in (*row, *lines))]


def table_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], layout: Layout, *, strong: Collection[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """The lines of the table's head with the rule, and the lines of each row.

    Cells without room are below their row.
    """
    shown = _columns_that_fit(columns, rows, list(range(len(columns))), layout.width)
    head, body = _cells_of_lines(_heads_of(columns, shown), [[row[i] for i in shown] for row in rows], layout, strong)
    left = [i for i in range(len(columns)) if i not in shown]
    for lines, row in zip(body, rows, strict=True):
        cells = [" ".join([*columns[i].alone.split(), row[i]]) for i in left if row[i] not in ("", ABSENT)]
        if cells:
            below = wrapped(", ".join(cells), layout.width - _BELOW, indent="")
            lines += [layout.faint(f"{'':{_BELOW}}{line}") for line in below]
    return head, body


def _heads_of(columns: Sequence[Column], shown: Sequence[int]) -> list[Column]:
    """The ``shown`` columns, each with a head that makes sense if the column before is not shown."""
    return [
        replace(columns[i], head=columns[i].alone) if i and i - 1 not in shown[1:] and columns[i].of else columns[i]
        for i in shown
    ]


def _cells_of_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], layout: Layout, strong: Collection[str]
) -> tuple[list[str], list[list[str]]]:
    """The lines of the head and of each row, for columns that have room."""
    widths = _shared(columns, natural_widths(columns, rows), layout.width)
    heads = _heads([column.head for column in columns])
    broken = []
    for row in rows:
        fitted = [
            wrapped(cell, width, indent="") if column.wraps else [shorten(cell, width)]
            for cell, column, width in zip(row, columns, widths, strict=True)
        ]
        broken.append([list(line) for line in zip_longest(*fitted, fillvalue="")])
    texts = [*heads, *(line for lines in broken for line in lines)]
    cells = [[filled(cell) for cell in line] for line in texts]
    # The heads are rows too: a head of tabulate's own would make its column two characters wider.
    text = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=[column.align for column in columns])
    lines = iter([line.replace(FILLER, "").rstrip() for line in text.split("\n")] if cells else [])
    head = [next(lines) for _ in heads]
    # A text broken into lines may need less than its room.
    taken = [max(map(columns_of, cells_of)) for cells_of in zip(*texts, strict=True)]
    rule = (" " * _GAP).join("-" * width for width in taken)
    body = []
    for row, parts in zip(rows, broken, strict=True):
        mine = [next(lines) for _ in parts]
        body.append([layout.bold(line) for line in mine] if row[0] in strong else mine)
    return [*head, rule], body


def _heads(texts: Sequence[str]) -> list[list[str]]:
    """The lines of the head, from top to bottom; shorter heads are directly above the rule."""
    split = [text.split("\n") for text in texts]
    most = max(map(len, split))
    padded = [[""] * (most - len(lines)) + lines for lines in split]
    return [list(line) for line in zip(*padded, strict=True)]


def natural_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column if nothing is cut."""
    return [
        max(map(columns_of, (*column.head.split("\n"), *(row[i] for row in rows)))) for i, column in enumerate(columns)
    ]


def narrowest(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """The least width of a table: ranked columns are moved below it, and cells are cut to their ``least``."""
    natural = natural_widths(columns, rows)
    return _together(_least(column, size) for column, size in zip(columns, natural, strict=True) if not column.rank)


def _together(widths: Iterable[int]) -> int:
    sizes = list(widths)
    return sum(sizes) + _GAP * (len(sizes) - 1)


def _least(column: Column, natural: int) -> int:
    if column.least is None:
        return natural
    return min(natural, max(column.least, *map(columns_of, column.head.split("\n"))))


def _columns_that_fit(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], left: Sequence[int], width: int
) -> list[int]:
    """The columns in ``left`` that fit beside the first of them; always at least one."""

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
    """The width of each column in a table of ``width``; of columns that may be cut, the widest shrinks first."""
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
    """Recordings side by side, a group of columns for each, in as few tables as the width allows.

    ``names`` are the cells of the first column; ``cells`` has for each group, and for each row, the group's cells.
    Columns with a rank move to a table of their own below before the recordings are split up.
    """

    def laid(chunk: range) -> tuple[list[Column], list[list[str]]]:
        rows = [[name, *(cell for i in chunk for cell in cells[i][row])] for row, name in enumerate(names)]
        return [first, *(column for i in chunk for column in groups[i])], rows

    for tables in range(1, len(groups) + 1):
        bounds = [len(groups) * i // tables for i in range(tables + 1)]
        parts = [laid(range(start, end)) for start, end in pairwise(bounds)]
        if tables == len(groups) or all(narrowest(*part) <= layout.width for part in parts):
            return [table(*part, layout, strong=strong) for part in parts]
    return []
