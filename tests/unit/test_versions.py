"""What ``tests/versions.py`` reads of pytest, and the table and exit code that it makes of it; nothing is installed."""

import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "versions.py"
sys.path.append(str(SCRIPT.parent))

import versions  # noqa: E402


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("2 failed, 1157 passed in 458.31s (0:07:38)", (1157, 2, 0)),
        ("===== 1 failed, 2 passed, 3 skipped, 4 warnings, 5 errors in 0.12s =====", (2, 6, 3)),
        ("======== 2606 passed, 12 skipped, 1 xfailed in 3.00s ========", (2606, 0, 12)),
        ("1 error in 0.50s", (0, 1, 0)),
        ("7 deselected in 0.01s", (0, 0, 0)),
    ],
)
def test_the_last_line_of_pytest_is_read(line: str, counts: tuple[int, int, int]) -> None:
    passed, failed, skipped = counts
    lines = ["9 passed in 1.00s\n", "FAILED tests/a.py::test_b - 3 passed in vain\n", f"{line}\n", "\n"]
    assert versions.counts_of(lines) == versions.Counts(passed=passed, failed=failed, skipped=skipped)


def test_a_run_that_died_has_no_counts() -> None:
    assert versions.counts_of(["....\n", "Fatal Python error: Segmentation fault\n"]) is None


def test_the_table() -> None:
    counts = versions.Counts(passed=2606, failed=0, skipped=12)
    rows = [
        versions.Row(torch="2.11.0+cu130", python="3.11.7", counts=counts, exit_code=0, seconds=725.0),
        versions.Row(torch="nightly", python="-", counts=None, exit_code=-11, seconds=3.0),
    ]
    assert versions.table(rows).splitlines() == [
        "torch         Python  passed  failed  skipped  minutes",
        "------------  ------  ------  ------  -------  -------",
        "2.11.0+cu130  3.11.7    2606       0       12     12.1",
        "nightly            -       -       -        -      0.1",
    ]


def test_constraints_leave_to_torch_what_torch_pins() -> None:
    text = "# said\ntorch==2.13.0\ntorchvision==0.1\nsetuptools==84.2.1\nclick==8.5.1\n"
    assert versions.constraints(text) == "# said\ntorchvision==0.1\nclick==8.5.1\n"


@pytest.mark.parametrize(("last", "code"), [("1 passed in 0.01s", 0), ("1 failed in 0.01s", 1), ("killed", 1)])
def test_an_environment_that_is_there_is_used_and_a_failure_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: str, code: int
) -> None:
    python = tmp_path / "2.11.0" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # It notes what it was called with, and answers both questions that are asked of it.
    python.write_text(
        f'#!/bin/sh\necho "$PYTHONPATH $@" >>{tmp_path}/calls\n'
        f'if [ "$1" = -c ]; then echo 3.11.7 2.11.0+cu130; else echo {last}; exit {code}; fi\n'
    )
    python.chmod(0o755)
    assert versions.main(["2.11.0", "--keep", str(tmp_path), "--select", "tests/unit", "-x"]) == code
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("2.11.0+cu130  3.11.7")
    assert last in printed.err
    called = (tmp_path / "calls").read_text().splitlines()[-1]
    assert called == f"{SCRIPT.parents[1]} -m pytest -n auto --dist loadfile tests/unit -x"


def test_what_could_not_be_made_is_not_used_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.sys, "executable", "/bin/false")
    with pytest.raises(versions.subprocess.CalledProcessError):
        versions.main(["2.11.0", "--keep", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []
