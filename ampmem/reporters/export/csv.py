"""A recording as a table for spreadsheets: one row per allocation, in order of birth."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.events import NO_STEP, Phase
from ampmem.output.files import open_output

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
)
"""What the columns are; ``died_ns`` is empty for what was never freed, ``step`` for what was there before the first."""

_FORMULA = ("=", "+", "-", "@")
"""What a cell begins with that a spreadsheet calculates."""


def write_csv(analysis: Analysis, path: Path, *, force: bool = False) -> None:
    """Raises :class:`~ampmem.errors.UsageError` when ``path`` cannot be written, or exists without ``force``."""
    with open_output(path, force=force) as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(_rows(analysis))


def _rows(analysis: Analysis) -> Iterator[tuple[object, ...]]:
    tensors = analysis.tensors
    lives, classes, texts = analysis.lifetimes, analysis.classes, analysis.recording.texts
    shown = cache(_text)
    for index in range(len(lives)):
        step = int(lives.step[index])
        yield (
            int(lives.born_ns[index]),
            "" if lives.died[index] == ALIVE else int(lives.died_ns[index]),
            int(lives.bytes[index]),
            int(lives.block_bytes[index]),
            CATEGORIES[classes.category[index]],
            shown(texts[classes.name[index]]),
            shown(texts[lives.module[index]] or texts[classes.module[index]]),
            shown(texts[lives.op[index]]),
            "" if step == NO_STEP else step,
            Phase(int(lives.phase[index])).name.lower(),
            shown(texts[tensors.dtype[index]]),
            shown(texts[tensors.shape[index]]),
        )


def _text(text: str) -> str:
    """``text`` as a spreadsheet shows it: what it would take for a formula comes after an apostrophe.

    Tabs, line ends and whatever else does not print are spelled out: before a formula they do not hide it, and a line's
    end ends no row. Source: OWASP, "CSV Injection". Numbers are written as they are, and so stay numbers.
    """
    shown = text if text.isprintable() else text.translate(_SPELLED)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


class _Spelled(dict[int, str]):
    """For ``str.translate``: every character as it is written, once it was asked for."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if character.isprintable() else character.encode("unicode_escape").decode()
        return self[code]


_SPELLED = _Spelled()
