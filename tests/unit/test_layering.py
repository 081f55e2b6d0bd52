"""Who may import whom, read from the source of every module: the rows of the layout, from the bottom up."""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import pytest

PACKAGE = "ampmem"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE

ROWS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "documentation errors failure growth names own_code patching units version vocabulary",
        "additions output results signals",
        "events",
        "recording",
        "allocator",
        "importer",
        "analysis",
        "simulator",
        "recorder",
        "reporters",
        "block",
        "watched_block",
        "api",
        "integrations",
        # `import ampmem`: the face that api.py and the integrations are seen through.
        "__init__",
        "workloads",
        "cli",
        "__main__",
    )
)
ROW_OF = {unit: number for number, row in enumerate(ROWS) for unit in row}

STRANGERS = {"recorder": "analysis", "analysis": "recorder"}
"""Units that do not see each other, whatever their rows."""

INSIDE: dict[str, tuple[str, ...]] = {
    "recording": ("bounds watched", "database", "rank_files", "appending reader", "writer", "watched_file"),
    "allocator": ("settings", "blocks gpus", "oom segments", "caching snapshot", "trace"),
    "recorder": (
        "script marker process torch_private",
        "comparable outcome options",
        "facts ranks",
        "models",
        "steering",
        "compiled sources steps",
        "running",
        "hooks device",
        "script_listener",
        "writing",
        "session simulated_block",
        "evaluation watch",
    ),
    "recorder/watch": ("gauges", "watcher"),
    "recorder/torch_private": ("entries", "cuda distributed general inductor"),
    "recorder/compiled": ("text", "graphs", "code"),
    "recorder/sources": (
        "base extension storages torch_flags",
        "ledger window",
        "cpu cuda simulated",
        "choose",
    ),
    "simulator": (
        "assumed branches refusal where",
        "world",
        "private",
        "memory",
        "device scratch",
        "ops",
        "extras values",
        "likely",
        "reads",
        "mode",
        "communication torch_cuda",
        "start",
    ),
    "analysis": (
        "jsonable ops",
        "timeline",
        "parameters",
        "activations casts estimate largest modules",
        "static_model",
        "blocks",
        "fit layers levers",
        "out_of_memory",
        "fine_tuning",
        "analyse",
        "findings",
        "summary",
        "comparison soundness watched",
        "suggested",
        "changes",
        "advise",
        "answer",
        "ranks",
        "advised",
        "difference",
        "budgets",
    ),
    "analysis/timeline": ("categories lifetimes marks", "predictions", "classify", "timeline"),
    "analysis/static_model": ("recipes", "evidence", "explain", "verdict"),
    "analysis/findings": ("base", "copies precision training_loop whole_run", "attention"),
    "analysis/ranks": ("ranks", "jobs", "merge"),
    "analysis/difference": ("sides", "matching", "difference"),
    "analysis/budgets": ("budget", "run", "check"),
    "importer": ("replay unpickle", "trace", "infer", "recording"),
    "cli/processes": (
        "kernel",
        "protection",
        "messages plan starting",
        "children end_messages",
        "script_run spawned_rank",
        "launcher spawn_message",
        "spawned",
    ),
    "integrations": ("loggers", "training", "accelerate lightning notebook pytest transformers"),
    "integrations/pytest": ("limits", "judging", "plugin"),
    "integrations/notebook": ("cells shell", "recorded", "extension"),
    "reporters/html": (
        "palette plotlyjs progress safety",
        "stream",
        "run small_timeline",
        "verdict",
        "comparison ranks",
        "page",
        "advise_page estimate_page fit_page",
        "write",
        "watched_page",
        "notebook",
    ),
}
"""The rows inside folders, from the bottom up."""

MAY_IMPORT_TORCH = frozenset({"additions", "recorder", "simulator", "workloads", "integrations"})


def unit_of(path: str) -> str:
    """The module or folder right under the package: ``analysis`` for ``analysis/casts.py``."""
    return path.split("/")[0].removesuffix(".py")


@functools.cache
def imported_modules(path: str, source: str) -> tuple[str, ...]:
    """The dotted name of everything that the module at ``path`` imports, ``if TYPE_CHECKING`` or in a function too.

    ``from a import b`` gives ``a.b``: whether ``b`` is a module does not matter for who sees whom.
    """
    return tuple(_imported(path, source))


def _imported(path: str, source: str) -> Iterator[str]:
    package = [PACKAGE, *path.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parts = [*base, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*parts, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func):
            yield from (
                argument.value
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )


def _is_dynamic_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def violations(tree: Mapping[str, str]) -> list[str]:
    """What breaks the layering in ``tree``, which maps paths relative to the package to source text."""
    found = []
    for path, source in sorted(tree.items()):
        unit = unit_of(path)
        if unit not in ROW_OF:
            found.append(f"{path}: in no row of the layout")
            continue
        for name in imported_modules(path, source):
            complaint = _complaint(unit, name.split("."))
            if complaint:
                found.append(f"{path}: imports {name}: {complaint}")
    return found


def _complaint(unit: str, name: list[str]) -> str | None:
    if name[0] == "torch":
        return None if unit in MAY_IMPORT_TORCH else "torch is not for this folder"
    if name[0] != PACKAGE:
        return None
    target = name[1] if len(name) > 1 and name[1] in ROW_OF else "__init__"
    if target == unit:
        return None
    if STRANGERS.get(unit) == target:
        return "these two do not see each other"
    return None if ROW_OF[target] < ROW_OF[unit] else "not a row below"


def imported_files(tree: Mapping[str, str]) -> dict[str, set[str]]:
    """Which files of ``tree`` each of its files imports; a name is that of the longest path that is a file there."""
    return {path: set(_targets(path, tree)) - {path} for path in tree}


def _targets(path: str, tree: Mapping[str, str]) -> Iterator[str]:
    for name in imported_modules(path, tree[path]):
        first, *parts = name.split(".")
        if first != PACKAGE:
            continue
        for length in range(len(parts), -1, -1):
            module = "/".join(parts[:length])
            found = [file for file in (f"{module}.py", f"{module}/__init__.py".lstrip("/")) if file in tree]
            if found:
                yield found[0]
                break


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Every group of nodes that lead to each other, as one line."""
    reached = {node: _reached(graph, node) for node in graph}
    groups = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return sorted(" <-> ".join(sorted(group)) for group in groups if len(group) > 1)


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        for target in graph.get(pending.pop(), ()):
            if target not in found:
                found.add(target)
                pending.append(target)
    return found


def neighbours(folder: str, graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """``graph`` as seen from ``folder``: its own modules and the folders in it, and which of them imports which."""
    seen: dict[str, set[str]] = {}
    lead = f"{folder}/" if folder else ""
    for path, targets in graph.items():
        if path.startswith(lead):
            unit = unit_of(path.removeprefix(lead))
            inside = {unit_of(target.removeprefix(lead)) for target in targets if target.startswith(lead)}
            seen.setdefault(unit, set()).update(inside - {unit})
    return seen


def upward(folder: str, rows: Sequence[str], graph: Mapping[str, set[str]]) -> list[str]:
    """What breaks the ``rows`` of ``folder``, from the bottom up: an import that does not lead down, a unit in none."""
    row_of = {unit: number for number, row in enumerate(rows) for unit in row.split()}
    seen = neighbours(folder, graph)
    found = [f"{folder}: {unit} is in no row" for unit in sorted(seen.keys() - row_of.keys() - {"__init__"})]
    return found + [
        f"{folder}: {unit} imports {target}: not a row below"
        for unit, targets in sorted(seen.items())
        for target in sorted(targets)
        if unit in row_of and target in row_of and row_of[target] >= row_of[unit]
    ]


def folders_of(tree: Iterable[str]) -> list[str]:
    """Every folder of ``tree``; ``""`` is the package itself."""
    parents = {parent.as_posix() for path in tree for parent in PurePosixPath(path).parents}
    return sorted("" if parent == "." else parent for parent in parents)


@functools.cache
def package_sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}


CIRCLE = {
    "recorder/session.py": "from ampmem.recorder.hooks.a import A",
    "recorder/hooks/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ampmem.recorder.b import B",
    "recorder/b.py": "def late():\n    from ampmem.recorder.session import Session",
    "recorder/__init__.py": "",
}


def test_a_circle_of_files_is_found_type_only_and_late_imports_too() -> None:
    assert circles(imported_files(CIRCLE)) == ["recorder/b.py <-> recorder/hooks/a.py <-> recorder/session.py"]
    without = {**CIRCLE, "recorder/b.py": "import ampmem.recorder\nfrom ampmem.version import __version__"}
    assert circles(imported_files(without)) == []


def test_a_circle_of_folders_is_found_where_no_file_leads_back() -> None:
    graph = imported_files(
        {
            "recorder/hooks/a.py": "from ampmem.recorder.steering.b import b",
            "recorder/hooks/c.py": "",
            "recorder/steering/b.py": "from ampmem.recorder.hooks import c",
        }
    )
    assert circles(graph) == []
    assert circles(neighbours("recorder", graph)) == ["hooks <-> steering"]
    assert upward("recorder", ("hooks", "steering"), graph) == ["recorder: hooks imports steering: not a row below"]
    assert upward("recorder", ("hooks",), graph) == ["recorder: steering is in no row"]


def test_the_package_keeps_its_layers() -> None:
    assert violations(package_sources()) == []


@functools.cache
def package_imports() -> dict[str, set[str]]:
    return imported_files(package_sources())


def test_no_file_leads_back_to_itself() -> None:
    assert circles(package_imports()) == []


def test_no_folder_leads_back_to_itself_by_a_folder_or_module_beside_it() -> None:
    graph = package_imports()
    found = {folder: circles(neighbours(folder, graph)) for folder in folders_of(graph)}
    assert {folder: groups for folder, groups in found.items() if groups} == {}


@pytest.mark.parametrize("folder", list(INSIDE))
def test_inside_a_folder_too_imports_lead_down(folder: str) -> None:
    assert upward(folder, INSIDE[folder], package_imports()) == []


def test_the_package_is_read_at_all() -> None:
    sources = package_sources()
    assert "recording/reader.py" in sources
    assert "ampmem.events.Recording" in set(imported_modules("recording/reader.py", sources["recording/reader.py"]))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("events.py", "from ampmem.recording import read"),
        ("units.py", "import ampmem.errors"),
        ("analysis/a.py", "from ampmem.recorder import session"),
        ("recorder/a.py", "from ampmem.analysis.summary import Summary"),
        ("recorder/hooks/a.py", "from ...analysis import summary"),
        ("allocator/a.py", "from ampmem import analysis"),
        ("analysis/a.py", "from ..reporters import table"),
        ("reporters/html/page.py", "from ampmem.api import load"),
        ("recorder/a.py", "import ampmem"),
        ("recorder/a.py", "from ampmem import profile"),
        ("recorder/a.py", "from ampmem import __version__"),
        ("workloads/a.py", "from ampmem.cli.main import main"),
        ("integrations/a.py", "from ampmem.workloads import gpt"),
        ("analysis/a.py", "import torch"),
        ("__init__.py", "from ampmem.cli.main import main"),
        ("api.py", "import ampmem"),
        ("api.py", "from torch import nn"),
        ("cli/profile.py", "import torch.nn.functional as F"),
        ("events.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("reporters/a.py", "def late():\n    import torch"),
        ("reporters/a.py", "import importlib\nimportlib.import_module('torch')"),
        ("events.py", "from importlib import import_module\nimport_module('ampmem.api')"),
        ("helpers.py", ""),
    ],
)
def test_a_violation_is_found(path: str, source: str) -> None:
    assert len(violations({path: source})) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("events.py", "from ampmem.errors import AmpmemError"),
        ("analysis/a.py", "import numpy as np\nfrom ampmem.analysis.b import c\nfrom .b import d"),
        (
            "recorder/a.py",
            "import torch\nfrom ampmem.version import __version__\nfrom ampmem.recording import RecordingWriter",
        ),
        ("recorder/hooks/a.py", "from ..log import Log"),
        ("api.py", "from ampmem.recorder import session\nfrom ampmem import analysis, reporters"),
        ("workloads/a.py", "from torch import nn\nimport torchvision"),
        ("cli/show.py", "import ampmem\nfrom ampmem.workloads import gpt"),
        ("__main__.py", "from ampmem.cli.main import main"),
        ("__init__.py", "from ampmem.api import profile"),
    ],
)
def test_what_the_layout_allows_is_allowed(path: str, source: str) -> None:
    assert violations({path: source}) == []
