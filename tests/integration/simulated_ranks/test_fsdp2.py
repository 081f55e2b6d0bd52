"""One simulated rank under FSDP2, beside PyTorch's own estimate of the same script and sizes worked out here."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.ready_python import ready_python

pytest.importorskip("torch.distributed.tensor.debug")

pytestmark = pytest.mark.slow

EQUAL = (
    "plain 8 0",
    "plain 8 7",
    "plain 4096 0",
    "plain 4096 4095",
    "kept 8 0",
    "halved 8 0",
    "nested 8 0",
    "ignored 8 0",
    "hybrid 8 0",
    "tensors 8 0",
    "tensors 8 7",
)
"""What is trained, on how many ranks, and which of them that is."""
DIFFERENT = ("adam 8 0", "bf16 8 0")
OFFLOADED = "offload 8 0"
LAYERS = 3
ROWS = 8
TENSORS = 6 * LAYERS
ADAM_STEP = 4


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    words = " ".join((*EQUAL, *DIFFERENT, OFFLOADED)).split()
    program = Path(__file__).parent / "fsdp2.py"
    done = subprocess.run([ready_python(), str(program), *words], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", EQUAL)
def test_a_rank_needs_what_pytorchs_tracker_counts(runs: dict[str, dict[str, Any]], case: str) -> None:
    assert runs[case]["peak"] == runs[case]["tracked"]


def test_the_tracker_counts_steps_of_adam_that_are_not_on_a_gpu(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["adam 8 0"]
    assert run["tracked"] - run["peak"] == TENSORS * ADAM_STEP


def test_a_gpu_keeps_the_statistics_of_a_norm_in_float32(runs: dict[str, dict[str, Any]]) -> None:
    """Mean and deviation of each row, of the two norms that have run backward last are gone; on the CPU in bfloat16."""
    run = runs["bf16 8 0"]
    assert run["peak"] - run["tracked"] == 2 * 2 * ROWS * (4 - 2)


def test_nothing_is_left_behind(runs: dict[str, dict[str, Any]]) -> None:
    assert {case: run["left"] for case, run in runs.items()} == dict.fromkeys(runs, 0)


@pytest.mark.parametrize(
    ("case", "rows", "padded"),
    [("plain 8 0", 13, 13), ("plain 8 7", 9, 13), ("plain 4096 0", 1, 1), ("plain 4096 4095", 0, 1)],
)
def test_shards_of_100_rows(runs: dict[str, dict[str, Any]], case: str, rows: int, padded: int) -> None:
    """``ceil(100 / W)`` rows for each rank, until there are none; the memory is that of the first rank's."""
    assert runs[case]["shards"]["0.down.weight"] == ["cuda", rows * 404 * 4, padded * 404 * 4]


def test_tensor_parallel_and_shards_divide_by_both(runs: dict[str, dict[str, Any]]) -> None:
    for case in ("tensors 8 0", "tensors 8 7"):
        shards = runs[case]["shards"]
        assert shards["0.up.weight"] == ["cuda", 512 * 128 * 4 // 8, 512 * 128 * 4 // 8]
        assert shards["0.down.bias"] == ["cuda", 128 * 4 // 2, 128 * 4 // 2]  # on all ranks of a row


def test_copies_of_a_hybrid_mesh_do_not_divide(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["hybrid 8 0"]["shards"]["0.up.weight"][1] == 404 // 4 * 100 * 4


def test_what_is_offloaded_is_on_the_cpu(runs: dict[str, dict[str, Any]]) -> None:
    assert {device for device, *_ in runs[OFFLOADED]["shards"].values()} == {"cpu"}
    assert 0 < runs[OFFLOADED]["peak"] < runs["plain 8 0"]["peak"]


def test_keeping_parameters_whole_costs_memory_and_shards_in_two_less(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["plain 8 0"]["peak"] < runs["halved 8 0"]["peak"] < runs["kept 8 0"]["peak"]
