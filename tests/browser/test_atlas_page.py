"""The page of the atlas in a browser: its charts, its filters, its tables, and the breakdown of a point."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.pages import Open, wait_until

REPORTS = Path(__file__).resolve().parents[2] / "reports"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not REPORTS.is_dir(), reason="no checkout: the reports are missing"),
]
if REPORTS.is_dir():
    sys.path.insert(0, str(REPORTS))
    import atlas_document
    import atlas_page
    import make_atlas

GIB = 1 << 30
GROUPS = (("BERT base", "adamw", False), ("VGG-16", "adamw", False), ("VGG-16", "sgd", False))
EACH = {"BERT base": {"fp32": 0.5, "amp": 0.25}, "VGG-16": {"fp32": 1.0, "amp": 1.0}}
"""GiB of each sample. VGG-16 saves nothing here: 5 GiB that the batch does not change are 5.001 GiB under AMP."""
PERCENT = "Math.round(100 * value) / 100"


def made(setting: Any) -> dict[str, Any]:
    """The point of a made-up model; the convolutions of VGG-16 may need 1 GiB."""
    static = 5.0 if setting.precision in ("fp32", "bf16") else 5.001
    each = EACH[setting.model].get(setting.precision, 0.25)
    size = int((static + each * setting.batch) * GIB)
    more = GIB if setting.model == "VGG-16" else 0
    if size + more > 80 * GIB:
        return asdict(setting) | {"fit": "does-not-fit"}
    rest = {"phase": "backward", "at_peak": {"activations": size}, "activations": size, "copies": 0}
    rest |= {} if setting.precision == "fp32" else {"in_fp32": {"norms": size // 4}}
    return asdict(setting) | {"fit": "fits", "peak": size, "at_most": size + more, "parameters": 60_000_000} | rest


def here(tasks: Iterator[Any], jobs: int) -> Iterator[Any]:
    """The points of all ``tasks``, made in this process."""
    for task in tasks:
        yield from task()


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a made-up atlas."""
    about = {"ampmem": "0", "torch": "2", "gpu": "a GPU", "memory": 80 * GIB}
    document = atlas_document.new_document(about)
    list(make_atlas.every_point(document, GROUPS, 1, make=made, run=here))
    document["emulated"] = [
        {
            **{name: document["points"][0][name] for name in atlas_document.SETTING},
            "peak": document["points"][0]["peak"],
        }
    ]
    path = tmp_path_factory.mktemp("atlas") / "atlas.html"
    path.write_text(atlas_page.page_of(document), encoding="utf-8")
    return path


def ends(page: Any) -> Any:
    """The models of the first chart from below, and the saved shares of the two marks of each, in percent."""
    script = f"""() => {{
      const round = (values) => Array.from(values, (value) => {PERCENT});
      const [first, last] = document.getElementById("ends").data.slice(1);
      return [first.y, round(first.x), round(last.x), round(last.error_x.array)];
    }}"""
    return page.evaluate(script)


def cells(page: Any, table: str) -> list[list[str]]:
    """The rows of a table."""
    found: list[list[str]] = page.evaluate(
        "(id) => Array.from(document.querySelectorAll(`#${id} tbody tr`), (row) =>"
        " Array.from(row.cells, (cell) => cell.textContent))",
        table,
    )
    return found


def test_the_ends_of_each_model_are_sorted_and_have_what_convolutions_may_need(look: Open, atlas: Path) -> None:
    models, first, last, above = ends(look(atlas))
    assert models == ["VGG-16", "BERT base"]
    assert first == [round(100 * (1 - 6.001 / 6), 2), round(100 * (1 - 5.251 / 5.5), 2)]
    assert last == [round(100 * (1 - 69.001 / 69), 2), round(100 * (1 - (5.001 + 32) / (5 + 64)), 2)]
    assert above == [round(100 * (69.001 / 69 - 69.001 / 70), 2), 0]


def test_no_share_is_minus_nothing(look: Open, atlas: Path) -> None:
    page = look(atlas)
    vgg = next(row for row in cells(page, "lines") if row[0].startswith("VGG-16"))
    assert vgg[5:7] == ["0.0 %", "0.0 %"]
    assert "-0.0" not in page.inner_text("main")


def test_what_stays_in_fp32_stands_beside_each_model(look: Open, atlas: Path) -> None:
    assert {row[-1] for row in cells(look(atlas), "lines")} == {"norms 25\u00a0%"}


def test_the_tables_about_all_models(look: Open, atlas: Path) -> None:
    page = look(atlas)
    of_fp32, *_ = cells(page, "rules")
    assert of_fp32[:3] == ["adamw", "fp32", "16"]
    assert cells(page, "emulated")[0][5] == "0"
    published = cells(page, "published")
    assert {"VGG-16", "GPT-2"} <= {row[0] for row in published}
    assert all(row[5] and row[6] for row in published)


def test_a_click_opens_the_breakdown_and_the_command(look: Open, atlas: Path) -> None:
    page = look(atlas)
    page.evaluate(
        "document.getElementById('ends').emit('plotly_click', {points: [{pointIndex: 1, customdata: 0}]})",
    )
    assert page.inner_text("#point-title").startswith("BERT base, adamw, without checkpointing, batch 1 (512 tokens")
    assert ["peak allocated", "5.5 GiB", "5.3 GiB"] in cells(page, "breakdown")
    assert page.inner_text("#command") == (
        "ampmem profile --gpu h100 reports/atlas_train.py 'BERT base' --batch 1 --precision amp --optimizer adamw"
    )


def test_the_filters_leave_what_they_name(look: Open, atlas: Path) -> None:
    page = look(atlas)
    page.select_option("#family", "convolutional")
    wait_until(page, "document.getElementById('ends').data[1].y.length === 1")
    assert [row[0] for row in cells(page, "lines")] == ["VGG-16 *"]
    page.select_option("#family", "all")
    page.select_option("#optimizer", "sgd")
    wait_until(page, "document.getElementById('chart').data.filter(({ name }) => name).length === 1")
    assert [row[0] for row in cells(page, "lines")] == ["VGG-16 *"]
    page.select_option("#size", "50 to 200 M")
    assert [row[0] for row in cells(page, "lines")] == ["VGG-16 *"]
