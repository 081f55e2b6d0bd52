"""What the browser tests share: pages on disk, and pages open in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from build import write as write_recording

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.events import Recording
from ampmem.reporters.html import write
from ampmem.reporters.html.safety import json_for_script

DATA = '<script type="application/json" id="page-data">'

WAIT_MS = 60_000

# Violations of the policy are reported to the page itself; the console has them too, but not of every kind.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""

Open = Callable[..., Any]
"""Opens a page: its path, and how the browser is to be set up."""


@dataclass(kw_only=True)
class Watched:
    """A page and what went wrong in it."""

    page: Any
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Nothing failed, nothing was forbidden, and nothing but the file was asked for."""
        assert self.troubles == []
        assert self.page.evaluate("window.violations") == []
        assert len(self.requests) == 1, self.requests
        assert self.requests[0].startswith("file:")


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
    change(values)
    output.write_text("".join((before, opening, json_for_script(values), closing, after)), encoding="utf-8")
    return output


def wait_until(page: Any, condition: str) -> None:
    """Wait for a JavaScript expression to be true; playwright's own wait needs an eval, which the policy forbids."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never true: {condition}")


def watched(
    browser: Any, path: Path, *, width: int = 1440, height: int = 1000, theme: str = "light", **context: Any
) -> Watched:
    """Opens a page, waits until it is drawn, and keeps what goes wrong in it."""
    place = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme, **context)
    page = place.new_page()
    one = Watched(page=page)
    page.on("console", lambda said: said.type == "error" and one.troubles.append(said.text))
    page.on("pageerror", lambda error: one.troubles.append(str(error)))
    page.on("dialog", lambda dialog: (one.troubles.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: one.requests.append(request.url))
    page.add_init_script(WATCH)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=WAIT_MS)
    return one


def start_anew(page: Any) -> None:
    """The page as it is after opening: the run is chosen again, and what outlives that is put back."""
    page.mouse.move(2, 2)
    page.evaluate("document.activeElement.blur()")
    page.locator("#by-events").click()
    page.locator("#as-treemap").click()
    page.locator("#stacks-search").fill("")
    page.evaluate("document.activeElement.blur()")
    page.evaluate("document.getElementById('run').dispatchEvent(new Event('change'))")
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=WAIT_MS)
    page.evaluate("window.scrollTo({ top: 0, behavior: 'instant' })")
