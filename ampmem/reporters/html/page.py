"""One self-contained HTML page: everything is in the file, and its policy forbids it to load anything.

A page that allows scripts by their hash cannot import modules, so its ES modules are put one after the other inside one
function. That is right for modules of a simple form, and every other form is refused:

* imports are ``import { a, b } from "./x.js";``, each on one line, without renaming, and of names that are exported;
  other folders are ``"./data/x.js"`` and ``"../data/x.js"``, and nothing is above the folder of the entry;
* exports are the word ``export`` before a declaration;
* names at the top level differ over all modules, and imports make no cycle.

Comments on lines of their own are left out: they are a fourth of the modules, and the page has no use for them.
"""

from __future__ import annotations

import base64
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ampmem.analysis.jsonable import NOT_IN_JSON, plain
from ampmem.analysis.timeline.categories import PRECISION_COPIES
from ampmem.reporters.html import plotlyjs
from ampmem.reporters.html.comparison import ChangesView, ComparedRuns
from ampmem.reporters.html.palette import CategoryView, category_views, layer_views
from ampmem.reporters.html.ranks import JobView
from ampmem.reporters.html.run import RunView
from ampmem.reporters.html.safety import FOLDER, filled_template, json_for_script, script_source_hash, visible
from ampmem.reporters.html.verdict import VerdictView
from ampmem.reporters.text.plain_text import IN_SHORT
from ampmem.version import __version__
from ampmem.vocabulary import AUTOCAST_PRECISIONS

_PATH = r"(?:\./|(?:\.\./)+)(?:[\w-]+/)*[\w.-]+\.js"
_IMPORT = re.compile(rf'import \{{ ([\w$]+(?:, [\w$]+)*,?) \}} from "({_PATH})";(?: *//.*)?')
_DECLARATION = re.compile(r"(?P<export>export )?(?:async )?(?:function\*?|class|const|let|var) (?P<name>[\w$]+)")
_MODULE_WORD = re.compile(r"\s*(?:import|export)\b")
_COMMENT = re.compile(r"^[ \t]*(?:/\*\*(?:(?!\*/).)*\*/|//[^\n]*)[ \t]*\n", re.DOTALL | re.MULTILINE)
"""A comment on lines of its own."""
_NEVER = re.compile(r"</script|<!--|\bimport\s*\(|\bimport\.meta\b", re.IGNORECASE)


class BundleError(Exception):
    """A module cannot be bundled because of its form: a bug in ampmem, not in its user's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JsModule:
    """A module: ``name`` is its path from the entry's folder, ``names`` are all top-level names.

    ``exports`` are the exported names. ``imports`` are names of modules, each with the names imported from it.
    """

    name: str
    imports: tuple[tuple[str, tuple[str, ...]], ...]
    names: tuple[str, ...]
    exports: frozenset[str]
    body: str


def bundle(entry: Path) -> str:
    """``entry`` and all modules that it imports, each after its own imports."""
    modules: dict[str, _JsModule] = {}
    _collect(entry.parent, entry.name, modules, ())
    _check(modules.values())
    bodies = "\n".join(f"// {module.name}\n{module.body}" for module in modules.values())
    return f'(async () => {{\n"use strict";\n{bodies}\n}})();\n'


def _collect(folder: Path, name: str, modules: dict[str, _JsModule], above: tuple[str, ...]) -> None:
    if name in above:
        raise BundleError(f"{' -> '.join((*above, name))}: these modules import each other in a cycle")
    if name in modules:
        return
    if not (folder / name).is_file():
        raise BundleError(f"{' -> '.join((*above, name))}: no such module")
    module = _parse(folder, name)
    for imported, _ in module.imports:
        _collect(folder, imported, modules, (*above, name))
    modules[name] = module


def _resolved(name: str, path: str) -> str:
    """The name of the module that ``name`` imports as ``path``."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
    if found.startswith("../"):
        raise BundleError(f"{name}: {path} is outside of the folder of the modules")
    return found


def _parse(folder: Path, name: str) -> _JsModule:
    text = (folder / name).read_text(encoding="utf-8")
    never = _NEVER.search(text)
    if never:
        raise BundleError(f"{name}: {never[0]!r} cannot stand in the page's script")
    imports, lines = [], []
    names: list[str] = []
    exports: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        found, declared = _IMPORT.fullmatch(line), _DECLARATION.match(line)
        if found:
            imports.append((_resolved(name, found[2]), tuple(found[1].rstrip(",").split(", "))))
            continue
        if declared:
            names.append(declared["name"])
            if declared["export"]:
                exports.add(declared["name"])
                line = line.removeprefix("export ")
        elif _MODULE_WORD.match(line):
            raise BundleError(f"{name}:{number}: this form of import or export is not supported: {line.strip()}")
        lines.append(line)
    return _JsModule(
        name=name,
        imports=tuple(imports),
        names=tuple(names),
        exports=frozenset(exports),
        body=_COMMENT.sub("", "\n".join(lines)),
    )


def _check(modules: Iterable[_JsModule]) -> None:
    by_name = {module.name: module for module in modules}
    owner: dict[str, str] = {}
    for module in by_name.values():
        for name in module.names:
            if name in owner:
                raise BundleError(f"{module.name}: the name {name} is in {owner[name]} already")
            owner[name] = module.name
        for imported, wanted in module.imports:
            missing = [name for name in wanted if name not in by_name[imported].exports]
            if missing:
                raise BundleError(f"{module.name}: {imported} does not export {', '.join(missing)}")


_MODULES = FOLDER.parent / "js"

PLOTLY_CONFIG: dict[str, bool | str] = {
    # Plotly offers a button that uploads the chart to a server unless it is switched off.
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "displaylogo": False,
    "showTips": False,
    "typesetMath": False,
    "responsive": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartView:
    """The data that each page of texts and one chart is drawn from."""

    ampmem: str = __version__
    config: Mapping[str, bool | str] = field(default_factory=lambda: PLOTLY_CONFIG)
    title: str


def render_chart(kind: str, view: ChartView) -> str:
    """The HTML of a page with one chart; ``kind`` is the name of its template and of its script."""
    return self_contained(f"{kind}.html", f"{kind}.js", view, title=view.title)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView(ChartView):
    """The data from which the page is drawn; ``opens`` is the index of the run that is shown first.

    ``marks`` has the names of a step's instants at the head of a column; ``autocast_precisions`` are the precisions
    whose tables always have a row for all ``precision_copies``.
    """

    categories: tuple[CategoryView, ...] = field(default_factory=category_views)
    precision_copies: tuple[str, ...] = PRECISION_COPIES
    autocast_precisions: tuple[str, ...] = AUTOCAST_PRECISIONS
    marks: Mapping[str, str] = field(default_factory=lambda: {mark.value: name for mark, name in IN_SHORT.items()})
    layers: tuple[CategoryView, ...] = field(default_factory=layer_views)
    runs: tuple[RunView, ...]
    opens: int
    comparison: ComparedRuns | None
    changes: ChangesView | None
    verdict: VerdictView = field(metadata=NOT_IN_JSON)
    job: JobView | None = field(default=None, metadata=NOT_IN_JSON)


def page_view(
    runs: tuple[RunView, ...],
    comparison: ComparedRuns | None,
    verdict: VerdictView,
    *,
    job: JobView | None = None,
    changes: ChangesView | None = None,
    opens: int | None = None,
) -> PageView:
    """The page of ``runs``, which are ranks of ``job`` if there is one; it opens on the run at ``opens``.

    ``changes`` are those from the first run to the second, if they are runs of changed code.
    """
    return PageView(
        title=", ".join(dict.fromkeys(run.title for run in runs)),
        runs=runs,
        opens=opens_on([run.precision for run in runs]) if opens is None else opens,
        comparison=comparison,
        changes=changes,
        verdict=verdict,
        job=job,
    )


def opens_on(precisions: Sequence[str]) -> int:
    """The run that the page opens on: the one in mixed precision, else the first."""
    return next((precisions.index(precision) for precision in AUTOCAST_PRECISIONS if precision in precisions), 0)


def render(view: PageView) -> str:
    """The HTML of the whole page."""
    template = "page.html" if view.job is None else "ranks.html"
    return self_contained(template, "main.js", view, title=view.title, verdict=view.verdict, job=view.job)


def self_contained(template: str, entry: str, data: object, *, title: str, first: str = "", **more: object) -> str:
    """The page from ``template`` with the modules behind ``entry``, plotly.js, ``data`` and ``more`` in it.

    ``first`` is a script that runs before the modules.
    """
    values = {"title": visible(title), "data_json": json_for_script(plain(data)), **_files(entry, first), **more}
    return filled_template(template, **values)


@cache
def _files(entry: str, first: str) -> dict[str, str]:
    """The parts of every page with the modules behind ``entry`` and the script ``first``, whatever it shows."""
    script = first + bundle(_MODULES / entry)
    return {
        "policy": _policy(script_source_hash(script), script_source_hash(plotlyjs.source())),
        "css": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "plotly_packed": base64.b64encode(plotlyjs.packed()).decode("ascii"),
        "script": script,
    }


def _policy(*scripts: str) -> str:
    return (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
