"""A browser, pages opened in it under watch, and the recordings that they show."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import Open, Watched, Written, start_anew, watched, written
from story import long_run

from ampmem.analysis.analyse import analyse
from ampmem.recording import read
from ampmem.reporters.html import write

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def chromium() -> str | None:
    """The browser that ``AMPMEM_CHROMIUM`` names, else one of the usual names."""
    named = os.environ.get("AMPMEM_CHROMIUM")
    return named or next((path for name in CHROMIUMS if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window, for one module: playwright keeps an event loop running meanwhile."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium: put one on PATH or name it in AMPMEM_CHROMIUM")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a report and waits until it is drawn; at the end every page opened must have been without trouble."""
    opened: list[Watched] = []

    def opener(path: Path, **setup: Any) -> Any:
        opened.append(watched(browser, path, **setup))
        return opened[-1].page

    yield opener
    for one in opened:
        one.check()
        one.page.context.close()


@pytest.fixture(scope="module")
def shared_long_page(browser: Any, long_page: Written) -> Iterator[Watched]:
    """Opening a page takes seconds, so most tests of a module use the same one."""
    one = watched(browser, long_page.path)
    yield one
    one.page.context.close()


@pytest.fixture
def long_open(shared_long_page: Watched) -> Iterator[Any]:
    """The page of ``long_page`` as it is after opening."""
    start_anew(shared_long_page.page)
    yield shared_long_page.page
    shared_long_page.check()


@pytest.fixture(scope="session")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """One run of some thousand events: more than are drawn at once."""
    return written(tmp_path_factory.mktemp("long"), long_run(steps=4))


@pytest.fixture(scope="session")
def arms_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Two arms of a run."""
    return written(tmp_path_factory.mktemp("arms"), long_run(steps=3, arm="fp32"), long_run(steps=3, arm="amp"))


@pytest.fixture(scope="session")
def profiled_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A real training run."""
    folder = tmp_path_factory.mktemp("profiled")
    profile = ["profile", "--arm", "amp", "-o", "run.ampmem", "-m", "ampmem.workloads.gpt", "--preset", "tiny"]
    subprocess.run([sys.executable, "-m", "ampmem", *profile], cwd=folder, check=True, capture_output=True)
    write([folder / "run.ampmem"], folder / "page.html", force=True)
    return Written(path=folder / "page.html", analyses=(analyse(read(folder / "run.ampmem")),))
