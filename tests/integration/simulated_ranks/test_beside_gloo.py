"""A simulated rank against real ranks: the same script on two gloo processes, allocation by allocation."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from support.ready_python import ready_python

RUNS = Path(__file__).with_name("parallel_runs.py")
CASES = (
    "ddp",
    "ddp-views",
    "ddp-unused",
    "ddp-static",
    "ddp-accumulate",
    "ddp-hook",
    "zero",
    "gpipe",
    "1f1b",
    "interleaved",
)
SMALL = 16
"""Bytes up to which allocations are numbers wrapped as tensors, and what gloo gathers counts of parameters in."""
PIPELINES = ("gpipe", "1f1b", "interleaved")

pytestmark = pytest.mark.slow

Allocations = list[tuple[int, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Allocations]]:
    """By kind and rank: the allocations of every case."""
    folder = tmp_path_factory.mktemp("meeting")
    started = {}
    for kind in ("real", "simulated"):
        for rank in (0, 1):
            command = [ready_python(), str(RUNS), kind, str(rank), str(folder / "meeting"), *CASES]
            pipe = subprocess.PIPE
            started[kind, rank] = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder)
    found = {}
    for key, process in started.items():
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        found[key] = json.loads(out)
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_a_rank_allocates_what_it_allocates_beside_others(
    runs: dict[tuple[str, int], dict[str, Allocations]], case: str, rank: int
) -> None:
    """The same sizes in the same order, whichever rank it is."""
    real = [(size, op) for size, op in runs["real", rank][case] if size > SMALL]
    here = [size for size, _ in runs["simulated", rank][case] if size > SMALL]
    if case in PIPELINES:
        # To find out its shapes a stage keeps the state of the CPU's random numbers, which no device holds.
        real.remove((torch.get_rng_state().nbytes, ""))
    assert here == [size for size, _ in real]
    assert len(here) > 100


def test_the_ranks_of_a_pipeline_differ(runs: dict[tuple[str, int], dict[str, Allocations]]) -> None:
    """So equal sizes say something."""
    for case in PIPELINES:
        assert runs["simulated", 0][case] != runs["simulated", 1][case]
