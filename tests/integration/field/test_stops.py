"""Scripts that catch the stop at the end of the recording are stopped again, and what is said is what happened."""

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.commands import ampmem
from support.field import PROGRAMS

from ampmem.recording import read

PROGRAM = PROGRAMS / "catches_everything.py"


def stopped(folder: Path, how: str) -> CompletedProcess[str]:
    """The program as it catches things in this way; all that it was to record is recorded."""
    options = ("--device", "cpu", "--quiet", "-o", "run.ampmem")
    done = ampmem(folder, "profile", *options, str(PROGRAM), how)
    assert len(read(folder / "run.ampmem").steps) == 3
    return done


def line_of(code: str) -> int:
    return PROGRAM.read_text(encoding="utf-8").splitlines().index(code) + 1


def test_a_script_that_goes_on_is_stopped_at_its_next_forward(tmp_path: Path) -> None:
    done = stopped(tmp_path, "once")
    assert done.returncode == 0
    assert done.stdout == "interrupted\n"
    assert re.search(r"recorded 3 steps in run.ampmem, \d+\.\d KiB; the script caught the stop once", done.stderr)
    forward = line_of("    model(torch.ones(4, 8, device=device)).sum().backward()")
    assert f"went on, and was then stopped at {PROGRAM}:{forward}" in done.stderr


def test_a_script_that_catches_every_stop_is_let_run_to_its_end(tmp_path: Path) -> None:
    done = stopped(tmp_path, "each_batch")
    assert done.returncode == 0
    *said, counted = done.stdout.splitlines()
    assert said == ["skipped a bad batch"] * 5
    assert json.loads(counted) == [0, 1, *range(7, 12)]  # the third is recorded, and stopped before it is counted
    assert done.stderr.count("the script catches every stop") == 1
    assert "the script caught the stop 5 times, as a bare except does, and ran to completion" in done.stderr


def test_a_script_that_drops_the_stop_and_ends(tmp_path: Path) -> None:
    done = stopped(tmp_path, "to_the_end")
    assert done.returncode == 0
    assert json.loads(done.stdout) == [0, 1]
    assert "the script caught the stop once, as a bare except does, and ran to completion" in done.stderr
    assert "stopped the script" not in done.stderr


def test_a_script_that_fails_after_it_has_caught_the_stop(tmp_path: Path) -> None:
    done = stopped(tmp_path, "then_fails")
    assert done.returncode == 1
    assert "ValueError: no result" in done.stderr
    assert re.search(r"recorded 3 steps in run.ampmem, \d+\.\d KiB; the script caught the stop once", done.stderr)
    assert "went on, and then failed" in done.stderr


def test_a_stop_that_passes_through_a_finally_was_not_caught(tmp_path: Path) -> None:
    done = stopped(tmp_path, "cleans_up")
    assert (done.returncode, done.stdout) == (0, "")
    assert re.search(r"recorded 3 steps in run.ampmem, \d+\.\d KiB, and stopped the script", done.stderr)
    assert "caught" not in done.stderr


@pytest.mark.parametrize("how", ["each_batch", "once"])
def test_to_the_end_nothing_is_stopped(tmp_path: Path, how: str) -> None:
    done = ampmem(tmp_path, "profile", "--device", "cpu", "--quiet", "--run-to-end", str(PROGRAM), how)
    assert done.returncode == 0
    assert len(json.loads(done.stdout)) == (12 if how == "each_batch" else 24)
    assert "caught" not in done.stderr


@pytest.mark.slow
def test_what_fits_is_found_of_a_script_that_fails_for_the_stop(tmp_path: Path) -> None:
    options = ("--gpu", "2GiB", "--precision", "fp32", "--points", "0")
    done = ampmem(tmp_path, "fit", *options, str(PROGRAM), "then_fails", "cuda", "--vary", "--size=1:2")
    assert done.returncode == 0, done.stderr
    assert "fp32: --size=2 fits" in done.stdout
