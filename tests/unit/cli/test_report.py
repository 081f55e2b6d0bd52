"""``ampmem report``: where the page goes, what is said of it, and who opens it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from build import small_run, write
from command_line import ampmem_here, refused
from page_reader import page_data

from ampmem.cli.report import page_beside
from ampmem.units import format_bytes


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
    (tmp_path / "other.json").write_text("{}")
    code, _, said = ampmem_here(tmp_path, "report", "other.json")
    assert (code, said.startswith("ampmem: other.json is not a summary of this version of ampmem")) == (1, True), said


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
