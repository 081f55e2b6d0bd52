"""The page of a watched run in a browser: its lines, its bands, the pages of full recordings, texts of a script."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.pages import Open, Written

from ampmem.analysis.summary import summarize
from ampmem.failure import FailureKind, FailureRecord
from ampmem.recording import read
from ampmem.recording.watched import Ending, HeldMemory, Row, WatchedHeader, Why
from ampmem.recording.watched_file import WatchedFile
from ampmem.reporters.html.watched_page import rows_to_draw, write_watched

pytestmark = pytest.mark.browser

MIB = 1 << 20
HOSTILE = "</script><img src=x onerror=alert(1)>‮"
TRACES = """Object.fromEntries(document.getElementById("chart").data.map((trace) =>
  [trace.name, {x: trace.x, y: trace.y, text: trace.text}]))"""


def row(step: int, peak: int, **others: Any) -> Row:
    known = Row(step, step, peak * MIB, "forward", 10 * MIB, 60 * MIB, MIB, 0, 0, f"8x{step} int64", False)
    return replace(known, **others)


def written(folder: Path, *, script: str = "train.py", failed: bool = False, full: Path | None = None) -> Path:
    path = folder / "run.ampmem"
    header = WatchedHeader(
        ampmem="1",
        torch="2",
        source="cuda",
        device="a GPU",
        script=script,
        arguments=(),
        started_ns=0,
        every=500,
        limit=80 * MIB,
    )
    file = WatchedFile(path, header, force=True)
    for step in range(30):
        file.row(row(step, 40 + step % 3))
    if full is not None:
        file.full(full, Why.START, 0, 2)
    if failed:
        file.end(
            Ending(
                step=30,
                time_ns=9,
                failure=FailureRecord(kind=FailureKind.RAISED, message="CUDA out of memory. A lot", error="torch.Oom"),
                out_of_memory=True,
                asked=50 * MIB,
                free=20 * MIB,
                total=80 * MIB,
                phase="backward",
                batch="8x4000 int64",
                line=f"{script}:8",
                held=(
                    HeldMemory(what="parameters", bytes=MIB, count=2),
                    HeldMemory(what=f"{script}:8", bytes=9 * MIB, count=1, line=True),
                ),
            )
        )
    else:
        file.end(Ending(step=30, time_ns=9))
    file.close()
    return path


def test_the_lines_are_the_rows(tmp_path: Path, open_page: Open) -> None:
    write_watched(written(tmp_path), tmp_path / "run.html")
    page = open_page(tmp_path / "run.html")
    traces = page.evaluate(TRACES)
    assert traces["peak"]["x"] == list(range(30))
    assert traces["peak"]["y"] == [(40 + step % 3) * MIB for step in range(30)]
    assert traces["peak"]["text"][4] == "step 4: peak 41.0 MiB, in forward, batch 8x4 int64"
    assert set(traces["allocated after the step"]["y"]) == {10 * MIB}
    assert set(traces["reserved"]["y"]) == {60 * MIB}
    shapes = page.evaluate("document.getElementById('chart').layout.shapes")
    assert [(shape["type"], shape["y0"]) for shape in shapes] == [("line", 80 * MIB)], "the device's memory"
    assert "highest peak 42.0 MiB of 80.0 MiB" in page.locator("#lines").inner_text()
    assert page.locator("h1").inner_text().startswith("No growth seen in the memory allocated at the end of each step")
    assert page.locator("#command").inner_text() == "train.py on a GPU"
    assert not page.locator("#shortage").is_visible() and not page.locator("#full").is_visible()


def test_out_of_memory_names_the_batch_and_the_line(tmp_path: Path, open_page: Open) -> None:
    write_watched(written(tmp_path, failed=True), tmp_path / "run.html")
    page = open_page(tmp_path / "run.html")
    assert page.locator("h1").inner_text().startswith("Memory ran out in step 30, ")
    text = page.locator("#shortage").inner_text()
    assert "step 30, in backward: 50.0 MiB requested at train.py:8; 20.0 MiB of 80.0 MiB was free" in text
    assert "the batch was 8x4000 int64" in text
    assert "train.py:8" in page.locator("#held").inner_text()
    assert "failed in step 30" in page.locator("#chart").inner_text()
    assert "ampmem advise --gpu 80MiB --steps 31 train.py" in page.locator("#commands").inner_text()


def test_a_full_recording_opens_by_a_click(tmp_path: Path, open_page: Open, profiled_page: Written) -> None:
    recording = profiled_page.path.with_name("run.ampmem")
    pages = write_watched(written(tmp_path, full=recording), tmp_path / "run.html")
    assert [path.name for path in pages] == ["run.html", "run.full-0.html"]
    page = open_page(tmp_path / "run.html")
    bands = [each for each in page.evaluate("document.getElementById('chart').layout.shapes") if each["type"] == "rect"]
    assert bands and all(band["x0"] < 1 < band["x1"] for band in bands)
    categories = summarize(read(recording)).peak.categories
    named = {name.replace("_", " ").capitalize() for name, size in categories.items() if size}
    assert named <= page.evaluate(TRACES).keys(), "the legend of the bands"
    assert [band["y1"] - band["y0"] for band in bands] == [size for size in categories.values() if size]
    link = page.locator("#full-table a")
    assert (link.get_attribute("href"), link.inner_text()) == ("run.full-0.html", "page of 0")
    assert open_page(tmp_path / "run.full-0.html").locator("#chart").count() == 1


def test_texts_of_a_script_are_only_ever_texts(tmp_path: Path, open_page: Open) -> None:
    write_watched(written(tmp_path, script=HOSTILE, failed=True), tmp_path / "run.html")
    page = open_page(tmp_path / "run.html")
    assert page.locator("main img").count() == 0
    assert "<img src=x" in page.locator("#held").inner_text()


def test_of_a_long_run_every_extreme_is_drawn() -> None:
    rows = [row(step, 40 + (step == 12345) * 7, alive=(10 - (step == 777) * 5) * MIB) for step in range(60_000)]
    found = rows_to_draw(rows, 1000)
    assert len(found) <= 2000
    assert max(each.peak for each in found) == 47 * MIB
    assert min(each.alive for each in found) == 5 * MIB
    assert [each.step for each in found] == sorted({each.step for each in found})
