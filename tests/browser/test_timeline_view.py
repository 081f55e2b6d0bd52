"""What of a run is in view: where the page opens, the window over the whole run, the axis, and links to a view."""

from pathlib import Path
from typing import Any

import pytest
from support.pages import Open, Written, bring, changed, wait_until

pytestmark = pytest.mark.browser

VIEW = "document.getElementById('chart').layout.xaxis.range"
AT_STACKS = "Math.abs(document.getElementById('stacks').getBoundingClientRect().top) < 120"
TICKS = "document.getElementById('chart').layout.xaxis.ticktext"


def view(page: Any) -> tuple[float, float]:
    low, high = page.evaluate(VIEW)
    return low, high


def last_step(shown: Written, run: int = 0) -> tuple[int, int]:
    analysis = shown.analyses[run]
    record = analysis.recording.steps[-1]
    return analysis.timeline.position(record.start_ns), analysis.timeline.position(record.end_ns)


def test_the_page_opens_on_the_last_step_in_mixed_precision(open_page: Open, precisions_page: Written) -> None:
    page = open_page(precisions_page.path)
    assert page.locator("#run option:checked").inner_text() == "amp"
    assert view(page) == last_step(precisions_page, 1)
    assert page.locator("#step").input_value() == "2"
    assert page.locator("#readout-title").inner_text() == "At the peak of step 2"
    assert page.locator("#in-view").inner_text() == "Step 2, the last."
    page.get_by_role("button", name="See all").click()
    assert view(page) == (0, len(precisions_page.analyses[1].recording.events))
    assert page.locator("#in-view").inner_text() == "The whole run."
    page.select_option("#step", "0")
    assert "The run's peak" in page.locator("#in-view").inner_text()


def test_time_is_in_seconds_and_not_there_where_none_was_measured(
    open_page: Open, long_page: Written, tmp_path: Path
) -> None:
    page = open_page(long_page.path)
    timed = page.locator("#readout-where").inner_text()
    page.get_by_role("button", name="Time", exact=True).click()
    seconds = long_page.analysis.timeline.time_ns[-1] / 1e9
    assert 0 <= view(page)[0] < view(page)[1] <= seconds
    ticks = page.evaluate(TICKS)
    assert len({tick.split()[1] for tick in ticks}) == 1 and len(ticks) >= 3

    def untimed(data: dict[str, Any]) -> None:
        data["runs"][0]["events"]["timed"] = False

    page = open_page(changed(long_page.path, tmp_path / "page.html", untimed), fragment="#axis=time")
    assert not page.get_by_role("button", name="Time", exact=True).is_visible()
    assert len(timed.split(" · ")) == 4
    assert page.locator("#readout-where").inner_text() == timed.rpartition(" · ")[0]
    assert view(page) == last_step(long_page)


def drag(page: Any, start: float, end: float, y: float) -> None:
    page.mouse.move(start, y)
    page.mouse.down()
    page.mouse.move((start + end) / 2, y)
    page.mouse.move(end, y)
    page.mouse.up()


def test_the_window_is_dragged_resized_and_chosen(long_open: Any, long_page: Written) -> None:
    page = long_open
    bring(page, "timeline")
    box = page.locator("#overview").bounding_box()
    events = len(long_page.analysis.recording.events)
    y = box["y"] + box["height"] / 2

    def at(position: float) -> float:
        return float(box["x"] + box["width"] * position / events)

    def seen(low: float, high: float) -> None:
        """Within the two pixels that a drag can be off."""
        near = 2 * events / box["width"]
        wait_until(page, f"Math.max(Math.abs({VIEW}[0] - {low}), Math.abs({VIEW}[1] - {high})) < {near}")

    drag(page, at(events * 0.1), at(events * 0.3), y)
    seen(events * 0.1, events * 0.3)
    drag(page, at(events * 0.2), at(events * 0.5), y)
    seen(events * 0.4, events * 0.6)
    edge = page.locator("#window-end").bounding_box()
    drag(page, edge["x"] + 4, edge["x"] + 4 + box["width"] * 0.2, y)
    seen(events * 0.4, events * 0.8)
    page.mouse.click(at(events * 0.3), y)
    seen(events * 0.1, events * 0.5)
    window = page.locator("#window")
    assert window.bounding_box()["x"] == pytest.approx(at(events * 0.1), abs=3)
    window.focus()
    page.keyboard.press("ArrowRight")
    seen(events * 0.14, events * 0.54)
    page.locator("#window-start").focus()
    page.keyboard.press("Home")
    seen(0, events * 0.54)
    assert window.get_attribute("aria-valuetext").startswith("events 0 to ")
    page.keyboard.press("End")
    seen(events * 0.54, events)
    edge = page.locator("#window-end").bounding_box()
    assert edge["x"] + edge["width"] == pytest.approx(box["x"] + box["width"], abs=1), "it ends where the chart does"


def state(page: Any) -> dict[str, Any]:
    return {
        "run": page.locator("#run option:checked").inner_text(),
        "view": view(page),
        "pinned": page.locator("#allocations-note").inner_text(),
        "theme": page.evaluate("document.documentElement.dataset.theme"),
        "axis": page.locator("#by-time").get_attribute("aria-pressed"),
    }


def test_a_link_leads_to_what_was_in_view(open_page: Open, precisions_page: Written) -> None:
    page = open_page(precisions_page.path)
    assert page.evaluate("location.hash") == "", "as long as all is as the page opens"
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.select_option("#run", label="fp32")
    page.wait_for_selector("html[data-drawn]", state="attached")
    page.get_by_role("button", name="Time", exact=True).click()
    page.locator("#chart-frame").focus()
    for key in ("p", "ArrowLeft", "Enter", "w"):
        page.keyboard.press(key)
    page.select_option("#theme", "dark")
    page.locator("#jumps").get_by_role("link", name="Stacks").click()
    before = state(page)
    wait_until(page, AT_STACKS)
    wait_until(page, "location.hash.startsWith('#stacks&run=fp32&axis=time&from=')")
    # A click of playwright's may scroll the page, as long as the page itself still scrolls.
    page.get_by_role("button", name="Copy link").dispatch_event("click")
    wait_until(page, "document.getElementById('copied').textContent === 'Copied'")
    link = page.evaluate("window.copied")
    assert link == page.evaluate("location.href")
    page = open_page(precisions_page.path, fragment=link[link.index("#") :])
    after = state(page)
    assert after.pop("view") == pytest.approx(before.pop("view"), abs=1e-8)
    assert after == before
    assert "alive at event" in after["pinned"]
    wait_until(page, AT_STACKS)
    assert page.evaluate("localStorage.getItem('ampmem-theme')") == "dark", "chosen by hand, before"


def test_the_hash_names_a_section_and_what_is_wrong_in_it_is_ignored(open_page: Open, precisions_page: Written) -> None:
    page = open_page(precisions_page.path, fragment="#stacks")
    assert page.evaluate(AT_STACKS)
    assert page.locator("#jumps [aria-current]").inner_text() == "Stacks"
    page = open_page(
        precisions_page.path, fragment="#nothing&run=none&from=9e9&pin=-3&theme=red&axis=%E0%A4%A&__proto__=1"
    )
    assert state(page)["run"] == "amp"
    assert view(page) == last_step(precisions_page, 1)
    assert page.evaluate("scrollY") == 0
    # A link that is put into the address of the open page is followed as well.
    page.evaluate("location.hash = '#run=fp32&from=10&to=200&pin=99999999'")
    wait_until(page, f"{VIEW}[0] === 10 && {VIEW}[1] === 200")
    assert state(page)["run"] == "fp32"
    wait_until(page, "document.getElementById('allocations-note').textContent.includes('alive at event')")
