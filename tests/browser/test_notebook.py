"""What a notebook shows, in a page whose styles are hostile: a frame and tables that look as they do anywhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.build import small_run
from support.build import write as write_recording
from support.pages import WAIT_MS, wait_until
from support.story import long_run

import ampmem
from ampmem.integrations.notebook.recorded import framed_bundle
from ampmem.reporters.html.notebook import frame

pytestmark = pytest.mark.browser

HOST = """
* { letter-spacing: 3px; text-transform: uppercase; font-style: italic; }
div { color: red; line-height: 4; background: black; }
table { width: 100%; border: 9px solid red; background: yellow; }
td, th { padding: 40px; color: lime; font-size: 50px; text-align: center; display: block; }
tr:nth-child(odd) { background: pink; }
iframe { display: none; width: 20px; height: 20px; filter: invert(1); }
"""


@pytest.fixture(scope="module")
def host(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A dark page with hostile styles in which a recorded cell and a summary are shown, and what it was asked for."""
    folder = tmp_path_factory.mktemp("host")
    path = write_recording(folder / "a.ampmem", long_run(steps=2))
    recording = ampmem.load(path)
    shown = framed_bundle(["All 2 steps of In [1] were recorded."], [path], recording._repr_mimebundle_(), light=False)
    table = small_run().recording()._repr_mimebundle_()
    page = folder / "host.html"
    dark = "background: #111; color: #eee"
    page.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><title>host</title><style>{HOST}</style><body style="{dark}">'
        f'<p id="own">own</p>{shown["text/html"]}<section id="table">{table["text/html"]}</section>',
        encoding="utf-8",
    )
    opened = browser.new_page(color_scheme="dark")
    opened.troubles, opened.asked = [], []
    opened.on("console", lambda said: said.type == "error" and opened.troubles.append(said.text))
    opened.on("pageerror", lambda error: opened.troubles.append(str(error)))
    opened.on("request", lambda asked: opened.asked.append(asked.url))
    opened.goto(page.as_uri())
    yield opened
    assert opened.troubles == []
    assert opened.asked == [page.as_uri()]
    opened.close()


def frame_of(host: Any) -> Any:
    """The frame's page, when it is drawn."""
    frame = host.query_selector("iframe").content_frame()
    frame.wait_for_selector("html[data-drawn]", state="attached", timeout=WAIT_MS)
    return frame


def test_the_page_is_drawn_in_its_frame_and_its_links_stay_there(host: Any) -> None:
    frame = frame_of(host)
    assert frame.locator(".main-svg").count() > 0
    box = host.locator("iframe").bounding_box()
    assert box["height"] == 720
    assert box["width"] > 1000
    assert frame.evaluate("getComputedStyle(document.querySelector('h1, h2')).textTransform") == "none"
    assert not frame.locator("#copy-link").is_visible()
    frame.locator('#jumps a[href="#steps"]').click()
    wait_until(frame, "Math.abs(document.getElementById('steps').getBoundingClientRect().top) < 300")
    frame.locator("a.brand").click()
    assert frame.url == "about:srcdoc"
    assert host.url.endswith("host.html")


def test_the_link_is_not_there_before_the_page_is_drawn_either(browser: Any, tmp_path: Path) -> None:
    """A cell's page stands in the notebook for a while before its scripts have run."""
    path = write_recording(tmp_path / "a.ampmem", long_run(steps=2))
    page = tmp_path / "host.html"
    page.write_text(frame([path], "a cell") or "", encoding="utf-8")
    opened = browser.new_page(java_script_enabled=False)
    opened.goto(page.as_uri())
    drawn = opened.query_selector("iframe").content_frame()
    assert drawn.locator(".brand").is_visible()
    assert not drawn.locator("#copy-link").is_visible()
    opened.close()


def test_the_frame_cannot_reach_the_notebook(host: Any) -> None:
    reached = "(() => { try { return parent.document.title } catch (error) { return error.name } })()"
    assert frame_of(host).evaluate(reached) == "SecurityError"


def test_a_table_looks_as_it_does_anywhere(host: Any) -> None:
    def style(selector: str, name: str) -> str:
        return str(host.evaluate(f"getComputedStyle(document.querySelector('#table {selector}')).{name}"))

    assert style("td", "color") == "rgb(23, 32, 46)"
    assert style("td", "fontSize") == "13px"
    assert style("td", "textAlign") == "right"
    assert style("td", "display") == "table-cell"
    assert style("tr", "backgroundColor") == "rgba(0, 0, 0, 0)"
    assert style("table", "borderTopWidth") == "0px"
    assert style("th", "letterSpacing") == "normal"
    assert style("> div", "backgroundColor") == "rgb(255, 255, 255)"
    assert host.evaluate("getComputedStyle(document.getElementById('own')).textTransform") == "uppercase"
