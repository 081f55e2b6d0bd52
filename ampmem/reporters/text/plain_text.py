"""Plain text that fits: lines of limited width, readable numbers, and characters that a terminal can show."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

from ampmem.output import printable
from ampmem.units import format_bytes
from ampmem.vocabulary import Mark

WIDTH = 100
"""The default width of a text report."""

FILLER = "\0"
"""Follows a character that takes two columns, for code that counts characters; shown text never has it."""

ABSENT = "-"
"""The cell of an unknown value."""


_TIE = "\1"
"""Stands for a space where a line must not be broken."""
_FIGURE = re.compile(r"\d(?:[\d.,]*\d)?\.?|\*\.?")
"""A number, or the star for all numbers of layers, with a point after it."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:B|[KMGTP]iB|%)(?!\w))")


def columns(text: str) -> int:
    """The number of a terminal's columns that ``text`` takes: two for an ideograph, none for a combining mark."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def filled(text: str) -> str:
    """``text`` with a :data:`FILLER` after each character that takes two columns."""
    return text if text.isascii() else "".join(c + FILLER * (_columns_of(c) == 2) for c in text)


_LONGEST = 10_000
"""Maximum characters of a text that is laid out, which takes time for each; the middle of a longer one is left out."""


def _cleaned(text: str) -> str:
    """``text`` without characters that a terminal cannot show, of at most :data:`_LONGEST` characters."""
    half = _LONGEST // 2
    return printable(text if len(text) <= _LONGEST else f"{text[:half]}…{text[-half:]}")


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` printable columns, cut in the middle; figures are never cut or left out.

    A name so keeps the numbers of its layers: ``transformer.h.11.…c_proj.weight``.
    """
    clean = _cleaned(text)
    if columns(clean) <= width:
        return clean
    figures = [found.span() for found in _FIGURE.finditer(clean)]
    return _cut_once(clean, width, figures) or _cut_between(clean, width, figures) or _cut(clean, width)


def _cut(text: str, width: int) -> str:
    tail = width // 2
    end = _start(reversed(text), tail)[::-1]
    return f"{_start(text, width - 1 - tail)}…{end}"


def _cut_once(text: str, width: int, figures: Sequence[tuple[int, int]]) -> str:
    """``text`` with one gap, as near to its middle as the figures allow; empty if that is not near."""
    before = list(accumulate(map(columns, text), initial=0))
    gap = before[-1] - width + 1
    middle = width - 1 - width // 2
    near = (at for at in range(len(text)) if abs(before[at] - middle) <= width // 4)
    for first in sorted(near, key=lambda at: abs(before[at] - middle)):
        last = bisect_left(before, before[first] + gap)
        if last <= len(text) and all(last <= start or end <= first for start, end in figures):
            return f"{text[:first]}…{text[last:]}"
    return ""


def _cut_between(text: str, width: int, figures: Sequence[tuple[int, int]]) -> str:
    """``text`` with gaps between its figures, where most text is; empty if the figures alone are too wide."""
    ends = [0, *(at for span in figures for at in span), len(text)]
    parts = [text[start:end] for start, end in pairwise(ends)]  # every second part is a figure
    for most in range(width, 0, -1):
        cut = "".join(part if i % 2 or columns(part) <= most else _cut(part, most) for i, part in enumerate(parts))
        if columns(cut) <= width:
            return cut
    return ""


def _start(characters: Iterable[str], width: int) -> str:
    """As many of the characters as fit."""
    kept: list[str] = []
    for character in characters:
        width -= _columns_of(character)
        if width < 0:
            break
        kept.append(character)
    return "".join(kept)


def per_parameter(size: int, parameters: int) -> str:
    """Bytes per parameter in at most seven characters; only 0 reads as 0."""
    if parameters == 0:
        return ABSENT
    ratio = size / parameters
    if 0 < ratio < 0.01:
        return "<0.01"
    if ratio < 9999.995:
        return f"{ratio:.2f}"
    return f"{ratio:.0f}" if ratio < 9_999_999 else f"{ratio:.1e}"


def wrapped(text: str, width: int, *, indent: str = "  ") -> list[str]:
    """``text`` as lines of at most ``width`` columns, all but the first indented.

    Words are not broken, not even at a hyphen, unless they are longer than a line; a figure is never broken and stays
    with its unit.
    """
    clean = _BEFORE_UNIT.sub(_TIE, filled(_cleaned(text)))
    # A character must stay with its filler, so one column is left for it.
    room = width - (FILLER in clean)
    lines = _Wrapper(room, subsequent_indent=indent, break_on_hyphens=False).wrap(clean) or [clean]
    return [line.replace(FILLER, "").replace(_TIE, " ") for line in lines]


def wrapped_text(texts: Iterable[str], width: int, *, indent: str = "  ") -> str:
    """The lines of each of ``texts``, as :func:`wrapped` makes them."""
    return "\n".join(line for text in texts for line in wrapped(text, width, indent=indent))


class _Wrapper(textwrap.TextWrapper):
    """A wrapper that breaks a word longer than a line, such as a path, before a figure instead of inside it."""

    def _handle_long_word(self, reversed_chunks: list[str], cur_line: list[str], cur_len: int, width: int) -> None:
        room, word = width - cur_len, reversed_chunks[-1]
        figures = (found.span() for found in _FIGURE.finditer(word))
        at = next((start for start, end in figures if start < room < end), room)
        if at < 1:
            if cur_line:
                return  # a text without room here begins the next line
            at = max(room, 1)
        cur_line.append(word[:at])
        reversed_chunks[-1] = word[at:]


def command_lines(line: str, width: int) -> list[str]:
    """A command that can be copied, continued after a backslash between two words if it is too wide."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(printable(line))):
        if lines[-1].strip() and len(f"{lines[-1]} {word} \\") > width:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


AT_MARK = {
    Mark.AFTER_FORWARD: "at the end of forward",
    Mark.AFTER_BACKWARD: "after backward",
    Mark.AFTER_OPTIMIZER: "after the update",
    Mark.PEAK: "at the peak",
}
"""The words for each mark, within a sentence and as a caption."""

IN_SHORT = {
    Mark.AFTER_FORWARD: "after forward",
    Mark.AFTER_BACKWARD: "after backward",
    Mark.AFTER_OPTIMIZER: "after update",
    Mark.PEAK: "peak",
}
"""The words for each mark at the head of a column."""


def or_absent(size: int | None, shown: Callable[[int], str] = format_bytes) -> str:
    """``size`` as ``shown`` writes it, or the cell of an unknown value."""
    return ABSENT if size is None else shown(size)


def signed(size: int | None) -> str:
    """A difference in bytes, with its sign."""
    if size is None:
        return ABSENT
    return ("+" if size > 0 else "") + format_bytes(size)


def size_beside(gpu: str) -> bool:
    """Whether the size of ``gpu`` is shown next to its name: not for ``--gpu 24GiB``, whose name is the size."""
    return not gpu[:1].isdigit()


def short(value: float | None) -> str:
    """A loss or a loss scale."""
    return ABSENT if value is None else f"{value:.6g}"


def times(ratio: float | None) -> str:
    """A ratio such as ``0.52x``; only 0 reads as 0."""
    if ratio is None:
        return ABSENT
    if 0 < ratio < 0.01:
        return "<0.01x"
    return f"{ratio:.2f}x" if ratio < 1e6 else f"{ratio:.1e}x"


def percent(difference: float | None) -> str:
    """A relative difference of losses; infinite if one of them diverged."""
    if difference is None:
        return ABSENT
    if math.isinf(difference):
        return "not finite"
    return f"{100 * difference:,.0f} %" if difference >= 0.1 else f"{100 * difference:.2g} %"


def trimmed(value: float) -> str:
    """At most two digits after the point: ``16``, ``2.5``."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def share(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent; only nothing reads as 0 %, and only all as 100 %."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 1:
        return "<1 %"
    if 99 < percent < 100:
        return ">99 %"
    return f"{percent:.0f} %"


def size_cells(size: int | None, parameters: int) -> list[str]:
    """The cells for bytes, and for bytes per parameter if there are parameters; empty for an unknown size."""
    if size is None:
        return [ABSENT] * (1 + bool(parameters))
    return [format_bytes(size), *([per_parameter(size, parameters)] if parameters else [])]


def between(low: int, high: int, shown: Callable[[int], str] = format_bytes) -> str:
    """One size, or two different ones, as ``shown`` writes them."""
    first, last = shown(low), shown(high)
    return first if first == last else f"{first} to {last}"
