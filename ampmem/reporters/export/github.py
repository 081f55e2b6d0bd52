"""The result of a check for GitHub: a Markdown table for a job's summary, and annotations of lines.

Names come from recordings, which may be anybody's: whatever is in them, they stay text. Workflow commands:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

from tabulate import tabulate

from ampmem.analysis.budgets.budget import GROWTH
from ampmem.analysis.budgets.check import Broken, CheckResult, Judged
from ampmem.analysis.difference.difference import Fold, GroupChange, WhichRun, changes_between, folded
from ampmem.output import printable
from ampmem.reporters.text.check import MOVED, answer, explained, instants_compared, limit_row, noteworthy, remarks
from ampmem.reporters.text.difference import what
from ampmem.reporters.text.plain_text import ABSENT
from ampmem.units import format_bytes

CHANGES = 20
"""The number of rows for growth."""
ANNOTATIONS = 10
"""The number of annotations: GitHub shows no more errors per step."""
_LONGEST = 300

_ENOUGH = Fraction(9, 10)
"""The share of the growth that the annotated lines explain."""

_Place: TypeAlias = tuple[str, int]
"""A file and a line of it."""

_FRAME = re.compile(r"(.+):(\d+) (.*)", re.DOTALL)
_PLAIN = re.compile(r"[^A-Za-z0-9 .,/%+()-]")

_GROWN = ("grew by", "before", "after")
_SIZES = ("bytes", "limit", "measured", *_GROWN)


def markdown(results: Sequence[CheckResult], workspace: Path) -> str:
    """The tables of all limits, and of the groups that grew or are largest.

    Files below ``workspace`` are named as they are in the repository.
    """
    return "\n".join(line for result in results for line in _of_run(result, workspace))


def commands(results: Sequence[CheckResult], workspace: Path) -> Iterator[str]:
    """The annotations as workflow commands: one for each run that fails, then one for each line that explains it.

    These are the lines at which most of the memory grew or was allocated, in files below ``workspace``.
    """
    for result in results:
        if not result.ok:
            yield f"::error title=ampmem check::{_data(answer(result))}"
    for place, message in list(_lines(results, workspace))[: ANNOTATIONS - 1]:
        file = _data(place[0]).replace(":", "%3A").replace(",", "%2C")  # a property, not the message
        yield f"::error file={file},line={place[1]},title=ampmem check::{_data(message)}"


def harmless(text: str) -> str:
    """``text`` for a log on GitHub, changed so that none of its lines is a workflow command."""
    lines = (_COMMAND.sub(r"\1: :", line) for line in text.replace("##[", "## [").split("\n"))
    return "\n".join(lines)


_COMMAND = re.compile(r"^((?:\x1b\[[0-9;]*m|\s)*)::")


def _of_run(result: CheckResult, workspace: Path) -> Iterator[str]:
    yield f"### {'✅' if result.ok else '❌'} {_text(answer(result))}"
    yield ""
    if noteworthy(result):
        yield from _table(("", "source", "limit", "measured", ""), map(_limit, noteworthy(result)))
    for each in explained(result):
        yield from (f"**{_text(each.caption)}**", "")
        if each.is_new:
            yield from _places(each.broken, workspace)
    for remark in remarks(result):
        yield from (f"- {_text(remark)}", "")


def _limit(judged: Judged) -> list[str]:
    *cells, said = map(_text, limit_row(judged))
    return [*cells, said if judged.kept else f"**{said}**"]


def _places(broken: Broken, workspace: Path) -> Iterator[str]:
    """The lines of a broken limit, as in a terminal but with more rows."""
    if instants_compared(broken):
        yield from (_text(instants_compared(broken)), "")
    if broken.held:
        yield from _folds(_groups_alive(broken), ("bytes",), workspace)
    elif not broken.grouped:
        yield from _folds(folded(broken.grew), _GROWN, None)
    else:
        if broken.grew:
            yield from _folds(folded(broken.grew), _GROWN, workspace)
        if broken.moved:
            size = sum(change.grown for change in broken.moved)
            yield from (f"{format_bytes(size)} are {MOVED}:", "")
            yield from _folds(folded(broken.moved), _GROWN, workspace)


def _folds(folds: Sequence[Fold], sizes: tuple[str, ...], workspace: Path | None) -> Iterator[str]:
    """The table of the largest ``folds``; without ``workspace`` by module, as a summary's JSON has no lines."""
    head = ("category", "module") if workspace is None else ("category", "what", "line")
    yield from _table((*sizes, *head), (_fold(fold, workspace)[-len(sizes) - len(head) :] for fold in folds[:CHANGES]))
    left = folds[CHANGES:]
    if left:
        yield from (f"… and {len(left)} smaller: {format_bytes(sum(fold.grown for fold in left))}", "")


def _fold(fold: Fold, workspace: Path | None) -> list[str]:
    several = f" ({len(fold.changes)})" if len(fold.changes) > 1 else ""
    where = [(fold.module or ABSENT) + several] if workspace is None else [what(fold), _line(fold.largest, workspace)]
    sizes = map(format_bytes, (fold.grown, fold.before, fold.after))
    return [*sizes, fold.largest.category, *map(_text, where)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table, and an empty line; sizes, which are the columns of :data:`_SIZES`, stand on the right."""
    align = ["right" if each in _SIZES else "left" for each in head]
    yield from (tabulate(list(rows), head, tablefmt="pipe", disable_numparse=True, colalign=align), "")


def _groups_alive(broken: Broken) -> tuple[Fold, ...]:
    """The groups that are alive, as changes from nothing."""
    return folded(changes_between((), broken.held))


def _lines(results: Sequence[CheckResult], workspace: Path) -> Iterator[tuple[_Place, str]]:
    """Each line once, with everything said about it."""
    messages: dict[_Place, list[str]] = defaultdict(list)
    for result in results:
        same: set[tuple[_Place, int, str]] = set()
        for broken in result.broken:
            for place, folds in _most_of(broken, workspace):
                size, what_grew = sum(fold.grown for fold in folds), _largest_changes(folds)
                if (place, size, what_grew) not in same:
                    same.add((place, size, what_grew))
                    messages[place].append(f"{_grew(broken, size)}: {what_grew}")
    yield from ((place, "; ".join(dict.fromkeys(texts))) for place, texts in messages.items())


def _grew(broken: Broken, size: int) -> str:
    if broken.held:
        return f"{format_bytes(size)} of {broken.key} are allocated here"
    if broken.key == GROWTH:
        return f"{format_bytes(size)} stay here {broken.instant}"
    return f"{broken.key} grew by {format_bytes(size)} here"


def _largest_changes(folds: Sequence[Fold]) -> str:
    """The largest changes by name, and the number of others."""
    more = f", and {len(folds) - 1} more" if len(folds) > 1 else ""
    return f"{folds[0].largest.category}, {what(folds[0])}{more}"


def _most_of(broken: Broken, workspace: Path) -> Iterator[tuple[_Place, list[Fold]]]:
    """The lines at which most of the memory grew: the first ones that make up :data:`_ENOUGH` of it.

    If nothing grew, or without a baseline, the lines at which most of it was allocated. Memory without a line of the
    user's counts in the total too.
    """
    places: dict[_Place | None, list[Fold]] = defaultdict(list)
    for fold in _groups_alive(broken) if broken.held else folded(broken.grew):
        places[_place(fold.largest, workspace)].append(fold)
    sizes = {place: sum(fold.grown for fold in folds) for place, folds in places.items()}
    left = sum(sizes.values()) * (1 - _ENOUGH)
    for place in sorted(places, key=lambda each: -sizes[each]):
        if place is not None:
            yield place, places[place]
        del sizes[place]
        if sum(sizes.values()) <= left:
            return


def _place(change: GroupChange, workspace: Path) -> _Place | None:
    """The file (below ``workspace``) and line; ``None`` for a line of the run before and for other files."""
    found = _FRAME.fullmatch(change.source_line or "")
    if found is None or change.lines_of is WhichRun.BEFORE:
        return None
    path = _below(workspace, found[1])
    return None if path is None else (path, int(found[2]))


def _line(change: GroupChange, workspace: Path) -> str:
    """The line with its file's path in the repository."""
    found = _FRAME.fullmatch(change.source_line or "")
    path = None if found is None else _below(workspace, found[1])
    return change.source_line or "" if found is None or path is None else f"{path}:{found[2]} {found[3]}"


def _below(workspace: Path, file: str) -> str | None:
    """The path of ``file`` relative to ``workspace``; ``None`` if it is elsewhere."""
    try:
        return (workspace / file).resolve().relative_to(workspace.resolve()).as_posix()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None


def _text(text: str) -> str:
    """``text`` as Markdown that only shows it: characters that could be markup become entities."""
    shown = printable(text)
    shown = shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
    return _PLAIN.sub(lambda character: f"&#{ord(character[0])};", shown)


def _data(text: str) -> str:
    """``text`` as the message of a command."""
    return printable(text)[:_LONGEST].replace("%", "%25")
