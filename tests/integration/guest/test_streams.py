"""A program ends as it does without ampmem where streams are closed, full or without a reader, and disks fail."""

import subprocess
from pathlib import Path

import pytest
from support.guest import beside
from support.ready_python import ready_python
from support.streams import CASES, CLOSED, FAST, SLOW, Case, run, run_closed


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_as_without_ampmem(tmp_path: Path, case: Case) -> None:
    assert run(case, tmp_path) == []


# The others take minutes: tests/benchmarks/destruction.py runs them all; here is one in eight.
@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW[::8], ids=lambda case: case.name)
def test_as_without_ampmem_too(tmp_path: Path, case: Case) -> None:
    assert run(case, tmp_path) == []


def test_no_case_is_there_twice() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 45


def test_a_difference_is_found(tmp_path: Path) -> None:
    files = "len(list(HERE.glob('*.ampmem')))"
    case = Case(
        name="looks around", last=f"print({files}, file=sys.stderr); seen.write(str({files})); sys.exit({files})"
    )
    found = run(case, tmp_path)
    assert found[:2] == ["code: plain 0, with ampmem 1", "err: plain '0\\n', with ampmem '1\\n'"]
    assert len(found) == 3


@pytest.mark.slow
def test_what_the_shell_closes(tmp_path: Path) -> None:
    assert run_closed(CLOSED[0], tmp_path) == []


@pytest.mark.slow
def test_a_file_in_the_place_of_standard_error_has_what_the_script_wrote(tmp_path: Path) -> None:
    both = beside(tmp_path, "opens_over_stderr")
    assert both.differences() == []
    plain, recorded = (tmp_path / name / "data.bin" for name in ("plain", "recorded"))
    assert recorded.read_bytes() == plain.read_bytes() == b"headtail"


def test_tables_for_a_full_disk_are_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [ready_python(), "-m", "ampmem", "model", "--params", "7e9"]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, b"ampmem: cannot write: No space left on device\n")
