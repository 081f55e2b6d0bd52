"""The PDF that ``chromium --print-to-pdf`` makes of a page: it prints as soon as the page is loaded."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pages import changed, chromium, written
from support.story import long_run, made

from ampmem.reporters.html.fit_page import write_fit

pytestmark = pytest.mark.browser

WORD = re.compile(r'<word xMin="([\d.]+)" yMin="[\d.]+" xMax="([\d.]+)" yMax="[\d.]+">')
PAGE = re.compile(r'<page width="([\d.]+)"')

Printed = Callable[[Path], Path]


@pytest.fixture
def printed(tmp_path: Path) -> Printed:
    """Prints a page as the command line does, and says where the PDF is."""
    browser = chromium()
    if browser is None:
        pytest.skip("no Chromium: put one on PATH or name it in AMPMEM_CHROMIUM")
    if shutil.which("pdftotext") is None:
        pytest.skip("no pdftotext, which reads the PDF: install poppler-utils")

    def of(page: Path) -> Path:
        pdf = tmp_path / "page.pdf"
        quiet = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command = [browser, *quiet, f"--print-to-pdf={pdf}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return pdf

    return of


def text_of(pdf: Path, *options: str) -> str:
    return subprocess.run(["pdftotext", *options, pdf, "-"], check=True, capture_output=True, text=True).stdout


def assert_on_paper(pdf: Path) -> None:
    """Every word ends before the right edge of its page."""
    boxes = text_of(pdf, "-bbox")
    widths = {float(width) for width in PAGE.findall(boxes)}
    ends = [float(end) for _, end in WORD.findall(boxes)]
    assert len(widths) == 1
    assert len(ends) > 100
    assert max(ends) <= widths.pop() - 20


def test_all_figures_and_folded_parts_are_in_it_and_no_long_name_is_cut(printed: Printed, tmp_path: Path) -> None:
    page = written(tmp_path, *(long_run(steps=1, layers=12, precision=precision) for precision in ("fp32", "amp")))

    def with_map(data: dict[str, Any]) -> None:
        blocks = [[number * 512, 512, "parameters" if number % 3 else "cached"] for number in range(6000)]
        for run in data["runs"]:
            run["events"]["address_map"] = [{"address": 4096, "bytes": 6000 * 512, "blocks": blocks}]

    pdf = printed(changed(page.path, tmp_path / "mapped.html", with_map))
    text = text_of(pdf, "-layout")
    # The timeline, the bars of the comparison and of the peak, the trees by module and by stack, the address map.
    for figure in (
        "allocator event",
        "From fp32 to amp",
        "What the peak is made of",
        "model and training step",
        "all live memory at the peak",
        "blocks for bars",
    ):
        assert figure in text, figure
    assert "Show all" not in text
    assert_on_paper(pdf)


def test_the_curves_of_a_fit_are_in_it(printed: Printed, tmp_path: Path) -> None:
    write_fit(made(), tmp_path / "fit.html")
    pdf = printed(tmp_path / "fit.html")
    text = text_of(pdf, "-layout")
    for figure in ("below 288.0 MiB: fits", "200 MiB", "amp: less allocated than fp32 from 4"):
        assert figure in text, figure
    assert_on_paper(pdf)
