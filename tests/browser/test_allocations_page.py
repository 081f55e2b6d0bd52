"""The table of allocations and the address map, as they are used: sorted, narrowed, unfolded, pointed at."""

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.build import Story
from support.pages import Open, Written, written
from support.story import gpu_run

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.layers import address_map
from ampmem.events import Fact, Phase
from ampmem.units import format_bytes

pytestmark = pytest.mark.browser

ROW_HEIGHT = 14
BY = "\N{MULTIPLICATION SIGN}"
LIBRARY = "/v/site-packages/torch/nn/modules/linear.py:134 Linear.forward"
STACK = f"<frozen runpy>:88 _run_code\n/home/me/train.py:3 main\n{LIBRARY}"


@pytest.fixture(scope="module")
def gpu_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(tmp_path_factory.mktemp("gpu"), gpu_run(steps=2))


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Tensors of several types and shapes, all of them alive at the peak."""
    story = Story()
    story.parameter(0x10, "h.0.weight", 6)
    story.begin(0, Phase.FORWARD)
    for number, (dtype, shape, size) in enumerate(
        (
            ("bfloat16", "[10, 2]", 40),
            ("float32", "[9, 2]", 72),
            ("float32", "[]", 4),
            ("int64", "[9, 10]", 720),
            ("", "", 8),
        )
    ):
        story.alloc(
            0x100 + number, size, op=f"aten::op{number}", module=f"h.{number}", stack=STACK if number else LIBRARY
        )
        story.fact(Fact.OUTPUT, 0x100 + number, f"aten::op{number}", dtype=dtype, shape=shape)
    story.enter(Phase.BACKWARD)
    story.free(*range(0x100, 0x105))
    story.end()
    return written(tmp_path_factory.mktemp("small"), story.recording())


def column(page: Any, field: str) -> list[str]:
    return page.locator(f"tr.allocation .field-{field}").all_inner_texts()


def test_each_allocation_says_its_type_and_shape(look: Open, small_page: Written) -> None:
    page = look(small_page.path)
    rows = dict(zip(column(page, "what"), zip(column(page, "dtype"), column(page, "shape"), strict=True), strict=True))
    assert rows == {
        "h.0.weight": ("-", "-"),
        "output of op0": ("bfloat16", f"10{BY}2"),
        "output of op1": ("float32", f"9{BY}2"),
        "output of op2": ("float32", "scalar"),
        "output of op3": ("int64", f"9{BY}10"),
        "output of op4": ("-", "-"),
    }
    page.locator("#search").fill("9x10 int64")
    assert column(page, "what") == ["output of op3"]
    page.locator("#search").fill("")


def test_a_click_on_a_head_sorts_and_another_turns_the_order(look: Open, small_page: Written) -> None:
    page = look(small_page.path)
    head = page.locator(".allocations thead")
    assert head.locator("[aria-sort]").all_inner_texts() == ["Size"]
    assert head.locator("[aria-sort]").get_attribute("aria-sort") == "descending"
    assert column(page, "size") == ["720 B", "72 B", "40 B", "24 B", "8 B", "4 B"]
    head.get_by_role("button", name="Size").click()
    assert head.locator("[aria-sort]").get_attribute("aria-sort") == "ascending"
    assert column(page, "size") == ["4 B", "8 B", "24 B", "40 B", "72 B", "720 B"]
    head.get_by_role("button", name="Shape").click()
    assert column(page, "shape") == [f"9{BY}2", f"9{BY}10", f"10{BY}2", "scalar", "-", "-"]
    assert head.locator("[aria-sort]").all_inner_texts() == ["Shape"]
    page.keyboard.press("Enter")
    assert column(page, "shape") == ["scalar", f"10{BY}2", f"9{BY}10", f"9{BY}2", "-", "-"], "the button kept the focus"
    head.get_by_role("button", name="Dtype").focus()
    page.keyboard.press("Space")
    assert column(page, "dtype") == ["bfloat16", "float32", "float32", "int64", "-", "-"]
    assert column(page, "size")[1:3] == ["72 B", "4 B"], "equal ones are still the largest first"


def test_the_table_is_narrowed_by_whoever_asks_and_says_so(look: Open, small_page: Written) -> None:
    page = look(small_page.path)
    everything = column(page, "what")
    assert not page.locator("#narrowed").is_visible()
    page.evaluate(
        """() => document.dispatchEvent(
             new CustomEvent("narrow", {detail: {label: "the <b>first</b> two\\u202e", keep: (kind) => kind < 2}}))"""
    )
    assert "the <b>first</b> two\\u202e" in page.locator("#narrowed").inner_text()
    assert sorted(column(page, "what")) == ["h.0.weight", "output of op0"]
    assert page.locator("#allocations-note").inner_text().startswith("2 allocations, 64 B")
    page.locator("#search").fill("weight")
    assert column(page, "what") == ["h.0.weight"]
    page.locator("#search").fill("")
    page.get_by_role("button", name="Show all allocations again").click()
    assert column(page, "what") == everything
    assert not page.locator("#narrowed").is_visible()


def test_stacks_leave_out_torch_and_launchers_until_they_are_asked_for(look: Open, small_page: Written) -> None:
    page = look(small_page.path)

    def shown() -> list[str]:
        return [item.inner_text() for item in page.locator("ol.stack li").all() if item.is_visible()]

    page.locator("tr.allocation", has_text="output of op1").click()
    assert shown() == ["/home/me/train.py:3 main"]
    page.get_by_role("button", name="Show 2 frames of torch and launchers").click()
    assert shown() == STACK.split("\n")
    page.get_by_role("button", name="Hide 2 frames of torch and launchers").click()
    page.locator("tr.allocation", has_text="output of op1").click()
    page.locator("tr.allocation", has_text="output of op0").click()
    assert shown() == [LIBRARY], "where there is nothing else, that is shown"


NOT_WHOLE = """box => {
      const right = box.getBoundingClientRect().right;
      const cells = [...box.querySelectorAll("th, td")].filter((cell) => cell.offsetParent);
      const out = (cell) => cell.getBoundingClientRect().right > right + 1 || cell.scrollWidth > cell.clientWidth + 1;
      return cells.filter(out).map((cell) => cell.textContent);
}"""


def test_no_column_is_cut_and_no_word_broken(open_page: Open, profiled_page: Written) -> None:
    page = open_page(profiled_page.path)
    box = page.locator("#allocations .scroll")
    for width in (390, 800, 1024):
        page.set_viewport_size({"width": width, "height": 844})
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
        assert box.evaluate(NOT_WHOLE) == []
        for field in ("dtype", "shape"):
            fields = page.locator(f".allocations tbody .field-{field}")
            assert fields.filter(has_text=re.compile(r"\w")).first.is_visible()


def place_of(page: Any, segments: Any, number: int, offset: int) -> tuple[float, float]:
    """Where on the screen the byte at ``offset`` of a segment is drawn."""
    total = sum(each.extent.size for each in segments)
    in_row = 512
    while in_row * 40 < total:
        in_row *= 2
    at = sum(each.extent.size for each in segments[:number]) + offset
    box = page.locator("#addresses canvas").bounding_box()
    return box["x"] + box["width"] * (at % in_row) / in_row, box["y"] + (at // in_row + 0.4) * ROW_HEIGHT


def largest_pieces(analysis: Analysis, at: int) -> tuple[Any, tuple[int, int, Any], tuple[int, int, Any]]:
    """The segments at ``at``, and the largest block and cached piece there: segment, place of its middle, piece."""
    segments = [*address_map(analysis, at)]
    pieces = [
        (number, piece.address - each.extent.address + piece.bytes // 2, piece)
        for number, each in enumerate(segments)
        for piece in each.pieces
    ]
    used = max((each for each in pieces if each[2].allocation is not None), key=lambda each: each[2].bytes)
    cached = max((each for each in pieces if each[2].allocation is None), key=lambda each: each[2].bytes)
    return segments, used, cached


def test_the_map_says_what_a_block_is_and_a_click_shows_its_allocation(look: Open, gpu_page: Written) -> None:
    page, analysis = look(gpu_page.path), gpu_page.analysis
    peak = int(analysis.timeline.total.argmax())
    segments, (number, middle, piece), (cached_in, cached_at, free) = largest_pieces(analysis, peak)
    lives, texts = analysis.lifetimes, analysis.recording.texts
    asked = int(lives.bytes[piece.allocation])
    page.locator("#addresses canvas").scroll_into_view_if_needed()
    page.mouse.move(*place_of(page, segments, number, middle))
    said = page.locator("#addresses-readout").inner_text()
    assert said.startswith(f"{format_bytes(piece.bytes)} ({piece.bytes:,} B), ")
    assert texts[lives.op[piece.allocation]] in said
    assert f"in {texts[lives.module[piece.allocation]]}" in said
    assert f"uint8 1{BY}{asked}," in said
    assert f"({asked:,} B) of it requested" in said
    event = int(lives.born[piece.allocation])
    assert f"Allocated by event {event + 1:,}, " in said
    assert f"of step {int(lives.step[piece.allocation])}." in said
    page.mouse.click(*place_of(page, segments, number, middle))
    assert page.locator("#narrowed").is_visible()
    assert column(page, "shape") == [f"1{BY}{asked}"]
    page.get_by_role("button", name="Show all allocations again").click()
    page.locator("#addresses canvas").scroll_into_view_if_needed()
    page.mouse.click(*place_of(page, segments, cached_in, cached_at))
    assert (
        page.locator("#addresses-readout")
        .inner_text()
        .startswith(f"{format_bytes(free.bytes)} ({free.bytes:,} B), cached")
    )
    assert not page.locator("#narrowed").is_visible()


def test_the_map_is_walked_with_the_keyboard(look: Open, gpu_page: Written) -> None:
    page, analysis = look(gpu_page.path), gpu_page.analysis
    segments = [*address_map(analysis, int(analysis.timeline.total.argmax()))]
    pieces = [piece for each in segments for piece in each.pieces]
    frame = page.get_by_role("slider", name="Blocks, by address")
    frame.focus()
    for key, expected in (
        ("Home", pieces[0]),
        ("ArrowRight", pieces[1]),
        ("ArrowLeft", pieces[0]),
        ("End", pieces[-1]),
    ):
        page.keyboard.press(key)
        size = (
            f"{format_bytes(expected.bytes)} ({expected.bytes:,} B), "
            if expected.bytes >= 1024
            else f"{expected.bytes} B"
        )
        assert frame.get_attribute("aria-valuetext").startswith(size), key
        assert page.locator("#addresses-readout").inner_text() == frame.get_attribute("aria-valuetext")
    page.keyboard.press("Home")
    for _ in range(next(at for at, piece in enumerate(pieces) if piece.allocation is not None)):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    first = next(piece for piece in pieces if piece.allocation is not None)
    assert f"{int(analysis.lifetimes.bytes[first.allocation]):,} B" in page.locator("#allocations-note").inner_text()


def test_a_map_without_events_says_what_it_does_not_know(
    open_page: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu_page: Written
) -> None:
    monkeypatch.setattr(importlib.import_module("ampmem.reporters.html.write"), "STREAM_LIMIT", 100)
    page = open_page(written(tmp_path, gpu_page.analysis.recording).path)
    segments, (number, middle, _), _ = largest_pieces(
        gpu_page.analysis, int(np.argmax(gpu_page.analysis.timeline.total))
    )
    page.locator("#addresses canvas").scroll_into_view_if_needed()
    page.mouse.click(*place_of(page, segments, number, middle))
    assert "does not say which allocation it is" in page.locator("#addresses-readout").inner_text()
    assert not page.locator("#narrowed").is_visible()
