"""A figure of a report as an SVG or a PNG file: the report draws it in a browser without a window.

The figure is the one that the report's buttons save. Plotly draws in a browser only, an SVG too.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

from ampmem.analysis.watched import watched_run
from ampmem.errors import UsageError
from ampmem.output import replaced_file
from ampmem.recording import is_watched
from ampmem.recording.watched_file import read_watched
from ampmem.reporters.html.page import render_chart
from ampmem.reporters.html.watched_page import watched_view
from ampmem.reporters.html.write import STREAMS_LIMIT, page_of

BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge", "microsoft-edge"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "C:/Program Files/Google/Chrome/Application/chrome.exe",
)
"""Where a browser is looked for, after the one that ``AMPMEM_CHROMIUM`` names."""

_SECONDS = 120
_PICTURE = re.compile(r'<pre id="picture">([^<]*)</pre>')


def write_picture(files: Sequence[Path], path: Path, *, kind: str, figure: str = "", force: bool = False) -> None:
    """Write the figure of the report of ``files``; ``kind`` is ``svg`` or ``png``; ``force`` replaces a file.

    ``figure`` is the section of the report with the figure, without one the first chart. Raises
    :class:`~ampmem.errors.UsageError` if there is no browser or no such figure, or ``path`` is not writable.
    """
    browser = _browser()
    if len(files) == 1 and is_watched(files[0]):
        run = read_watched(files[0])
        page = render_chart("watched", watched_view(watched_run(run), run.rows, {}))
    else:
        page = page_of(files, STREAMS_LIMIT)
    with replaced_file(path, force=force) as half:
        half.write_bytes(_drawn(browser, page, f"picture={kind}&of={figure}", figure))


def _browser() -> str:
    """The browser that draws. Raises :class:`~ampmem.errors.UsageError` if there is none."""
    named = os.environ.get("AMPMEM_CHROMIUM")
    found = next(filter(None, map(shutil.which, [named] if named else BROWSERS)), None)
    if found is None:
        raise UsageError(
            f"AMPMEM_CHROMIUM names no program: {named}"
            if named
            else "a picture is drawn in a browser, and none was found: install Chromium, Chrome or Edge, or name one "
            "in AMPMEM_CHROMIUM; or use the buttons of the page that ampmem report writes"
        )
    return found


def _drawn(browser: str, page: str, asked: str, figure: str) -> bytes:
    """The picture that ``page`` draws if its address asks for it."""
    with tempfile.TemporaryDirectory(prefix="ampmem-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        options = ["--headless", "--disable-gpu", "--disable-background-networking", "--window-size=1440,1000"]
        options.append(f"--user-data-dir={folder}/profile")
        if getattr(os, "geteuid", lambda: 1)() == 0:  # Chromium has no sandbox for root
            options.append("--no-sandbox")
        command = [browser, *options, "--dump-dom", f"{file.as_uri()}#{asked}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise UsageError(f"{browser} drew no picture within {_SECONDS} s") from None
    found = _PICTURE.search(done.stdout)
    if found is None:
        raise UsageError(
            f"{browser} drew no picture: {done.stderr.strip()[-200:] or f'it ended with {done.returncode}'}"
        )
    if not found[1]:
        raise UsageError(f"the report has no figure {figure or 'of a curve'}")
    with urlopen(html.unescape(found[1])) as picture:
        return bytes(picture.read())
