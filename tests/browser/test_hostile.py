"""Texts that a script chooses are only ever text, whatever they are."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.pages import Open, Written, changed, written
from support.story import PAYLOADS, hostile_run

from ampmem.reporters.html.safety import MAX_TEXT, visible

pytestmark = pytest.mark.browser

RECORDED = [payload for payload in PAYLOADS if "\ud800" not in payload]


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(tmp_path_factory.mktemp("hostile"), hostile_run())


def hostile_activations() -> dict[str, Any]:
    bars = [
        {"label": text, "detail": text, "full": 5, "low": 3, "other": 1, "ops": [[text, text]], "module": text}
        for text in PAYLOADS
    ]
    return {
        "when": PAYLOADS[0],
        "position": 1,
        "by": "saved for",
        "words": {"full": PAYLOADS[1], "low": PAYLOADS[2], "other": PAYLOADS[3]},
        "whole": bars[0],
        "kinds": bars,
        "modules": bars,
        "modules_rest": bars[0],
        "savings": [{"saved_for": text, "made_by": text, "dtype": text, "tensors": 2, "bytes": 5} for text in PAYLOADS],
        "savings_left_out": 1,
    }


def hostile_data(data: dict[str, Any]) -> None:
    """Payloads also where the reporter itself writes sentences, and where the recording had none."""
    (run,) = data["runs"]
    run["said"]["findings"] = [
        {
            "code": payload[:50],
            "severity": payload[:50],
            "message": payload[:1000],
            "change": payload[:1000],
            "evidence": [payload[:1000]],
            "meaning": [payload[:1000]],
            "jump": "timeline",
        }
        for payload in PAYLOADS
    ]
    for step, words, payload in zip(run["summary"]["steps"], run["said"]["steps"], PAYLOADS, strict=False):
        words.update(loss=payload, loss_scale=payload, took=payload, update=payload)
        step["peak"]["phase"] = payload
    run["said"]["activations"] = hostile_activations()
    run["events"]["phase_runs"] = [[number * 3, payload] for number, payload in enumerate(PAYLOADS[:15])]
    run["label"] = PAYLOADS[0]
    data["runs"] = [run, {**run, "label": PAYLOADS[1]}]
    step = run["summary"]["steps"][0]
    data["comparison"] = {
        "baseline": 0,
        "labels": [PAYLOADS[0], PAYLOADS[1]],
        "steps": [step, {**step, "peak": {**step["peak"], "categories": dict.fromkeys(step["peak"]["categories"], 1)}}],
        "waterfalls": [[1, "peak"]],
        "figures": [[text, text, text] for text in PAYLOADS],
        "losses": [[PAYLOADS[2], PAYLOADS[3], PAYLOADS[4]]],
        "loss_differences": [PAYLOADS[5], PAYLOADS[6], PAYLOADS[7]],
        "remarks": list(PAYLOADS),
        "failures": list(PAYLOADS),
        "compiling": [[text, [[text] * 6]] for text in PAYLOADS],
    }
    data["marks"] = dict(zip(data["marks"], PAYLOADS[8:], strict=False))


def use_everything(page: Any) -> None:
    """Every control that draws something anew."""
    page.locator("#chart-frame").focus()
    for key in ("p", "ArrowLeft", "Enter", "Home", "w"):
        page.keyboard.press(key)
    for name in ("Time", "Icicle", "Treemap"):
        page.get_by_role("button", name=name, exact=True).click()
    page.locator("#stacks-search").fill("script")
    page.locator("#search").fill("<img")
    page.locator("#search").fill("")
    page.select_option("#alive", "run")
    for row in page.locator("button.expand").all()[:8]:
        row.click()
    for box in page.locator("#modules-tree [role=treeitem]").all()[1:3]:
        box.dispatch_event("click")
    for button in page.get_by_role("button", name="Show its allocations").all():
        button.click()
    page.select_option("#theme", "dark")


def assert_only_text(page: Any) -> None:
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("({}).bytes") is None
    assert page.locator("img, iframe, object, embed, base, [onerror], [onload], [onmouseover]").count() == 0
    links = page.locator("a").evaluate_all("all => all.map((link) => link.getAttribute('href'))")
    assert all(re.fullmatch("#[a-z]+", link) for link in links), links
    assert page.locator("#chart a, #chart tspan[style]").count() == 0
    assert page.locator("script:not([type])").count() == 1


def test_nothing_runs(open_page: Open, hostile_page: Written, tmp_path: Path) -> None:
    page = open_page(changed(hostile_page.path, tmp_path / "page.html", hostile_data))
    use_everything(page)
    page.wait_for_timeout(200)
    assert_only_text(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_payloads_are_shown_as_what_they_are(open_page: Open, hostile_page: Written) -> None:
    page = open_page(hostile_page.path)
    page.select_option("#alive", "run")
    text = page.locator("#main").evaluate("main => main.textContent")
    labels = "\n".join(page.locator("[aria-label]").evaluate_all("all => all.map((one) => one.ariaLabel)"))
    for payload in RECORDED:
        shown = visible(payload)[: MAX_TEXT // 2]
        assert shown in text, shown
        assert shown in labels or "." in shown, shown
    assert PAYLOADS[0] in page.title() or "</script>" in page.title()
    texts = "Array.from(document.querySelectorAll('main *'), (one) => one.children.length ? 0 : one.textContent.length)"
    longest = max(page.evaluate(texts))
    assert longest <= 2500
    assert hostile_page.path.stat().st_size < 4_000_000
    assert_only_text(page)
