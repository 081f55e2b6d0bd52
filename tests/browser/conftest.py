"""A browser, pages opened in it under watch, and the recordings that they show."""

import functools
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.pages import Open, Tab, Written, chromium, written
from support.ready_python import ready_python
from support.story import long_run

from ampmem.analysis.analyse import analyse
from ampmem.recording import read
from ampmem.reporters.html import write

_open = ExitStack()
"""What is closed after the last test of this folder."""


@functools.cache
def _started() -> Any:
    """Chromium without a window, for all tests of this folder that follow each other."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium: put one on PATH or name it in AMPMEM_CHROMIUM")
    _open.callback(_started.cache_clear)
    running = _open.enter_context(playwright.sync_playwright())
    return _open.enter_context(running.chromium.launch(executable_path=path, args=["--no-sandbox"]))


@functools.cache
def _tab(file: Path) -> Tab:
    _open.callback(_tab.cache_clear)
    return Tab(_started(), file)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close the browser before tests of other folders run: playwright keeps an event loop running meanwhile."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _open.close()


@pytest.fixture(scope="module")
def browser() -> Any:
    """The browser, for what cannot be looked at in :func:`tab`."""
    return _started()


@pytest.fixture(scope="session")
def tab_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tab finds every page, one after another."""
    return tmp_path_factory.mktemp("tab") / "page.html"


@pytest.fixture(scope="module")
def tab(tab_file: Path) -> Tab:
    """The tab in which tests open their pages: one, since a new one has to compile the drawing library anew."""
    return _tab(tab_file)


@pytest.fixture
def open_page(tab: Tab) -> Iterator[Open]:
    """Opens a report and waits until it is drawn; every page opened must have been without trouble."""
    yield tab.open
    try:
        tab.check()
    finally:
        tab.forget()


@pytest.fixture
def look(open_page: Open, tab: Tab) -> Open:
    """As ``open_page``, but tests that follow each other share the page: each leaves it as it found it."""
    return tab.look


@pytest.fixture
def long_open(open_page: Open, long_page: Written) -> Any:
    """The page of ``long_page``."""
    return open_page(long_page.path)


@pytest.fixture(scope="session")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """One run of some thousand events: more than are drawn at once."""
    return written(tmp_path_factory.mktemp("long"), long_run(steps=4))


@pytest.fixture(scope="session")
def precisions_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Two precisions of a run."""
    return written(
        tmp_path_factory.mktemp("precisions"), long_run(steps=3, precision="fp32"), long_run(steps=3, precision="amp")
    )


@pytest.fixture(scope="session")
def profiled_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A real training run."""
    folder = tmp_path_factory.mktemp("profiled")
    profile = ["profile", "--precision", "amp", "-o", "run.ampmem", "-m", "ampmem.workloads.gpt", "--preset", "tiny"]
    subprocess.run([ready_python(), "-m", "ampmem", *profile], cwd=folder, check=True, capture_output=True)
    write([folder / "run.ampmem"], folder / "page.html", force=True)
    return Written(path=folder / "page.html", analyses=(analyse(read(folder / "run.ampmem")),))
