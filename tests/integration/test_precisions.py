"""Forced precisions: the same script, unmodified, is what it would be had it asked for that precision itself."""

import dataclasses
import gc
import json
from contextlib import nullcontext
from typing import Any

import jsonschema
import pytest
import torch
from support import measure
from support.measure import EXTRA, WORKLOADS, options, plain
from support.precisions import PRECISIONS, record, workload

from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import Summary, summary_of, summary_schema
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Action

clean_start = measure.clean_start
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean_start")]


@pytest.mark.parametrize("forced", PRECISIONS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_losses_are_those_of_the_scripts_own_precision_bit_for_bit(name: str, forced: str) -> None:
    other = "amp" if forced == "fp32" else "fp32"
    own = measure.train(name, forced).losses
    assert len(own) == 2
    for precision in ("fp32", other):
        analysis, run = workload(name, precision, forced)
        assert run.losses == own
        made = analysis.recording.precision
        assert (made.name, made.forced, made.wrapped) == (forced, True, False)
        assert (made.dtype, made.cache) == ((None, None) if forced == "fp32" else ("bfloat16", forced == "amp"))


def at_marks(summary: Summary) -> list[dict[str, int]]:
    """Live bytes at every mark; without what other runs in this process left alive before, as their models."""
    marks = [mark for step in summary.steps for mark in dataclasses.astuple(step.marks) if mark is not None]
    return [{key: size for key, size in mark.items() if key not in ("other", "untrained")} for mark in marks]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_forced_precision_takes_the_memory_of_the_scripts_own_precision(name: str) -> None:
    for forced in PRECISIONS:
        steered = summary_of(workload(name, "fp32", forced)[0])
        own = summary_of(workload(name, forced, "as-is")[0])
        assert at_marks(steered) == at_marks(own)
        assert steered.static_model == own.static_model
        assert steered.casts == own.casts
        assert steered.activations == own.activations


@pytest.mark.parametrize("forced", PRECISIONS)
@pytest.mark.parametrize("name", ["gpt", "gan"])
def test_a_forced_precision_allocates_as_the_script_with_autocast_does_without_ampmem(name: str, forced: str) -> None:
    module = measure.workload(name)

    def run(precision: str) -> list[float]:
        with measure.watched(module, keep=False) as seen:
            module.train(options(precision), **EXTRA.get(name, {}))
        return seen.losses

    run(forced)  # leaves torch's lasting buffers behind
    without = plain(lambda: run(forced))
    measure._seed()
    results: list[Any] = []

    def unlike() -> None:
        results.append(run("amp" if forced == "fp32" else "fp32"))
        gc.collect()
        results.append(measure._rng())

    recording = record(unlike, forced)
    assert without.allocs
    assert measure.sizes_of(recording, Action.ALLOC) == without.allocs
    assert sorted(measure.sizes_of(recording, Action.FREE)) == without.frees
    assert results == [without.result, without.rng]


@pytest.mark.parametrize("forced", PRECISIONS)
def test_a_script_without_autocast_is_wrapped_as_if_it_had_it(forced: str) -> None:
    """The region of ampmem's own: from the first forward to backward, so the loss is in it."""

    def losses(*, own: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            region = torch.autocast("cpu", torch.bfloat16, enabled=forced != "fp32", cache_enabled=forced == "amp")
            with region if own else nullcontext():
                loss = torch.nn.functional.mse_loss(model(torch.randn(4, 16)), torch.zeros(4, 8))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    results: list[list[float]] = []
    wrapped = analyse(record(lambda: results.append(losses(own=False)), forced))
    own = analyse(record(lambda: results.append(losses(own=True))))
    assert results[0] == results[1]
    assert wrapped.recording.precision.wrapped == (forced != "fp32")
    copies = [analysis.timeline.series(Category.CAST_COPIES).max() for analysis in (wrapped, own)]
    assert copies[0] == copies[1]
    assert (copies[0] == 0) == (forced == "fp32")


@pytest.mark.parametrize(
    ("name", "forced"), [("bert", "as-is"), ("bert", "amp"), ("accumulate", "fp32"), ("accumulate", "amp-nocache")]
)
def test_the_json_of_every_precision_is_as_the_schema_says(name: str, forced: str) -> None:
    value = json.loads(summary_of(workload(name, "fp32", forced)[0]).to_json())
    jsonschema.Draft202012Validator(summary_schema()).validate(value)
    assert value["arm"]["forced"] == (forced != "as-is")
    assert value["static_recipe"]["precision"] == ("autocast" if forced in ("amp", "amp-nocache") else "fp32")
    assert all(part["holds"] for part in value["static_model"])
    after_forward = value["steps"][-1]["marks"]["after_forward"]
    assert sum(group["bytes"] for group in value["activations"]) == after_forward["activations"] > 0
    eligible = value["parameters"]["cast_eligible"]
    assert (eligible is None) == (forced in ("as-is", "fp32"))
