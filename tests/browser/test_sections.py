"""The sections that are bars and tables, in a browser."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pages import Open, Written

from ampmem.analysis.ops import plain_kind
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.reporters.html.stream.kinds import kinds_of
from ampmem.units import format_bytes

pytestmark = pytest.mark.browser

NARROWED = """() => document.addEventListener("narrow", ({ detail }) => {
  const kept = [];
  for (let kind = 0; kind < 5000; kind += 1) if (detail.keep(kind)) kept.push(kind);
  window.narrowed = [detail.label, kept];
})"""


@pytest.fixture
def real_open(open_page: Open, profiled_page: Written) -> Any:
    """The page of a real run under autocast."""
    return open_page(profiled_page.path)


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
    row = section.get_by_role("table", name="What they are kept for").get_by_role("row").filter(has_text="norms")
    assert format_bytes(sum(norms)) in row.inner_text()
    assert "layer norm" in row.inner_text()
    assert row.locator(".precision-full").count() == 1
    assert row.locator(".precision-low").count() == 0
    assert section.locator(".legend").inner_text().startswith("still float32: ")
    assert section.get_by_role("table", name="Which modules made them").get_by_text("blocks.*.mlp.up").is_visible()
    section.locator("summary").click()
    told = [row.inner_text().split("\t")[:3] for row in section.locator("details tbody tr").all()]
    assert ["gelu", "addmm", "bfloat16"] in told
    above = real_open.evaluate("['activations', 'timeline'].map((id) => document.getElementById(id).offsetTop)")
    assert above[0] < above[1], "it stands before the timeline"


def test_activations_narrow_the_allocation_table(real_open: Any, profiled_page: Written) -> None:
    page = real_open
    page.evaluate(NARROWED)
    kinds, _ = kinds_of(profiled_page.analysis)
    texts = profiled_page.analysis.recording.texts
    activations = kinds.category == CATEGORIES.index(Category.ACTIVATIONS)

    page.locator("#activations").get_by_role("button", name="norms").click()
    label, kept = page.evaluate("window.narrowed")
    assert label == "activations saved for layer norm"
    names = [plain_kind(texts[name]) == "norms" for name in kinds.name]
    assert kept == np.flatnonzero(activations & names).tolist() != []

    page.locator("#activations").get_by_role("button", name="blocks.*.mlp.up").click()
    label, kept = page.evaluate("window.narrowed")
    assert label == "activations made in blocks.*.mlp.up"
    modules = [texts[module] in ("blocks.0.mlp.up", "blocks.1.mlp.up") for module in kinds.module]
    assert kept == np.flatnonzero(activations & modules).tolist() != []
