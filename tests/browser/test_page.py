"""What the page shows and does, in a browser, against what the analysis says."""

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pages import EXACT, Open, Written, bring, wait_until, written

from ampmem.analysis.summary import summary_of
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.reporters.html import write
from ampmem.units import format_bytes, format_count

pytestmark = pytest.mark.browser

DRAWN = """() => {
  const areas = document.getElementById("chart").data.filter((trace) => trace.stackgroup);
  const totals = Array.from(areas[0].x, (_, i) => areas.reduce((sum, area) => sum + area.y[i], 0));
  return {areas: areas.map((area) => area.name), points: totals.length, most: Math.max(...totals)};
}"""


def total(page: Written) -> np.ndarray:
    return np.sum([page.analysis.timeline.series(category) for category in CATEGORIES], axis=0)


def number(text: str) -> int:
    return int(re.sub(r"\D", "", text))


def readout(page: Any) -> dict[str, int]:
    """Exact bytes of every category in the readout."""
    return {category: number(exact) for category, exact in page.locator(".readout-row").evaluate_all(EXACT)}


def position(page: Any) -> int:
    return int(page.locator("#chart-frame").get_attribute("aria-valuenow"))


def expected_readout(page: Written, at: int) -> dict[str, int]:
    series = {str(category): page.analysis.timeline.series(category) for category in CATEGORIES}
    return {name: int(values[at]) for name, values in series.items() if values.max() > 0}


def test_the_drawn_stack_has_the_peak_in_full_and_zoomed(long_open: Any, long_page: Written) -> None:
    page, live = long_open, total(long_page)
    assert len(live) > 2300, "more events than are drawn at once"
    page.get_by_role("button", name="See all").click()
    drawn = page.evaluate(DRAWN)
    assert drawn["most"] == live.max()
    assert drawn["points"] < len(live)
    assert "exact instants" in page.locator("#shown").inner_text()
    page.get_by_role("button", name="Zoom to peak").click()
    drawn = page.evaluate(DRAWN)
    assert drawn["most"] == live.max()
    assert page.locator("#shown").inner_text().startswith("Every event is shown")
    page.get_by_role("button", name="See all").click()
    assert "exact instants" in page.locator("#shown").inner_text()


def test_in_time_the_peak_is_the_same(long_open: Any, long_page: Written) -> None:
    page = long_open
    page.keyboard.press("Home")
    page.get_by_role("button", name="Time", exact=True).click()
    assert page.evaluate(DRAWN)["most"] == total(long_page).max()
    page.keyboard.press("p")
    assert page.evaluate(DRAWN)["most"] == total(long_page).max()
    assert page.evaluate("document.getElementById('chart').layout.xaxis.range[1]") < 1


def test_the_readout_is_exact_wherever_the_keyboard_goes(long_open: Any, long_page: Written) -> None:
    page = long_open
    page.keyboard.press("Home")
    assert page.locator("#readout-title").inner_text() == "At the peak"
    assert readout(page) == expected_readout(long_page, int(total(long_page).argmax()))
    page.locator("#chart-frame").focus()
    for key in ("ArrowRight", "p", "ArrowLeft", "ArrowLeft", "Shift+ArrowLeft", "w", "ArrowRight", "End"):
        page.keyboard.press(key)
        assert readout(page) == expected_readout(long_page, position(page)), key
    assert position(page) == len(long_page.analysis.recording.events)


def test_keys_zoom_pan_and_reset(long_open: Any, long_page: Written) -> None:
    page = long_open

    def view() -> list[float]:
        return page.evaluate("document.getElementById('chart').layout.xaxis.range")

    page.keyboard.press("Home")
    whole = view()
    assert whole == [0, len(long_page.analysis.recording.events)]
    page.keyboard.press("w")
    zoomed = view()
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.keyboard.press("a")
    assert view()[0] < zoomed[0]
    page.keyboard.press("d")
    assert view() == pytest.approx(zoomed)
    page.keyboard.press("s")
    page.keyboard.press("p")
    assert view()[1] - view()[0] < 100
    page.keyboard.press("Home")
    assert view() == whole
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("wasdp")
    assert view() == whole, "letters typed into a field are text"


def test_a_drag_zooms_and_a_double_click_resets(long_open: Any, long_page: Written) -> None:
    page = long_open
    page.keyboard.press("Home")
    bring(page, "timeline")
    box = page.locator("#chart-frame").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 300, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 350, middle, steps=4)
    page.mouse.up()
    wait_until(page, "document.getElementById('shown').textContent.startsWith('Every event')")
    page.mouse.dblclick(box["x"] + 300, middle)
    wait_until(page, "!document.getElementById('shown').textContent.startsWith('Every event')")
    assert page.locator("#allocations-note").inner_text().endswith("alive at the peak")


def alive(page: Written, at: int) -> tuple[int, int]:
    mask = page.analysis.lifetimes.alive_at(at)
    return int(mask.sum()), int(page.analysis.lifetimes.bytes[mask].sum())


@pytest.mark.parametrize("way", ["keyboard", "mouse"])
def test_pinning_shows_what_is_alive_there(way: str, long_open: Any, long_page: Written) -> None:
    page = long_open
    at_peak = int(total(long_page).argmax())
    count, size = alive(long_page, at_peak)
    note = page.locator("#allocations-note")
    assert note.inner_text() == f"{count:,} allocations, {format_bytes(size)} ({size:,} B), alive at the peak"
    if way == "keyboard":
        page.locator("#chart-frame").focus()
        for key in ("p", "ArrowLeft", "Shift+ArrowLeft", "Enter"):
            page.keyboard.press(key)
    else:
        bring(page, "timeline")
        box = page.locator("#chart-frame").bounding_box()
        page.mouse.click(box["x"] + 200, box["y"] + 200)
        page.mouse.move(5, 5)
    at = position(page)
    assert at != at_peak
    count, size = alive(long_page, at)
    event = f"event {format_count(at)}"
    assert page.locator("#readout-title").inner_text() == "At the pinned event"
    assert note.inner_text() == f"{count:,} allocations, {format_bytes(size)} ({size:,} B), alive at {event}"
    for tree in ("modules", "stacks"):
        assert event in page.locator(f"#{tree}-title").inner_text()
        root = page.locator(f"#{tree}-tree [role=treeitem]").first
        assert int(root.get_attribute("data-bytes")) == size
    page.keyboard.press("Escape")
    assert note.inner_text().endswith("alive at the peak")
    assert "at the peak" in page.locator("#stacks-title").inner_text()
    page.select_option("#alive", "run")
    made = long_page.analysis.lifetimes.bytes
    assert f"{len(made):,} allocations" in note.inner_text()
    assert f"({int(made.sum()):,} B)" in note.inner_text()


def test_a_category_can_be_hidden_with_mouse_and_keyboard(long_open: Any, long_page: Written) -> None:
    page = long_open
    row = page.locator(".readout-row[data-category=activations]")
    row.click()
    assert row.get_attribute("aria-pressed") == "false"
    rest = [category for category in CATEGORIES if category != "activations"]
    without = np.sum([long_page.analysis.timeline.series(category) for category in rest], axis=0)
    drawn = page.evaluate(DRAWN)
    assert drawn["most"] == without.max()
    assert "Activations" not in drawn["areas"]
    row.focus()
    page.keyboard.press("Enter")
    assert page.evaluate(DRAWN)["most"] == total(long_page).max()


def test_a_step_can_be_chosen(long_open: Any, long_page: Written) -> None:
    page = long_open
    page.select_option("#step", "2")
    record = long_page.analysis.recording.steps[2]
    timeline = long_page.analysis.timeline
    first, last = timeline.position(record.start_ns), timeline.position(record.end_ns)
    assert page.evaluate("document.getElementById('chart').layout.xaxis.range") == [first, last]
    assert page.evaluate(DRAWN)["most"] == total(long_page)[first : last + 1].max()
    assert page.locator("#readout-title").inner_text() == "At the peak of step 2"
    page.get_by_role("button", name="Zoom the timeline to step 1").click()
    assert page.locator("#step").input_value() == "1"


def test_runs_can_be_chosen_and_compared(open_page: Open, precisions_page: Written) -> None:
    page = open_page(precisions_page.path)
    peaks = []
    for label in ("fp32", "amp"):
        page.select_option("#run", label=label)
        page.wait_for_selector("html[data-drawn]", state="attached")
        peaks.append(page.evaluate(DRAWN)["most"])
    expected = [
        np.sum([analysis.timeline.series(category) for category in CATEGORIES], axis=0).max()
        for analysis in precisions_page.analyses
    ]
    assert peaks == expected
    assert "cast_copies" in readout(page)
    comparison = page.locator("#comparison")
    assert comparison.is_visible()
    assert comparison.get_by_text("From fp32 to amp, after forward").is_visible()
    assert comparison.get_by_text("At the same instants of step 2.").is_visible()
    assert comparison.get_by_role("row").filter(has_text="Cast copies").count() >= 1


def test_a_single_run_has_no_comparison_and_no_run_selector(long_open: Any, long_page: Written) -> None:
    page = long_open
    assert not page.locator("#comparison").is_visible()
    assert not page.locator("#run").is_visible()
    assert not page.locator("#addresses").is_visible()
    assert "Address map" not in page.locator("#jumps").inner_text()
    box = page.locator("#chart").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    assert page.locator(".modebar-btn").count() == 0, "none that uploads"
    assert not re.search("share|cloud|edit in", page.locator("#timeline").inner_text(), re.IGNORECASE)


def test_the_table_searches_filters_grows_and_unfolds(long_open: Any, long_page: Written) -> None:
    page = long_open
    rows = page.locator("tr.allocation")
    assert rows.count() == 25
    page.get_by_role("button", name="Show more").click()
    assert rows.count() > 25
    page.select_option("#category", label="Parameters")
    page.locator("#search").fill("layers.7.linear.weight")
    assert rows.count() == 1
    assert "1 allocation, 3.9 KiB (4,028 B)" in page.locator("#allocations-note").inner_text()
    page.select_option("#category", label="All categories")
    page.locator("#search").fill("model.py")
    rows.first.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert page.locator("ol.stack li").all_inner_texts() == ["train.py:20 main", "model.py:7 Net.forward"]
    page.keyboard.press("Enter")
    assert not page.locator("ol.stack").is_visible()
    page.locator("#search").fill("there is no such thing")
    assert "Nothing matches" in page.locator("#allocations-body").inner_text()


def test_a_reduced_stream_keeps_the_peak_and_says_what_it_lacks(
    open_page: Open, tmp_path: Path, long_page: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package's attribute of this name is the function.
    monkeypatch.setattr(importlib.import_module("ampmem.reporters.html.write"), "STREAM_LIMIT", 100)
    page = open_page(written(tmp_path, long_page.analysis.recording).path)
    assert page.evaluate(DRAWN)["most"] == total(long_page).max()
    assert "kept instants" in page.locator("#shown").inner_text()
    _, size = alive(long_page, int(total(long_page).argmax()))
    assert page.locator("#allocations-note").inner_text().endswith(f"({size:,} B), alive at the peak")
    page.locator("#chart-frame").focus()
    for key in ("p", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    assert readout(page) == expected_readout(long_page, position(page))
    assert "only at the peak" in page.locator("#modules-note").inner_text()
    assert page.locator("#allocations-note").inner_text().endswith(f"({size:,} B), alive at the peak")


def test_a_page_of_json_has_all_but_what_needs_the_events(
    open_page: Open, precisions_page: Written, tmp_path: Path
) -> None:
    given = tmp_path / "summary.json"
    given.write_text(summary_of(precisions_page.analysis).to_json())
    write([given], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    note = page.locator("#no-events").inner_text()
    assert note == (
        "This run was given as JSON from ampmem show --json, which does not have events: only the page of the "
        "recording has the timeline, modules, stacks, addresses and allocations."
    )
    for name in ("timeline", "modules", "stacks", "addresses", "allocations"):
        assert page.locator(f"#{name}").is_hidden(), name
    said = {name: page.locator(f"#{name}").inner_text() for name in ("verdict", "steps", "static", "headlines")}
    peak = page.locator("#peak-body").inner_text()
    whole = open_page(written(tmp_path, precisions_page.analysis.recording).path)
    assert whole.locator("#no-events").count() == 0
    assert said == {name: whole.locator(f"#{name}").inner_text() for name in said}
    assert peak == re.sub(r", event [\d,]+:", ":", whole.locator("#peak-body").inner_text())
