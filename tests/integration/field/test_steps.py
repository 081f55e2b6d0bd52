"""What a step is in programs of many kinds: who updates, when, and what runs beside training."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.commands import ampmem
from support.field import PROGRAMS, Ran, record

from ampmem.recorder.steps import FORWARD_UNSEEN, PATIENCE

pytest.importorskip("torch")

ALL = ("--steps", "99")


def ended(ran: Ran) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [step for step in ran.summary["steps"] if step["finished"]]
    return steps


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "run.ampmem")) as database:
        return database.execute(sql).fetchall()


def test_a_transform_is_data_and_validation_is_evaluation(tmp_path: Path) -> None:
    ran = record(tmp_path, "normalized", *ALL)
    steps = ended(ran)
    assert len(steps) == ran.counted["updates"]
    assert [step["batch_size"] for step in steps] == [ran.counted["batch"]] * len(steps)
    for step in steps:  # zero_grad comes before forward
        assert step["marks"]["after_forward"]["gradients"] == 0
        assert step["marks"]["after_backward"]["gradients"] == ran.counted["parameters"]
    assert [step["peak"]["phase"] == "evaluation" for step in steps] == [False, False, True, False]
    assert not any("Normalize" in module["name"] for module in ran.summary["modules"])
    assert "gradients-through-forward" not in {finding["code"] for finding in ran.summary["findings"]}
    image = query(tmp_path, "SELECT DISTINCT phase FROM allocator_event WHERE bytes = 256 AND action = 'alloc'")
    assert image == [("data",)]


@pytest.mark.parametrize(
    ("order", "how", "steps"),
    [
        ("AAAABBBB", "apart", 8),
        ("AAAABBBBAAAABBBB", "apart", 16),
        ("ABABAB", "both", 3),
        ("AAAAABAAAAABAAAAAB", "both", 3),
        ("A" * (PATIENCE + 3), "both", 4),
        ("A" * 11, "apart", 11),
        ("A" * 11, "thread", 11),
    ],
    ids=["in turn", "in turn, twice", "GAN", "critic five times", "idle, and runs", "idle", "trained elsewhere"],
)
def test_whose_updates_are_one_step(tmp_path: Path, order: str, how: str, steps: int) -> None:
    ran = record(tmp_path, "two_optimizers", *ALL, arguments=(order, how))
    assert ran.exit_code == 0, ran.said
    assert len(ended(ran)) == steps
    notes = [note for (note,) in query(tmp_path, "SELECT message FROM note") if "combined into one step" in note]
    assert bool(notes) == (steps < ran.counted["updates"])


def test_the_note_says_whose_updates_are_put_together(tmp_path: Path) -> None:
    ran = record(tmp_path, "two_optimizers", *ALL, arguments=("AAABAAAB", "both"))
    assert "the updates of several optimizers are combined into one step: SGD 3 times, another SGD once" in " ".join(
        ran.said.split()
    )


@pytest.mark.parametrize(("order", "skip", "steps"), [("ABABABAB", 2, 2), ("AAAABBBB", 3, 5)])
def test_steps_that_are_skipped_are_the_same(tmp_path: Path, order: str, skip: int, steps: int) -> None:
    how = "both" if order.startswith("AB") else "apart"
    ran = record(tmp_path, "two_optimizers", "--skip", str(skip), *ALL, arguments=(order, how))
    assert len(ended(ran)) == steps, ran.said
    assert [step["batch_size"] for step in ended(ran)] == [4] * steps


def test_without_an_optimizer_backward_ends_steps(tmp_path: Path) -> None:
    ran = record(tmp_path, "manual_sgd", *ALL)
    assert len(ended(ran)) == ran.counted["batches"]
    assert "no torch.optim optimizer: a step ends with each backward" in " ".join(ran.said.split())
    shown = ampmem(tmp_path, "show", "--static-model", "run.ampmem").stdout
    assert "everything in float32, with no torch.optim optimizer: 8 bytes per parameter" in " ".join(shown.split())
    for step in ended(ran):
        assert step["marks"]["after_backward"]["gradients"] == ran.counted["parameters"]
        assert step["marks"]["after_optimizer"] is None


@pytest.mark.parametrize(
    "marker", ["backward", "manual_sgd.py:train_one_batch", "programs/manual_sgd.py:train_one_batch"]
)
def test_what_ends_a_step_can_be_said(tmp_path: Path, marker: str) -> None:
    ran = record(tmp_path, "manual_sgd", "--step-on", marker, *ALL, how=())
    assert ran.exit_code == 0, ran.said
    assert [step["loss"] for step in ended(ran)] == pytest.approx(ran.counted["losses"])


def test_a_function_that_is_called_later_is_skipped_and_stopped_at(tmp_path: Path) -> None:
    ran = record(tmp_path, "manual_sgd", "--step-on", "__main__.train_one_batch", "--skip", "1", "--steps", "2")
    assert [step["index"] for step in ended(ran)] == [1, 2]


def test_each_update_alone_can_be_a_step(tmp_path: Path) -> None:
    ran = record(tmp_path, "two_optimizers", "--step-on", "optimizer", *ALL, arguments=("ABAB", "both"))
    assert len(ended(ran)) == 4
    assert "combined into one step" not in ran.said


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("manual_sgd.py:train_batch", "--step-on manual_sgd.py:train_batch names a function that never returned"),
        (
            "other.py:train_one_batch",
            f"a function with that name returned in {PROGRAMS / 'manual_sgd.py'}:train_one_batch",
        ),
        ("train_one_batch", "--step-on train_one_batch: give backward, optimizer, forward"),
    ],
)
def test_a_marker_that_is_never_met_is_one_clear_error(tmp_path: Path, marker: str, said: str) -> None:
    ran = record(tmp_path, "manual_sgd", "--step-on", marker, *ALL, how=())
    assert ran.exit_code in (1, 2)
    assert said in ran.said
    assert "backward, optimizer, forward, evaluation, or a function as FILE.py:FUNCTION" in ran.said
    assert not (tmp_path / "run.ampmem").exists()


def test_a_function_of_torch_with_that_name_is_not_suggested(tmp_path: Path) -> None:
    ran = record(tmp_path, "two_optimizers", "--step-on", "two_optimizers.py:nothing", *ALL, arguments=("ABAB", "both"))
    assert "names a function that never returned. Name a function" in ran.said  # torch's own `nothing` has returned


def test_each_forward_of_inference_is_a_step(tmp_path: Path) -> None:
    ran = record(tmp_path, "generate", "--step-on", "forward", *ALL)
    steps = ended(ran)
    assert ran.exit_code == 0, ran.said
    assert len(steps) == len(ran.counted["cache"])
    for step, cache in zip(steps, ran.counted["cache"], strict=True):
        live = step["marks"]["after_forward"]
        assert live["parameters"] == ran.counted["parameters"]
        assert live["other"] == cache
        assert step["marks"]["after_backward"] is None
    held = [item for item in ran.summary["top"] if item["category"] == "other"]
    assert {item["name"] for item in held} == {"cache.keys[0]"}
    found = {(each["holder"], each["bytes"], each["tensors"]) for each in ran.summary["held"]}
    assert ("cache", ran.counted["cache"][-1], 1) in found
    assert ran.summary["conservation"]["residual_bytes"] == 0


@pytest.mark.parametrize(
    ("how", "recipe", "parameter"),
    [
        ("fp32", "inference-fp32", 4),
        ("half", "inference-half", 2),
        ("once", "inference-autocast", 4),
        ("each", "inference-autocast", 4),
        ("frozen", "inference-autocast", 4),
    ],
)
def test_the_static_model_of_inference_is_parameters_and_casts(
    tmp_path: Path, how: str, recipe: str, parameter: int
) -> None:
    ran = record(tmp_path, "infer", "--step-on", "forward", *ALL, arguments=(how,))
    assert ran.exit_code == 0, ran.said
    told = ran.summary["static_recipe"]
    assert (told["precision"], told["bytes_per_param"], told["optimizer"]) == (recipe, parameter, [])
    kept = ran.counted["cast"] if how in ("once", "each") else 0  # autocast keeps no copy of what needs no gradient
    rows = {row["component"]: row for row in ran.summary["static_model"]}
    assert {row["mark"] for row in rows.values()} == {"after_forward"}
    assert rows["parameters"]["measured_bytes"] == rows["parameters"]["model_bytes"] == ran.counted["parameters"]
    assert rows["cast_copies"]["measured_bytes"] == kept
    assert rows["gradients"]["model_bytes"] == rows["optimizer_state"]["model_bytes"] == 0
    assert rows["total"]["measured_bytes"] == ran.counted["parameters"] + kept
    checked = ampmem(tmp_path, "show", "--check", "run.ampmem")
    assert (checked.returncode, "the static model holds" in checked.stdout) == (0, True)


def test_inference_is_recorded_without_saying_so(tmp_path: Path) -> None:
    ran = record(tmp_path, "generate", *ALL, how=())
    assert ran.exit_code == 0
    assert "no backward ran, so this is a recording of inference" in ran.said


def test_the_loss_is_that_of_the_last_micro_batch_and_says_so(tmp_path: Path) -> None:
    ran = record(tmp_path, "accumulate", *ALL)
    assert [step["backwards"] for step in ended(ran)] == [4, 4]
    assert [step["loss"] for step in ended(ran)] == pytest.approx([losses[-1] for losses in ran.counted])
    assert "(last of 4)" in ran.said


def test_a_loss_that_diverged_is_shown_as_what_it_is(tmp_path: Path) -> None:
    ran = record(tmp_path, "diverges", *ALL)
    assert ran.counted[1:] == ["inf", "nan"]
    assert [step["loss_not_finite"] for step in ended(ran)] == [None, "inf", "nan"]
    shown = [line.split()[:2] for line in ran.said.splitlines()]
    assert [loss in shown for loss in (["1", "inf"], ["2", "nan"])] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "started"), [((), "2 child processes"), (("--test",), "a child process")])
def test_training_in_child_processes_is_said_to_be_unseen(
    tmp_path: Path, arguments: tuple[str, ...], started: str
) -> None:
    ran = record(tmp_path, "spawned", *ALL, arguments=arguments, how=())
    assert ran.exit_code == 1
    assert f"it started {started}, and child processes are not recorded" in ran.said


@pytest.mark.parametrize(("arguments", "precision"), [((), "as-is"), (("autocast",), "amp")])
def test_a_first_step_whose_forward_is_in_a_compiled_function_begins_with_backward(
    tmp_path: Path, arguments: tuple[str, ...], precision: str
) -> None:
    ran = record(tmp_path, "compiled_step", *ALL, arguments=arguments)
    assert ran.summary["arm"]["name"] == precision  # the compiled function may use autocast itself
    assert FORWARD_UNSEEN in ran.summary["notes"]
    steps = ended(ran)
    assert [step["loss"] for step in steps] == ran.counted["losses"]
    for step in steps:
        assert [step["marks"]["after_forward"]["gradients"], step["marks"]["after_backward"]["gradients"]] == [
            0,
            ran.counted["parameters"],
        ]
        assert step["marks"]["after_optimizer"]["parameters"] == ran.counted["parameters"]
