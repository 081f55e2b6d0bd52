"""The page of ``ampmem fit`` in a browser: its curves, its table, and texts of a script that are only ever texts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.pages import Open, violations, wait_until
from support.story import fit_of, made

from ampmem.analysis.fit import Memory, Vary
from ampmem.reporters.html.fit_page import write_fit
from ampmem.reporters.text.fit import break_even_lines, fitting_lines
from ampmem.units import format_bytes

pytestmark = pytest.mark.browser

MIB = 1 << 20
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[2J"

TRACES = """Object.fromEntries(document.getElementById("chart").data.map((trace) =>
  [trace.name, {x: trace.x, y: trace.y, text: trace.text, opacity: trace.opacity, line: trace.line,
                size: trace.marker?.size}]))"""


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fit") / "fit.html"
    write_fit(made(), path)
    return path


@pytest.fixture
def page(look: Open, fitted: Path) -> Any:
    return look(fitted)


def test_the_curves_are_the_runs(page: Any) -> None:
    traces = page.evaluate(TRACES)
    fp32, amp, failing = traces["fp32"], traces["amp"], traces["fp32 does not fit"]
    assert fp32["x"] == [1, 2, 3, 4, 16, 24]
    assert fp32["y"] == [(26 + 10 * value) * MIB for value in fp32["x"]]
    assert (amp["x"][-1], amp["y"][-1]) == (64, 179 * MIB)
    assert amp["text"][0] == "amp, --batch-size 1: fits<br>53.0 MiB reserved<br>47.0 MiB allocated"
    assert failing["x"] == [25, 64]
    assert min(failing["y"]) > 288 * MIB, "above the line"
    assert traces["amp does not fit"]["x"] == [], "128 is far beside the picture"
    shapes = page.evaluate("document.getElementById('chart').layout.shapes")
    assert [(shape["type"], shape.get("y0")) for shape in shapes] == [("line", 288 * MIB), ("rect", 0)]
    assert (shapes[1]["x0"], shapes[1]["x1"]) == (3, 4)
    assert "amp: less allocated than fp32 from 4" in page.locator("#chart").inner_text()
    assert "below 288.0 MiB: fits" in page.locator("#chart").inner_text()


def test_what_is_allocated_is_faint_under_what_is_reserved(page: Any) -> None:
    traces = page.evaluate(TRACES)
    for precision, least in (("fp32", 30), ("amp", 47)):
        faint, plain = traces[f"{precision} allocated"], traces[precision]
        assert (faint["x"], faint["y"][0]) == (plain["x"], least * MIB)
        assert faint["opacity"] < 1
        assert faint["line"]["width"] < plain["line"]["width"]
        assert faint["line"]["color"] == plain["line"]["color"]
    assert page.locator("#chart .legendtext").all_text_contents() == ["fp32", "amp"]


def test_everything_is_there_without_the_picture(page: Any) -> None:
    found = made()
    assert page.locator("#fitting li").all_inner_texts() == fitting_lines(found)
    assert page.locator("#break-even li").all_inner_texts() == break_even_lines(found)
    assert page.locator("#remarks li").all_inner_texts() == ["a note"]
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#runs tr").all()]
    assert rows[0] == ["--batch-size", "fp32", "amp"]
    assert rows[1] == ["1", "36.0 MiB (30.0 MiB)", "53.0 MiB (47.0 MiB)"]
    assert rows[-3] == ["25", "does not fit", "not run"]
    assert rows[-2] == ["64", "does not fit", "179.0 MiB (173.0 MiB)"]


def test_the_page_is_accessible(page: Any) -> None:
    assert violations(page) == []


def test_a_mark_can_be_read_with_the_mouse(page: Any) -> None:
    page.locator("#chart .points path.point").first.hover(force=True)
    hover = page.locator("#chart .hoverlayer")
    hover.locator("text").first.wait_for()
    assert "fp32, --batch-size 1: fits36.0 MiB reserved30.0 MiB allocated" in hover.text_content()


def test_no_width_cuts_the_page(page: Any) -> None:
    for width in (390, 1024, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        wait_until(page, "document.querySelector('#chart .main-svg').clientWidth <= innerWidth")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        inner = "[...document.querySelectorAll('.scroll')].every((one) => one.scrollWidth <= one.clientWidth)"
        assert page.evaluate(inner), width


def test_the_theme_changes_the_curves(page: Any) -> None:
    colour = "document.getElementById('chart').data[0].line.color"
    light = page.evaluate(colour)
    page.locator("#theme").select_option("dark")
    assert page.evaluate(colour) != light


def test_what_may_fit_is_neither_what_fits_nor_what_does_not(tmp_path: Path, open_page: Open) -> None:
    """The axes begin near the data, the zone between is shaded, and a mark of each kind looks like no other."""

    def at(reserved: int) -> Memory:
        used, most = reserved + 80, reserved + 896
        return Memory(
            allocated=(reserved - 20) * MIB,
            reserved=reserved * MIB,
            used=used * MIB,
            highest=most * MIB,
            surely=most <= 2048,
            outside_at_most=896 * MIB,
        )

    points = {"fp32": {16: at(700), 32: at(1100), 33: at(1170), 64: None}, "amp": {16: at(520), 43: at(1140)}}
    write_fit(fit_of(points, 2048 * MIB, "2GiB"), tmp_path / "fit.html")
    page = open_page(tmp_path / "fit.html")
    assert page.locator("h1").inner_text() == "On 2 GiB AMP fits a batch of 43 or more, FP32 32."
    symbols = "Object.fromEntries(document.getElementById('chart').data.map((one) => [one.name, one.marker?.symbol]))"
    drawn = page.evaluate(symbols)
    assert drawn["fp32"] == ["circle", "circle", "circle-open"]
    assert drawn["fp32 does not fit"] == "x"
    layout = page.evaluate("document.getElementById('chart').layout")
    zone = [(one["y0"], one["y1"]) for one in layout["shapes"] if one["type"] == "rect"]
    assert zone == [(1152 * MIB, 1968 * MIB)]
    assert 13 < layout["xaxis"]["range"][0] < 16
    assert 400 * MIB < layout["yaxis"]["range"][0] < 500 * MIB
    assert page.locator("#room").inner_text() == (
        "Of the 2.00 GiB that the device has, 0.08 to 0.88 GiB is in use outside of the allocator, such as the CUDA "
        "context: the allocator can surely take 1.12 GiB, and at most 1.92 GiB. What lies between is the shaded zone, "
        "in which a run may fit."
    )


def test_equal_precisions_are_both_seen(tmp_path: Path, open_page: Open) -> None:
    write_fit(made(precisions=("amp", "amp-nocache")), tmp_path / "fit.html")
    page = open_page(tmp_path / "fit.html")
    same = "amp-nocache: the same as amp"
    traces = page.evaluate(TRACES)
    under, over = traces["amp"], traces[same]
    assert under["y"] == over["y"]
    assert (under["line"]["dash"], traces["fp32"]["line"]["dash"]) == ("solid", "solid")
    assert "," in over["line"]["dash"], "there are gaps, through which the other shows"
    assert over["size"][0] < under["size"][0]
    assert page.locator("#chart .legendtext").all_text_contents() == ["fp32", "amp", same]
    assert page.locator("#fitting li").all_inner_texts()[-1] == same
    assert page.locator("#break-even li").all_inner_texts()[-1] == same
    page.locator("#chart .points path.point").first.hover(force=True)
    hover = page.locator("#chart .hoverlayer")
    hover.locator("text").first.wait_for()
    assert "amp, --batch-size 1" in hover.text_content()
    assert "amp-nocache, --batch-size 1" in hover.text_content()


def test_a_capacity_that_is_far_above_is_told_and_not_drawn(tmp_path: Path, open_page: Open) -> None:
    write_fit(made(80 << 30), tmp_path / "fit.html")
    page = open_page(tmp_path / "fit.html", width=400)
    room = format_bytes((80 << 30) - 512 * MIB)
    assert (
        page.locator("#capacity").inner_text()
        == f"Not drawn, because all runs are far below: the {room} that the allocator can take."
    )
    assert page.evaluate("document.getElementById('chart').layout.yaxis.range[1]") < 512 * MIB
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_texts_of_the_script_are_only_ever_texts(tmp_path: Path, open_page: Open) -> None:
    hostile = replace(
        made(),
        script=HOSTILE,
        gpu=replace(made().gpu, name=HOSTILE),
        notes=(HOSTILE,),
        vary=Vary(name=HOSTILE, separator="=", low=1, high=None),
    )
    write_fit(hostile, tmp_path / "fit.html")
    page = open_page(tmp_path / "fit.html")
    assert page.locator("img").count() == 0
    assert "</script><img src=x" in page.locator("#remarks").inner_text()
    assert "\\u202e" in page.locator("#facts").inner_text()
