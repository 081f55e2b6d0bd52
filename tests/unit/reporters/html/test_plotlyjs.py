"""The drawing library in the package: which one it is, as it was published, and with its licence in the wheel."""

import importlib.util
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs_version

from ampmem.reporters.html import plotlyjs

ROOT = Path(__file__).resolve().parents[4]
FOUND = re.search(r"plotly\.js \(basic - minified\) v([\d.]+)", plotlyjs.source())
VERSION = FOUND[1] if FOUND else ""


def test_it_is_the_version_of_the_plotly_in_the_constraints() -> None:
    pinned = re.search(r"^plotly==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if version("plotly") != pinned[1]:
        pytest.skip(f"plotly {version('plotly')} is installed, and not the {pinned[1]} of constraints.txt")
    assert get_plotlyjs_version() == VERSION, "run tests/plotly_bundle.py"


def test_it_needs_no_eval_and_cannot_end_its_script_element() -> None:
    source = plotlyjs.source()
    assert not re.search(r"\beval\(|\bnew Function\b|\bFunction\(", source)
    assert "</script" not in source.lower()


def test_it_is_as_it_was_published() -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    path = ROOT / "tests" / "plotly_bundle.py"
    spec = importlib.util.spec_from_file_location("plotly_bundle", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        script, licence = module.published(VERSION)
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm cannot get it: {error}")
    assert plotlyjs.source().encode() == script
    assert (plotlyjs.FOLDER / "LICENSE").read_bytes() == licence


def test_the_wheel_has_it_and_its_licence() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    files = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    folder = plotlyjs.FOLDER.relative_to(ROOT).as_posix()
    assert {f"{folder}/{plotlyjs.BUNDLE.name}", f"{folder}/LICENSE"} <= files
    assert plotlyjs.BUNDLE.stat().st_size < 500_000
