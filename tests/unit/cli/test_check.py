"""``ampmem check`` on recordings and summaries: exit codes, messages, baselines written anew, and GitHub."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.build import RUN, write
from support.checked import MIB, run
from support.command_line import ampmem_here, refused, transcript
from support.golden_sections import Golden

import ampmem
from ampmem.analysis.budgets.check import check_schema
from ampmem.analysis.summary import summarize
from ampmem.errors import UsageError
from ampmem.events import Recording
from ampmem.vocabulary import SourceKind


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever these tests run, they do not run as a step of a workflow."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def now(tmp_path: Path) -> Path:
    return write(tmp_path / "now.ampmem", run(saved=3 * MIB))


@pytest.fixture
def main(tmp_path: Path) -> Path:
    return write(tmp_path / "main.ampmem", run())


def of_rank(recording: Recording, rank: int) -> Recording:
    return replace(recording, run=replace(RUN, rank=rank, world_size=2))


def test_exit_codes_and_the_answer_first(tmp_path: Path, now: Path, golden: Golden) -> None:
    budgets = ["--budget", "peak=8MiB"], ["--budget", "peak=1MiB"]
    golden(transcript(tmp_path, *(["check", *budget, "now.ampmem"] for budget in budgets)))


def test_a_run_that_cannot_be_judged_is_not_kept(tmp_path: Path, now: Path, golden: Golden) -> None:
    with closing(sqlite3.connect(now)) as database, database:
        database.execute("UPDATE meta SET value = '{\"ended\": false}' WHERE key = 'ended'")
    write(tmp_path / "none.ampmem", replace(run(), steps=()))
    files = ("now.ampmem", "none.ampmem")
    golden(transcript(tmp_path, *(["check", file, "--budget", "peak=8MiB"] for file in files)))


def test_wrong_use_is_one_line(tmp_path: Path, now: Path, golden: Golden) -> None:
    (tmp_path / "train.py").touch()
    gpu = replace(RUN, source=SourceKind.SIMULATED, device_type="cuda")
    write(tmp_path / "gpu.ampmem", replace(run(), run=gpu))
    wrong = (
        "now.ampmem --budget paek=1",
        "now.ampmem --allow 1%",
        "now.ampmem --update-baseline",
        "now.ampmem --baseline none.ampmem",
        "now.ampmem --baseline gpu.ampmem",
        "now.ampmem --device sim --budget peak=1B",
        "none.ampmem --budget peak=1B",
        "train.py",
        "train.py --budget=peak=1",
        "--budget peak=1B none.py",
        "now.ampmem --budget modules.encoder=1",
        "--baseline none.ampmem train.py",
    )
    golden(transcript(tmp_path, *(["check", *arguments.split()] for arguments in wrong)))


@pytest.mark.parametrize("device", [("--device", "sim"), ()], ids=" ".join)
def test_that_the_baseline_is_of_another_gpu_is_said_before_the_script_runs(
    tmp_path: Path, device: tuple[str, ...], golden: Golden
) -> None:
    gpu = replace(RUN, source=SourceKind.SIMULATED, device_type="cuda", device_name="NVIDIA A40")
    write(tmp_path / "main.ampmem", replace(run(), run=gpu))
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    said = refused(tmp_path, "check", *device, "--gpu", "h100", "--baseline", "main.ampmem", "train.py")
    *before, answer = said.splitlines()
    assert len(before) == (0 if device else 1)  # that --gpu alone simulates one
    golden(answer)


def test_the_budgets_of_a_recording_are_those_of_its_script(tmp_path: Path) -> None:
    for folder, peak in (("here", "1GiB"), ("there", "1MiB")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").touch()
        (tmp_path / folder / "pyproject.toml").write_text(f'[tool.ampmem.budgets]\npeak = "{peak}"\n')
    here = tmp_path / "here"
    for script, limit in (
        ("train.py", "1.000 GiB"),
        ("../there/train.py", "1.0 MiB"),
        (str(tmp_path / "there" / "train.py"), "1.0 MiB"),
        ("/not/there/train.py", "1.000 GiB"),
        ("-m there.train", "1.000 GiB"),
    ):
        (here / "run.ampmem").unlink(missing_ok=True)
        write(here / "run.ampmem", replace(run(), run=replace(RUN, script=script)))
        _, output, _ = ampmem_here(here, "check", "run.ampmem")
        assert f"budget of {limit}" in output or f"of {limit}" in output.split("\n")[0], script


def test_the_budgets_of_a_script_are_looked_for_from_its_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "train.py").write_text("raise SystemExit(9)")
    (tmp_path / "pyproject.toml").write_text("[tool.ampmem.budgets]\npaek = 1\n")
    wrong = f"{tmp_path / 'pyproject.toml'}: [tool.ampmem.budgets] unknown budget 'paek'"
    assert wrong in refused(Path("/"), "check", str(inner / "train.py"))
    (inner / "pyproject.toml").write_text("[tool.ampmem.budgets]\npeek = 1\n")
    assert f"{inner / 'pyproject.toml'}: " in refused(tmp_path, "check", "inner/train.py")
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "pyproject.toml").write_text("[tool.ampmem.budgets]\npook = 1\n")
    (tmp_path / "train.py").touch()
    assert wrong in refused(beside, "check", "../train.py")


def test_a_table_of_no_script_is_said_beside_a_broken_peak_and_refused_where_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    write(tmp_path / "now.ampmem", run(saved=3 * MIB))
    table = '[tool.ampmem.budgets."trian.py"]\nactivations = 1\n'
    file = tmp_path / "pyproject.toml"
    wrong = f"[tool.ampmem.budgets.\"trian.py\"] in {file} does not name a script or a module; did you mean 'train.py'?"
    file.write_text(table)
    for name in ("train.py", "now.ampmem"):
        assert refused(tmp_path, "check", name) == f"ampmem: {wrong}\n"
    file.write_text(f'[tool.ampmem.budgets]\npeak = "1MiB"\n{table}')
    code, output, _ = ampmem_here(tmp_path, "check", "now.ampmem")
    said = " ".join(output.split())
    assert code == 1
    assert said.startswith("now.ampmem: broken: peak 4.0 MiB, 3.0 MiB over its budget of 1.0 MiB; not judged: ")
    assert wrong.replace(" ", "") in said.replace(" ", "")
    (result,) = [json.loads(ampmem_here(tmp_path, "check", "--json", "now.ampmem")[1])]
    assert (result["ok"], result["problems"]) == (False, [wrong])
    file.write_text(f'[tool.ampmem.budgets]\npeak = "1GiB"\n{table}')
    assert ampmem_here(tmp_path, "check", "now.ampmem")[0] == 1


def test_budgets_of_pyproject_and_those_of_the_command_line_win(tmp_path: Path, now: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.ampmem.budgets]\npeak = "1MiB"\n[tool.ampmem.budgets."train.py"]\nactivations = "8MiB"\n'
    )
    folder = tmp_path / "below"
    folder.mkdir()
    code, output, _ = ampmem_here(folder, "check", str(now))
    assert code == 1 and "BROKEN by 3.0 MiB" in output and "activations  budget" in output
    assert ampmem_here(folder, "check", str(now), "--budget", "peak=8MiB")[0] == 0
    (tmp_path / "pyproject.toml").write_text("[tool.ampmem.budgets]\npaek = 1\n")
    assert f"{tmp_path / 'pyproject.toml'}: [tool.ampmem.budgets] unknown budget" in refused(folder, "check", str(now))


def test_without_a_budget_a_recording_is_checked_as_by_show(tmp_path: Path, now: Path) -> None:
    checked = ampmem_here(tmp_path, "check", "now.ampmem")
    assert checked == ampmem_here(tmp_path, "show", "--check", "now.ampmem")
    (tmp_path / "run.json").write_text(ampmem_here(tmp_path, "show", "--json", "now.ampmem")[1])
    assert "no budget and no baseline given for run.json" in refused(tmp_path, "check", "run.json")


def test_a_baseline_is_a_recording_or_a_summary(tmp_path: Path, now: Path, main: Path) -> None:
    (tmp_path / "main.json").write_text(ampmem_here(tmp_path, "show", "--json", "main.ampmem")[1])
    for baseline in ("main.ampmem", "main.json"):
        code, output, _ = ampmem_here(tmp_path, "check", "now.ampmem", "--baseline", baseline)
        assert code == 1 and f"2.0 MiB more than the 2.0 MiB of {baseline}" in output
        assert ampmem_here(tmp_path, "check", "now.ampmem", "--baseline", baseline, "--allow", "2MiB")[0] == 0
        assert ampmem_here(tmp_path, "check", "main.json", "--baseline", baseline)[0] == 0


@pytest.mark.parametrize("name", ["base.ampmem", "base.json", "memory/of/base.json"])
def test_a_baseline_is_written_anew_only_where_something_changed(
    name: str, tmp_path: Path, now: Path, main: Path
) -> None:
    update = ("--baseline", name, "--update-baseline")
    code, output, errors = ampmem_here(tmp_path, "check", "main.ampmem", *update)
    assert (code, output) == (0, "") and errors.startswith(f"ampmem: wrote {name}, ") and "peak 2.0 MiB" in errors
    written = (tmp_path / name).read_bytes()
    assert ampmem_here(tmp_path, "check", "main.ampmem", "--baseline", name)[0] == 0
    _, _, errors = ampmem_here(tmp_path, "check", "main.ampmem", *update)
    assert errors == f"ampmem: {name} was not rewritten: nothing has changed\n"
    assert (tmp_path / name).read_bytes() == written
    code, _, errors = ampmem_here(tmp_path, "check", "now.ampmem", *update)
    assert code == 0 and "peak 4.0 MiB, was 2.0 MiB; activations 3.0 MiB, was 1.0 MiB" in errors
    assert ampmem_here(tmp_path, "check", "now.ampmem", "--baseline", name)[0] == 0


def test_a_folder_that_cannot_be_made_for_a_baseline_is_one_line(tmp_path: Path, main: Path) -> None:
    (tmp_path / "memory").touch()
    said = refused(tmp_path, "check", "main.ampmem", "--baseline", "memory/base.json", "--update-baseline")
    assert said == "ampmem: cannot write memory/base.json: File exists\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("victim.py", "print('hello')\n"),
        ("package.json", '{"name": "mine"}'),
        ("list.json", "[1]"),
        ("none.json", "[]"),
        ("notes.md", "# Notes"),
    ],
)
def test_a_file_that_is_no_baseline_is_not_written_over(name: str, text: str, tmp_path: Path, main: Path) -> None:
    (tmp_path / name).write_text(text)
    said = refused(tmp_path, "check", "main.ampmem", "--baseline", name, "--update-baseline")
    assert f"{name} is neither an ampmem recording nor an ampmem summary" in said
    # A script is not even started for it.
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    assert said == refused(tmp_path, "check", "--baseline", name, "--update-baseline", "train.py")
    assert (tmp_path / name).read_text() == text


def test_a_database_of_others_is_not_written_over_but_what_ampmem_wrote_or_nothing_is(
    tmp_path: Path, main: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "mine.db")) as database, database:
        database.execute("CREATE TABLE meta (key TEXT, value TEXT)")
    assert "is neither" in refused(tmp_path, "check", "main.ampmem", "--baseline", "mine.db", "--update-baseline")
    with closing(sqlite3.connect(write(tmp_path / "old.ampmem", run()))) as database, database:
        database.execute("PRAGMA user_version = 1")
    (tmp_path / "old.json").write_text('{"schema": "ampmem.summary/0"}')
    (tmp_path / "empty.json").touch()
    for name in ("old.ampmem", "old.json", "empty.json"):
        code, _, errors = ampmem_here(tmp_path, "check", "main.ampmem", "--baseline", name, "--update-baseline")
        assert code == 0 and f"wrote {name}" in errors


@pytest.mark.parametrize("text", ["{}", "", "some text"])
def test_a_baseline_that_cannot_be_compared_with_is_wrong_use(text: str, tmp_path: Path, now: Path) -> None:
    (tmp_path / "base.ampmem").write_text(text)
    said = refused(tmp_path, "check", "now.ampmem", "--baseline", "base.ampmem")
    assert "the baseline cannot be used: base.ampmem is " in said
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    assert said == refused(tmp_path, "check", "--baseline", "base.ampmem", "train.py")


def test_a_broken_budget_is_no_reason_to_keep_an_old_baseline_but_a_doubt_is(tmp_path: Path, now: Path) -> None:
    update = ("--baseline", "base.json", "--update-baseline")
    code, output, errors = ampmem_here(tmp_path, "check", "now.ampmem", "--budget", "peak=1MiB", *update)
    assert code == 1 and "broken: peak" in output and "wrote base.json" in errors
    with closing(sqlite3.connect(now)) as database, database:
        database.execute("UPDATE meta SET value = '{\"ended\": false}' WHERE key = 'ended'")
    (tmp_path / "base.json").unlink()
    code, _, errors = ampmem_here(tmp_path, "check", "now.ampmem", *update)
    assert code == 1 and "base.json was not updated: now.ampmem could not be judged" in errors
    assert not (tmp_path / "base.json").exists()


def test_ranks_are_judged_each_against_its_own_baseline(tmp_path: Path) -> None:
    for name, sizes in {"main": (1, 2), "now": (1, 5)}.items():
        for rank, size in enumerate(sizes):
            write(tmp_path / f"{name}.rank{rank}-of-2.ampmem", of_rank(run(saved=size * MIB), rank))
    files = ("now.rank0-of-2.ampmem", "now.rank1-of-2.ampmem")
    code, output, _ = ampmem_here(tmp_path, "check", *files, "--baseline", "main.ampmem")
    assert code == 1
    assert output.startswith("1 of 2 fail; the worst is now.rank1-of-2.ampmem.\n")
    assert "now.rank0-of-2.ampmem: kept: all sizes equal those of main.rank0-of-2.ampmem" in output
    assert "give the job's name" in refused(tmp_path, "check", *files, "--baseline", "main.rank0-of-2.ampmem")
    code, _, errors = ampmem_here(tmp_path, "check", *files, "--baseline", "new.ampmem", "--update-baseline")
    assert code == 0 and (tmp_path / "new.rank1-of-2.ampmem").exists() and errors.count("wrote") == 2


def test_json_is_what_the_schema_says(tmp_path: Path, now: Path, main: Path) -> None:
    schema = json.loads(ampmem_here(tmp_path, "check", "--schema")[1])
    assert schema == check_schema()
    code, output, _ = ampmem_here(tmp_path, "check", "--json", "now.ampmem", "--baseline", "main.ampmem")
    document = json.loads(output)
    jsonschema.validate(document, schema)
    assert code == 1 and document["schema"] == "ampmem.check/1" and not document["ok"]
    assert document["broken"][0]["grew"][0]["source_line"] == "/repo/net.py:7 Net.forward"
    _, output, _ = ampmem_here(tmp_path, "check", "--json", "now.ampmem", "main.ampmem", "--budget", "peak=1GiB")
    assert [each["label"] for each in json.loads(output)] == ["now.ampmem", "main.ampmem"]


def test_in_python_it_is_the_same(tmp_path: Path, now: Path, main: Path) -> None:
    result = ampmem.check(now, budgets={"peak": "1MiB", "growth": 0}, baseline=main, allow="1%")
    assert not result.ok and [broken.key for broken in result.broken] == ["peak", "peak", "activations"]
    assert ampmem.check(ampmem.load(now), baseline=ampmem.load(now)).ok
    with pytest.raises(UsageError, match="did you mean 'peak'"):
        ampmem.check(now, budgets={"paek": 1})


def test_a_profile_and_a_summary_are_runs_in_python(now: Path, main: Path) -> None:
    prof, summary = ampmem.profile(output=now), summarize(ampmem.load(main))
    assert [each.grown for each in ampmem.check(prof, baseline=summary).broken[0].grew] == [2 * MIB]
    assert ampmem.check(summary, baseline=prof).ok and ampmem.check(prof, baseline=now).ok
    assert not ampmem.diff(prof, prof).changes and ampmem.diff(summary, prof).grown == 2 * MIB
    with pytest.raises(UsageError, match="dict is not a run: give a recording"):
        ampmem.check({})  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"baseline": True, "allow": 0.01}, {"allow": "1%"}, {"budgets": ["peak=1"]}])
def test_what_cannot_be_meant_in_python_is_said(now: Path, main: Path, given: dict[str, Any], golden: Golden) -> None:
    with pytest.raises(UsageError) as error:
        ampmem.check(now, **given | ({"baseline": main} if "baseline" in given else {}))
    golden(str(error.value))


def test_a_step_of_a_workflow_gets_a_table_and_annotations(
    tmp_path: Path, now: Path, main: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_WORKSPACE", "/repo")
    code, output, errors = ampmem_here(tmp_path, "check", "now.ampmem", "--baseline", "main.ampmem")
    assert code == 1 and output.startswith("now.ampmem: broken: ")
    assert errors.splitlines()[-1].startswith(
        "::error file=net.py,line=7,title=ampmem check::peak grew by 2.0 MiB here"
    )
    text = summary.read_text()
    assert text.startswith("before\n### ❌ now.ampmem")
    assert "| 2.0 MiB | 1.0 MiB | 3.0 MiB | activations |" in " ".join(text.split()), "columns are padded"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "none" / "summary.md"))
    code, _, errors = ampmem_here(tmp_path, "check", "now.ampmem", "--budget", "peak=1GiB")
    assert code == 0 and errors.startswith("ampmem: cannot write the job summary")
