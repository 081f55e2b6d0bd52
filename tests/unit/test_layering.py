"""Who may import whom, read from the source of every module: the rows of the layout, from the bottom up."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "ampmem"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE

ROWS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "errors failure units own_code patching version vocabulary",
        "outputs",
        "events",
        "recording",
        "allocator",
        "importer",
        "analysis",
        "simulator",
        "recorder",
        "reporters",
        "api",
        # `import ampmem`: the face that api.py is seen through.
        "__init__",
        "integrations",
        "workloads",
        "cli",
        "__main__",
    )
)
ROW_OF = {unit: number for number, row in enumerate(ROWS) for unit in row}

STRANGERS = {"recorder": "analysis", "analysis": "recorder"}
"""Units that do not see each other, whatever their rows."""

MAY_IMPORT_TORCH = frozenset({"recorder", "simulator", "workloads", "integrations"})
MAX_LINES = 400


def unit_of(path: str) -> str:
    """The module or folder right under the package: ``analysis`` for ``analysis/casts.py``."""
    return path.split("/")[0].removesuffix(".py")


def imported_modules(path: str, source: str) -> Iterator[str]:
    """The dotted name of everything that the module at ``path`` imports, ``if TYPE_CHECKING`` or in a function too.

    ``from a import b`` gives ``a.b``: whether ``b`` is a module does not matter for who sees whom.
    """
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
        if len(source.splitlines()) >= MAX_LINES:
            found.append(f"{path}: {MAX_LINES} lines or more")
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


def package_sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}


def test_the_package_keeps_its_layers() -> None:
    assert violations(package_sources()) == []


def test_the_package_is_read_at_all() -> None:
    sources = package_sources()
    assert "recording.py" in sources
    assert "ampmem.events.Recording" in set(imported_modules("recording.py", sources["recording.py"]))


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
        ("units.py", "\n" * MAX_LINES),
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
        ("units.py", "\n" * (MAX_LINES - 1)),
    ],
)
def test_what_the_layout_allows_is_allowed(path: str, source: str) -> None:
    assert violations({path: source}) == []
