"""The run on a GPU, without one: what counts as ok, what is left after a kill, and that nothing goes on for ever."""

import json
import os
import select
import sys
import tarfile
import time
from pathlib import Path

import children
import pytest
import results
import run_all
from parts import Part, parts
from results import DIED, FAILED, LATE, PASSED, SKIPPED, STARTED, Row

TESTS = """
import os, signal, time
import pytest

def test_passes(): pass

def test_fails(): assert 1 == 2, "one is not two"

def test_dies(): os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.skip(reason="not today")
def test_skipped(): pass

def test_hangs():
    while True:
        time.sleep(60)

def test_comes_last(): pass
"""


def report_in(folder: Path, said: list[str] | None = None) -> run_all.Report:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return run_all.Report(folder / "out", work, (said if said is not None else []).append)


def rows(*outcomes: str) -> list[Row]:
    return [Row(name=str(number), outcome=outcome) for number, outcome in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ((PASSED, SKIPPED), "ok"),
        ((SKIPPED, SKIPPED), "nothing passed"),
        ((), "nothing passed"),
        ((PASSED, FAILED, LATE), "2 failed"),
        ((PASSED, STARTED), "1 failed"),
        ((PASSED, DIED), "1 failed"),
        ((results.REFUSED, results.NO_TIME), "nothing passed"),
        ((PASSED, results.REFUSED), "ok"),
    ],
)
def test_ok_needs_one_that_passed_and_none_that_failed(outcomes: tuple[str, ...], verdict: str) -> None:
    assert results.verdict(rows(*outcomes)) == verdict


def test_rows_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    results.append(path, Row(name="a", outcome=STARTED))
    results.append(path, Row(name="a", outcome=PASSED, facts={"bytes": 3}))
    results.append(path, Row(name="b", outcome=STARTED))
    with path.open("a") as stream:
        stream.write('{"name": "c", "outc')
    assert [(row.name, row.outcome) for row in results.read(path)] == [("a", PASSED), ("b", STARTED)]


@pytest.mark.slow
def test_a_test_that_dies_or_hangs_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "one_by_one", "--seconds-per-test", "1", str(file))
    part = Part(name="laws", command=command, seconds=60, tests=True, rows=True)
    outcome = run_all.run(part, report_in(tmp_path), time.monotonic() + 60)
    found = {row.name.rpartition("::")[2]: (row.outcome, row.detail) for row in outcome.rows}
    assert found["test_passes"] == (PASSED, "")
    assert found["test_fails"][0] == FAILED and "one is not two" in found["test_fails"][1]
    assert found["test_dies"] == (DIED, "its process ended while it ran")
    assert found["test_skipped"] == (SKIPPED, "Skipped: not today")
    assert found["test_hangs"][0] == FAILED and "more than 1 s" in found["test_hangs"][1]
    assert found["test_comes_last"][0] == PASSED
    assert outcome.how == "3 failed"


@pytest.mark.slow
def test_tests_that_are_all_skipped_are_not_ok(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("import pytest\n@pytest.mark.skip(reason='no GPU')\ndef test_it(): pass\n")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "one_by_one", str(file))
    report = report_in(tmp_path)
    report.end(run_all.run(Part(name="laws", command=command, seconds=60, tests=True, rows=True), report, sys.maxsize))
    assert not report.close()
    assert "nothing passed" in (tmp_path / "out" / "results.txt").read_text()


def test_a_part_that_takes_too_long_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('started', flush=True)\ntime.sleep(600)\n"
    )
    outcome = run_all.run(Part(name="compare", command=("-c", script), seconds=2), report_in(tmp_path), sys.maxsize)
    assert [row.outcome for row in outcome.rows] == [LATE]
    assert outcome.rows[0].detail == "started"
    assert ended(int(pid.read_text()))


def ended(pid: int) -> bool:
    """Whether the process ends, or has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 10)[0])  # it was told to by now, and is soon over
    finally:
        os.close(process)


def test_children_in_sessions_of_their_own_end_with_their_parent(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    inner = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); print('there'); time.sleep(600)"
    outer = f"import children; children.end_with_us(); children.follow(('-c', {inner!r}), 600, say=print)"
    assert children.follow(("-c", outer), 4).code is None
    assert ended(int(pid.read_text()))


@pytest.mark.parametrize(
    ("script", "leaves", "how", "detail"),
    [
        ("print('fine')", (), "ok", "fine"),
        ("raise SystemExit(3)", (), "1 failed", "exit code 3"),
        ("print('done')", ("gone.ampmem",), "1 failed", "gone.ampmem is missing"),
    ],
)
def test_a_command_is_ok_by_its_exit_code_and_what_it_leaves(
    script: str, leaves: tuple[str, ...], how: str, detail: str, tmp_path: Path
) -> None:
    part = Part(name="x", command=("-c", script), seconds=30, leaves=tuple(tmp_path / each for each in leaves))
    outcome = run_all.run(part, report_in(tmp_path), sys.maxsize)
    assert (outcome.how, outcome.rows[0].detail) == (how, detail)


def test_without_time_a_part_is_not_started(tmp_path: Path) -> None:
    part = Part(name="x", command=("-c", "open('started', 'w')"), seconds=30)
    assert run_all.run(part, report_in(tmp_path), time.monotonic() - 1).how == results.NO_TIME


def test_results_are_there_while_a_part_runs(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    report.begin("laws")
    results.append(report.rows_of("laws"), Row(name="test_a", outcome=PASSED))
    results.append(report.rows_of("laws"), Row(name="test_b", outcome=STARTED))
    report.write()  # and now the machine is taken away
    (part,) = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert (part["name"], part["how"]) == ("laws", "running")
    assert [row["outcome"] for row in part["rows"]] == [PASSED, STARTED]
    assert "== laws" in (tmp_path / "out" / "log.txt").read_text()


def test_what_is_left_is_few_files_and_one_archive(tmp_path: Path) -> None:
    said: list[str] = []
    report = report_in(tmp_path, said)
    work = tmp_path / "work"
    for number in range(20):
        (work / f"{number}.ampmem").write_bytes(b"x" * 100)
    (work / "huge.ampmem").write_bytes(b"\0" * (run_all.MOST_IN_ARCHIVE + 1))
    report.end(run_all.Outcome(name="compare", how="ok", seconds=1, rows=(Row(name="compare", outcome=PASSED),)))
    assert report.close()
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ["log.txt", "rest.tar.gz", "results.json", "results.txt"]
    with tarfile.open(tmp_path / "out" / "rest.tar.gz") as archive:
        assert len(archive.getnames()) == 20
    assert "huge.ampmem" in (tmp_path / "out" / "log.txt").read_text()
    assert "bring home" in said[-1] and "rest.tar.gz" in said[-1]


def test_the_parts_are_those_that_the_help_names(tmp_path: Path) -> None:
    listed = [line.split()[0] for line in run_all.__doc__.splitlines() if line.startswith("    ") and " s " in line]
    listed += [line.split()[0] for line in run_all.__doc__.splitlines() if line.startswith("    ") and " min " in line]
    assert set(listed) == set(parts(tmp_path, tmp_path))


def test_a_part_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_all.main([str(tmp_path / "out"), "weather"])
    assert ended.value.code == 2
    assert "there is no part 'weather'" in capsys.readouterr().err


def test_parts_get_the_checkout_and_are_told_how_long_they_have(tmp_path: Path) -> None:
    script = "import os, sys, ampmem; print(sys.argv[1:], os.path.dirname(ampmem.__file__))"
    said: list[str] = []
    part = Part(name="probes", command=("-c", script, "{seconds}"), seconds=30)
    run_all.run(part, report_in(tmp_path, said), sys.maxsize)
    assert int(said[-1].split("'")[1]) in range(20, 26)
    assert Path(said[-1].split()[-1]).parent == children.ROOT
