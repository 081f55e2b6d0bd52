"""A recording as a table for pandas and spreadsheets: one row for each allocation, in order of birth.

``pandas.read_csv`` gives each column one type without any option: no cell is empty, whole numbers stay whole numbers,
and no text can be taken for a number, a truth value or a missing value. ``docs/recording.md`` has the columns.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.ops import user_frame
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.events import Phase
from ampmem.output import open_output

HEADER = (
    "born_ns",
    "died_ns",
    "bytes",
    "block_bytes",
    "category",
    "name",
    "module",
    "op",
    "step",
    "phase",
    "dtype",
    "shape",
    "address",
    "line",
    "stack",
)

NEVER: Final = -1
"""The ``died_ns`` of an allocation that was never freed: an empty cell would turn the column into floats. Steps need no
such value, as :data:`~ampmem.events.NO_STEP` is a number too."""

UNKNOWN_TEXT: Final = "?"
"""An unknown text. With an empty cell ``groupby`` would leave out the row, and so its bytes."""

LONGEST_STACK: Final = 4_000
"""Characters of a stack that are kept; a longer one keeps its innermost frames. An endless stack may be in every
row."""

_FORMULA = ("=", "+", "-", "@", "\n")
"""The first characters of a cell that a spreadsheet takes for a formula."""

_MISSING: Final = frozenset(
    ("#n/a", "#n/a n/a", "#na", "1.#ind", "1.#qnan", "<na>", "n/a", "na", "null", "none", "true", "false", UNKNOWN_TEXT)
)
"""Texts that ``read_csv`` takes for a missing value (``pandas._libs.parsers.STR_NA_VALUES``) or a truth value, in lower
case. Python takes ``nan`` and infinities for numbers, and a text that begins with ``-`` is a formula."""


def write_csv(analysis: Analysis, path: Path, *, force: bool = False) -> None:
    """Write the table; ``force`` replaces a file. Raises :class:`~ampmem.errors.UsageError` if it is not writable."""
    with open_output(path, force=force) as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(_rows(analysis))


def _rows(analysis: Analysis) -> Iterator[tuple[object, ...]]:
    tensors, start = analysis.tensors, analysis.start_ns
    lives, classes, texts = analysis.lifetimes, analysis.classes, analysis.recording.texts
    shown, line, stack = cache(_text), cache(_line), cache(_stack)
    for index in range(len(lives)):
        calls = texts[lives.stack[index]]
        yield (
            int(lives.born_ns[index]) - start,
            NEVER if lives.died[index] == ALIVE else int(lives.died_ns[index]) - start,
            int(lives.bytes[index]),
            int(lives.block_bytes[index]),
            CATEGORIES[classes.category[index]],
            shown(texts[classes.name[index]]),
            shown(texts[lives.module[index]] or texts[classes.module[index]]),
            shown(texts[lives.op[index]]),
            int(lives.step[index]),
            Phase(int(lives.phase[index])).name.lower(),
            shown(texts[tensors.dtype[index]]),
            shown(texts[tensors.shape[index]]),
            int(lives.address[index]),
            line(calls),
            stack(calls),
        )


def _line(stack: str) -> str:
    """``FILE:LINE`` of the innermost frame that is the user's."""
    frame = user_frame(stack.split("\n")) if stack else None
    return _text((frame or "").rpartition(" ")[0])


def _stack(stack: str) -> str:
    """The recorded ``stack``, a line per frame, outermost first; of a long stack the innermost frames."""
    if len(stack) > LONGEST_STACK:
        stack = stack[-LONGEST_STACK:].partition("\n")[2]
    return _text(stack)


def _text(text: str) -> str:
    """``text`` as a cell that every reader takes for exactly that text.

    A formula for a spreadsheet, or a value that pandas would not take for a text, gets an apostrophe in front, and so
    does a text that begins with one: without one apostrophe each cell is the text. Line ends stay, in quotes; other
    unprintable characters are spelled out, as they could hide a formula. Source: OWASP, "CSV Injection".
    """
    if not text:
        return UNKNOWN_TEXT
    shown = text if text.isprintable() else text.translate(_SPELLED)
    return f"'{shown}" if shown.startswith(("'", *_FORMULA)) or _is_a_value(shown) else shown


def _is_a_value(text: str) -> bool:
    """Whether pandas might take ``text`` for something else than a text."""
    word = text.strip()
    if word.lower() in _MISSING:
        return True
    try:
        float(word)
    except ValueError:
        return False
    return True


class _Spelled(dict[int, str]):
    """A table for ``str.translate``: every character as it is written, computed when first needed."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if character.isprintable() else character.encode("unicode_escape").decode()
        return self[code]


_SPELLED = _Spelled({ord("\n"): "\n"})
