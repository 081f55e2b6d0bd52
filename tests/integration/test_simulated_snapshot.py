"""The simulated language model against snapshots that others took of such models on real GPUs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.commands import ampmem, python

from ampmem.allocator.gpus import GPUS
from ampmem.allocator.settings import MIB

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "benchmarks" / "simulated_snapshots.py"
FOLDER = Path(os.environ.get("AMPMEM_SNAPSHOTS") or ROOT.parent / "shared" / "snapshots")
SHAPED_AFTER = "lm_medium_ctx128_fp32_step"
"""The one whose frames the workload was written after; the others' sizes are known, and nothing else."""
NAMES = (
    SHAPED_AFTER,
    "lm_medium_ctx512_bf16_inference",
    "lm2700m_ctx128_bf16_forward",
)
OTHERS = ("cnn_small_fp32_10steps", "old_no_free_requested")
"""Those that are not of such a model."""

Row = dict[str, Any]


def run(*arguments: str) -> Any:
    done = python(ROOT, str(SCRIPT), *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # the workload prints too


def existing(name: str) -> None:
    if not (FOLDER / f"{name}.pickle").exists():
        pytest.skip(f"{name}.pickle is not in {FOLDER}; name its folder in AMPMEM_SNAPSHOTS")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    for name in (*NAMES, *OTHERS):
        existing(name)
    folder = tmp_path_factory.mktemp("snapshots")
    for name in (*NAMES, *OTHERS):
        (folder / f"{name}.pickle").symlink_to(FOLDER / f"{name}.pickle")
    found: dict[str, Any] = run(str(folder), "--json")
    return found


@pytest.fixture
def row(table: dict[str, Any], name: str) -> Row:
    (found,) = [each for each in table["rows"] if each["name"] == name]
    return dict(found)


@pytest.mark.parametrize("name", NAMES)
def test_the_peaks_are_those_of_the_gpu_within_a_percent(row: Row) -> None:
    assert row["allocated_simulated"] == pytest.approx(row["allocated_real"], rel=0.01)
    assert row["reserved_simulated"] == pytest.approx(row["reserved_real"], rel=0.01)


@pytest.mark.parametrize("name", [SHAPED_AFTER])
def test_a_training_step_allocates_what_it_did_on_the_gpu(row: Row) -> None:
    assert row["allocations_real"] == row["allocations_simulated"] == row["common"] == 6526
    assert row["allocated_simulated"] == pytest.approx(row["allocated_real"], abs=0.1 * MIB)


@pytest.mark.parametrize("name", ["lm_medium_ctx512_bf16_inference"])
def test_inference_allocates_what_it_did_on_the_gpu(row: Row) -> None:
    assert row["allocations_real"] == row["allocations_simulated"] == row["common"] == 1666


def test_no_snapshot_is_passed_over(table: dict[str, Any]) -> None:
    assert {each["name"] for each in table["rows"]} == set(NAMES)
    assert set(table["left_out"]) == set(OTHERS)


def test_on_hopper_it_differs_by_the_larger_workspaces() -> None:
    here = [
        run("--simulate", gpu, "1", "step", "--preset", "full", "--device", "cuda", "--layers", "2")["allocated"]
        for gpu in ("h100", "a100-80")
    ]
    assert here[0] - here[1] == pytest.approx(2 * (32 * MIB - 8_519_680), abs=0.1 * MIB)


def test_every_forward_of_an_inference_allocates_the_same() -> None:
    """Parts of composite ops too, which fake tensors would remember and not run again."""
    tiny = ("forward", "--preset", "tiny", "--device", "cuda", "--precision", "amp", "--inference")
    first, second = (run("--simulate", "a100-80", before, *tiny)["sizes"] for before in ("0", "1"))
    first.remove(8_519_680)
    assert first == second


def profile(output: Path, *arguments: str) -> None:
    options = ("--steps", "2", "--quiet", "-o", str(output))
    done = ampmem(output.parent, "profile", *options, *arguments, "--preset", "tiny")
    assert done.returncode == 0, done.stderr


def test_a_recording_is_simulated_again_by_its_own_command(tmp_path: Path) -> None:
    """Recordings of GPUs are to go there; a simulated one stands in, and agrees with itself."""
    sim = ("--device", "sim", "--gpu", "h100")
    profile(tmp_path / "gpt.ampmem", *sim, "--precision", "amp", "--dtype", "fp16", "-m", "ampmem.workloads.gpt")
    profile(tmp_path / "unknown.ampmem", "--device", "sim", "--gpu", "24GiB", "-m", "ampmem.workloads.gpt")
    profile(tmp_path / "cpu.ampmem", "--device", "cpu", "-m", "ampmem.workloads.gpt")
    found = run(str(tmp_path), "--json")
    (row,) = found["rows"]
    assert row["name"] == "gpt"
    assert row["allocations_real"] == row["allocations_simulated"] == row["common"] > 100
    assert row["allocated_real"] == row["allocated_simulated"] > 0
    assert row["reserved_real"] == row["reserved_simulated"] >= row["allocated_real"]
    assert found["left_out"] == {
        "cpu": "recorded on cpu",
        "unknown": f"ampmem cannot simulate 24GiB; it knows {', '.join(GPUS)}",
    }
