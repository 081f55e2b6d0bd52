"""The page's JavaScript without a page: unit tests, syntax of the bundle, lint, and the shared number formats."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ampmem.reporters.html.page.bundle import bundle
from ampmem.units import format_bytes, format_count, format_duration

HERE = Path(__file__).resolve().parent
MODULES = HERE.parents[1] / "ampmem" / "reporters" / "html" / "js"
NODE = shutil.which("node")
NPM = shutil.which("npm")
NPM_OPTIONS = ("--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "--fetch-timeout=30000")

needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def run(*command: str | Path, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)


def test_the_cases_of_the_number_formats_are_those_of_python() -> None:
    cases = json.loads((HERE / "js" / "format_cases.json").read_text(encoding="utf-8"))
    for name, function in (("bytes", format_bytes), ("counts", format_count), ("durations", format_duration)):
        assert len(cases[name]) >= 7
        for value, text in cases[name]:
            assert function(value) == text


@needs_node
def test_the_modules_pass_their_unit_tests() -> None:
    result = run("node", "--test", *sorted((HERE / "js").glob("*.test.mjs")))
    assert result.returncode == 0, result.stdout[-6000:]


@needs_node
def test_the_bundle_is_valid(tmp_path: Path) -> None:
    script = tmp_path / "bundle.js"
    script.write_text(bundle(MODULES / "main.js"), encoding="utf-8")
    result = run("node", "--check", script)
    assert result.returncode == 0, result.stderr


def test_modules_are_small() -> None:
    assert {
        path.name: lines for path in MODULES.rglob("*.js") if (lines := len(path.read_text().splitlines())) > 400
    } == {}


@needs_node
@pytest.mark.skipif(NPM is None, reason="npm is not installed")
def test_the_modules_pass_the_linter(tmp_path: Path) -> None:
    for name in ("package.json", "eslint.config.mjs"):
        shutil.copy(HERE / name, tmp_path / name)
    shutil.copytree(MODULES, tmp_path / "modules")
    shutil.copytree(HERE / "js", tmp_path / "js")
    installed = run("npm", "install", *NPM_OPTIONS, cwd=tmp_path)
    if installed.returncode:
        pytest.skip(f"eslint cannot be installed: {installed.stderr.strip()[-300:]}")
    result = run("npm", "run", "--silent", "lint", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
