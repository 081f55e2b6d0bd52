"""Every byte of programs whose memory does not all come from the training thread's allocations."""

from pathlib import Path

import pytest
from support.field import Ran, plain, record

from ampmem.events import OTHER_THREADS, Action
from ampmem.recording import read


def conserved(ran: Ran) -> bool:
    return ran.exit_code == 0 and ran.summary["conservation"]["residual_bytes"] == 0


def test_batches_of_workers_are_inputs(tmp_path: Path) -> None:
    ran = record(tmp_path, "worker_batches")
    assert conserved(ran)
    assert ran.last["after_optimizer"]["inputs"] == ran.counted["batch"]
    assert ran.last["after_optimizer"]["other"] == ran.counted["loaded"]


@pytest.mark.parametrize("keep", [True, False])
def test_batches_that_workers_read_ahead_are_no_growth(tmp_path: Path, keep: bool) -> None:
    ran = record(tmp_path, "worker_batches", arguments=("keep",) if keep else ())
    assert conserved(ran)
    found = [finding for finding in ran.summary["findings"] if finding["code"] == "steady-growth"]
    assert [finding["bytes"] for finding in found] == ([ran.counted["input"]] if keep else [])


@pytest.mark.parametrize("program", ["mapped_weights", "shared_model"])
def test_tensors_in_one_mapping_are_counted_each_with_its_own_bytes(tmp_path: Path, program: str) -> None:
    ran = record(tmp_path, program)
    assert conserved(ran)
    for category, size in ran.counted.items():
        assert [step["marks"]["after_forward"][category] for step in ran.summary["steps"]] == [size] * len(
            ran.summary["steps"]
        )


def test_what_another_thread_drops_is_dead(tmp_path: Path) -> None:
    ran = record(tmp_path, "dropped_elsewhere", "--steps", "6")
    assert conserved(ran)
    assert sum(ran.last["after_optimizer"].values()) == ran.counted["alive"]
    assert "steady-growth" not in {finding["code"] for finding in ran.summary["findings"]}


def test_weights_that_threads_allocated_are_parameters_and_the_rest_is_theirs(tmp_path: Path) -> None:
    ran = record(tmp_path, "loaded_by_threads")
    assert conserved(ran)
    assert ran.last["after_optimizer"]["parameters"] == ran.counted["parameters"]
    assert ran.last["after_optimizer"]["other"] == ran.counted["elsewhere"]
    events = read(tmp_path / "run.ampmem").events
    held = events.bytes[(events.address == OTHER_THREADS) & (events.action == Action.ALLOC)]
    assert held[-1] == ran.counted["elsewhere"]
    assert ran.summary["conservation"]["other_threads_bytes"] >= ran.counted["elsewhere"]
    assert (
        "other threads, which are not recorded, held up to " in ran.said and " at once (counted in other)" in ran.said
    )
    assert "other threads" in [large["op"] for large in ran.summary["top"] if large["category"] == "other"]


@pytest.mark.parametrize("program", ["sharded", "wrapped_weight"])
def test_wrappers_are_what_they_wrap(tmp_path: Path, program: str) -> None:
    ran = record(tmp_path, program)
    assert conserved(ran)
    assert {category: ran.last["after_optimizer"][category] for category in ran.counted} == ran.counted
    model = [part for part in ran.summary["static_model"] if part["mark"] == "after_optimizer"]
    assert all(part["holds"] for part in model)


@pytest.mark.parametrize("arguments", [(), ("views",)])
def test_a_flat_fp32_copy_of_half_weights_is_a_master_copy(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ran = record(tmp_path, "flat_master", arguments=arguments)
    assert conserved(ran)
    assert {category: ran.last["after_optimizer"][category] for category in ran.counted} == ran.counted
    assert ran.summary["static_recipe"]["precision"].startswith("half-master")
    assert all(part["holds"] for part in ran.summary["static_model"])


@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_what_a_graph_of_backward_saves_are_activations(tmp_path: Path, precision: str) -> None:
    ran = record(tmp_path, "gradient_penalty", "--precision", precision)
    assert conserved(ran)
    if precision == "fp32":
        counted = plain(tmp_path, "gradient_penalty", "count")["activations"]
        assert ran.last["after_forward"]["activations"] == counted
    # What the model was fed is made of the batch, which a variable holds.
    assert ran.last["after_forward"]["other"] == ran.counted["batch"]


def test_averages_of_the_weights_have_names(tmp_path: Path) -> None:
    ran = record(tmp_path, "ema")
    assert conserved(ran)
    assert {category: ran.last["after_optimizer"][category] for category in ran.counted} == ran.counted
    large = {(entry["category"], entry["name"]) for entry in ran.summary["top"]}
    assert {("untrained", "copy of 0.weight"), ("other", "average.shadow[0]")} <= large
    assert all(part["holds"] for part in ran.summary["static_model"])
    assert ran.summary["static_model"][0]["terms"] == []
    assert ran.summary["parameters"]["untrained_bytes"] == ran.counted["untrained"]
