"""One self-contained HTML page: everything is in the file, and its policy forbids it to load anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plotly.offline import get_plotlyjs

from ampmem.reporters.html.palette import FILLS
from ampmem.reporters.html.safety import escaped, json_for_script, script_source_hash
from ampmem.reporters.html.timeline_view import TimelineView
from ampmem.units import format_bytes

PLOTLY_CONFIG: dict[str, bool | str] = {
    # By default plotly offers a button that uploads the chart to a server.
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "displaylogo": False,
    "showTips": False,
    "typesetMath": False,
    "responsive": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One large number and what it is."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A titled table of plain texts; every row has a cell for every column of ``columns``.

    ``numeric`` columns are aligned to the right. ``swatch`` is the column that holds category names
    and gets their colour, if there is one.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    swatch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What the page says about one recording. All texts are plain: they are escaped here and nowhere else."""

    title: str
    facts: tuple[str, ...]
    notes: tuple[str, ...]
    headlines: tuple[Headline, ...]
    timeline: TimelineView | None
    tables: tuple[Table, ...]


def render(sections: Sequence[Section]) -> str:
    """The whole page, ready to be written as UTF-8."""
    plotly, drawing = get_plotlyjs(), _beside("page.js")
    views = [section.timeline.as_json() for section in sections if section.timeline]
    data = json_for_script({"config": PLOTLY_CONFIG, "timelines": views})
    title = ", ".join(section.title for section in sections)
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(plotly, drawing)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{escaped(title)} - ampmem</title>\n<style>\n{_beside('page.css')}</style>\n</head>\n<body>\n",
            "<h1>Where the memory went</h1>\n",
            *(part for number, section in enumerate(sections) for part in _section(number, section)),
            '<p class="quiet">Made by ampmem. This page loads nothing from the network.</p>\n',
            f'<script type="application/json" id="page-data">{data}</script>\n',
            f"<script>{plotly}</script>\n<script>{drawing}</script>\n</body>\n</html>\n",
        )
    )


def element_id(number: int) -> str:
    """The id of the element that the chart of section ``number`` is drawn in."""
    return f"timeline-{number}"


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    allowed = " ".join(script_source_hash(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _section(number: int, section: Section) -> Iterator[str]:
    yield f'<section>\n<h2>{escaped(section.title)}</h2>\n<p class="quiet">'
    yield " · ".join(escaped(fact) for fact in section.facts) + "</p>\n"
    for note in section.notes:
        yield f'<p class="card">{escaped(note)}</p>\n'
    yield '<dl class="headline">\n'
    for headline in section.headlines:
        detail = f"<small>{escaped(headline.detail)}</small>" if headline.detail else ""
        yield f"<div><dt>{escaped(headline.label)}</dt><dd>{escaped(headline.value)}{detail}</dd></div>\n"
    yield "</dl>\n"
    if section.timeline:
        yield _timeline_card(element_id(number), section.timeline)
    for table in section.tables:
        yield from _table_card(table)
    yield "</section>\n"


def _timeline_card(element: str, view: TimelineView) -> str:
    drawn = f"{view.events:,} allocator events"
    if len(view.instants) <= view.events:
        drawn += f", drawn at {len(view.instants):,} instants: the lowest and the highest of every stretch, exact"
    label = f"Live bytes of every category after each allocator event; the peak is {format_bytes(view.peak.bytes)}"
    return (
        f'<div class="card">\n<h3>Memory over the run</h3>\n<p class="quiet">{escaped(drawn)}.</p>\n'
        f'<div class="chart" id="{element}" role="img" aria-label="{escaped(label)}"></div>\n</div>\n'
    )


def _table_card(table: Table) -> Iterator[str]:
    kinds = [' class="number"' if column in table.numeric else "" for column in range(len(table.columns))]
    yield f'<div class="card">\n<h3>{escaped(table.title)}</h3>\n<div class="table">\n<table>\n<thead><tr>'
    for kind, name in zip(kinds, table.columns, strict=True):
        yield f'<th scope="col"{kind}>{escaped(name)}</th>'
    yield "</tr></thead>\n<tbody>\n"
    for row in table.rows:
        cells = zip(range(len(row)), kinds, row, strict=True)
        yield "<tr>" + "".join(f"<td{kind}>{_cell(text, column == table.swatch)}</td>" for column, kind, text in cells)
        yield "</tr>\n"
    yield "</tbody>\n</table>\n</div>\n</div>\n"


def _cell(text: str, swatch: bool) -> str:
    if not swatch or text not in FILLS:
        return escaped(text)
    fill = FILLS[text]
    return f'<span class="swatch" style="background: light-dark({fill.light}, {fill.dark})"></span>{escaped(text)}'
