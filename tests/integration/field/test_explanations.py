"""What ampmem says of programs as they are found: each reason names its tensors, and is true of them."""

from pathlib import Path
from typing import Any

from support.command_line import ampmem_here
from support.field import Ran, record


def component(ran: Ran, mark: str, name: str) -> dict[str, Any]:
    (found,) = [row for row in ran.summary["static_model"] if (row["mark"], row["component"]) == (mark, name)]
    assert found["holds"], found
    return found


def reasons(row: dict[str, Any]) -> dict[str, list[str]]:
    """The names of the tensors, by reason."""
    return {term["why"]: term["names"] for term in row["terms"]}


def told(ran: Ran) -> dict[str, dict[str, Any]]:
    return {finding["code"]: finding for finding in ran.summary["findings"]}


def adds_up(folder: Path) -> None:
    """The recording passes the check."""
    code, said, _ = ampmem_here(folder, "show", "--check", "run.ampmem")
    assert code == 0
    assert said.startswith("run.ampmem: ok, ")


def test_copies_that_nothing_keeps_are_named_the_first_weight_before_the_biases(tmp_path: Path) -> None:
    ran = record(tmp_path, "first_weight")
    copies = component(ran, "after_forward", "cast_copies")
    assert copies["measured_bytes"] == ran.counted["kept"]
    (term,) = copies["terms"]
    assert term["why"] == "copies freed before this mark: nothing kept them"
    assert -term["bytes"] > ran.counted["first"]
    assert (term["names"][0], term["tensors"]) == ("parts.first.weight", 4)
    shown = ampmem_here(tmp_path, "show", "--all", "run.ampmem")[1]
    assert "parts.first.weight" in shown and "biases" not in shown
    adds_up(tmp_path)


def test_copies_of_a_checkpoint_are_made_again_in_backward(tmp_path: Path) -> None:
    ran = record(tmp_path, "first_weight", arguments=("checkpointed",))
    copies = component(ran, "after_forward", "cast_copies")
    assert copies["measured_bytes"] == ran.counted["kept"]
    again = "copies freed before this mark: backward made them again, as checkpointing does"
    assert reasons(copies)[again][0] == "parts.second.weight"
    assert reasons(copies)["copies freed before this mark: nothing kept them"][0] == "parts.first.weight"


def test_each_group_of_an_optimizer_has_a_model_of_its_own(tmp_path: Path) -> None:
    ran = record(tmp_path, "momentum_groups")
    state = component(ran, "after_backward", "optimizer_state")
    assert state["model_bytes"] == state["measured_bytes"] == ran.counted["state"]
    assert state["terms"] == []
    assert set(ran.summary["static_recipe"]["optimizer"]) == {"SGD", "SGD with momentum"}
    adds_up(tmp_path)


def test_an_optimizer_is_judged_by_its_tensors_and_not_by_its_name(tmp_path: Path) -> None:
    ran = record(tmp_path, "another_adamw")
    state = component(ran, "after_backward", "optimizer_state")
    assert state["model_bytes"] == state["measured_bytes"] == ran.counted["state"]
    assert state["terms"] == []
    assert ran.summary["static_recipe"]["optimizer"] == ["AdamW, as seen"]
    assert ran.summary["static_recipe"]["bytes_per_param"] == 4 + 4 + 6


def test_nothing_is_said_of_who_freed_gradients(tmp_path: Path) -> None:
    ran = record(tmp_path, "update_in_backward", "--steps", "3")
    gradients = component(ran, "after_backward", "gradients")
    assert gradients["measured_bytes"] == 0
    assert list(reasons(gradients)) == ["gradients freed before this mark"]
    assert gradients["terms"][0]["bytes"] == -ran.counted["parameters"]
    assert "zero_grad" not in ampmem_here(tmp_path, "show", "--all", "run.ampmem")[1]


def test_parameters_that_overlap_count_once(tmp_path: Path) -> None:
    ran = record(tmp_path, "overlapping_parameters")
    parameters = component(ran, "after_backward", "parameters")
    assert parameters["model_bytes"] == parameters["measured_bytes"] == ran.counted["parameters"]
    assert ran.summary["parameters"]["bytes"] == ran.counted["parameters"]
    gradients = component(ran, "after_backward", "gradients")
    assert gradients["measured_bytes"] == ran.counted["gradients"]
    why = "parameters that share part of another's memory: a whole tensor for each"
    assert sorted(reasons(gradients)[why]) == ["left", "upper"]


def test_states_that_are_replaced_keep_their_category_after_skipped_steps(tmp_path: Path) -> None:
    ran = record(tmp_path, "replaced_states", "--skip", "2", "--steps", "2")
    assert len(ran.summary["steps"]) == 2
    for step in ran.summary["steps"]:
        assert step["marks"]["after_forward"]["optimizer_state"] == ran.counted["state"]
        assert step["marks"]["after_optimizer"]["optimizer_state"] == ran.counted["state"]
        assert step["marks"]["after_forward"]["other"] == 0
    assert component(ran, "after_backward", "optimizer_state")["terms"] == []
    adds_up(tmp_path)


def test_no_batch_size_is_named_where_no_dimension_is_known_to_be_the_batch(tmp_path: Path) -> None:
    ran = record(tmp_path, "tokens_first")
    finding = told(ran)["amp-saves-nothing"]
    assert "batch size" not in finding["message"]
    assert "batch_size" not in finding["change"]
    assert not any("batch" in line for line in finding["evidence"])
    assert not any(step["batch_loaded"] for step in ran.summary["steps"])


def test_one_finding_alone_speaks_of_buckets(tmp_path: Path) -> None:
    ran = record(tmp_path, "ddp_buckets")
    findings = told(ran)
    said = " ".join(str(finding) for finding in findings.values())
    assert "output of empty" not in said
    buckets = ran.counted["parameters"]
    assert findings.pop("reduce-buckets")["bytes"] == buckets
    assert all(finding["bytes"] is None or finding["bytes"] < buckets for finding in findings.values())
