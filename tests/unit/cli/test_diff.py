"""``ampmem diff``: what is printed, what is taken for a side, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from support.build import write
from support.changed_code import Code, run_of
from support.command_line import ampmem_here, refused, transcript
from support.golden_sections import Golden
from support.jobs import rank_recording

import ampmem
from ampmem.analysis.difference.difference import difference_schema
from ampmem.analysis.summary import summarize
from ampmem.reporters.text.difference import render_difference
from ampmem.reporters.text.layout import Layout
from ampmem.reporters.text.plain_text import columns

BEFORE = Code(sizes=(4096, 4096))
AFTER = Code(sizes=(4096, 8192), batch=16, line=30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "a.ampmem", run_of(BEFORE))
    write(tmp_path / "b.ampmem", run_of(AFTER))
    return tmp_path


def printed(folder: Path, *arguments: str) -> str:
    code, stdout, stderr = ampmem_here(folder, "diff", *arguments)
    assert (code, stderr) == (0, "")
    return stdout


def test_what_is_printed(folder: Path, golden: Golden) -> None:
    (folder / "main.json").write_text(summarize(run_of(BEFORE)).to_json())
    (folder / "list.json").write_text(f"[{summarize(run_of(BEFORE)).to_json()}]")
    given = (
        "a.ampmem b.ampmem",
        "a.ampmem a.ampmem",
        "a.ampmem b.ampmem --category activations",
        "a.ampmem b.ampmem --top 1",
        "a.ampmem b.ampmem --top 1 --all",
        "main.json b.ampmem",
        "list.json b.ampmem",
    )
    golden(transcript(folder, *(["diff", *arguments.split()] for arguments in given)))


def test_as_json_and_its_schema(folder: Path) -> None:
    document = json.loads(printed(folder, "a.ampmem", "b.ampmem", "--json"))
    schema = json.loads(printed(folder, "--schema"))
    assert schema == difference_schema()
    jsonschema.Draft202012Validator(schema).validate(document)
    assert (document["label_before"], document["after"] - document["before"]) == ("a.ampmem", 4104)


def test_in_python_it_is_the_same(folder: Path) -> None:
    found = ampmem.diff(folder / "a.ampmem", ampmem.load(folder / "b.ampmem"))
    assert [change.grown for change in found.changes] == [4096, 8]


def test_of_a_job_the_worst_rank_is_compared(folder: Path) -> None:
    for job, sizes in (("old", (100, 300)), ("new", (500, 200))):
        for rank, size in enumerate(sizes):
            recording = rank_recording(rank, 2, activations=size)
            write(folder / f"{job}.rank{rank}-of-2.ampmem", recording)
    document = json.loads(printed(folder, "old.ampmem", "new.ampmem", "--json"))
    assert (document["label_before"], document["label_after"]) == ("old.ampmem, rank 1", "new.ampmem, rank 0")
    assert document["after"] - document["before"] == 200 * 1024
    assert {"what": "rank", "before": "1", "after": "0"} in document["conditions"]
    alone = json.loads(printed(folder, "old.rank0-of-2.ampmem", "new.rank0-of-2.ampmem", "--json"))
    assert alone["conditions"] == [] and alone["after"] - alone["before"] == 400 * 1024


def test_what_is_refused_is_said_in_one_line(folder: Path, golden: Golden) -> None:
    (folder / "odd.json").write_text('{"schema": "ampmem.fit/1"}')
    (folder / "two.json").write_text(ampmem_here(folder, "show", "--json", "a.ampmem", "b.ampmem")[1])
    (folder / "text.ampmem").write_text("hello")
    wrong = (
        "gone.ampmem a.ampmem",
        "a.ampmem",
        "a.ampmem b.ampmem a.ampmem",
        "two.json a.ampmem",
        "odd.json a.ampmem",
        "text.ampmem a.ampmem",
    )
    golden(transcript(folder, *(["diff", *arguments.split()] for arguments in wrong)))
    assert "'nonsense' is not one of" in refused(folder, "diff", "a.ampmem", "b.ampmem", "--category", "nonsense")


def test_a_page_is_not_replaced_unasked(folder: Path) -> None:
    (folder / "out.html").write_text("mine")
    said = refused(folder, "diff", "a.ampmem", "b.ampmem", "--html", "out.html")
    assert "out.html" in said and (folder / "out.html").read_text() == "mine"
    code, stdout, stderr = ampmem_here(folder, "diff", "a.ampmem", "b.ampmem", "--html", "out.html", "--force")
    assert code == 0 and stdout.startswith("The peak grew") and "wrote out.html" in stderr
    assert (folder / "out.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = "module_with_a_long_name." * 4 + "layers"
    after = replace(AFTER, layers=long, file="/a/very/long/path" * 5 + "/net.py", function="f" * 60)
    found = ampmem.diff(run_of(BEFORE), run_of(after))
    assert found.changes
    for line in render_difference(found, Layout(width=width), most=None).splitlines():
        assert columns(line) <= width
