"""What came of each test, probe or measurement of a run on a GPU: one row each, in the file as soon as it is known."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

Fact: TypeAlias = "str | int | float | bool | list[Fact] | dict[str, Fact] | None"

FILE = "AMPMEM_GPU_RESULTS"
"""The environment variable that names the file to which a part writes its rows."""

STARTED, PASSED, FAILED, SKIPPED = "started", "passed", "failed", "skipped"
REFUSED, LATE, DIED, NO_TIME = "refused", "timed out", "died", "no time left"
BROKEN = frozenset({STARTED, FAILED, LATE, DIED})
"""Outcomes that are to be looked into; a row that only ``started`` was running when its process ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One outcome: a word of the above, and ``detail`` in a line."""

    name: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""
    facts: dict[str, Fact] = field(default_factory=dict)


def append(path: Path, row: Row) -> None:
    """Add ``row``, on the disk before this returns: the machine may go away at any time."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(row)) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def report(row: Row) -> None:
    """Add ``row`` to the file that the environment names; nothing where it names none."""
    if path := os.environ.get(FILE):
        append(Path(path), row)


def read(path: Path) -> list[Row]:
    """The last row of each name, in order; a line that was cut off when its process ended is left out."""
    rows: dict[str, Row] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = Row(**json.loads(line))
            except (ValueError, TypeError):
                continue
            rows[row.name] = row
    return list(rows.values())


def verdict(rows: Iterable[Row]) -> str:
    """``ok`` where at least one passed and none is broken; else why not."""
    outcomes = [row.outcome for row in rows]
    broken = sum(outcome in BROKEN for outcome in outcomes)
    if broken:
        return f"{broken} failed"
    if PASSED in outcomes:
        return "ok"
    return "nothing passed"


def counts(rows: Iterable[Row]) -> str:
    """How many had which outcome, such as ``3 passed, 1 skipped``."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.outcome] = found.get(row.outcome, 0) + 1
    return ", ".join(f"{count} {outcome}" for outcome, count in found.items())


def replace(path: Path, text: str) -> None:
    """Write ``path`` whole, or leave it as it was."""
    half = path.with_name(f"{path.name}.new")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lines of cells, in columns."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))] if rows else []
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
