"""The page's JavaScript without a page: unit tests, the bundle's syntax, lint, types, and the shared number formats."""

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.page_types import FILE, page_types

from ampmem.reporters.html.page import bundle
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
    files = [str(path) for path in sorted((HERE / "js").glob("*.test.mjs"))]
    # In one process: `node --test FILES` starts one for each.
    result = run("node", "--input-type=module", "-e", f"for (const file of {json.dumps(files)}) await import(file);")
    assert result.returncode == 0, result.stdout[-6000:]
    assert len(re.findall(r"^# tests [1-9]", result.stdout, re.MULTILINE)) == 1, result.stdout[-6000:]


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


def test_the_types_of_the_page_are_those_of_the_views() -> None:
    assert FILE.read_text(encoding="utf-8") == page_types(), "run tests/support/page_types.py"


@pytest.fixture(scope="session")
def packages() -> Path:
    """The folder ``node_modules`` of what package.json asks for, kept for later runs."""
    if NODE is None or NPM is None:
        pytest.skip("node or npm is not installed")
    wanted = (HERE / "package.json").read_bytes()
    kept = Path(tempfile.gettempdir()) / f"ampmem-packages-{hashlib.sha256(wanted).hexdigest()[:16]}"
    if not kept.exists():
        # Two workers may do this at once: each installs beside it, and the first one's is kept.
        folder = Path(tempfile.mkdtemp(prefix="ampmem-packages-"))
        (folder / "package.json").write_bytes(wanted)
        installed = run("npm", "install", *NPM_OPTIONS, cwd=folder)
        if installed.returncode:
            shutil.rmtree(folder)
            pytest.skip(f"eslint and typescript cannot be installed: {installed.stderr.strip()[-300:]}")
        try:
            folder.rename(kept)
        except OSError:
            shutil.rmtree(folder)
    return kept / "node_modules"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["lint", "types"])
def test_the_modules_pass(script: str, packages: Path, tmp_path: Path) -> None:
    for name in ("package.json", "eslint.config.mjs", "tsconfig.json"):
        shutil.copy(HERE / name, tmp_path / name)
    shutil.copytree(MODULES, tmp_path / "modules")
    shutil.copytree(HERE / "js", tmp_path / "js")
    (tmp_path / "node_modules").symlink_to(packages)
    result = run("npm", "run", "--silent", script, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
