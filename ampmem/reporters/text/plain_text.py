"""What every report in plain text shares: its width, its tables, and texts that fit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise

from tabulate import tabulate

from ampmem.terminal import printable

WIDTH = 100
"""No line of a text report is longer."""

COLUMNS = 3
"""How many recordings a table lays side by side; more than that are spread over several tables."""

ABSENT = "-"
"""A value that is not known."""


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, all printable; the middle gives way."""
    clean = printable(text)
    if len(clean) <= width:
        return clean
    tail = width // 2
    return f"{clean[: width - 1 - tail]}…{clean[len(clean) - tail :]}"


def per_parameter(size: int, parameters: int) -> str:
    """Bytes per parameter in at most seven characters; something never reads as nothing."""
    if parameters == 0:
        return ABSENT
    ratio = size / parameters
    if 0 < ratio < 0.01:
        return "<0.01"
    if ratio < 9999.995:
        return f"{ratio:.2f}"
    return f"{ratio:.0f}" if ratio < 9_999_999 else f"{ratio:.1e}"


def table(rows: Sequence[Sequence[str]], headers: Sequence[str], align: Sequence[str]) -> str:
    """A table with a rule under its head; ``align`` has ``left`` or ``right`` for each column."""
    text = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=align)
    return "\n".join(line.rstrip() for line in text.splitlines())


def wrapped(text: str, *, width: int = WIDTH, indent: str = "  ") -> list[str]:
    """``text`` as lines of at most ``width`` characters, the second and later ones indented.

    No word is broken, at a hyphen neither, unless it is longer than a line.
    """
    clean = printable(text)
    return textwrap.wrap(clean, width, subsequent_indent=indent, break_on_hyphens=False) or [clean]


def chunks(count: int) -> list[range]:
    """The indices of ``count`` recordings in runs of at most :data:`COLUMNS`, as even as can be."""
    tables = -(-count // COLUMNS)
    bounds = [count * i // tables for i in range(tables + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]
