"""Forced arms: the same script, unmodified, is what it would be had it asked for that precision itself."""

import dataclasses
import gc
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonschema
import measure
import pytest
import torch
from arms import ARMS, record, workload
from commands import ampmem
from measure import EXTRA, WORKLOADS, options, plain

from ampmem.analysis.analyse import analyse
from ampmem.analysis.static_model.verdict import TOTAL
from ampmem.analysis.summary import Summary, summarize, summary_of, summary_schema
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Action
from ampmem.recording import read

clean_start = measure.clean_start
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean_start")]


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_losses_are_those_of_the_scripts_own_precision_bit_for_bit(name: str, arm: str) -> None:
    other = "amp" if arm == "fp32" else "fp32"
    own = measure.train(name, arm).losses
    assert len(own) == 2
    for precision in ("fp32", other):
        analysis, run = workload(name, precision, arm)
        assert run.losses == own
        made = analysis.recording.arm
        assert (made.name, made.forced, made.wrapped) == (arm, True, False)
        assert (made.dtype, made.cache) == ((None, None) if arm == "fp32" else ("bfloat16", arm == "amp"))


def at_marks(summary: Summary) -> list[dict[str, int]]:
    """Live bytes at every mark; without what other runs in this process left alive before."""
    marks = [mark for step in summary.steps for mark in dataclasses.astuple(step.marks) if mark is not None]
    return [{key: size for key, size in mark.items() if key != "other"} for mark in marks]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_forced_arm_takes_the_memory_of_the_scripts_own_precision(name: str) -> None:
    for arm in ARMS:
        forced = summary_of(workload(name, "fp32", arm)[0])
        own = summary_of(workload(name, arm, "as-is")[0])
        assert at_marks(forced) == at_marks(own)
        assert forced.static_model == own.static_model
        assert forced.casts == own.casts
        assert forced.activations == own.activations


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", ["gpt", "gan"])
def test_a_forced_arm_allocates_as_the_script_with_autocast_does_without_ampmem(name: str, arm: str) -> None:
    module = measure.workload(name)

    def run(precision: str) -> list[float]:
        with measure.watched(module, keep=False) as seen:
            module.train(options(precision), **EXTRA.get(name, {}))
        return seen.losses

    run(arm)  # leaves torch's lasting buffers behind
    without = plain(lambda: run(arm))
    measure._seed()
    results: list[Any] = []

    def unlike() -> None:
        results.append(run("amp" if arm == "fp32" else "fp32"))
        gc.collect()
        results.append(measure._rng())

    recording = record(unlike, arm)
    assert without.allocs
    assert measure.sizes_of(recording, Action.ALLOC) == without.allocs
    assert sorted(measure.sizes_of(recording, Action.FREE)) == without.frees
    assert results == [without.result, without.rng]


@pytest.mark.parametrize("arm", ARMS)
def test_a_script_without_autocast_is_wrapped_as_if_it_had_it(arm: str) -> None:
    """The region of ampmem's own: from the first forward to backward, so the loss is in it."""

    def losses(*, own: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            region = torch.autocast("cpu", torch.bfloat16, enabled=arm != "fp32", cache_enabled=arm == "amp")
            with region if own else nullcontext():
                loss = torch.nn.functional.mse_loss(model(torch.randn(4, 16)), torch.zeros(4, 8))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    results: list[list[float]] = []
    forced = analyse(record(lambda: results.append(losses(own=False)), arm))
    own = analyse(record(lambda: results.append(losses(own=True))))
    assert results[0] == results[1]
    assert forced.recording.arm.wrapped == (arm != "fp32")
    copies = [analysis.timeline.series(Category.CAST_COPIES).max() for analysis in (forced, own)]
    assert copies[0] == copies[1]
    assert (copies[0] == 0) == (arm == "fp32")


@pytest.mark.parametrize("arm", ["as-is", *ARMS])
@pytest.mark.parametrize("name", ["bert", "accumulate"])
def test_the_json_of_every_arm_is_as_the_schema_says(name: str, arm: str) -> None:
    value = json.loads(summary_of(workload(name, "fp32", arm)[0]).to_json())
    jsonschema.Draft202012Validator(summary_schema()).validate(value)
    assert value["arm"]["forced"] == (arm != "as-is")
    assert value["static_recipe"]["precision"] == ("autocast" if arm in ("amp", "amp-nocache") else "fp32")
    assert all(part["holds"] for part in value["static_model"])
    after_forward = value["steps"][-1]["marks"]["after_forward"]
    assert sum(group["bytes"] for group in value["activations"]) == after_forward["activations"] > 0
    eligible = value["parameters"]["cast_eligible"]
    assert (eligible is None) == (arm in ("as-is", "fp32"))


@pytest.mark.parametrize(("arm", "copies"), [("fp32", 0), ("amp", 8388608), ("amp-nocache", 14680064)])
def test_the_command_forces_the_arm_on_the_reuse_workload(arm: str, copies: int, tmp_path: Path) -> None:
    """16 bytes per parameter after backward in every arm; 8 and 14 MiB of copies at the end of forward."""
    path = tmp_path / "run.ampmem"
    options = ("--precision", arm, "--steps", "2", "-o", str(path))
    done = ampmem(tmp_path, "profile", *options, "-m", "ampmem.workloads.reuse", "--steps", "2")
    assert done.returncode == 0, done.stderr
    summary = summarize(read(path))
    assert (summary.arm.name, summary.arm.forced) == (arm, True)
    marks = summary.steps[-1].marks
    assert marks.after_forward is not None
    assert marks.after_forward["cast_copies"] == copies
    (total,) = [part for part in summary.static_model if (part.mark, part.component) == ("after_backward", TOTAL)]
    count = 4 * 1024 * 1024
    assert summary.parameters.count == count
    assert (total.model_bytes, total.measured_bytes, total.holds) == (16 * count, 16 * count + 16, True)
    assert [(term.why, term.bytes, term.tensors) for term in total.terms] == [("scalars of the optimizer: step", 16, 4)]
