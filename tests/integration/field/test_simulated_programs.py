"""Programs on a simulated device that has nothing of them, or whose sizes depend on data that it has not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ampmem
from field import PROGRAMS

WITHOUT_GPU = str(PROGRAMS / "without_gpu.py")
ELSEWHERE = "the model is on cpu: none of its 2 parameters was on the simulated GPU"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "does the script need its option --accel?"),
        (("--half-way",), "does the script need its option --accel?"),
        (("--half-way", "--accel"), None),
    ],
)
def test_a_model_that_is_not_on_the_gpu_is_an_error(
    tmp_path: Path, arguments: tuple[str, ...], said: str | None
) -> None:
    done = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", "--run-to-end", WITHOUT_GPU, *arguments)
    if said is None:
        assert done.returncode == 0
        assert json.loads(done.stdout) == ["cuda:0"] * 2
        assert "it fits" in done.stderr
        return
    assert done.returncode == 1
    assert f"ampmem: {ELSEWHERE}; {said}\n" in done.stderr
    assert "fits" not in done.stderr
    assert not (tmp_path / "without_gpu.ampmem").exists()


def test_no_arm_of_a_comparison_has_anything_to_show(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "compare", "--device", "sim", "--arms", "fp32,amp", WITHOUT_GPU)
    assert done.returncode == 1
    assert done.stdout.count(ELSEWHERE) == 2
    assert not list(tmp_path.iterdir())


def test_nothing_is_said_of_what_fits(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "fit", "--gpu", "2GiB", "--arms", "fp32", WITHOUT_GPU, "--vary", "--batch-size=1:8")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{ELSEWHERE}; does the script need its option --accel?" in done.stderr
    assert "so it cannot be said what fits" in done.stderr
