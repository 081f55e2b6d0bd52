import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hostile import mutations
from support.hostile.mutations import RECORDINGS, again, outcome

TRIES = 200
"""So many of those that tests/benchmarks/destruction.py makes."""

FOUND = (
    "on_gpu:2022590352",
    "on_gpu:2006190521-3176213305",
    "on_gpu:2006190521-839524984",
    "on_gpu:2554280084",
    "on_cpu:4026554299-994744342",
    "watched:204119440",
    "watched:181495850-1774730185-3052562332-627761759-2005686994",
    "on_gpu:1392964597-3466798004-3485951540-672903765-336106960-1808949818",
)
"""Tries that once ended in a traceback, or in JSON that its schema does not admit."""


@pytest.mark.parametrize("name", FOUND)
def test_what_once_went_wrong_does_no_more(tmp_path: Path, name: str) -> None:
    assert outcome(again(name, tmp_path / "try.ampmem")) is None


@pytest.mark.slow
@pytest.mark.parametrize("names", [RECORDINGS, ("watched",)])
def test_whatever_is_in_a_file_it_is_read_right_or_refused_clearly(names: tuple[str, ...]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, mutations.__file__, str(TRIES), "0", *names],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{TRIES} tries, 0 failures" in done.stdout
