"""The first screen, in a browser: the verdict is there before any script, and equal runs are one bar."""

from pathlib import Path
from typing import Any

import pytest
from support.pages import Open, Written, changed

pytestmark = pytest.mark.browser


def test_the_verdict_is_read_without_scripts(browser: Any, precisions_page: Written) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(precisions_page.path.as_uri())
    title = page.locator("#verdict h1")
    assert title.inner_text().startswith("Mixed precision ")
    box = page.locator("#verdict").bounding_box()
    assert box["y"] + box["height"] < 900
    assert page.locator("#verdict .piece").count() > 4
    context.close()


def test_the_verdict_comes_first(open_page: Open, precisions_page: Written) -> None:
    page = open_page(precisions_page.path)
    order = page.evaluate("[...document.querySelectorAll('main > section:not([hidden])')].map((each) => each.id)")
    assert order.index("verdict") < order.index("activations") < order.index("timeline")
    assert page.locator("h1").count() == 1
    widths = page.evaluate("[...document.querySelectorAll('#verdict .track-line')].map((each) => each.clientWidth)")
    assert min(widths) > 100


def test_equal_runs_are_one_bar(open_page: Open, precisions_page: Written, tmp_path: Path) -> None:
    def with_a_third(data: dict[str, Any]) -> None:
        comparison = data["comparison"]
        comparison["labels"].append("amp-nocache")
        comparison["steps"].append(comparison["steps"][1])

    page = open_page(changed(precisions_page.path, tmp_path / "page.html", with_a_third))
    bars = page.locator("#comparison .bars").first.locator("tr")
    assert [bar.split("\t")[0] for bar in bars.all_inner_texts()] == ["fp32", "amp", "amp-nocache"]
    assert bars.nth(2).inner_text().endswith("the same as amp")
