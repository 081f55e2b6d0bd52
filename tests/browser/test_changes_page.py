"""The page of two runs of changed code: what changed, as it is sorted, searched and opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.build import write as write_recording
from support.changed_code import Code, run_of
from support.pages import Open
from support.story import PAYLOADS, hostile_run

from ampmem.analysis.difference.difference import Side, difference
from ampmem.analysis.difference.sides import read_side
from ampmem.analysis.summary import summarize
from ampmem.events import Recording
from ampmem.reporters.html import write_difference

pytestmark = pytest.mark.browser

BEFORE = Code(sizes=(4096, 4096, 512))
AFTER = Code(sizes=(4096, 8192, 256), batch=16, line=30)


def page_of(folder: Path, before: Recording, after: Recording) -> Path:
    sides = [read_side(write_recording(folder / f"{name}.ampmem", run)) for name, run in (("a", before), ("b", after))]
    write_difference(*sides, difference(*sides), folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def changes_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(tmp_path_factory.mktemp("changes"), run_of(BEFORE), run_of(AFTER))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(tmp_path_factory.mktemp("hostile"), run_of(BEFORE), hostile_run())


def column(page: Any, number: int) -> list[str]:
    rows = page.query_selector_all("#changes-body tr.allocation")
    return [row.query_selector_all("th, td")[number].inner_text() for row in rows]


def test_the_answer_and_the_changes_with_the_largest_first(look: Open, changes_page: Path) -> None:
    page = look(changes_page)
    assert page.inner_text("#verdict-title").startswith("The peak grew from 9.1 KiB to 12.9 KiB, +3.8 KiB, nearly all")
    assert page.inner_text("#changes-note") == "The 3 changes add up to +3.8 KiB; residual 0 B."
    assert column(page, 1) == ["+4.0 KiB", "-256 B", "+8 B"]
    assert column(page, 2) == ["grew", "shrank", "grew"]
    assert column(page, 6) == ["mm in layers.1", "mm in layers.2", "not known"]
    assert [option.inner_text() for option in page.query_selector_all("#run option")] == ["before", "after"]


def test_changes_are_sorted_narrowed_and_searched(look: Open, changes_page: Path) -> None:
    page = look(changes_page)
    page.click("#changes-sort-0")
    assert column(page, 1) == ["-256 B", "+8 B", "+4.0 KiB"]
    assert page.get_attribute("#changes-body th[aria-sort]", "aria-sort") == "ascending"
    page.select_option("#changes-kind", "shrank")
    assert column(page, 1) == ["-256 B"]
    assert page.inner_text("#changes-shown") == "1 of 3 rows, -256 B"
    page.select_option("#changes-kind", "all")
    page.select_option("#changes-category", "inputs")
    assert column(page, 1) == ["+8 B"]
    page.select_option("#changes-category", "all")
    page.fill("#changes-search", "NET.PY layers.1")
    assert column(page, 1) == ["+4.0 KiB"]
    page.fill("#changes-search", "nothing of it")
    assert page.inner_text("#changes-body tbody") == "Nothing matches."
    page.fill("#changes-search", "")


def test_a_row_opens_to_its_stack_with_the_keyboard(look: Open, changes_page: Path) -> None:
    page = look(changes_page)
    page.focus("#changes-body tr:has-text('+4.0 KiB') .expand")
    page.keyboard.press("Enter")
    details = page.inner_text("#changes-body tr.details")
    assert "4,096 before, 8,192 after" in details and "uint8 [8192], was uint8 [4096]" in details
    assert "/home/me/repo/net.py:31 Net.forward" in details
    page.keyboard.press("Enter")
    assert not page.is_visible("#changes-body tr.details")


def test_it_fits_a_phone(look: Open, changes_page: Path) -> None:
    page = look(changes_page)
    page.set_viewport_size({"width": 390, "height": 1000})
    page.click("#changes-body .expand")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_hostile_names_are_text(open_page: Open, hostile_page: Path) -> None:
    page = open_page(hostile_page)
    page.click("#changes-more")
    page.evaluate("for (const button of document.querySelectorAll('#changes-body .expand')) button.click()")
    said = page.inner_text("#changes-body")
    assert PAYLOADS[1] in said and "\u202e" not in said
    assert page.evaluate("window.pwned === undefined")
    assert page.evaluate("document.querySelectorAll('#changes img, #changes script, #changes a').length") == 0


def test_of_a_summary_there_is_what_changed_and_the_other_run(open_page: Open, tmp_path: Path) -> None:
    before = Side(label="main.json", summary=summarize(run_of(BEFORE)), groups=None)
    after = read_side(write_recording(tmp_path / "b.ampmem", run_of(AFTER)))
    write_difference(before, after, difference(before, after), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert "main.json is a summary" in page.inner_text("#verdict")
    assert column(page, 5) == ["Activations", "Inputs"]
    assert page.is_visible("#timeline") and not page.is_visible("#run-choice")


def test_of_two_summaries_there_is_what_changed_alone(open_page: Open, tmp_path: Path) -> None:
    sides = [
        Side(label=name, summary=summarize(run_of(code)), groups=None) for name, code in (("a", BEFORE), ("b", AFTER))
    ]
    write_difference(*sides, difference(*sides), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert column(page, 1) == ["+3.8 KiB", "+8 B"]
    assert not page.is_visible("#timeline")


def test_a_report_of_other_recordings_has_no_such_section(open_page: Open, tmp_path: Path) -> None:
    same = page_of(tmp_path, run_of(BEFORE), run_of(BEFORE))
    page = open_page(same)
    assert page.inner_text("#verdict-title").startswith("No difference: the peak is 9.1 KiB in both")
    assert not page.is_visible("#changes")
