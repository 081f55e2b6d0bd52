"""The trees of modules and of stacks, in a browser, with a model of 200 layers."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.pages import Open, Written, written
from support.story import LAUNCHER, LIBRARY, WRAPPERS, deep_run

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.reporters.html.palette import category_views
from ampmem.reporters.html.stream import kinds_of
from ampmem.units import format_bytes

pytestmark = pytest.mark.browser

LAYERS = 200
DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
FOLD = f"layers.1{DASH}{LAYERS - 1}"

LABELS = "boxes => boxes.map((box) => box.getAttribute('aria-label'))"
SIZES = "boxes => boxes.map((box) => [box.getAttribute('aria-label'), box.getAttribute('data-bytes')])"

HEARD = """
document.addEventListener("narrow", ({ detail: { label, keep } }) => {
  window.narrowed = { label, kinds: Array.from({ length: 5000 }, (_, kind) => kind).filter(keep) };
});
"""


@pytest.fixture(scope="module")
def deep_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(tmp_path_factory.mktemp("deep"), deep_run(layers=LAYERS))


@pytest.fixture
def deep(look: Open, deep_page: Written) -> Any:
    return look(deep_page.path)


def at_peak(analysis: Analysis) -> list[tuple[int, str, str, str]]:
    """Bytes, module, stack and category of what is alive at the peak."""
    lifetimes, classes, texts = analysis.lifetimes, analysis.classes, analysis.recording.texts
    module = np.where(lifetimes.module != 0, lifetimes.module, classes.module)
    alive = np.flatnonzero(lifetimes.alive_at(int(analysis.timeline.total.argmax())))
    return [
        (int(lifetimes.bytes[i]), texts[module[i]], texts[lifetimes.stack[i]], CATEGORIES[classes.category[i]])
        for i in alive
    ]


def boxes(tree: Any) -> dict[str, int]:
    """Bytes of the boxes by what they are called, those on the first level below what is shown."""
    found = tree.locator("[role=treeitem][aria-level='2']").evaluate_all(SIZES)  # one by one takes seconds
    return {label: int(size) for label, size in found}


def box(tree: Any, name: str) -> Any:
    return tree.locator(f'[role=treeitem][aria-label^="{name}"]').first


def press(target: Any, key: str) -> None:
    target.focus()
    target.press(key)


def size_of(page: Written, wanted: Callable[[str, str], bool]) -> int:
    return sum(size for size, module, stack, _ in at_peak(page.analysis) if wanted(module, stack))


def names(tree: Any) -> list[str]:
    return [label.partition(",")[0] for label in boxes(tree)]


@pytest.mark.parametrize("shape", ["treemap", "icicle"])
def test_layers_that_are_alike_are_one_box_that_opens_and_closes(shape: str, deep: Any, deep_page: Written) -> None:
    page, tree = deep, deep.locator("#modules-tree")
    page.locator(f"#as-{shape}").click()
    fold = box(tree, FOLD)
    alike = size_of(deep_page, lambda module, _: bool(re.fullmatch(r"net\.layers\.[1-9]\d*\..*", module)))
    assert int(fold.get_attribute("data-bytes")) == alike
    assert fold.get_attribute("aria-expanded") == "false"
    assert f"{FOLD}, {LAYERS - 1} {TIMES} {format_bytes(alike // (LAYERS - 1))}," in fold.get_attribute("aria-label")
    assert fold.locator(".box-label").inner_text().startswith(f"▸ {FOLD}, {LAYERS - 1} {TIMES} ")
    # What is in it shows put together, beside the layer that is larger.
    drawn = [label.partition(",")[0] for label in tree.locator("[role=treeitem]").evaluate_all(LABELS)]
    assert {"0", "fc", "norm"} <= set(drawn)
    press(fold, "Enter")
    layers = boxes(tree)
    assert names(tree) == [str(number) for number in range(1, LAYERS)], "in natural order"
    assert sum(layers.values()) == alike
    assert tree.locator("[role=treeitem]").count() <= 1000
    assert page.locator("#modules-path .crumb").all_inner_texts()[-1].startswith(FOLD)
    top = tree.locator("[role=treeitem]").first
    assert top.get_attribute("aria-expanded") == "true"
    page.keyboard.press("Backspace")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(FOLD)
    fold.click(position={"x": 20, "y": 8})
    assert len(boxes(tree)) == LAYERS - 1
    top.click(position={"x": 20, "y": 8})
    assert fold.get_attribute("aria-expanded") == "false"


def test_library_frames_are_shown_when_asked_for_and_wrappers_are_one_line(deep: Any, deep_page: Written) -> None:
    page, tree = deep, deep.locator("#stacks-tree")
    total = size_of(deep_page, lambda module, stack: True)
    loss = size_of(deep_page, lambda module, stack: "Net.loss" in stack)
    library = size_of(deep_page, lambda module, stack: stack == LIBRARY)
    called = size_of(deep_page, lambda module, stack: WRAPPERS[0] in stack)
    unknown = size_of(deep_page, lambda module, stack: not stack)
    assert library and unknown and loss

    def sums() -> dict[str, int]:
        return {label.rpartition(", ")[0].rpartition(", ")[0]: size for label, size in boxes(tree).items()}

    assert sums() == {"4 frames": called, "(no stack)": unknown, "(library frames only)": library}
    assert sum(sums().values()) == total
    run = box(tree, "4 frames")
    label = run.locator(".box-label").inner_text()
    assert label == f"▸ 4 frames, <module> train.py:90 → … → train train.py:40 · {format_bytes(called)}"
    below = tree.locator("[aria-level='3'] .box-label").all_inner_texts()
    assert any(text.startswith("Net.forward") for text in below), "what they call stands right below"
    press(run, "Enter")
    shown = [tree.locator(f"[aria-level='{level}']").first.get_attribute("aria-label") for level in range(2, 6)]
    assert [each.partition(",")[0] for each in shown] == [*WRAPPERS, "/home/me/train.py:40 train"]
    page.keyboard.press("Backspace")
    assert run.get_attribute("aria-expanded") == "false"
    page.get_by_label("Show library frames").check()
    assert sums() == {"5 frames": called, "(no stack)": unknown, LIBRARY: library}
    page.locator("#stacks-search").fill("linear")
    searched = size_of(deep_page, lambda module, stack: LIBRARY in stack)
    assert page.locator("#stacks-matched").inner_text().startswith(f"1 frame, {format_bytes(searched)} (")
    assert tree.locator(".match").count() == 2
    page.get_by_label("Show library frames").uncheck()
    assert (
        page.locator("#stacks-matched")
        .inner_text()
        .startswith(f"1 frame, 1 of them not shown, {format_bytes(searched)}")
    )
    assert tree.locator(".match").count() == 0
    assert LAUNCHER not in "".join(boxes(tree))
    page.locator("#stacks-search").fill("")


COLOURS = """boxes => boxes.map((box) => {
  const style = getComputedStyle(box);
  return (style.backgroundImage + style.backgroundColor).match(/rgb\\([^)]*\\)/g) ?? [];
})"""

UNREADABLE = """boxes => boxes.filter((box) => {
  const label = box.querySelector(".box-label");
  const right = (element) => element.getBoundingClientRect().right;
  return label && (label.scrollWidth > label.clientWidth || right(label) > right(box));
}).map((box) => box.textContent)"""


def rgb(color: str) -> str:
    return f"rgb({int(color[1:3], 16)}, {int(color[3:5], 16)}, {int(color[5:7], 16)})"


def test_boxes_have_the_colours_of_their_categories_and_labels_that_fit(deep: Any) -> None:
    page, tree = deep, deep.locator("#modules-tree")
    page.locator("#as-icicle").click()
    press(box(tree, FOLD), "Enter")
    for theme in ("dark", "light"):
        page.select_option("#theme", theme)
        palette = {rgb(getattr(view, theme)) for view in category_views()}
        layers = tree.locator("[role=treeitem][aria-level='2']").evaluate_all(COLOURS)
        assert len(layers) == LAYERS - 1
        for colours in layers:
            stripes = [colour for colour in colours if colour in palette]
            assert len(set(stripes)) == 2, "parameters and activations"
            assert set(colours) - palette == set()
    for width in (1440, 1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        for shape in ("icicle", "treemap"):
            page.locator(f"#as-{shape}").click()
            assert page.locator("[role=treeitem]").evaluate_all(UNREADABLE) == []


def narrowed(page: Any, written_page: Written) -> tuple[str, list[tuple[int, str, str, str]]]:
    """What the table is asked to show, of what is alive at the peak."""
    asked = page.evaluate("window.narrowed")
    analysis = written_page.analysis
    alive = np.flatnonzero(analysis.lifetimes.alive_at(int(analysis.timeline.total.argmax())))
    _, kinds = kinds_of(analysis)
    kept = np.isin(kinds[alive], asked["kinds"])
    return asked["label"], [row for row, keep in zip(at_peak(analysis), kept, strict=True) if keep]


def test_what_is_opened_or_chosen_can_narrow_the_allocations(open_page: Open, deep_page: Written) -> None:
    page, rows = open_page(deep_page.path), at_peak(deep_page.analysis)
    page.evaluate(HEARD)
    modules, stacks = page.locator("#modules-tree"), page.locator("#stacks-tree")
    assert not page.locator("#modules-path").is_visible()
    press(box(modules, FOLD), "Enter")
    show = page.locator("#modules-path").get_by_role("button", name="Show its allocations")
    show.click()
    label, found = narrowed(page, deep_page)
    assert label == f"net.layers.1{DASH}{LAYERS - 1}"
    assert found == [row for row in rows if re.match(r"net\.layers\.[1-9]", row[1])]
    press(box(modules, "17,"), "Enter")
    press(box(modules, "fc,"), "Enter")
    press(box(modules, "Activations,"), "Enter")
    assert box(modules, "Activations,").get_attribute("aria-selected") == "true"
    show.click()
    label, found = narrowed(page, deep_page)
    assert label == "net.layers.17.fc, Activations"
    assert found == [row for row in rows if row[1] == "net.layers.17.fc" and row[3] == "activations"]
    assert page.locator("#narrowed-label").inner_text() == label
    assert page.locator("tr.allocation").count() == len(found)
    assert page.evaluate("document.activeElement.id") == "allocations-title"
    press(box(stacks, "/home/me/net.py:9 Net.loss"), "Enter")
    page.locator("#stacks-path").get_by_role("button", name="Show its allocations").click()
    label, found = narrowed(page, deep_page)
    assert label == "Net.loss  net.py:9"
    assert found == [row for row in rows if "Net.loss" in row[2]]


def test_what_is_opened_stays_open_at_another_instant(open_page: Open, deep_page: Written) -> None:
    page = open_page(deep_page.path)
    tree = page.locator("#modules-tree")
    press(box(tree, FOLD), "Enter")
    page.locator("#chart-frame").focus()
    for key in ("p", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    assert "at event" in page.locator("#modules-title").inner_text()
    assert len(boxes(tree)) == LAYERS - 1


def test_the_switch_is_there_only_where_there_are_library_frames(long_open: Any) -> None:
    assert not long_open.locator("#stacks-libraries").is_visible()


def test_stacks_are_searched_with_their_bytes(long_open: Any, long_page: Written) -> None:
    page = long_open
    page.locator("#stacks-search").fill("net.forward")
    lifetimes, texts = long_page.analysis.lifetimes, long_page.analysis.recording.texts
    mine = lifetimes.alive_at(int(long_page.analysis.timeline.total.argmax()))
    size = sum(
        int(lifetimes.bytes[index]) for index in np.flatnonzero(mine) if "Net.forward" in texts[lifetimes.stack[index]]
    )
    assert format_bytes(size) in page.locator("#stacks-matched").inner_text()
    assert page.locator("#stacks-tree .match").count() >= 1


def test_trees_are_walked_with_the_keyboard(long_open: Any, long_page: Written) -> None:
    page = long_open
    page.get_by_role("button", name="Icicle").click()
    tree = page.locator("#modules-tree")
    tree.locator("[role=treeitem]").first.focus()
    page.keyboard.press("ArrowDown")
    opened = page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Enter")
    assert page.locator("#modules-path .crumb").count() == 2
    assert tree.locator("[role=treeitem]").first.get_attribute("aria-label") == opened
    page.keyboard.press("Backspace")
    assert not page.locator("#modules-path").is_visible()
    assert tree.locator("[role=treeitem]").count() <= 1000
