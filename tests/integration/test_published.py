"""The table of published runs: its rows, its page, and two of its runs made again."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import python

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "benchmarks" / "published.py"
FOLDER = Path(os.environ.get("AMPMEM_SNAPSHOTS") or ROOT.parent / "shared" / "snapshots")
sys.path.insert(0, str(SCRIPT.parent))

from published.claims import ABOVE_HALF, CLAIMED, NEAREST, RESNET50  # noqa: E402
from published.document import document_of, older, read_document  # noqa: E402
from published.documentation import tables  # noqa: E402
from published.page import claims, page_of, simulated_when  # noqa: E402
from published.runs import Peak, PublishedRun, Row, Simulated  # noqa: E402
from published.savings import SAVINGS  # noqa: E402
from published.snapshots import compared, longest_common  # noqa: E402
from published.sources import every_run  # noqa: E402
from published.summaries import below_the_least, larger_misses, others_beside, summaries  # noqa: E402
from published.table import line_of  # noqa: E402
from published.wording import percent, signed  # noqa: E402

MIB = 1 << 20
RUNS = every_run()


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return read_document(ROOT / "reports" / "published.json")


def test_every_run_says_where_its_figure_is_published_and_what_repeats_it() -> None:
    for run in RUNS:
        assert len(run.source) > 20, run.key
        assert (SCRIPT.parent / "published" / "scripts" / run.command[0]).exists(), run.key
        if run.environment:
            assert (SCRIPT.parent / "published" / "environments" / f"{run.environment}.txt").exists(), run.key


def test_libraries_are_pinned() -> None:
    for wanted in (SCRIPT.parent / "published" / "environments").glob("*.txt"):
        lines = [line for line in wanted.read_text().splitlines() if line and not line.startswith("#")]
        assert all("==" in line for line in lines), wanted


def test_the_table_has_the_runs_as_their_sources_have_them(document: dict[str, Any]) -> None:
    runs = {run.key: run for run in RUNS}
    written = json.loads((ROOT / "reports" / "published.json").read_text(encoding="utf-8"))
    assert {row["key"] for row in written["rows"]} <= set(runs)
    for row, known in zip(written["rows"], document["rows"], strict=True):
        run = runs[row["key"]]
        # What decides the numbers of a row is that of the source; words are taken from there anyway.
        assert (row["real"], row["fitted"], row["what"], row["gpu"]) == (run.real, run.fitted, run.what, run.gpu)
        assert (tuple(row["command"]), row["settings"]) == (run.command, run.settings)
        assert row["others"] == dict(run.others)
        assert (known["source"], known["why"]) == (run.source, run.why)


def test_the_page_is_made_of_the_table(document: dict[str, Any]) -> None:
    page = (ROOT / "reports" / "published.html").read_text(encoding="utf-8")
    assert page == page_of(document)
    assert "default-src &#39;none&#39;" in page
    assert len(page) < 400_000
    style = (ROOT / "ampmem" / "reporters" / "html" / "templates" / "page.css").read_text(encoding="utf-8")
    assert style in page, "the dress of the other pages"
    assert len(re.findall(r'<section class="card" id="[^"]+" data-jump="[^"]+">', page)) >= 6, "ways to the sections"


def test_the_documentation_has_the_same_numbers(document: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
    for table in tables(document["rows"]):
        assert "\n".join(table) + "\n\n" in text


def test_every_larger_miss_is_on_the_page_with_what_is_known_of_it(document: dict[str, Any]) -> None:
    page = page_of(document).replace("<wbr>", "")
    for row in larger_misses(document["rows"]):
        assert page.count(row["key"]) >= 2
        assert row["why"]


def test_a_page_of_hostile_names_is_harmless(document: dict[str, Any]) -> None:
    row = document["rows"][0] | {"key": "<script>alert(1)</script>", "source": '"><img src=x>'}
    page = page_of(document | {"rows": [row]})
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert "<img" not in page


def row_of(real: int, *, likely: int, others: dict[str, int] | None = None, spread: int = 0) -> dict[str, Any]:
    run = PublishedRun(
        key="a",
        source="b",
        family="cnn",
        precision="fp32",
        gpu="h100",
        torch="",
        what="reserved",
        real=real,
        others=others or {},
        command=("mlp.py",),
    )
    peak = Peak(least=likely - spread, likely=likely, most=likely + spread)
    nothing = Peak(least=0, likely=0, most=0)
    simulated = Simulated(
        allocated=peak, reserved=peak, outside=nothing, total=10**9, ran_out=False, seconds=0.0, sizes=()
    )
    row = Row(run=run, simulated=simulated)
    return {
        "key": "a",
        "family": "cnn",
        "precision": "fp32",
        "snapshot": "",
        "what": run.what,
        "resolution": run.resolution,
        "predicted": {"least": peak.least, "likely": peak.likely, "most": peak.most},
        "reason_known": True,
        "fitted": None,
        "real": real,
        "others": run.others,
        "error": row.error,
        "held": row.held,
    }


def test_errors_are_of_what_is_likely_and_beside_each_predictor_on_its_own_runs() -> None:
    rows = [row_of(1000, likely=1009, others={"x": 1500}), row_of(100, likely=90, spread=20)]
    every = summaries(rows)[0]
    assert (every.count, every.ranges, every.held) == (2, 1, 1)
    assert every.worst == pytest.approx(0.1)
    ((name, theirs, ours),) = others_beside(rows)
    assert (name, theirs.worst, ours.worst) == ("x", pytest.approx(0.5), pytest.approx(0.009))
    assert [row["error"] for row in larger_misses(rows)] == [pytest.approx(-0.1)]


def test_a_batch_that_failed_for_a_reason_that_nobody_said_is_no_verdict(document: dict[str, Any]) -> None:
    run = next(run for run in RUNS if run.key == "timm/resnet101-b384")
    peak = Peak(least=1, likely=2, most=3)
    simulated = Simulated(
        allocated=peak, reserved=peak, outside=peak, total=10**9, ran_out=False, seconds=0.0, sizes=()
    )
    assert (Row(run=run, simulated=simulated).held, run.fitted) == (None, False)
    row = row_of(100, likely=101) | {"fitted": False, "reason_known": False, "error": None, "held": False}
    assert summaries([row])[0].verdicts == 0
    assert larger_misses([row]) == []
    assert summaries([row | {"reason_known": True}])[0].verdicts == 1
    said = "failed, the reason is not said"
    assert said in line_of(Row(run=run, simulated=simulated))
    rows = [row for row in document["rows"] if row["fitted"] is False and not row["reason_known"]]
    assert rows and page_of(document).replace("<br>", " ").count(said) == len(rows)


def test_runs_that_were_left_out_are_spoken_of_where_there_are_some(document: dict[str, Any]) -> None:
    said, head = "those on the list that were not run are at the end", "<h2>Not run</h2>"
    for left_out in ([], [{"key": "a", "why": "too large"}]):
        page = page_of(document | {"left_out": left_out})
        assert (said in page, head in page) == (bool(left_out), bool(left_out))


def test_scripts_of_numbers_say_how_they_are_used() -> None:
    for name in ("boundaries", "published", "report", "simulated_snapshots"):
        done = python(ROOT, f"tests/benchmarks/{name}.py", "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"tests/benchmarks/{name}.py" in done.stdout


def test_recordings_do_not_count_in_the_second_line() -> None:
    rows = [row_of(100, likely=101), row_of(100, likely=150) | {"snapshot": "x"}]
    every, others = summaries(rows)[:2]
    assert (every.count, others.count, others.worst) == (2, 1, pytest.approx(0.01))
    assert [each.family for each in summaries(rows[:1])] == ["all", "cnn"]


def test_a_least_that_was_too_much_is_told() -> None:
    row = row_of(100, likely=120, spread=10) | {"what": "allocated"}
    assert below_the_least([row, row | {"real": 111}, row | {"what": "reserved"}]) == [row]


def test_an_error_is_never_rounded_to_nothing_and_has_no_sign_before_a_bound() -> None:
    assert [percent(error) for error in (None, 0.0, 0.00001, 0.5)] == ["", "0 %", "< 0.01 %", "50.00 %"]
    assert [signed(error) for error in (0.0, -0.00001, -0.5, 0.5)] == ["0 %", "< 0.01 %", "-50.00 %", "+50.00 %"]


def test_what_is_assumed_or_not_known_is_on_the_page(document: dict[str, Any]) -> None:
    page = page_of(document)
    assumed = [row for row in document["rows"] if row["gpu_assumed"]]
    assert assumed and page.count(" (assumed)</td>") == len(assumed)
    assert all(f'<a href="{row["address"]}">' in page for row in document["rows"] if row["address"])
    assert "(address not known)" in page
    assert 'href="javascript' not in page_of(
        document | {"rows": [document["rows"][0] | {"address": "javascript:alert(1)"}]}
    )


def test_sequences_are_compared_in_order() -> None:
    assert longest_common([1, 2, 3, 4], [2, 9, 4]) == 2
    assert compared([1, 2, 3], [1, 2, 3]).first_difference == -1
    assert compared([1, 2, 3], [1, 2]).first_difference == 2
    assert compared([1, 2, 3], [1, 5, 3]).first_difference == 1


def test_savings_name_their_sources() -> None:
    assert all(len(each.source) > 20 and each.unit in ("MiB", "MB", "GB") for each in SAVINGS)
    assert min(each.ratio for each in SAVINGS) > 0.4  # half would be remarkable: look twice


def test_a_run_goes_on_with_the_rows_that_are_older_or_missing() -> None:
    one, other, missing = RUNS[:3]
    nothing = Peak(least=1, likely=1, most=1)
    simulated = Simulated(
        allocated=nothing, reserved=nothing, outside=nothing, total=1, ran_out=False, seconds=0.0, sizes=()
    )
    rows = [Row(run=one, simulated=simulated, day="2026-11-23"), Row(run=other, simulated=simulated, day="2026-11-24")]
    table = document_of(rows, [])
    assert older(RUNS[:3], table, "2026-11-24") == [one, missing]
    assert older(RUNS[:3], table, "2026-11-23") == [missing]
    del table["rows"][1]["day"]  # as rows were written before
    assert older(RUNS[:3], table, "2026-11-24") == [one, other, missing]
    assert simulated_when(table["rows"]) == "Figures simulated: 1 on 2026-11-23, 1 earlier, by an earlier ampmem."


@pytest.mark.slow
def test_a_run_on_ranks_is_the_first_of_them_and_keeps_its_simulation(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import gc, os, torch\n"
        "gc.collect()\n"
        "query = torch.zeros(1, 1, 256, 64, device='cuda', requires_grad=True)\n"
        "torch.nn.functional.scaled_dot_product_attention(query, query, query)\n"
        "kept = torch.cuda.max_memory_allocated()\n"
        "assert kept < 256 * 256 * 4, f'the scores are kept: {kept} bytes'\n"
        "del query\n"
        "ranks = int(os.environ.get('WORLD_SIZE', 0))\n"
        "assert os.environ.get('RANK') == ('0' if ranks else None)\n"
        "torch.zeros(2 + ranks << 20, dtype=torch.uint8, device='cuda')\n"
    )
    asked = [
        {"gpu": "rtx3090", "ranks": ranks, "settings": "", "file": str(tmp_path / f"{ranks}.json")}
        | {"script": str(script), "arguments": []}
        for ranks in (0, 2)
    ]
    given = "\n".join(map(json.dumps, asked)) + "\n"
    done = python(ROOT, "tests/benchmarks/published/simulate.py", given=given)
    assert (done.returncode, done.stdout) == (0, "\n\n")
    peaks = [json.loads((tmp_path / f"{ranks}.json").read_text())["allocated"]["likely"] for ranks in (0, 2)]
    assert peaks == [2 << 20, 4 << 20]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "allocations", "allocated", "reserved"),
    [("lm-small-3-steps-amp", 4404, 984_657_920, 1_205_862_400)],
)
def test_three_steps_under_autocast_are_those_of_the_gpu_to_the_byte(
    name: str, allocations: int, allocated: int, reserved: int, tmp_path: Path
) -> None:
    table = tmp_path / "table.json"
    done = python(ROOT, str(SCRIPT), "--only", name, "--json", str(table))
    assert done.returncode == 0, done.stderr
    rows = json.loads(table.read_text())["rows"]
    assert [row["predicted"]["likely"] for row in rows] == [allocated, reserved]
    if (FOLDER / f"{rows[0]['snapshot']}.pickle").exists() and "AMPMEM_SNAPSHOTS" in os.environ:
        for row in rows:
            assert row["sequence"]["common"] == row["sequence"]["real"] == row["sequence"]["simulated"] == allocations


def test_the_claims_are_held_against_numbers() -> None:
    said, half = CLAIMED
    assert abs(NEAREST.fp32 / MIB - said) < 40 < NEAREST.mixed / MIB - half
    assert all(0.5 < each.ratio < 0.55 for each in RESNET50)
    assert sum(size for size, _ in ABOVE_HALF) == round((NEAREST.mixed - NEAREST.fp32 / 2) / MIB)
    text = claims()
    assert "52.4 %" in text and f"{RESNET50[-1].ratio:.1%}".replace("%", " %") == "52.4 %"
    assert "0.92 GB" in text and "3.68 GB before any activation" in text
