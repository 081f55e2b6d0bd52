"""Reserved memory and the address map of the page, against the analysis and the model of the allocator."""

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pages import EXACT, Open, Written, written
from support.story import gpu_run

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.layers import AllocatorLayers
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.reporters.html.stream import address_map_view, stream_view
from ampmem.units import format_bytes, format_count

MODULES = Path(__file__).resolve().parents[2] / "ampmem" / "reporters" / "html" / "js"
MAPS = """
import { readFileSync } from "node:fs";
import { unpackStream } from "MODULES/data/decode.js";
import { liveOf } from "MODULES/data/live.js";
import { segmentsFilledAt } from "MODULES/data/segments.js";
const { stream, keys, positions } = JSON.parse(readFileSync(0));
const live = liveOf(await unpackStream(stream, keys.length), 0);
const sums = positions.map((position) => live.sample([position]).map((series) => series[0]));
console.log(JSON.stringify({ sums, maps: positions.map((position) => segmentsFilledAt(live, position, keys)) }));
"""


def layers_in(analysis: Analysis) -> AllocatorLayers:
    layers = analysis.layers
    assert layers is not None
    return layers


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("expandable", [False, True])
def test_the_page_computes_the_layers_and_the_map_of_the_analysis(expandable: bool, tmp_path: Path) -> None:
    analysis = analyse(gpu_run(steps=2, expandable=expandable))
    layers, timeline = layers_in(analysis), analysis.timeline
    assert layers.cached.min() >= 0
    view = stream_view(analysis, [], 0, 1 << 30)
    stream = {"mode": view.mode, "events": view.events, "packed": view.packed}
    positions = sorted({*range(0, view.events + 1, 29), int(timeline.total.argmax()), view.events})
    script = tmp_path / "maps.mjs"
    script.write_text(MAPS.replace("MODULES", MODULES.as_posix()), encoding="utf-8")
    given = json.dumps({"stream": stream, "keys": [str(each) for each in CATEGORIES], "positions": positions})
    done = subprocess.run(["node", script], input=given, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    for position, sums, shown in zip(positions, found["sums"], found["maps"], strict=True):
        rounding = int(layers.allocated[position] - timeline.total[position])
        assert sums == [*timeline.live[:, position].tolist(), rounding, int(layers.cached[position])]
        segments = address_map_view(analysis, position)
        told = [(each["address"], each["bytes"], [tuple(piece[:3]) for piece in each["blocks"]]) for each in shown]
        assert told == [(each.address, each.bytes, [*each.blocks]) for each in segments]
        blocks = [piece[3] for each in shown for piece in each["blocks"] if piece[2] != "cached"]
        alive = np.flatnonzero(analysis.lifetimes.alive_at(position))
        born = dict(
            zip(analysis.lifetimes.address[alive].tolist(), analysis.lifetimes.born[alive].tolist(), strict=True)
        )
        assert {block["address"]: block["born"] for block in blocks} == born
        assert sum(size for _, size, _ in told) == layers.reserved[position]
        for _, size, pieces in told:
            ends = [0, *(offset + length for offset, length, _ in pieces)]
            assert [offset for offset, _, _ in pieces] == ends[:-1] and ends[-1] == size


@pytest.fixture(scope="module")
def gpu_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(tmp_path_factory.mktemp("gpu"), gpu_run(steps=4, expandable=True))


def number(text: str) -> int:
    return int(re.sub(r"\D", "", text))


def reading(page: Any) -> dict[str, int]:
    shown = {category: number(exact) for category, exact in page.locator(".readout-row").evaluate_all(EXACT)}
    return shown | {name: number(page.locator(f"#readout-{name}exact").inner_text()) for name in ("", "reserved-")}


def expected_reading(analysis: Analysis, at: int) -> dict[str, int]:
    layers, timeline = layers_in(analysis), analysis.timeline
    series = {str(category): timeline.series(category) for category in CATEGORIES}
    shown = {name: int(values[at]) for name, values in series.items() if values.max()}
    shown |= {"rounding": int(layers.allocated[at] - timeline.total[at]), "cached": int(layers.cached[at])}
    return shown | {"": int(timeline.total[at]), "reserved-": int(layers.reserved[at])}


TOP = """() => {
  const areas = document.getElementById("chart").data.filter((trace) => trace.stackgroup);
  return Math.max(...Array.from(areas[0].x, (_, i) => areas.reduce((sum, area) => sum + area.y[i], 0)));
}"""


@pytest.mark.browser
def test_reserved_and_cached_are_exact_wherever_one_looks(open_page: Open, gpu_page: Written) -> None:
    page, analysis = open_page(gpu_page.path), gpu_page.analysis
    peak = int(analysis.timeline.total.argmax())
    assert len(analysis.timeline.total) > 2300, "more events than are drawn at once"
    page.keyboard.press("Home")
    assert reading(page) == expected_reading(analysis, peak)
    # Reserved memory is largest elsewhere than live memory, and still drawn.
    assert layers_in(analysis).reserved.argmax() != peak
    assert page.evaluate(TOP) == layers_in(analysis).reserved.max()
    page.locator("#chart-frame").focus()
    for key in ("ArrowRight", "p", "ArrowLeft", "Shift+ArrowLeft", "w", "ArrowRight", "End"):
        page.keyboard.press(key)
        at = int(page.locator("#chart-frame").get_attribute("aria-valuenow"))
        assert reading(page) == expected_reading(analysis, at), key
    page.keyboard.press("Home")
    page.locator('.readout-row[data-category="cached"]').click()
    page.locator('.readout-row[data-category="rounding"]').click()
    assert page.evaluate(TOP) == analysis.timeline.total.max()
    headlines = page.locator("#headlines").inner_text()
    assert format_bytes(int(layers_in(analysis).reserved[peak])) in headlines
    assert format_bytes(int(layers_in(analysis).cached[peak])) in headlines


def expected_map(analysis: Analysis, at: int) -> tuple[str, str]:
    view = address_map_view(analysis, at)
    pieces = [piece for segment in view for piece in segment.blocks]
    size = sum(segment.bytes for segment in view)
    free = sum(length for _, length, key in pieces if key == "cached")
    label = f"{len(view)} segments with {len(pieces)} blocks, {format_bytes(size)}"
    return label, f"reserved but free: {format_bytes(free)}."


@pytest.mark.browser
def test_the_address_map_is_that_of_the_peak_or_of_the_pinned_instant(open_page: Open, gpu_page: Written) -> None:
    page, analysis = open_page(gpu_page.path), gpu_page.analysis
    section = page.locator("#addresses")

    def shown() -> tuple[str, str]:
        note = section.locator("#addresses-note").inner_text()
        return section.locator("canvas").get_attribute("aria-label"), note[note.index("reserved but free") :]

    peak = int(analysis.timeline.total.argmax())
    assert section.locator("h2").inner_text() == "Allocator address map at the peak"
    assert shown() == expected_map(analysis, peak)
    page.locator("#chart-frame").focus()
    for key in ("End", "Enter"):
        page.keyboard.press(key)
    at = int(page.locator("#chart-frame").get_attribute("aria-valuenow"))
    assert section.locator("h2").inner_text() == f"Allocator address map at event {format_count(at)}"
    assert shown() == expected_map(analysis, at) != expected_map(analysis, peak)
    section.get_by_role("button", name="Back to the peak").click()
    assert shown() == expected_map(analysis, peak)


@pytest.mark.browser
def test_a_reduced_page_has_the_map_of_the_peak(
    open_page: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.import_module("ampmem.reporters.html.write"), "STREAM_LIMIT", 100)
    shown = written(tmp_path, gpu_run(steps=2))
    page, analysis = open_page(shown.path), shown.analysis
    peak = int(analysis.timeline.total.argmax())
    assert reading(page) == expected_reading(analysis, peak)
    assert page.evaluate(TOP) == layers_in(analysis).reserved.max()
    label = page.locator("#addresses canvas").get_attribute("aria-label")
    assert label == expected_map(analysis, peak)[0]
    page.locator("#chart-frame").focus()
    for key in ("Home", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    assert page.locator("#addresses h2").inner_text() == "Allocator address map at the peak"
    assert page.locator("#addresses canvas").get_attribute("aria-label") == label
    assert np.diff(layers_in(analysis).reserved).any()
