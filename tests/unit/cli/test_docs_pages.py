"""``ampmem docs``: pages, findings and headings of the documentation that is installed."""

from pathlib import Path

import pytest
from support.command_line import ampmem_here

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_pages_are_listed_and_printed_as_they_are(tmp_path: Path) -> None:
    code, listed, _ = ampmem_here(tmp_path, "docs")
    assert code == 0
    assert [line.split()[0] for line in listed.splitlines()] == sorted(page.stem for page in DOCS.glob("*.md"))
    assert ampmem_here(tmp_path, "docs", "watch") == (0, (DOCS / "watch.md").read_text(encoding="utf-8"), "")


def test_a_part_ends_where_the_next_begins(tmp_path: Path) -> None:
    code, text, _ = ampmem_here(tmp_path, "docs", "outputs-kept")
    page = (DOCS / "findings.md").read_text(encoding="utf-8")
    start = page.index("### `outputs-kept`")
    assert code == 0
    assert text == f"{page[start : page.index('### ', start + 1)].rstrip()}\n"
    # Two findings under one heading; and a heading with a part inside, by its words.
    assert ampmem_here(tmp_path, "docs", "amp-saves-nothing")[1].startswith("### `amp-saves`, `amp-saves-nothing`")
    assert "### `outputs-kept`" in ampmem_here(tmp_path, "docs", "The training loop")[1]


@pytest.mark.parametrize("code", ["residual", "cache-off-costs", "compiled-casts", "out-of-memory"])
def test_a_finding_has_its_part(tmp_path: Path, code: str) -> None:
    assert f"`{code}`" in ampmem_here(tmp_path, "docs", code)[1].partition("\n")[0]


def test_what_is_not_there_is_one_line_with_the_nearest(tmp_path: Path) -> None:
    code, _, said = ampmem_here(tmp_path, "docs", "fp32-activatons")
    assert (code, said.count("\n")) == (2, 1)
    assert "did you mean 'fp32-activations'? ampmem docs lists its pages" in said
    assert (
        ampmem_here(tmp_path, "docs", "qqqq")[2]
        == "ampmem: the documentation has no 'qqqq'. ampmem docs lists its pages\n"
    )
