"""``--format``: the tables alone, each after its heading, in a form that can be pasted."""

import csv
import io
from pathlib import Path

import pytest
from support.build import AMP, FP32, precision_run, write
from support.command_line import ampmem_here, transcript
from support.golden_sections import Golden

from ampmem.analysis.summary import summarize
from ampmem.reporters.text.layout import Layout, table, words
from ampmem.units import format_bytes
from ampmem.vocabulary import Form

HOSTILE = "a|b*c`<img src=x>[l](x)\\_d"


@pytest.mark.parametrize("form", ["markdown", "latex", "csv"])
def test_the_tables_in_each_form(tmp_path: Path, golden: Golden, form: str) -> None:
    write(tmp_path / "run.ampmem", precision_run(AMP))
    write(tmp_path / "fp32.ampmem", precision_run(FP32))
    golden(
        transcript(
            tmp_path,
            ["show", "--format", form, "run.ampmem"],
            ["show", "--format", form, "fp32.ampmem", "run.ampmem"],
            ["diff", "--format", form, "fp32.ampmem", "run.ampmem"],
        )
    )


def test_csv_has_the_cells_that_the_text_has(tmp_path: Path) -> None:
    recording = precision_run(AMP)
    write(tmp_path / "run.ampmem", recording)
    _, text, _ = ampmem_here(tmp_path, "show", "--format", "csv", "run.ampmem")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    sizes = {row[0]: row[1] for row in rows[1 : rows.index([])]}
    peak = summarize(recording).peak
    assert {name: sizes[name] for name, size in peak.categories.items() if size and name in sizes} == {
        name: format_bytes(size) for name, size in peak.categories.items() if size and name in sizes
    }
    assert sizes["total"] == format_bytes(peak.bytes)


def test_no_cell_is_markup() -> None:
    layout = Layout(form=Form.MARKDOWN)
    table([words("name")], [[HOSTILE]], layout)
    assert layout.shown("").splitlines()[-1] == r"| a\|b\*c\`\<img src=x>\[l](x)\\_d |"
