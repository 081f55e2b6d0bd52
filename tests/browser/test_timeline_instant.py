"""What one instant of the timeline is: the event that led to it, and all that lives then."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pages import Open, Written, bring, wait_until, written

from ampmem.analysis.ops import result_of
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.units import format_bytes, format_count

pytestmark = pytest.mark.browser

TIMES = "\N{MULTIPLICATION SIGN}"


def position(page: Any) -> int:
    return int(page.locator("#chart-frame").get_attribute("aria-valuenow"))


def event_in_words(shown: Written, at: int) -> str:
    """The event that led to position ``at``, from the analysis."""
    analysis = shown.analysis
    lifetimes, classes, texts = analysis.lifetimes, analysis.classes, analysis.recording.texts
    born = np.flatnonzero(lifetimes.born == at - 1)
    each = int((born if len(born) else np.flatnonzero(lifetimes.died == at - 1))[0])
    in_category = CATEGORIES[classes.category[each]]
    category = str(in_category).replace("_", " ")
    op, module = texts[lifetimes.op[each]], texts[lifetimes.module[each] or classes.module[each]]
    name = texts[classes.name[each]]
    what = f"{name} ({op})" if name and op else name or op
    if op and in_category in (Category.ACTIVATIONS, Category.TEMPORARIES):
        what = result_of(op)
    size = format_bytes(int(lifetimes.bytes[each]))
    return f"{'alloc' if len(born) else 'free'} {size}, {category}, {what}" + (f" in {module}" if module else "")


def test_events_are_stepped_through_one_at_a_time(long_open: Any, long_page: Written) -> None:
    page = long_open
    page.keyboard.press("Home")
    event, at = page.locator("#event"), position(page)
    kinds = set()
    for press in (".", ".", ",", ",", ","):
        page.keyboard.press(press)
        at += 1 if press == "." else -1
        assert position(page) == at
        assert event.inner_text() == event_in_words(long_page, at)
        kinds.add(event.inner_text().split()[0])
    for _ in range(3):
        page.get_by_role("button", name="Next event").click()
        at += 1
        assert (position(page), event.inner_text()) == (at, event_in_words(long_page, at))
        kinds.add(event.inner_text().split()[0])
    assert kinds == {"alloc", "free"}
    page.locator("#chart-frame").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Previous event").click()
    assert position(page) == at - 1
    assert page.locator("#readout-title").inner_text() == "At the pinned event"
    assert page.locator("#allocations-note").inner_text().endswith(f"alive at event {format_count(at - 1)}")


def sizes(page: Any) -> list[str]:
    return page.locator(".live-row b").all_inner_texts()


def test_all_that_lives_at_an_instant_is_listed(long_open: Any, long_page: Written) -> None:
    page, lifetimes = long_open, long_page.analysis.lifetimes
    at_peak = page.locator("#live-note").inner_text()
    page.locator("#chart-frame").focus()
    for key in ("p", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    alive = lifetimes.alive_at(position(page))
    count, size = int(alive.sum()), int(lifetimes.bytes[alive].sum())
    assert page.locator("#live-title").inner_text() == "Alive at the pinned event"
    assert page.locator("#live-note").inner_text() == f"{count} allocations, {format_bytes(size)}"
    largest = sorted({int(each) for each in lifetimes.bytes[alive]}, reverse=True)
    assert sizes(page)[0] == format_bytes(largest[0])
    first = page.locator(".live-name").first.inner_text()
    assert first.startswith("exp_avg of layers.*.linear.weight"), "equal layers are one row"
    while page.locator("#live-more").is_visible():
        page.locator("#live-more").click()
    listed = sum(int((text.split(TIMES)[1:] or ["1"])[0]) for text in page.locator(".live-name").all_inner_texts())
    assert listed == count
    # A click in a band of the chart lists its category.
    bring(page, "timeline")
    frame = page.locator("#chart-frame").bounding_box()
    parameters = format_bytes(int(long_page.analysis.timeline.series(CATEGORIES[0])[-1]))
    page.mouse.click(frame["x"] + 300, frame["y"] + 350)
    assert page.locator("#live-category option:checked").inner_text() == "Parameters"
    assert page.locator("#live-note").inner_text().endswith(parameters)
    page.mouse.click(frame["x"] + 300, frame["y"] + 12)
    assert page.locator("#live-category option:checked").inner_text() == "All categories"
    # Unpinned, the list is that of the peak again, and of all of it.
    page.mouse.click(frame["x"] + 300, frame["y"] + 350)
    page.keyboard.press("Escape")
    assert page.locator("#live-category option:checked").inner_text() == "All categories"
    assert page.locator("#live-note").inner_text() == at_peak


def test_a_row_opens_and_leads_to_the_table(long_open: Any, long_page: Written) -> None:
    page = long_open
    page.evaluate("document.addEventListener('narrow', (event) => { window.narrowed = event.detail; })")
    page.select_option("#live-category", label="Activations")
    row = page.locator(".live-row").first
    row.click()
    assert row.get_attribute("aria-expanded") == "true"
    assert page.locator(".live-details li").all_inner_texts() == ["train.py:20 main", "model.py:7 Net.forward"]
    size = sizes(page)[0]
    page.get_by_role("button", name="Show in the table").click()
    assert page.evaluate("window.narrowed.label") == f"output of mm {TIMES} 3, {size}"
    assert page.evaluate("Array.from({length: 1000}, (_, each) => each).filter(window.narrowed.keep).length") == 3
    wait_until(page, "document.getElementById('allocations').getBoundingClientRect().top < innerHeight")
    assert f"alive at event {format_count(position(page))}" in page.locator("#allocations-note").inner_text()


def test_the_list_follows_the_pointer(long_open: Any, long_page: Written) -> None:
    page, lifetimes = long_open, long_page.analysis.lifetimes
    at_peak = page.locator("#live-note").inner_text()
    bring(page, "timeline")
    frame = page.locator("#chart-frame").bounding_box()
    page.mouse.move(frame["x"] + 120, frame["y"] + 100)
    alive = lifetimes.alive_at(position(page))
    assert page.locator("#live-title").inner_text() == "Alive at the cursor"
    assert page.locator("#live-note").inner_text().startswith(f"{int(alive.sum())} allocations")
    assert page.locator(".live-row").count() <= 20, "no more than can be seen while it moves"
    page.mouse.move(2, 2)
    assert page.locator("#live-note").inner_text() == at_peak
    assert page.locator(".live-row").count() > 20


def test_a_reduced_page_lists_what_lives_at_the_peak_only(
    open_page: Open, tmp_path: Path, long_page: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("ampmem.reporters.html.write"), "STREAM_LIMIT", 100)
    page = open_page(written(tmp_path, long_page.analysis.recording).path)
    page.keyboard.press("Home")
    alive = long_page.analysis.lifetimes.alive_at(position(page))
    assert page.locator("#live-note").inner_text().startswith(f"{int(alive.sum())} allocations")
    assert not page.get_by_role("button", name="Next event").is_visible()
    page.keyboard.press("ArrowLeft")
    assert "only at the peak" in page.locator("#live-note").inner_text()
    assert page.locator(".live-row").count() == 0
