"""What the browser tests share: pages on disk, and pages open in a browser."""

import base64
import gzip
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.events import Recording
from ampmem.reporters.html import write
from ampmem.reporters.html.safety import json_for_script
from support.build import write as write_recording
from support.page_reader import unpacked

DATA = '<script type="application/json" id="page-data">'

WAIT_MS = 60_000

EXACT = """rows => rows.map((row) => {
  const [exact, ...others] = row.querySelectorAll(".exact");
  return others.length ? null : [row.dataset.category, exact.innerText];
})"""
"""Of each row of the readout its category and its exact bytes, in one question to the browser."""

# Violations of the policy are reported to the page itself; the console has them too, but not of every kind.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""

Open = Callable[..., Any]
"""Opens a page: its path, and how the browser is to be set up."""


class Tab:
    """A tab of a browser in which one page after the other is opened, and what goes wrong in the page of the moment.

    Most of the time that a page takes to open goes into compiling the drawing library. The browser does that once for a
    tab, as long as all of its pages have the same address; so each is copied to ``file`` first.
    """

    def __init__(self, browser: Any, file: Path) -> None:
        self._file = file
        self.page = browser.new_context().new_page()
        self._shown: object = None
        self._troubles: list[str] = []
        self._requests: list[str] = []
        self.page.on("console", lambda said: said.type == "error" and self._troubles.append(said.text))
        self.page.on("pageerror", lambda error: self._troubles.append(str(error)))
        self.page.on("dialog", lambda dialog: (self._troubles.append(dialog.message), dialog.dismiss()))
        # A picture that is saved goes through a blob, which is no request to anyone.
        self.page.on("request", lambda request: request.url.startswith("blob:") or self._requests.append(request.url))
        self.page.add_init_script(WATCH)

    def open(
        self, path: Path, *, width: int = 1440, height: int = 1000, theme: str = "light", fragment: str = ""
    ) -> Any:
        """Opens the page at ``path`` as in a new browser, and waits until it is drawn."""
        self.check()
        self._shown = None
        self._requests.clear()
        self.page.mouse.move(2, 2)
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(media="screen", color_scheme=theme)
        shutil.copyfile(path, self._file)
        if fragment:
            # To go from one fragment to another would not load the page again.
            self.page.goto("about:blank")
        self.page.goto(self._file.as_uri() + fragment)
        self.page.wait_for_selector("html[data-drawn]", state="attached", timeout=WAIT_MS)
        return self.page

    def look(self, path: Path, *, width: int = 1440) -> Any:
        """The page at ``path`` for tests that leave it as they found it: those that follow each other open it once."""
        if self._shown != (path, width):
            self.open(path, width=width)
            self._shown = path, width
        return self.page

    def check(self) -> None:
        """Nothing failed, nothing was forbidden, and nothing but the file was asked for."""
        assert self._troubles == []
        if not self._requests:
            return
        assert self.page.evaluate("window.violations") == []
        assert len(self._requests) == 1, self._requests
        assert self._requests[0].startswith("file:")

    def forget(self) -> None:
        """Forgets what went wrong, and what the page remembers."""
        if self.page.url.startswith("file:"):
            self.page.evaluate("localStorage.clear()")
        self._requests.clear()
        self._troubles.clear()


@dataclass(frozen=True, kw_only=True)
class Written:
    """A page on disk and what it was made of."""

    path: Path
    analyses: tuple[Analysis, ...]

    @property
    def analysis(self) -> Analysis:
        return self.analyses[0]


def written(folder: Path, *recordings: Recording) -> Written:
    """The page of ``recordings``."""
    files = [write_recording(folder / f"{number}.ampmem", one) for number, one in enumerate(recordings)]
    write(files, folder / "page.html", force=True)
    return Written(path=folder / "page.html", analyses=tuple(map(analyse, recordings)))


def changed(path: Path, output: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The page with its data changed in place: data are not under the policy's hashes."""
    before, opening, rest = path.read_text(encoding="utf-8").partition(DATA)
    data, closing, after = rest.partition("</script>")
    values = json.loads(data)
    for run in values.get("runs", ()):
        run |= unpacked(run["packed"])
    change(values)
    for run in values.get("runs", ()):
        words = json.dumps({"summary": run.pop("summary"), "said": run.pop("said")})
        run["packed"] = base64.b64encode(gzip.compress(words.encode())).decode()
    output.write_text("".join((before, opening, json_for_script(values), closing, after)), encoding="utf-8")
    return output


def wait_until(page: Any, condition: str) -> None:
    """Wait for a JavaScript expression to be true; playwright's own wait needs an eval, which the policy forbids."""
    for _ in range(1200):  # a busy machine may take seconds to draw another run
        if page.evaluate(condition):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never true: {condition}")


def bring(page: Any, section: str) -> None:
    """Scrolls to a section, so that the mouse meets it."""
    page.evaluate(f"document.getElementById('{section}').scrollIntoView({{behavior: 'instant'}})")


CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def chromium() -> str | None:
    """The browser that ``AMPMEM_CHROMIUM`` names, else one of the usual names."""
    named = os.environ.get("AMPMEM_CHROMIUM")
    return named or next((path for name in CHROMIUMS if (path := shutil.which(name))), None)


BROKEN = """() => {
  const broken = [];
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (!text.parentElement.checkVisibility() || text.parentElement.closest(".unseen, svg, .tree")) continue;
    for (const word of text.data.matchAll(/[A-Za-z0-9]+/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = new Set(Array.from(range.getClientRects(), (box) => Math.round(box.top)));
      if (lines.size > 1) broken.push(`${word[0]} in ${text.parentElement.closest("[id]").id}`);
    }
  }
  return broken;
}"""


CUT = """() => Array.from(document.querySelectorAll("section:not(#allocations) .scroll"))
  .filter((box) => box.checkVisibility() && box.scrollWidth > box.clientWidth)
  .map((box) => `${box.ariaLabel}: ${box.scrollWidth - box.clientWidth} px`)"""


def violations(page: Any) -> list[str]:
    """What axe-core finds, in words."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:4]]} "
        f"{one['nodes'][0].get('failureSummary', '')}"
        for one in found
    ]
