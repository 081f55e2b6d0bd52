"""Figures and tables to take away: the buttons of a page, and ``ampmem export --format svg|png``."""

import struct
from pathlib import Path
from typing import Any

import pytest
from support.build import write as write_recording
from support.command_line import ampmem_here
from support.pages import Open, Written, chromium
from support.story import long_run, made

from ampmem.units import format_bytes

pytestmark = pytest.mark.browser

COPIED = """window.addEventListener("copy", ({ clipboardData }) => {
  window.copied = ["text/plain", "text/html"].map((kind) => clipboardData.getData(kind));
})"""


def saved(page: Any, section: str, button: str) -> bytes:
    with page.expect_download() as download:
        page.locator(f"#{section} .take").get_by_role("button", name=button).click()
    assert download.value.suggested_filename.startswith(f"ampmem-{section}.")
    return Path(download.value.path()).read_bytes()


def test_the_buttons_save_the_figures_of_their_cards(open_page: Open, precisions_page: Written) -> None:
    page = open_page(precisions_page.path)
    timeline = saved(page, "timeline", "Save SVG").decode()
    assert timeline.startswith("<svg") and "Memory over time" in timeline
    for label in ("Parameters", "Optimizer state", "allocator event"):
        assert label in timeline, label
    verdict = saved(page, "verdict", "Save SVG").decode()
    peaks = {format_bytes(max(analysis.timeline.total.tolist())) for analysis in precisions_page.analyses}
    assert all(peak in verdict for peak in peaks)
    assert page.locator("#verdict-title").inner_text() in verdict
    assert page.locator("#verdict .legend li").first.inner_text() in verdict
    assert saved(page, "verdict", "Save PNG").startswith(b"\x89PNG")
    assert page.locator("#allocations .take").get_by_role("button").all_inner_texts() == ["Copy table"]


def test_a_table_is_copied_as_text_that_no_spreadsheet_computes_and_as_a_table(
    open_page: Open, precisions_page: Written
) -> None:
    page = open_page(precisions_page.path)
    page.evaluate(COPIED)
    button = page.locator("#steps .take").get_by_role("button", name="Copy table")
    button.click()
    assert page.locator("#steps .take").inner_text() == "Copied"
    plain, table = page.evaluate("window.copied")
    caption, head, *rows = (line.split("\t") for line in plain.split("\n"))
    assert (caption, head[:3]) == (["Every step"], ["Step", "Peak", "In"])
    analysis = precisions_page.analyses[0]
    size = int(max(analysis.timeline.total[: analysis.peaks[0] + 1]))
    assert rows[0][:3] == ["0", format_bytes(size), rows[0][2]]
    assert f"<td>{format_bytes(size)}</td>" in table
    page.evaluate("document.querySelector('#steps tbody td').textContent = '=HYPERLINK(1)'")
    page.locator("#steps .take button").click()
    assert "\t'=HYPERLINK(1)\t" in page.evaluate("window.copied")[0]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with two recordings and a fit."""
    if chromium() is None:
        pytest.skip("no Chromium: put one on PATH or name it in AMPMEM_CHROMIUM")
    for precision in ("fp32", "amp"):
        write_recording(tmp_path / f"{precision}.ampmem", long_run(steps=1, precision=precision))
    (tmp_path / "fit.json").write_text(made().to_json(), encoding="utf-8")
    return tmp_path


def test_export_draws_the_figures_of_the_page(files: Path) -> None:
    code, _, said = ampmem_here(files, "export", "fp32.ampmem", "amp.ampmem", "--format", "svg", "-o", "verdict.svg")
    assert (code, said.count("\n")) == (0, 1), said
    verdict = (files / "verdict.svg").read_text(encoding="utf-8")
    assert "From fp32 to amp" in verdict and "Optimizer state" in verdict
    code, _, said = ampmem_here(files, "export", "fit.json", "--format", "png", "--figure", "curve", "-o", "fit.png")
    assert code == 0, said
    picture = (files / "fit.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">I", picture[16:20]) == (2400,), "twice as wide as the page has it"


def test_export_says_what_is_missing(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = ("export", "fp32.ampmem", "-o", "out", "--format")
    code, _, said = ampmem_here(files, *export, "svg", "--figure", "comparison")
    assert (code, said) == (2, "ampmem: the report has no figure comparison\n")
    assert ampmem_here(files, *export, "csv", "--figure", "verdict")[0] == 2
    monkeypatch.setenv("AMPMEM_CHROMIUM", "no-such-browser")
    code, _, said = ampmem_here(files, *export, "png")
    assert (code, said) == (2, "ampmem: AMPMEM_CHROMIUM names no program: no-such-browser\n")
    assert not (files / "out").exists()
