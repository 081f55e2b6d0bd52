"""The page of a watched run: the whole run as a line, its end, and links to each full recording's own page."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ampmem.analysis.jsonable import like
from ampmem.analysis.watched import WatchedSummary, full_recording, watched_run
from ampmem.output import check_output, write_text
from ampmem.recording.watched import Row
from ampmem.recording.watched_file import read_watched
from ampmem.reporters.html.page import ChartView, render_chart
from ampmem.reporters.html.palette import CategoryView, category_views
from ampmem.reporters.html.safety import MAX_PROSE, visible
from ampmem.reporters.html.stream import extreme_positions
from ampmem.reporters.text.watched import (
    FULL_COLUMNS,
    HELD_COLUMNS,
    PHASES,
    full_row,
    held_rows,
    shortage_lines,
    summary_lines,
    watched_heading,
    watched_verdict,
)
from ampmem.units import format_bytes

_POINTS = 1500
"""At most twice this many steps are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLine:
    """A line over the steps, with sizes in bytes."""

    name: str
    steps: tuple[int, ...]
    bytes: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullView:
    """A full recording: its row in the table, its own page next to this one, its first and last step as a band.

    ``categories`` are those at its peak, in bytes.
    """

    cells: tuple[str, ...]
    page: str | None
    first: int
    last: int
    categories: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedView(ChartView):
    """The data that the page is drawn from; ``failed`` is the step in which the run failed."""

    command: str
    lines: tuple[str, ...]
    curves: tuple[WatchedLine, ...]
    categories: tuple[CategoryView, ...] = field(default_factory=category_views)
    limit: int | None
    limit_text: str
    failed: int | None
    shortage: tuple[str, ...]
    held_columns: tuple[str, ...]
    held: tuple[tuple[str, ...], ...]
    full_columns: tuple[str, ...]
    full: tuple[FullView, ...]
    commands: tuple[str, ...]
    notes: tuple[str, ...]


def write_watched(file: Path, output: Path, *, force: bool = False) -> list[Path]:
    """Write the page of the run at ``file`` and, next to it, the replaced pages of its full recordings.

    Returns all pages, the run's first. Raises what reading ``file`` raises, and :class:`~ampmem.errors.UsageError` when
    ``output`` cannot be written.
    """
    from ampmem.reporters.html.write import write

    check_output(output, force=force, source=file)
    run = read_watched(file)
    found = watched_run(run)
    pages: dict[int, Path] = {}
    with tempfile.TemporaryDirectory(prefix="ampmem-") as folder:
        for part in found.full:
            if part.peak is not None:
                pages[part.number] = output.with_name(f"{output.stem}.full-{part.number}.html")
                recording = Path(folder) / f"{file.stem}-{part.first}.ampmem"
                full_recording(run, part.number, recording)
                write([recording], pages[part.number], force=True)
    names = {number: page.name for number, page in pages.items()}
    write_text(output, render_chart("watched", watched_view(found, run.rows, names)), force=force)
    return [output, *pages.values()]


def watched_view(found: WatchedSummary, rows: Sequence[Row], pages: dict[int, str]) -> WatchedView:
    """The page's data from the run; ``pages`` are those of full recordings, by number."""
    shown = rows_to_draw(rows, _POINTS)
    short = found.shortage
    return WatchedView(
        title=visible(f"{watched_verdict(found)}.", MAX_PROSE),
        command=visible(watched_heading(found), MAX_PROSE),
        lines=_page_texts(summary_lines(found)),
        curves=_curves(shown),
        limit=found.run.limit,
        limit_text="" if found.run.limit is None else f"the device's {format_bytes(found.run.limit)}",
        failed=None if found.ending is None or found.ending.failure is None else found.ending.step,
        shortage=() if short is None else _page_texts(shortage_lines(short)),
        held_columns=HELD_COLUMNS,
        held=() if short is None else tuple(map(_page_texts, held_rows(short))),
        full_columns=FULL_COLUMNS,
        full=tuple(
            like(FullView, part, cells=tuple(full_row(part, found.run.every)), page=pages.get(part.number))
            for part in found.full
        ),
        commands=_page_texts(found.commands),
        notes=_page_texts(found.notes),
    )


def _page_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """``texts``, which may quote the script, made safe for the page."""
    return tuple(visible(text, MAX_PROSE) for text in texts)


def rows_to_draw(rows: Sequence[Row], most: int) -> list[Row]:
    """At most twice ``most`` of ``rows``, with all extremes of the peak and of allocated memory after a step."""
    if len(rows) <= 2 * most:
        return list(rows)
    series = (np.array([row.peak for row in rows]), np.array([row.alive for row in rows]))
    kept = np.union1d(*(extreme_positions(each, most // 2) for each in series))
    return [rows[position] for position in kept.tolist()]


def _curves(rows: Sequence[Row]) -> tuple[WatchedLine, ...]:
    def line(name: str, size: Callable[[Row], int], text: Callable[[Row], str]) -> WatchedLine:
        return WatchedLine(
            name=name,
            steps=tuple(row.step for row in rows),
            bytes=tuple(map(size, rows)),
            texts=_page_texts(map(text, rows)),
        )

    curves = [
        ("peak", lambda row: row.peak, _peak_text),
        ("allocated after the step", lambda row: row.alive, lambda row: f"{format_bytes(row.alive)} allocated after"),
    ]
    if any(row.reserved for row in rows):
        curves.append(("reserved", lambda row: row.reserved, lambda row: f"{format_bytes(row.reserved)} reserved"))
    return tuple(line(*curve) for curve in curves)


def _peak_text(row: Row) -> str:
    batch = f", batch {row.batch}" if row.batch else ""
    return f"step {row.step}: peak {format_bytes(row.peak)}, {PHASES.get(row.phase, row.phase)}{batch}"
