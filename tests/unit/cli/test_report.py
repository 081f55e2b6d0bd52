"""``ampmem report``: where the page goes, what is said of it, and who opens it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.build import AMP, FP32, small_run, write
from support.changed_code import Code, run_of
from support.command_line import ampmem_here, refused
from support.jobs import rank_recording, runs_of
from support.page_reader import page_data

from ampmem.analysis.fit import Memory, Vary, fit_result
from ampmem.analysis.ranks.merge import merge
from ampmem.cli.report import page_beside
from ampmem.events import PrecisionRecord
from ampmem.recording import rank_file
from ampmem.reporters.html.fit_page import write_fit
from ampmem.units import format_bytes
from ampmem.vocabulary import Precision


@pytest.mark.parametrize(
    ("files", "page"),
    [
        (["gpt.ampmem"], "gpt.html"),
        (["runs/gpt.2.ampmem"], "runs/gpt.2.html"),
        (["train.fp32.ampmem", "train.amp.ampmem", "train.amp-nocache.ampmem"], "train.html"),
        (["a/train.2.fp32.ampmem", "b/train.2.amp.ampmem"], "a/train.2.html"),
        (["before.ampmem", "after.ampmem"], "before.html"),
        (["train.ampmem", "trainer.ampmem"], "train.html"),
        (["same.ampmem", "other/same.ampmem"], "same.html"),
        (["no-suffix"], "no-suffix.html"),
    ],
)
def test_the_page_lies_beside_the_first_recording(files: list[str], page: str) -> None:
    assert page_beside([Path(file) for file in files]) == Path(page)


def test_the_page_is_named_with_its_size_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    write(tmp_path / "runs" / "gpt.ampmem", small_run().recording())
    page = tmp_path / "runs" / "gpt.html"
    code, stdout, said = ampmem_here(tmp_path, "report", "runs/gpt.ampmem")
    assert (code, stdout, said) == (0, "", f"ampmem: wrote runs/gpt.html, {format_bytes(page.stat().st_size)}\n")
    assert page.read_text().startswith("<!DOCTYPE html>")
    page.write_text("precious")
    assert "runs/gpt.html exists already" in refused(tmp_path, "report", "runs/gpt.ampmem", "-o", "runs/gpt.html")
    assert page.read_text() == "precious"
    assert ampmem_here(tmp_path, "report", "--force", "runs/gpt.ampmem")[0] == 0
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_what_show_prints_as_json_has_a_page(tmp_path: Path) -> None:
    write(tmp_path / "gpt.ampmem", small_run().recording())
    _, text, _ = ampmem_here(tmp_path, "show", "--json", "gpt.ampmem")
    (tmp_path / "summary.json").write_text(text)
    code, _, said = ampmem_here(tmp_path, "report", "summary.json")
    page = tmp_path / "summary.html"
    assert (code, said) == (0, f"ampmem: wrote summary.html, {format_bytes(page.stat().st_size)}\n")
    (run,) = page_data(page.read_text(encoding="utf-8"))["runs"]
    assert (run["summary"], run["events"]) == (json.loads(text), None)


def saved_ranks(folder: Path, precision: PrecisionRecord, job: str) -> list[str]:
    """The files of two ranks, of which the second has more activations."""
    return [
        write(
            rank_file(folder / f"{job}.ampmem", rank, 2),
            rank_recording(rank, 2, precision=precision, activations=800 + 100 * rank),
        ).name
        for rank in range(2)
    ]


def sections(page: Path, *names: str) -> list[str]:
    """The markup of these sections of a page, without the links to pages of single ranks."""
    text = re.sub(r"</?a\b[^>]*>", "", page.read_text(encoding="utf-8"))
    found = [re.search(rf'<section id="{name}".*?</section>', text, re.DOTALL) for name in names]
    return [section[0] for section in found if section is not None]


def page_of_json(folder: Path, given: list[str], *command: str) -> Path:
    """The page of what ``command`` prints as JSON of the files ``given``."""
    _, text, _ = ampmem_here(folder, *command, "--json", *given)
    (folder / "printed.json").write_text(text)
    assert ampmem_here(folder, "report", "--force", "printed.json")[0] == 0
    return folder / "printed.html"


def test_the_json_of_several_recordings_has_their_page_without_events(tmp_path: Path) -> None:
    files = [f"{precision.name}.ampmem" for precision in (FP32, AMP)]
    for file, precision in zip(files, (FP32, AMP), strict=True):
        write(tmp_path / file, small_run().recording(precision=precision))
    assert ampmem_here(tmp_path, "report", *files, "-o", "whole.html")[0] == 0
    page = page_of_json(tmp_path, files, "show")
    assert sections(page, "verdict") == sections(tmp_path / "whole.html", "verdict") != []
    data, whole = (page_data(each.read_text(encoding="utf-8")) for each in (page, tmp_path / "whole.html"))
    assert data["comparison"] == whole["comparison"]
    assert [run["summary"] for run in data["runs"]] == json.loads((tmp_path / "printed.json").read_text())
    assert [(run["label"], run["events"]) for run in data["runs"]] == [("fp32", None), ("amp", None)]


def test_summaries_and_recordings_of_one_script_are_compared(tmp_path: Path) -> None:
    for precision in (FP32, AMP):
        write(tmp_path / f"{precision.name}.ampmem", small_run().recording(precision=precision))
    (tmp_path / "fp32.json").write_text(ampmem_here(tmp_path, "show", "--json", "fp32.ampmem")[1])
    assert ampmem_here(tmp_path, "report", "fp32.json", "amp.ampmem")[0] == 0
    comparison = page_data((tmp_path / "fp32.html").read_text(encoding="utf-8"))["comparison"]
    assert (comparison["baseline"], comparison["remarks"]) == (0, []), "JSON does not name the script"


def test_the_json_of_ranks_has_their_page_without_single_ranks(tmp_path: Path) -> None:
    files = saved_ranks(tmp_path, FP32, "fp32")
    assert ampmem_here(tmp_path, "report", *files, "-o", "whole.html")[0] == 0
    page = page_of_json(tmp_path, files, "show", "--ranks")
    assert sections(page, "job", "verdict", "ranks") == sections(tmp_path / "whole.html", "job", "verdict", "ranks")
    assert len(sections(page, "job", "verdict", "ranks")) == 3
    (one,) = sections(page, "one-rank")
    assert "This page was made from JSON: the pages of single ranks need the recordings." in one
    assert page_data(page.read_text(encoding="utf-8"))["runs"] == []


def test_the_json_of_ranks_in_several_precisions_says_what_its_page_lacks(tmp_path: Path) -> None:
    files = [*saved_ranks(tmp_path, FP32, "fp32"), *saved_ranks(tmp_path, AMP, "amp")]
    assert ampmem_here(tmp_path, "report", *files, "-o", "whole.html")[0] == 0
    page = page_of_json(tmp_path, files, "show", "--ranks")
    assert sections(page, "ranks") == sections(tmp_path / "whole.html", "ranks") != []
    headline = sections(page, "verdict")[0].partition("</h1>")[0]
    assert (
        re.sub("<[^>]*>", "", headline)
        .strip()
        .endswith("fp32: Rank 1 of 2 is the worst, with 1.6 MiB at the peak, in backward of step 1, 6 % above rank 0.")
    )
    assert "and the precisions side by side, need the recordings." in sections(page, "one-rank")[0]


def test_the_json_of_a_difference_has_its_page_without_the_runs(tmp_path: Path) -> None:
    write(tmp_path / "a.ampmem", run_of(Code()))
    write(tmp_path / "b.ampmem", run_of(Code(sizes=(1000, 5000), line=30)))
    assert ampmem_here(tmp_path, "diff", "a.ampmem", "b.ampmem", "--html", "whole.html")[0] == 0
    page = page_of_json(tmp_path, ["a.ampmem", "b.ampmem"], "diff")
    said = '<p class="quiet more-line">This page was made from JSON, without the runs&#39; own pages.</p>\n'
    verdict = sections(page, "verdict")[0]
    assert said in verdict and [verdict.replace(said, "")] == sections(tmp_path / "whole.html", "verdict")
    data, whole = (page_data(each.read_text(encoding="utf-8")) for each in (page, tmp_path / "whole.html"))
    assert data["changes"] == whole["changes"] is not None
    assert (data["runs"], [run["label"] for run in whole["runs"]]) == ([], ["before", "after"])


def test_the_json_of_a_fit_has_its_page(tmp_path: Path) -> None:
    fitting = Memory(allocated=9000, reserved=20_000, used=20_512, highest=30_512, outside_at_most=10_512)
    found = fit_result(
        {Precision.FP32: {1: fitting, 2: None}, Precision.AMP: {1: fitting, 2: replace(fitting, surely=False)}},
        script="train.py",
        steps=2,
        vary=Vary(name="--batch-size", separator=" ", low=1, high=None),
        gpu="a GPU",
        total=40_000,
        notes=("a note",),
    )
    write_fit(found, tmp_path / "whole.html")
    (tmp_path / "fit.json").write_text(found.to_json())
    assert ampmem_here(tmp_path, "report", "fit.json")[0] == 0
    page = (tmp_path / "fit.html").read_text(encoding="utf-8")
    assert page == (tmp_path / "whole.html").read_text(encoding="utf-8")
    assert page_data(page)["fit"] == json.loads(found.to_json())


def _not_of_this_version(what: str, why: str, command: str) -> str:
    return f"is not {what} of this version of ampmem ({why}); write it again with {command}"


def test_json_without_a_page_is_refused_in_one_line(tmp_path: Path) -> None:
    write(tmp_path / "gpt.ampmem", small_run().recording())
    (tmp_path / "ranks.json").write_text(merge(runs_of(2)).to_json())
    kinds = ("show --json", "show --ranks --json", "diff --json", "fit --json", "advise --json", "estimate --json")
    commands = ", ".join(f"ampmem {kind}" for kind in kinds)
    not_json = "it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    for text, said in (
        ('{"schema": "ampmem.check/1"}', f"is JSON, but not from one of these commands: {commands}"),
        ("[]", _not_of_this_version("a summary", "it is an empty array", "ampmem show --json")),
        ("{", _not_of_this_version("a summary", not_json, "ampmem show --json")),
        (
            '{"schema": "ampmem.diff/1"}',
            _not_of_this_version("a difference", "label_before is missing", "ampmem diff --json"),
        ),
    ):
        (tmp_path / "odd.json").write_text(text)
        assert ampmem_here(tmp_path, "report", "odd.json") == (1, "", f"ampmem: odd.json {said}\n")
    for files in (["ranks.json", "gpt.ampmem"], ["gpt.ampmem", "ranks.json"]):
        assert refused(tmp_path, "report", *files) == (
            "ampmem: ranks.json cannot be compared with other files: report on it alone\n"
        )
    assert not [*tmp_path.glob("*.html")]


def test_the_page_does_not_replace_a_recording_that_it_is_of(tmp_path: Path) -> None:
    for name in ("a.ampmem", "b.ampmem"):
        write(tmp_path / name, small_run().recording())
    before = (tmp_path / "b.ampmem").read_bytes()
    for command, option in ((["report"], "-o"), (["diff"], "--html")):
        said = refused(tmp_path, *command, "a.ampmem", "b.ampmem", option, "b.ampmem", "--force")
        assert said == f"ampmem: cannot write b.ampmem: it is also the input file; give another name with {option}\n"
    assert (tmp_path / "b.ampmem").read_bytes() == before


def test_a_second_page_takes_the_next_number(tmp_path: Path) -> None:
    write(tmp_path / "gpt.ampmem", small_run().recording())
    (tmp_path / "gpt.html").write_text("precious")
    for name in ("gpt.2.html", "gpt.3.html"):
        code, stdout, said = ampmem_here(tmp_path, "report", "gpt.ampmem")
        size = format_bytes((tmp_path / name).stat().st_size)
        taken = "gpt.html exists already (--force replaces it)"
        assert (code, stdout, said) == (0, "", f"ampmem: wrote {name}, {size}; {taken}\n")
    assert (tmp_path / "gpt.html").read_text() == "precious"


@pytest.mark.parametrize(
    "command",
    [
        ["report", "train.py"],
        ["report", "train.py", "-o", "train.html"],
        ["export", "train.py", "--format", "csv", "-o", "train.html"],
    ],
)
def test_what_is_no_recording_is_told_before_the_output_is_looked_at(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    (tmp_path / "train.html").write_text("precious")
    code, stdout, said = ampmem_here(tmp_path, *command)
    told = "train.py is not an ampmem recording, or it is damaged (file is not a database)"
    assert (code, stdout, said) == (1, "", f"ampmem: {told}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.html", "train.py"]


@pytest.mark.parametrize("there_is_one", [True, False])
def test_a_browser_opens_the_page_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there_is_one: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: asked.append(address) or there_is_one)
    write(tmp_path / "a run.ampmem", small_run().recording())
    code, _, said = ampmem_here(tmp_path, "report", "--open", "a run.ampmem")
    assert code == 0
    assert asked == [f"{tmp_path.as_uri()}/a%20run.html"]
    rest = said.splitlines()[1:]
    assert rest == ([] if there_is_one else ["ampmem: no browser could be started here; open a run.html in one"])
