"""The sections that are bars and tables, in a browser."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pages import Open, Written, changed

from ampmem.analysis.ops import plain_kind
from ampmem.analysis.summary import summary_of
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.reporters.html.stream import kinds_of
from ampmem.reporters.text.static_model import judgement
from ampmem.units import format_bytes, format_count

pytestmark = pytest.mark.browser

NARROWED = """() => document.addEventListener("narrow", ({ detail }) => {
  const kept = [];
  for (let kind = 0; kind < 5000; kind += 1) if (detail.keep(kind)) kept.push(kind);
  window.narrowed = [detail.label, kept];
})"""


@pytest.fixture
def real_open(look: Open, profiled_page: Written) -> Any:
    """The page of a real run under autocast."""
    return look(profiled_page.path)


def test_activations_are_told_by_kind_and_precision(real_open: Any, profiled_page: Written) -> None:
    section = real_open.locator("#activations")
    analysis = profiled_page.analysis
    mark = analysis.marks[-1].after_forward
    assert mark is not None
    position = analysis.timeline.position(mark)
    mine = analysis.classes.of(Category.ACTIVATIONS) & analysis.lifetimes.alive_at(position)
    texts, saved = analysis.recording.texts, analysis.saved_as
    norms = [
        int(analysis.lifetimes.bytes[index])
        for index in np.flatnonzero(mine)
        if texts[saved.op[index]] == "aten::native_layer_norm"
    ]
    # Some of them were not saved by any op: nobody knows that those are kept for backward.
    said = f"Activations alive at the end of forward: {format_bytes(int(analysis.lifetimes.bytes[mine].sum()))}."
    assert section.locator("p.quiet").first.inner_text() == said
    row = section.get_by_role("table", name="What they were saved for").get_by_role("row").filter(has_text="norms")
    assert format_bytes(sum(norms)) in row.inner_text()
    assert "layer norm" in row.inner_text()
    assert row.locator(".precision-full").count() == 1
    assert row.locator(".precision-low").count() == 0
    assert section.locator(".legend").inner_text().startswith("still float32: ")
    assert section.get_by_role("table", name="Which modules made them").get_by_text("blocks.*.mlp.up").is_visible()
    section.locator("summary").click()
    told = [row.inner_text().split("\t")[:3] for row in section.locator("details tbody tr").all()]
    assert ["gelu", "addmm", "bfloat16"] in told
    section.locator("summary").click()
    above = real_open.evaluate("['activations', 'timeline'].map((id) => document.getElementById(id).offsetTop)")
    assert above[0] < above[1], "it stands before the timeline"


def test_the_rule_of_thumb_says_what_it_is(real_open: Any, profiled_page: Written) -> None:
    section = real_open.locator("#static")
    assert section.locator("h2").inner_text() == "Rule of thumb"
    heads = [head.inner_text() for head in section.locator("table").first.locator("thead th").all()]
    assert heads == ["Component", "Rule of thumb", "B/param", "Measured", "B/param", "Why they differ", "Verdict"]
    text = section.inner_text()
    assert "as told" not in text
    assert "of told" not in text
    assert judgement(summary_of(profiled_page.analysis))[1:] in text
    assert section.locator(".same").all_inner_texts() == ["After update: the same"]


def test_the_sections_have_their_names_in_the_bar(real_open: Any) -> None:
    names = real_open.locator("#jumps a").all_inner_texts()
    assert names == [
        "Verdict",
        "What helps",
        "Activations",
        "Timeline",
        "Peak",
        "Steps",
        "Rule of thumb",
        "Casts",
        "Modules",
        "Stacks",
        "Allocations",
    ], "what there is nothing to show of has no way to it"


def test_activations_narrow_the_allocation_table(real_open: Any, profiled_page: Written) -> None:
    page = real_open
    page.evaluate(NARROWED)
    kinds, _ = kinds_of(profiled_page.analysis)
    texts = profiled_page.analysis.recording.texts
    activations = kinds.category == CATEGORIES.index(Category.ACTIVATIONS)

    page.locator("#activations").get_by_role("button", name="norms").click()
    label, kept = page.evaluate("window.narrowed")
    assert label == "activations saved for layer norm"
    names = [
        plain_kind(texts[name]) == "norms" and texts[dtype] == "float32"
        for name, dtype in zip(kinds.name, kinds.dtype, strict=True)
    ]
    assert kept == np.flatnonzero(activations & names).tolist() != []

    page.locator("#activations").get_by_role("button", name="blocks.*.mlp.up").click()
    label, kept = page.evaluate("window.narrowed")
    assert label == "activations made in blocks.*.mlp.up"
    modules = [texts[module] in ("blocks.0.mlp.up", "blocks.1.mlp.up") for module in kinds.module]
    assert kept == np.flatnonzero(activations & modules).tolist() != []


def test_a_bar_leads_to_a_table_that_comes_to_its_bytes(real_open: Any, profiled_page: Written) -> None:
    page = real_open
    mark = profiled_page.analysis.marks[-1].after_forward
    assert mark is not None
    event = format_count(profiled_page.analysis.timeline.position(mark))
    section = page.locator("#activations")
    for more in section.get_by_role("button", name="Show all").all():
        more.click()
    names = section.locator(".bars .link")
    sizes = section.locator(".bars .number").all_inner_texts()
    assert names.count() == len(sizes) > 10
    for name, size in zip(names.all(), sizes, strict=True):
        # What was chosen before would leave some of them out.
        page.select_option("#alive", "peak")
        page.select_option("#category", label="Gradients")
        page.locator("#search").fill("nothing like it")
        name.press("Enter")
        note = page.locator("#allocations-note").inner_text()
        assert f", {size} (" in note
        assert note.endswith(f", alive at event {event}")
    assert page.evaluate("document.activeElement.id") == "allocations-title"


def test_a_badge_says_that_every_byte_is_accounted_for_or_how_many_are_not(
    real_open: Any, open_page: Open, profiled_page: Written, tmp_path: Path
) -> None:
    badge = real_open.locator("#accounted")
    assert badge.inner_text() == "every byte accounted for"
    assert "good" in badge.get_attribute("class")

    def off(data: dict[str, Any]) -> None:
        data["runs"][0]["summary"]["conservation"]["residual_bytes"] = 2048

    badge = open_page(changed(profiled_page.path, tmp_path / "off.html", off)).locator("#accounted")
    assert badge.inner_text() == "2.0 KiB not accounted for"
    assert "bad" in badge.get_attribute("class")

    def unknown(data: dict[str, Any]) -> None:
        data["runs"][0]["summary"]["conservation"].update(residual_bytes=None, reserved_residual_bytes=None)

    page = open_page(changed(profiled_page.path, tmp_path / "unknown.html", unknown))
    assert page.locator("#accounted").is_hidden()


def test_a_bar_leads_nowhere_where_the_table_would_say_something_else(
    open_page: Open, profiled_page: Written, tmp_path: Path
) -> None:
    def off(data: dict[str, Any]) -> None:
        for bar in data["runs"][0]["said"]["activations"]["kinds"]:
            if bar["label"] == "norms":
                bar["full"] += 1

    section = open_page(changed(profiled_page.path, tmp_path / "off.html", off)).locator("#activations")
    assert section.get_by_role("button", name="matmuls").count() == 1
    assert section.get_by_role("rowheader", name="norms").count() == 1
    assert section.get_by_role("button", name="norms").count() == 0


def test_what_is_not_known_has_no_column(open_page: Open, precisions_page: Written, tmp_path: Path) -> None:
    heads = "all => all.map((head) => head.textContent)"
    page = open_page(precisions_page.path)
    known = page.locator("#steps table").first.locator("thead th").evaluate_all(heads)
    assert known == ["Step", "Peak", "In", "Loss", "Update", "Took"]
    assert page.locator("#comparison").get_by_role("table", name="Losses").count() == 1
    assert page.locator("#comparison h2").inner_text() == "The precisions side by side"

    def bare(data: dict[str, Any]) -> None:
        for step in (step for run in data["runs"] for step in run["said"]["steps"]):
            step.update(loss="-", update="", took="")
        data["comparison"].update(losses=[], baseline=None, waterfalls=[])
        for number, step in enumerate(data["comparison"]["steps"], start=1):
            step["index"] = number

    page = open_page(changed(precisions_page.path, tmp_path / "bare.html", bare))
    known = page.locator("#steps table").first.locator("thead th").evaluate_all(heads)
    assert known == ["Step", "Peak", "In"]
    assert page.locator("#comparison").get_by_role("table", name="Losses").count() == 0
    assert page.locator("#comparison h2").inner_text() == "The recordings side by side"
    each = "At the same instants of one step of each: fp32 step 1, amp step 2."
    assert page.locator("#comparison").get_by_text(each).is_visible()
