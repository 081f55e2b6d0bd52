"""Accessibility, widths, themes, print, and what is there only sometimes."""

from pathlib import Path
from typing import Any

import pytest
from support.build import write as write_recording
from support.pages import BROKEN, CUT, Open, Written, changed, violations, wait_until, written
from support.story import long_run

from ampmem.reporters.html import write

pytestmark = pytest.mark.browser

WIDTHS = (390, 600, 900, 1024, 1440)


def test_accessible_at_all_widths_and_in_both_themes(open_page: Open, tmp_path: Path) -> None:
    # axe takes seconds for each hundred rows, and rows are alike: few layers, and all sections.
    runs = (long_run(steps=2, precision=precision, layers=3) for precision in ("fp32", "amp"))
    page = open_page(written(tmp_path, *runs).path)
    page.select_option("#run", label="amp")
    page.wait_for_selector("html[data-drawn]", state="attached")
    page.locator("button.expand").first.click()
    page.locator("#stacks-search").fill("Net.forward")
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    # Of each width and theme one is enough: colours do not depend on the width.
    for width, theme in ((390, "light"), (1440, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.select_option("#theme", theme)
        assert violations(page) == [], (width, theme)


def test_a_real_run_is_accessible_when_narrow_and_pinned(open_page: Open, profiled_page: Written) -> None:
    page = open_page(profiled_page.path, width=390, height=844, theme="dark")
    page.locator("#chart-frame").focus()
    for key in ("p", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    page.get_by_role("button", name="Icicle").click()
    assert violations(page) == []


def test_no_width_overflows(open_page: Open, precisions_page: Written) -> None:
    page = open_page(precisions_page.path, width=WIDTHS[-1])
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(150)
        size = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert size[0] <= size[1], width
        drawn = page.locator("#chart .main-svg").first.bounding_box()
        frame = page.locator("#chart-frame").bounding_box()
        assert drawn["width"] == pytest.approx(frame["width"], abs=2), "the chart has the width of its frame"


def test_no_width_breaks_a_word_or_cuts_a_column(open_page: Open, profiled_page: Written) -> None:
    page = open_page(profiled_page.path)
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(BROKEN) == [], width
        assert page.evaluate(CUT) == [], width


def test_long_names_of_recordings_are_not_broken_nor_are_the_ways_to_the_sections_cut(
    open_page: Open, tmp_path: Path
) -> None:
    recording = write_recording(tmp_path / "gpt.medium.fp32.ampmem", long_run(steps=1, precision="fp32"))
    write([recording, recording], tmp_path / "page.html", force=True)
    page = open_page(tmp_path / "page.html")
    label = page.locator("#verdict .bars th").first
    assert label.inner_text() == "fp32 gpt.medium.fp32.ampmem #1"
    for width in (390, 1024, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(BROKEN) == [], width
        assert label.bounding_box()["height"] < 90, width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    # As on a page that has all the sections.
    fits = page.evaluate(
        """() => {
          const nav = document.querySelector("nav");
          for (const word of ["What helps", "Out of memory", "Activations", "Rule of thumb", "Casts", "Address map"]) {
            const link = Object.assign(document.createElement("a"), { textContent: word });
            if (!nav.textContent.includes(word)) nav.append(link);
          }
          return nav.scrollWidth <= nav.clientWidth && nav.children.length === 14;
        }"""
    )
    assert fits, page.locator("nav a").all_inner_texts()


def test_everything_can_be_reached_with_tab(long_open: Any) -> None:
    page = long_open
    reached: set[str] = set()
    page.locator(".skip").focus()
    for _ in range(400):
        page.keyboard.press("Tab")
        where = page.evaluate("document.activeElement.id || document.activeElement.className")
        reached.add(where)
        if where == "more":
            break
    expected = {"theme", "by-time", "step", "to-peak", "chart-frame", "readout-row", "stacks-search", "search", "alive"}
    assert expected <= reached
    assert any("box" in where for where in reached)
    assert any("expand" in where for where in reached)


def test_the_theme_is_remembered(long_open: Any) -> None:
    page = long_open
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.select_option("#theme", "dark")
    dark = page.evaluate(back)
    assert dark != light
    area = "document.getElementById('chart').data[0].fillcolor"
    assert page.evaluate(area) == "#5074e9"
    page.select_option("#theme", "light")
    assert (page.evaluate(back), page.evaluate(area)) == (light, "#3958d1")
    assert page.evaluate("localStorage.getItem('ampmem-theme')") == "light"


def test_a_browser_without_storage_still_shows_the_page(browser: Any, long_page: Written) -> None:
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('denied'); } });")
    page.goto(long_page.path.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    page.select_option("#theme", "dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert errors == []
    page.close()


def test_printing_shows_all_sections_and_no_controls(open_page: Open, precisions_page: Written) -> None:
    page = open_page(precisions_page.path, theme="dark")
    page.emulate_media(media="print")
    assert not page.locator(".bar").is_visible()
    assert not page.locator(".controls").first.is_visible()
    for name in ("timeline", "peak", "comparison", "steps", "modules", "stacks", "allocations"):
        assert page.locator(f"#{name}").is_visible(), name


def test_an_address_map_is_drawn_when_there_is_one(open_page: Open, long_page: Written, tmp_path: Path) -> None:
    def with_map(data: dict[str, Any]) -> None:
        blocks = [[number * 512, 512, "parameters" if number % 3 else "cached"] for number in range(6000)]
        data["runs"][0]["events"]["address_map"] = [{"address": 4096, "bytes": 6000 * 512, "blocks": blocks}]

    page = open_page(changed(long_page.path, tmp_path / "page.html", with_map))
    assert page.locator("#addresses canvas").is_visible()
    assert "too many blocks for bars" in page.locator("#addresses-note").inner_text()
    assert "Address map" in page.locator("#jumps").inner_text()


def test_what_there_is_no_data_for_is_left_out(open_page: Open, long_page: Written, tmp_path: Path) -> None:
    def bare(data: dict[str, Any]) -> None:
        data["runs"][0]["said"].update(static_model=None, activations=None, findings=[])
        data["runs"][0]["summary"]["casts"]["copies"] = data["runs"][0]["summary"]["peak"]["bytes"] = 0

    page = open_page(changed(long_page.path, tmp_path / "page.html", bare))
    for name in ("static", "casts", "activations", "peak", "findings"):
        assert not page.locator(f"#{name}").is_visible()
    jumps = page.locator("#jumps").inner_text()
    assert "Timeline" in jumps
    assert "Casts" not in jumps


def test_findings_lead_to_where_they_show(open_page: Open, long_page: Written, tmp_path: Path) -> None:
    def with_findings(data: dict[str, Any]) -> None:
        told = {
            "code": "x",
            "severity": "warning",
            "message": "Much memory.",
            "change": "Use less.",
            "evidence": ["a"],
            "meaning": ["Set `it`."],
        }
        data["runs"][0]["said"]["findings"] = [{**told, "jump": "allocations"}, {**told, "jump": "comparison"}]

    page = open_page(changed(long_page.path, tmp_path / "page.html", with_findings))
    findings = page.locator("#findings article")
    assert findings.count() == 2
    assert "Use less." in findings.first.inner_text()
    findings.first.locator("summary", has_text="What this means").click()
    assert findings.first.locator("details code").inner_text() == "it"
    assert findings.nth(1).get_by_role("button").count() == 0, "there is no such section on this page"
    findings.first.get_by_role("button", name="Show where").click()
    wait_until(page, "document.getElementById('allocations').getBoundingClientRect().top < innerHeight")
    assert page.evaluate("document.activeElement.id") == "allocations-title"


def test_many_notes_are_one_line_that_opens_and_prints(
    open_page: Open, precisions_page: Written, tmp_path: Path
) -> None:
    notes = [f"note {number}" for number in range(5)]

    def with_notes(count: int) -> Path:
        def change(values: dict[str, Any]) -> None:
            for run in values["runs"]:
                run["said"]["notes"] = notes[:count]

        return changed(precisions_page.path, tmp_path / f"{count}.html", change)

    assert open_page(with_notes(3)).locator("#notes p").all_inner_texts() == notes[:3]
    page = open_page(with_notes(5))
    items = page.locator("#notes li")
    assert not items.first.is_visible()
    page.emulate_media(media="print")
    assert items.first.is_visible()
    page.emulate_media(media="screen")
    page.locator("#notes summary").click()
    assert items.all_inner_texts() == notes
