"""Texts that fit: cut in the middle, wrapped, and as wide as a terminal shows them."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable

from ampmem.output.terminal import printable

WIDTH = 100
"""No line of a text report is longer where nothing says how wide it may be."""

FILLER = "\0"
"""Stands beside a character that takes two columns, for code that counts characters; no text that is shown has it."""

ABSENT = "-"
"""A value that is not known."""


_TIE = "\1"
"""Stands for a space at which no line is broken."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:B|[KMGTP]iB|%)(?!\w))")


def columns(text: str) -> int:
    """How many columns of a terminal ``text`` takes: an ideograph takes two, a combining mark none."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def filled(text: str) -> str:
    """``text`` with a :data:`FILLER` for each second column of a character."""
    return text if text.isascii() else "".join(c + FILLER * (_columns_of(c) == 2) for c in text)


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns, all printable; the middle gives way."""
    clean = printable(text)
    if columns(clean) <= width:
        return clean
    tail = width // 2
    end = _start(reversed(clean), tail)[::-1]
    return f"{_start(clean, width - 1 - tail)}…{end}"


def _start(characters: Iterable[str], width: int) -> str:
    """As many of them as fit."""
    kept: list[str] = []
    for character in characters:
        width -= _columns_of(character)
        if width < 0:
            break
        kept.append(character)
    return "".join(kept)


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


def wrapped(text: str, width: int, *, indent: str = "  ") -> list[str]:
    """``text`` as lines of at most ``width`` columns, the second and later ones indented.

    No word is broken, at a hyphen neither, unless it is longer than a line; a figure stays with its unit.
    """
    clean = _BEFORE_UNIT.sub(_TIE, filled(printable(text)))
    # A character must not be parted from its filler: one column is left for it.
    room = width - (FILLER in clean)
    lines = textwrap.wrap(clean, room, subsequent_indent=indent, break_on_hyphens=False) or [clean]
    return [line.replace(FILLER, "").replace(_TIE, " ") for line in lines]
