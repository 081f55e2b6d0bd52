"""One self-contained HTML page: everything is in the file, and its policy forbids it to load anything."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from ampmem.analysis.json.jsonable import NOT_IN_JSON, plain
from ampmem.analysis.timeline.categories import PRECISION_COPIES
from ampmem.reporters.html import plotlyjs
from ampmem.reporters.html.page.bundle import bundle
from ampmem.reporters.html.page.template import FOLDER, filled
from ampmem.reporters.html.palette import CategoryView, category_views, layer_views
from ampmem.reporters.html.run import RunView
from ampmem.reporters.html.safety import json_for_script, script_source_hash, visible
from ampmem.reporters.html.views.changes import ChangesView
from ampmem.reporters.html.views.comparison import ComparisonView
from ampmem.reporters.html.views.job import JobView
from ampmem.reporters.html.views.verdict import VerdictView
from ampmem.reporters.text.common.words import IN_SHORT
from ampmem.version import __version__
from ampmem.vocabulary import AUTOCAST_ARMS

_TEMPLATE = "page.html"
_JOB_TEMPLATE = "ranks.html"
_STYLE = "page.css"
_ENTRY = "main.js"
_MODULES = FOLDER.parent / "js"

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
class PageView:
    """All that the page is drawn from; ``opens`` is the index of the run that it opens on.

    ``marks`` has what the instants of a step are called at the head of a column; ``autocast_arms`` are the precisions
    whose tables have a row for the ``precision_copies`` together in any case.
    """

    ampmem: str
    config: Mapping[str, bool | str]
    categories: tuple[CategoryView, ...]
    precision_copies: tuple[str, ...]
    autocast_arms: tuple[str, ...]
    marks: Mapping[str, str]
    layers: tuple[CategoryView, ...]
    runs: tuple[RunView, ...]
    opens: int
    comparison: ComparisonView | None
    changes: ChangesView | None
    verdict: VerdictView = field(metadata=NOT_IN_JSON)
    job: JobView | None = field(default=None, metadata=NOT_IN_JSON)


def page_view(
    runs: tuple[RunView, ...],
    comparison: ComparisonView | None,
    verdict: VerdictView,
    *,
    job: JobView | None = None,
    changes: ChangesView | None = None,
    opens: int | None = None,
) -> PageView:
    """The page of ``runs``, which are some ranks of ``job`` if there is one; it opens on the run at ``opens``.

    ``changes`` are those from the first run to the second where they are of changed code.
    """
    return PageView(
        ampmem=__version__,
        config=PLOTLY_CONFIG,
        categories=category_views(),
        precision_copies=PRECISION_COPIES,
        autocast_arms=AUTOCAST_ARMS,
        marks={mark.value: name for mark, name in IN_SHORT.items()},
        layers=layer_views(),
        runs=runs,
        opens=opens_on([run.arm for run in runs]) if opens is None else opens,
        comparison=comparison,
        changes=changes,
        verdict=verdict,
        job=job,
    )


def opens_on(arms: Sequence[str]) -> int:
    """Which of these runs the page opens on: the one in mixed precision, else the first."""
    return next((arms.index(arm) for arm in AUTOCAST_ARMS if arm in arms), 0)


def render(view: PageView) -> str:
    """The whole page, ready to be written as UTF-8."""
    title = ", ".join(dict.fromkeys(run.title for run in view.runs))
    if view.job is None:
        return self_contained(_TEMPLATE, _ENTRY, view, title=title, verdict=view.verdict)
    return self_contained(_JOB_TEMPLATE, _ENTRY, view, title=title, verdict=view.verdict, job=view.job)


def self_contained(template: str, entry: str, data: object, *, title: str, **more: object) -> str:
    """The page that ``template`` gives with the modules behind ``entry``, plotly.js, ``data`` and ``more`` in it."""
    return filled(template, title=visible(title), data_json=json_for_script(plain(data)), **_files(entry), **more)


@cache
def _files(entry: str) -> dict[str, str]:
    """What is in every page with the modules behind ``entry``, whatever it shows."""
    script = bundle(_MODULES / entry)
    return {
        "policy": _policy(script_source_hash(script), script_source_hash(plotlyjs.source())),
        "css": (FOLDER / _STYLE).read_text(encoding="utf-8"),
        "plotly_packed": base64.b64encode(plotlyjs.packed()).decode("ascii"),
        "script": script,
    }


def _policy(*scripts: str) -> str:
    return (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
