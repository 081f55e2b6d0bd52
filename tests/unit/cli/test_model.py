import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.build import small_run, write
from support.golden_sections import Golden

from ampmem.analysis.static_model.recipes import OPTIMIZERS, PRECISIONS, PUBLISHED
from ampmem.cli.model import model, parse_count
from ampmem.errors import NothingRecorded, UsageError
from ampmem.events import OptimizerRecord
from ampmem.reporters.text.plain_text import WIDTH


def run(*arguments: str) -> str:
    result = CliRunner().invoke(model, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def row(text: str, first: str) -> list[str]:
    """The cells of the first line that starts with ``first``."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [first])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write(tmp_path / "run.ampmem", small_run().recording())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7e9", 7 * 10**9),
        ("7E+9", 7 * 10**9),
        ("7B", 7 * 10**9),
        ("6.7b", 6_700_000_000),
        ("350M", 350 * 10**6),
        ("12k", 12_000),
        ("1T", 10**12),
        ("124_000_000", 124_000_000),
        (" 1 ", 1),
        ("1.5e1", 15),
    ],
)
def test_numbers_of_parameters(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "0", "-7e9", "7G", "seven", "1.5", "7e9B7", "nan", "inf", "1e99", "0x10", "_7", "\u0667B", "7e999"]
)
def test_what_is_no_number_of_parameters(text: str) -> None:
    with pytest.raises(UsageError, match="write it as 7e9, 7B, 350M or 124_000_000"):
        parse_count(text)


def test_all_recipes_and_formulas_side_by_side(golden: Golden) -> None:
    text = run("--params", "7e9")
    assert row(text, "fp32")[-2:] == [f"{16 * 7e9 / 2**30:.1f}", "GiB"]
    sources = text.split("\nsources\n")[1]
    assert all(key in text and key in sources for key in PUBLISHED)
    golden(text)


CHOICES = (
    "--params 230e6",
    "--params 230e6 --recipe fp32 --optimizer sgd",
    "--params 1000 --recipe autocast",
    "--params 1 --recipe half-master-fp32-accumulation",
    "--params 1 --recipe pure-half --optimizer adafactor",
    "--params 1e9 --optimizer Adafactor",
    "--optimizer sgd-momentum run.ampmem",
    "--recipe fp32 run.ampmem",
)


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_printed(choice: str, recorded: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded.parent)
    golden(run(*choice.split()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_is_wider_than_the_page(optimizer: str, recorded: Path) -> None:
    amounts: list[Sequence[str]] = [("--params", "1e15"), ("--params", "1"), (str(recorded),)]
    for amount in amounts:
        for choice in ([], *(["--recipe", key] for key in PRECISIONS)):
            text = run(*amount, "--optimizer", optimizer, *choice)
            assert max(map(len, text.splitlines())) <= WIDTH


def test_sources_are_not_broken_in_the_middle_of_an_address() -> None:
    text = run("--params", "7B")
    for formula in PUBLISHED.values():
        address = formula.source.rsplit(" ", 1)[1]
        assert address.startswith("https://")
        assert address in text


def test_an_optimizer_is_named_in_any_case() -> None:
    assert run("--params", "1e9", "--optimizer", "AdamW") == run("--params", "1e9", "--optimizer", "adamw")


@pytest.mark.parametrize("optimizer", ["amsgrad", "adam", "adamw"])
def test_settings_of_the_same_optimizer_are_no_reason_for_a_remark(recorded: Path, optimizer: str) -> None:
    assert "note:" not in run(str(recorded), "--optimizer", optimizer)


def test_an_optimizer_that_is_not_known_is_no_reason_for_a_remark(tmp_path: Path) -> None:
    recording = replace(
        small_run().recording(), optimizers=(OptimizerRecord(class_name="Lion", implementation="for-loop"),)
    )
    assert "note:" not in run(str(write(tmp_path / "lion.ampmem", recording)), "--optimizer", "sgd")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(model, arguments)


def test_a_number_and_a_recording_are_one_too_many_and_neither_is_too_few(recorded: Path) -> None:
    neither = "give a number of parameters, as in --params 7e9, or a recording"
    both = "give either --params or a recording, and not both"
    for arguments, said in (([], neither), ([str(recorded), "--params", "7B"], both)):
        error = invoke(*arguments).exception
        assert isinstance(error, UsageError)
        assert error.exit_code == 2
        assert str(error) == said


@pytest.mark.parametrize(("option", "value"), [("--optimizer", "lion"), ("--recipe", "fp64")])
def test_an_unknown_choice_is_wrong_usage(option: str, value: str) -> None:
    result = invoke("--params", "7B", option, value)
    assert result.exit_code == 2
    assert value in result.output


def test_a_recording_at_fault_is_named(tmp_path: Path) -> None:
    assert "gone.ampmem does not exist" in str(invoke(str(tmp_path / "gone.ampmem")).exception)
    recording = small_run().recording()
    skipped = replace(recording, steps=tuple(replace(step, skipped_update=True) for step in recording.steps))
    path = write(tmp_path / "skipped.ampmem", skipped)
    with pytest.raises(NothingRecorded, match=r"skipped\.ampmem: nothing to compare with"):
        run(str(path))


def test_model_works_where_torch_does_not(recorded: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['plotly'] = None\n"
        "from ampmem.cli.model import model\n"
        "model.main(sys.argv[1:], standalone_mode=False)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for arguments in ([str(recorded)], ["--params", "7B"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert "published, with Adam" in done.stdout


def test_the_command_line_knows_the_subcommand() -> None:
    command = [sys.executable, "-m", "ampmem", "model"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ampmem: give a number of parameters, as in --params 7e9, or a recording\n"
