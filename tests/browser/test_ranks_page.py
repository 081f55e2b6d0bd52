"""The page of a job's ranks: which is the worst, every rank in one table, and the page of one a click away."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.build import AMP, FP32
from support.build import write as write_recording
from support.jobs import rank_recording
from support.pages import BROKEN, CUT, Open, violations, wait_until
from support.story import PAYLOADS

from ampmem.analysis.ranks.jobs import read_runs
from ampmem.analysis.ranks.merge import merge
from ampmem.analysis.ranks.ranks import Ranks
from ampmem.events import MeshAxis, PrecisionRecord, Recording
from ampmem.recording import rank_file
from ampmem.reporters.html import write
from ampmem.units import format_bytes, format_count

pytestmark = pytest.mark.browser

ROWS = """Array.from(document.querySelectorAll("#ranks tbody tr:not(.group)"), (row) => ({
  label: row.querySelector("th").firstElementChild?.textContent ?? row.querySelector("th").textContent,
  group: row.parentElement.querySelector(".group th").firstChild.textContent.trim(),
  titles: Array.from(row.querySelectorAll("td.number"), (cell) => cell.title),
  texts: Array.from(row.querySelectorAll("td.number"), (cell) => cell.textContent),
  shades: Array.from(row.querySelectorAll("td.number"), (cell) => cell.style.getPropertyValue("--shade")),
}))"""


def saved(folder: Path, recordings: Sequence[Recording], job: str = "train") -> list[Path]:
    """The files of ranks, under the names that they have."""
    named = [(rank_file(folder / f"{job}.ampmem", each.run.rank, each.run.world_size), each) for each in recordings]
    return [write_recording(path, each) for path, each in named]


def staged(precision: PrecisionRecord = FP32, *, halved: bool = False) -> list[Recording]:
    """Four ranks in two stages; the first stage keeps more activations, the second of each stage has more weights."""
    return [
        rank_recording(
            rank,
            4,
            precision=precision,
            weights=256 + 64 * (rank % 2),
            activations=(3000 - 600 * (rank // 2)) // (2 if halved else 1),
            mesh=(
                MeshAxis(name="pp", size=2, coordinate=rank // 2),
                MeshAxis(name="dp", size=2, coordinate=rank % 2),
            ),
        )
        for rank in range(4)
    ]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ranks]:
    """The page of four ranks in two stages, and what they come to."""
    folder = tmp_path_factory.mktemp("ranks")
    files = saved(folder, staged())
    write(files, folder / "page.html")
    return folder / "page.html", merge(read_runs(files))


def test_the_verdict_and_every_rank_are_read_without_scripts(browser: Any, job: tuple[Path, Ranks]) -> None:
    path, ranks = job
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(path.as_uri())
    assert ranks.worst is not None
    assert page.locator("h1").all_inner_texts()[0].startswith("Rank 1 of 4 is the worst, with 3.9 MiB at the peak")
    assert page.locator("#verdict .why-line").inner_text() == "It has 600.0 KiB more in activations."
    bars = page.locator("#verdict .bars").first.locator("tr").all_inner_texts()
    assert [bar.split("\t")[0] for bar in bars] == ["Rank 1, most", "Rank 3, median", "Rank 2, least"]
    box = page.locator("#verdict").bounding_box()
    assert box["y"] + box["height"] < 900
    assert page.locator("#ranks tbody tr").count() > 10
    context.close()


def test_the_cells_are_the_bytes_of_the_analysis(look: Open, job: tuple[Path, Ranks]) -> None:
    path, ranks = job
    rows = look(path).evaluate(ROWS)
    assert ranks.peak is not None
    categories = [each.category for each in ranks.categories]
    of_ranks = {row["label"]: row for row in rows if row["group"] == "Ranks"}
    assert list(of_ranks) == ["0", "1", "2", "3"]
    for rank in ranks.compared:
        assert rank.peak is not None
        row, sizes = of_ranks[str(rank.rank)], [rank.peak.bytes, *(rank.peak.categories[key] for key in categories)]
        assert [title.split(" bytes")[0] for title in row["titles"]] == list(map(format_count, sizes))
        assert row["texts"] == list(map(format_bytes, sizes))
    spreads = [ranks.peak, *ranks.categories]
    overall = {row["label"]: row["titles"] for row in rows if row["group"] == "All 4 ranks"}
    assert overall["Most"] == [f"{format_count(each.max)} bytes" for each in spreads]
    assert overall["Median"] == [f"{format_count(each.median)} bytes" for each in spreads]
    assert overall["Least"] == [f"{format_count(each.min)} bytes" for each in spreads]
    worst = next(row["texts"] for row in rows if row["label"] == "Worst rank")
    assert worst == [str(each.worst) for each in spreads]
    for group in ranks.groups:
        kind = "Pipeline stages" if group.axis is None else "Mesh axis dp"
        name = f"{group.axis or 'stage'} {group.coordinate}"
        (row,) = (row for row in rows if (row["group"], row["label"]) == (kind, name))
        assert row["titles"][0].startswith(f"{format_count(group.peak.max)} bytes")


def test_a_cell_is_shaded_by_what_it_has_above_the_least(look: Open, job: tuple[Path, Ranks]) -> None:
    path, ranks = job
    page = look(path)
    rows = [row for row in page.evaluate(ROWS) if row["group"] == "Ranks"]
    assert ranks.peak is not None
    least = [ranks.peak.min, *(each.min for each in ranks.categories)]
    for row, rank in zip(rows, ranks.compared, strict=True):
        assert rank.peak is not None
        sizes = [rank.peak.bytes, *(rank.peak.categories[each.category] for each in ranks.categories)]
        above = [size - low for size, low in zip(sizes, least, strict=True)]
        shades = [f"{100 * each / ranks.peak.spread:.1f}%" if each else "" for each in above]
        assert row["shades"] == shades
    assert f"0 to {format_bytes(ranks.peak.spread)}" in page.locator(".shades").inner_text()


def test_the_page_of_any_rank_is_a_click_away(look: Open, job: tuple[Path, Ranks]) -> None:
    path, ranks = job
    page = look(path)
    assert page.locator("#run option").all_inner_texts() == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert page.locator("#one-rank-title").inner_text() == "The page of rank 1", "it opens on the worst"
    peak = page.locator("#headlines dd").first
    in_view = "Math.abs(document.getElementById('one-rank').getBoundingClientRect().top - 120) < 120"
    for number in (3, 3, 0):
        page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
        wait_until(page, "!location.hash.includes('one-rank')")
        link = page.locator("#ranks tbody tr:not(.group) a", has_text=re.compile(f"^{number}$"))
        link.focus()
        page.keyboard.press("Enter")
        wait_until(page, f"document.getElementById('shown-run').textContent === 'rank {number}'")
        wait_until(page, in_view)
        page.wait_for_selector("html[data-drawn]", state="attached")
        assert page.locator("#run").evaluate("run => run.selectedOptions[0].text") == f"rank {number}"
        shown = ranks.rank(number)
        assert peak.get_attribute("title") == f"{format_count(shown.largest.bytes)} bytes"
        assert f"rank {number} of 4" in page.locator("#facts").inner_text()


def test_a_click_is_followed_although_the_page_wrote_its_address_meanwhile(look: Open, job: tuple[Path, Ranks]) -> None:
    """The event says where the click has led; the address may have been written anew before it comes."""
    page = look(job[0])
    shown = page.locator("#shown-run").inner_text()
    other = next(each for each in ("0", "1", "2") if not shown.endswith(each))
    page.evaluate(
        """(text) => {
          const link = [...document.querySelectorAll("#ranks table a")].find((each) => each.textContent === text);
          const led = { oldURL: location.href, newURL: link.href };
          window.dispatchEvent(new HashChangeEvent("hashchange", led));
        }""",
        other,
    )
    wait_until(page, f"document.getElementById('shown-run').textContent.endsWith('rank {other}')")


def test_accessible_and_whole_at_all_widths(look: Open, job: tuple[Path, Ranks]) -> None:
    page = look(job[0])
    for width, theme in ((390, "dark"), (1024, "light"), (1440, "light")):
        page.set_viewport_size({"width": width, "height": 900})
        page.select_option("#theme", theme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(BROKEN) == [], width
        assert page.evaluate(CUT) == [], width
        if width != 1024:
            assert violations(page) == [], (width, theme)
    page.emulate_media(media="print")
    for name in ("verdict", "ranks", "one-rank"):
        assert page.locator(f"#{name}").is_visible(), name
    page.emulate_media(media="screen")


def test_the_page_of_json_has_every_rank_and_no_run(
    look: Open, open_page: Open, job: tuple[Path, Ranks], tmp_path: Path
) -> None:
    path, ranks = job
    (tmp_path / "ranks.json").write_text(ranks.to_json())
    write([tmp_path / "ranks.json"], tmp_path / "page.html")
    rows = [row | {"label": ""} for row in look(path).evaluate(ROWS)]
    page = open_page(tmp_path / "page.html")
    assert [row | {"label": ""} for row in page.evaluate(ROWS)] == rows
    assert page.locator("#ranks a").count() == 0 and not page.is_visible("#run-choice")
    shown = "[...document.querySelectorAll('main > section')].filter((one) => one.offsetHeight).map(({ id }) => id)"
    assert page.evaluate(shown) == ["job", "verdict", "ranks", "one-rank"]
    assert page.inner_text("#one-rank-title") == "Single ranks"


def test_ranks_that_are_the_same_are_one_row_and_one_page(open_page: Open, tmp_path: Path) -> None:
    equal = rank_recording(0, 64)
    files = saved(tmp_path, [replace(equal, run=replace(equal.run, rank=rank)) for rank in range(64) if rank != 9])
    write(files, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 1_000_000
    page = open_page(tmp_path / "page.html")
    assert page.locator("h1").inner_text().startswith("The 63 ranks that are compared need the same, 1.5 MiB")
    rows = page.evaluate(ROWS)
    assert [row["label"] for row in rows] == ["0-8, 10-63", "9"]
    assert rows[0]["shades"] == [""] * len(rows[0]["shades"])
    assert page.locator("#ranks tbody").inner_text().endswith("9\tno file")
    assert page.locator("#job .note.bad").all_inner_texts() == ["Warning: Rank 9 has no file."]
    assert not page.locator("#run-choice").is_visible()
    assert page.locator("#one-rank code").inner_text() == f"ampmem report {files[1]}"


def test_of_several_precisions_the_worst_ranks_are_compared(open_page: Open, tmp_path: Path) -> None:
    files = [*saved(tmp_path, staged(), "train.fp32"), *saved(tmp_path, staged(AMP, halved=True), "train.amp")]
    write(files, tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    title = page.locator("h1").inner_text()
    assert title.startswith("On the worst rank of each precision, mixed precision lowers the peak from 3.9 to 2.4 MiB")
    bars = page.locator("#verdict .bars").first.locator("tr").all_inner_texts()
    assert [bar.split("\t")[0] for bar in bars] == ["fp32 rank 1", "amp rank 1"]
    assert page.locator("#ranks h3").all_inner_texts() == ["fp32", "amp bfloat16"]
    assert page.locator("#ranks table").count() == 2
    assert page.locator("#one-rank-title").inner_text() == "The page of amp rank 1"
    page.locator("#ranks table").first.locator("a", has_text=re.compile("^2$")).click()
    wait_until(page, "document.getElementById('shown-run').textContent === 'fp32 rank 2'")


def test_texts_of_the_script_are_only_ever_texts(open_page: Open, tmp_path: Path) -> None:
    payloads = [payload for payload in PAYLOADS[:6] if "\ud800" not in payload]
    hostile = [
        rank_recording(
            rank,
            4,
            weights=256 + 64 * rank,
            script=payloads[0],
            arguments=tuple(payloads),
            mesh=(MeshAxis(name=payloads[1], size=2, coordinate=rank // 2),),
        )
        for rank in range(4)
    ]
    write(saved(tmp_path, hostile, "'\"><img src=x onerror=window.pwned=2>"), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert page.evaluate("window.pwned === undefined && document.querySelectorAll('main img').length === 0")
    assert payloads[1] in page.locator("#ranks").inner_text()
    assert payloads[0] in page.locator("#job").inner_text()
