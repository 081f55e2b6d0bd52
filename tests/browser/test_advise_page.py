"""The page of ``ampmem advise`` in a browser: its marks, its table, its pages, and texts that are only texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.build import write as write_recording
from support.pages import Open, changed, violations, wait_until
from support.story import long_run

from ampmem.analysis.advise import AdviceDocument, Proof, advice
from ampmem.analysis.blocks import Blocks
from ampmem.analysis.changes import Script, Trial
from ampmem.analysis.fit import Memory
from ampmem.analysis.suggested import Suggestion
from ampmem.reporters.html.advise_page import advice_view
from ampmem.reporters.html.write import write_advice
from ampmem.reporters.text.advise import headline, proof_lines, refused_lines, rows_of
from ampmem.results import Deviation
from ampmem.vocabulary import NOTHING_FORCED, Forced

pytestmark = pytest.mark.browser

MIB = 1 << 20
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[2J"
SCRIPT = Script(
    blocks=Blocks(names=("h.0", "h.1", "h.2", "h.3"), saved_bytes=(1, 2, 4, 2), flops=(9, 9, 9, 9)),
    optimizers=("AdamW",),
    updated=12,
    batch=8,
    suggestions=(Suggestion(change="del logits", saved_bytes=MIB),),
)

TRACES = """Object.fromEntries(document.getElementById("chart").data.map((trace) =>
  [trace.name, {mode: trace.mode, x: trace.x, y: trace.y, text: trace.text, symbol: trace.marker?.symbol}]))"""


def ran(mebibytes: int, recomputed: int = 0) -> Trial:
    memory = Memory(
        allocated=mebibytes * MIB,
        reserved=(mebibytes + 10) * MIB,
        used=(mebibytes + 100) * MIB,
        highest=(mebibytes + 120) * MIB,
    )
    return Trial(memory=memory, flops=1000 + recomputed, recomputed_flops=recomputed)


def blocks(count: int) -> Forced:
    return Forced(checkpoint=SCRIPT.blocks.first(count) if SCRIPT.blocks else ())


def made(budget: int | None = 900, total: int = 1000, **changes: Any) -> AdviceDocument:
    trials = {
        NOTHING_FORCED: ran(880),
        blocks(4): ran(600, 200),
        blocks(2): ran(740, 100),
        Forced(fused=True): ran(870),
        Forced(bfloat16=True): ran(650),
        Forced(batch_size=4): Trial(memory=None),
        Forced(foreach=False): Trial(memory=None, failure="the script set foreach itself"),
    }
    same = Deviation(
        losses=3,
        gradients=9,
        equal=True,
        same_kind=True,
        loss_difference=0.0,
        gradient_difference=0.0,
        largest_loss=1.0,
        largest_gradient=1.0,
    )
    found = advice(
        trials,
        SCRIPT,
        None if budget is None else budget * MIB,
        title="train.py",
        steps=2,
        gpu="NVIDIA H100 80GB HBM3",
        total=total * MIB,
        proofs={blocks(2): Proof(base="the script as it is", difference=same)},
    )
    return replace(found, **changes)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(tmp_path_factory.mktemp("run") / "run.ampmem", long_run(steps=1))


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory, recording: Path) -> Path:
    path = tmp_path_factory.mktemp("advice") / "advise.html"
    write_advice(made(), path, before=recording, after=recording)
    return path


@pytest.fixture
def page(look: Open, advised: Path) -> Any:
    return look(advised)


def test_every_mark_is_a_run(page: Any) -> None:
    traces = page.evaluate(TRACES)
    alone, others = traces["activation checkpointing alone"], traces["other changes"]
    assert alone["mode"] == "lines+markers" and others["mode"] == "markers"
    assert alone["x"] == [0, 10, 20]
    assert alone["y"] == [1000 * MIB, 860 * MIB, 720 * MIB]
    assert alone["symbol"] == ["circle-open", "circle", "circle"]
    assert alone["text"][1].split("<br>") == [
        "checkpoint 2 of 4 blocks",
        "860.0 MiB in use at most",
        "740.0 MiB allocated",
        "recomputes 10.0 % of the step's FLOPs",
        "no other run beats it",
    ]
    assert traces["activation checkpointing alone: peak allocated"]["y"] == [880 * MIB, 740 * MIB, 600 * MIB]
    assert others["y"] == [990 * MIB] and others["symbol"] == ["square-open"]
    assert traces["changes of what is computed"]["y"] == [770 * MIB], "a run out of memory has no peak"


def test_what_no_other_run_beats_has_a_ring(page: Any) -> None:
    rings = page.evaluate(TRACES)["no other run beats these"]
    # fused=True needs less than the script as it is and costs nothing; autocast computes something else
    marked = {(0, 990 * MIB), (10, 860 * MIB), (20, 720 * MIB), (0, 770 * MIB)}
    assert set(zip(rings["x"], rings["y"], strict=True)) == marked
    assert rings["symbol"] == "circle-open"
    names = page.evaluate("document.getElementById('chart').layout.annotations.map((each) => each.text)")
    assert set(names) == {
        "the budget: 900.0 MiB",
        "fused=True",
        "checkpoint 2 of 4 blocks",
        "checkpoint 4 of 4 blocks",
        "autocast bfloat16",
    }


def test_blocks_are_listed_in_the_order_in_which_they_are_taken(page: Any) -> None:
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#order tr").all()]
    assert rows[0] == ["order", "block", "kept for backward", "FLOPs of forward"]
    assert rows[1:] == [
        ["1", "h.2", "4 B", "9"],
        ["2", "h.1", "2 B", "9"],
        ["3", "h.3", "2 B", "9"],
        ["4", "h.0", "1 B", "9"],
    ]
    assert page.locator("#suggestions li").all_inner_texts() == ["del logits: 1.0 MiB computed"]


def test_the_budget_is_a_line(page: Any) -> None:
    shapes = "document.getElementById('chart').layout.shapes.map((shape) => shape.y0)"
    assert page.evaluate(shapes) == [900 * MIB]
    assert "the budget: 900.0 MiB" in page.locator("#chart").inner_text()
    assert page.locator("#limit").inner_text() == ""


def test_the_change_is_there_in_code_with_all_runs(page: Any) -> None:
    found = made()
    assert page.locator("h1").inner_text() == headline(found)
    assert page.locator("#best-title").inner_text() == "In code: checkpoint 2 of 4 blocks"
    assert page.locator("#code li").all_inner_texts() == list(found.runs[0].code)
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#runs tr").all()]
    assert rows[0] == [
        "change",
        "peak allocated",
        "peak reserved",
        "device at most",
        "saved",
        "fits",
        "cost (computed)",
    ]
    assert rows[1:] == rows_of(found)
    assert page.locator("#reasons li").all_inner_texts() == refused_lines(found)
    assert page.locator("#proofs li").all_inner_texts() == proof_lines(found)
    assert "bit for bit" in page.locator("#proofs").inner_text()


def test_the_page_is_accessible(page: Any) -> None:
    assert violations(page) == []


def test_no_width_cuts_the_page(page: Any) -> None:
    for width in (390, 1024, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        wait_until(page, "document.querySelector('#chart .main-svg').clientWidth <= innerWidth")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_theme_changes_the_marks(page: Any) -> None:
    colour = "document.getElementById('chart').data[0].line.color"
    light = page.evaluate(colour)
    page.locator("#theme").select_option("dark")
    assert page.evaluate(colour) != light


def test_the_pages_before_and_after_are_beside_it(advised: Path, page: Any, open_page: Open) -> None:
    links = page.locator("#pages a")
    assert links.all_inner_texts() == ["timeline of the script as it is", "timeline of checkpoint 2 of 4 blocks"]
    addresses = [link.get_attribute("href") for link in links.all()]
    assert addresses == ["advise.before.html", "advise.after.html"]
    for address in addresses:
        assert open_page(advised.with_name(address)).locator("#chart").count() == 1


OVER = """() => {
  const boxes = (selector) => [...document.querySelectorAll(selector)].map((each) => each.getBoundingClientRect());
  const [names, marks] = [boxes("#chart .annotation-text"), boxes("#chart .scatterlayer .point")];
  const texts = [...document.querySelectorAll("#chart .annotation-text")].map((each) => each.textContent);
  const before = (one, two) => one.left < two.right && one.top < two.bottom;
  const meet = (one, two) => before(one, two) && before(two, one);
  return [names.length, marks.length, texts.filter((_, i) => marks.some((mark) => meet(names[i], mark)))];
}"""
"""How many texts and marks are in the picture, and which of the texts lie over a mark."""


def test_no_name_lies_over_a_mark(tmp_path: Path, open_page: Open, recording: Path) -> None:
    def crowd(data: dict[str, Any]) -> None:
        (points,) = (each["points"] for each in data["series"] if each["joined"])
        last = points[-1]
        points += [
            {**last, "cost": cost, "unbeaten": cost > 18, "text": [f"{cost} {'long ' * 12}"]} for cost in range(8, 20)
        ]

    write_advice(made(), tmp_path / "advise.html", before=recording)
    page = open_page(changed(tmp_path / "advise.html", tmp_path / "crowded.html", crowd))
    for width in (1440, 1024):
        page.set_viewport_size({"width": width, "height": 1000})
        wait_until(page, "document.querySelector('#chart .main-svg').clientWidth <= innerWidth")
        names, marks, over = page.evaluate(OVER)
        assert (names, over) == (6, []) and marks > 16


def test_a_limit_that_is_far_above_is_told_and_not_drawn(tmp_path: Path, open_page: Open, recording: Path) -> None:
    write_advice(made(None, 80 << 10), tmp_path / "advise.html", before=recording)
    page = open_page(tmp_path / "advise.html", width=400)
    assert (
        page.locator("#limit").inner_text() == "Not drawn, because all runs are far below: the GPU's memory: 80.0 GiB."
    )
    assert page.evaluate("document.getElementById('chart').layout.yaxis.range[1]") < 1100 * MIB
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_without_a_best_change_there_is_neither_code_nor_a_page_after(
    tmp_path: Path, open_page: Open, recording: Path
) -> None:
    found = made(1000)
    assert not found.runs[0].code
    paths = write_advice(found, tmp_path / "advise.html", before=recording)
    assert [path.name for path in paths] == ["advise.html", "advise.before.html"]
    page = open_page(tmp_path / "advise.html")
    assert page.locator("#best").is_hidden() and page.locator("#pages a").count() == 1


def test_texts_of_the_script_are_only_ever_texts(tmp_path: Path, open_page: Open, recording: Path) -> None:
    found = made()
    runs = tuple(replace(run, change=HOSTILE, failure=run.failure and HOSTILE, code=(HOSTILE,)) for run in found.runs)
    hostile = replace(found, script=HOSTILE, gpu=HOSTILE, runs=runs)
    write_advice(hostile, tmp_path / "advise.html", before=recording, after=recording)
    page = open_page(tmp_path / "advise.html")
    assert page.locator("img").count() == 0
    assert "</script><img src=x" in page.locator("#code").inner_text()
    assert "\\u202e" in page.locator("#facts").inner_text()


def test_runs_whose_flops_are_not_known_are_in_the_table_alone() -> None:
    found = made()
    view = advice_view(replace(found, runs=tuple(replace(run, step_flops=None) for run in found.runs)))
    assert view.series == () and len(view.table) == 6
