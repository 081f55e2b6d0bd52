"""The page of ``ampmem fit`` in a browser: its curves, its table, and texts of a script that are only ever texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import Open

from ampmem.analysis.fit.fit import FitResult, Memory, Vary, arm_fits, break_evens
from ampmem.reporters.html.page.fit_page import write_fit
from ampmem.reporters.text.fit import break_even_lines, fitting_lines
from ampmem.units import format_bytes

pytestmark = pytest.mark.browser

MIB = 1 << 20
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[2J"

TRACES = """document.getElementById("chart").data.map((trace) =>
  ({name: trace.name, x: trace.x, y: trace.y, text: trace.text}))"""


def memory(mebibytes: int) -> Memory:
    return Memory(allocated=mebibytes * MIB, reserved=(mebibytes + 6) * MIB, used=(mebibytes + 518) * MIB)


def made(total: int = 800 * MIB) -> FitResult:
    fp32 = {value: memory(20 + 10 * value) for value in (1, 2, 3, 4, 16, 24)}
    points = {
        "fp32": {**fp32, 25: None, 64: None},
        "amp": {**{value: memory(45 + 2 * value) for value in fp32}, 64: memory(173)},
    }
    return FitResult(
        script="train.py",
        vary=Vary(name="--batch-size", separator="=", low=1, high=64),
        gpu="a GPU",
        total=total,
        steps=2,
        arms=arm_fits(points),
        break_even=break_evens(points),
        notes=("a note",),
    )


@pytest.fixture
def page(tmp_path: Path, open_page: Open) -> Any:
    write_fit(made(), tmp_path / "fit.html")
    return open_page(tmp_path / "fit.html")


def test_the_curves_are_the_runs(page: Any) -> None:
    fp32, amp, failing, none = page.evaluate(TRACES)
    assert (fp32["name"], fp32["x"]) == ("fp32", [1, 2, 3, 4, 16, 24])
    assert fp32["y"] == [(20 + 10 * value) * MIB for value in fp32["x"]]
    assert (amp["x"][-1], amp["y"][-1]) == (64, 173 * MIB)
    assert amp["text"][0] == "amp, --batch-size 1: 47.0 MiB allocated, 53.0 MiB reserved"
    assert (failing["x"], failing["y"]) == ([25, 64], [288 * MIB] * 2)
    assert none["x"] == []
    shapes = page.evaluate("document.getElementById('chart').layout.shapes")
    assert [(shape["type"], shape.get("y0")) for shape in shapes] == [("line", 288 * MIB), ("rect", 0)]
    assert (shapes[1]["x0"], shapes[1]["x1"]) == (3, 4)
    assert "amp: less than fp32 from 4" in page.locator("#chart").inner_text()
    assert "288.0 MiB for the allocator" in page.locator("#chart").inner_text()


def test_a_mark_can_be_read_with_the_mouse(page: Any) -> None:
    page.locator("#chart .points path.point").first.hover(force=True)
    hover = page.locator("#chart .hoverlayer")
    hover.locator("text").first.wait_for()
    assert "fp32, --batch-size 1: 30.0 MiB allocated, 36.0 MiB reserved" in hover.text_content()


def test_everything_is_there_without_the_picture(page: Any) -> None:
    found = made()
    assert page.locator("#fitting li").all_inner_texts() == fitting_lines(found)
    assert page.locator("#break-even li").all_inner_texts() == break_even_lines(found)
    assert page.locator("#remarks li").all_inner_texts() == ["a note"]
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#runs tr").all()]
    assert rows[0] == ["--batch-size", "fp32", "amp"]
    assert rows[1] == ["1", "30.0 MiB (36.0 MiB reserved)", "47.0 MiB (53.0 MiB reserved)"]
    assert rows[-2] == ["25", "does not fit", "not run"]
    assert rows[-1] == ["64", "does not fit", "173.0 MiB (179.0 MiB reserved)"]


def test_the_theme_changes_the_curves(page: Any) -> None:
    colour = "document.getElementById('chart').data[0].line.color"
    light = page.evaluate(colour)
    page.locator("#theme").select_option("dark")
    assert page.evaluate(colour) != light


def test_a_capacity_that_is_far_above_is_told_and_not_drawn(tmp_path: Path, open_page: Open) -> None:
    write_fit(made(80 << 30), tmp_path / "fit.html")
    page = open_page(tmp_path / "fit.html", width=400)
    room = format_bytes((80 << 30) - 512 * MIB)
    assert page.locator("#capacity").inner_text() == f"The {room} that the allocator can take are above the picture."
    assert page.evaluate("document.getElementById('chart').layout.yaxis.range[1]") < 512 * MIB
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_texts_of_the_script_are_only_ever_texts(tmp_path: Path, open_page: Open) -> None:
    hostile = replace(
        made(),
        script=HOSTILE,
        gpu=HOSTILE,
        notes=(HOSTILE,),
        vary=Vary(name=HOSTILE, separator="=", low=1, high=None),
    )
    write_fit(hostile, tmp_path / "fit.html")
    page = open_page(tmp_path / "fit.html")
    assert page.locator("img").count() == 0
    assert "</script><img src=x" in page.locator("#remarks").inner_text()
    assert "\\u202e" in page.locator("#facts").inner_text()


def test_the_page_is_accessible(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
