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
"""``died_ns`` of what was never freed. An empty cell would turn the column into floats. A step has no such case:
:data:`~ampmem.events.NO_STEP` is a number, too.
"""

UNKNOWN_TEXT: Final = "?"
"""A text that is not known. For an empty cell ``groupby`` would leave the row out, and so its bytes."""

LONGEST_STACK: Final = 4_000
"""Characters; of a longer stack the innermost frames. One endless stack may belong to every row."""

_FORMULA = ("=", "+", "-", "@", "\n")
"""What a cell begins with that a spreadsheet calculates."""

_MISSING: Final = frozenset(
    ("#n/a", "#n/a n/a", "#na", "1.#ind", "1.#qnan", "<na>", "n/a", "na", "null", "none", "true", "false", UNKNOWN_TEXT)
)
"""What ``read_csv`` takes for a missing value (``pandas._libs.parsers.STR_NA_VALUES``) or for a truth value, in small
letters; ``nan`` and infinities are numbers to Python, and what begins with ``-`` is a formula.
"""


def write_csv(analysis: Analysis, path: Path, *, force: bool = False) -> None:
    """Raises :class:`~ampmem.errors.UsageError` when ``path`` cannot be written, or exists without ``force``."""
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
    """``stack`` as it is recorded, a line for each frame, outermost first; of a long one the innermost frames."""
    if len(stack) > LONGEST_STACK:
        stack = stack[-LONGEST_STACK:].partition("\n")[2]
    return _text(stack)


def _text(text: str) -> str:
    """``text`` as a cell that every reader takes for that text.

    What a spreadsheet would take for a formula, or pandas for something else than a text, comes after an apostrophe; so
    does what has one already: without one apostrophe each cell is the text. A line's end stays, in quotes; whatever
    else does not print is spelled out, so that before a formula it does not hide it. Source: OWASP, "CSV Injection".
    """
    if not text:
        return UNKNOWN_TEXT
    shown = text if text.isprintable() else text.translate(_SPELLED)
    return f"'{shown}" if shown.startswith(("'", *_FORMULA)) or _is_a_value(shown) else shown


def _is_a_value(text: str) -> bool:
    """Whether pandas might make something else of ``text`` than a text."""
    word = text.strip()
    if word.lower() in _MISSING:
        return True
    try:
        float(word)
    except ValueError:
        return False
    return True


class _Spelled(dict[int, str]):
    """For ``str.translate``: every character as it is written, once it was asked for."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if character.isprintable() else character.encode("unicode_escape").decode()
        return self[code]


_SPELLED = _Spelled({ord("\n"): "\n"})
