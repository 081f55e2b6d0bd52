"""Every workload, in every precision, on a simulated GPU: the exact categories, and the kernels that a GPU runs."""

import functools
import itertools
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support import measure, precisions
from support.commands import python
from support.simulated_runs import STEPS

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.events import Action, Phase, Recording
from ampmem.recording import read
from ampmem.vocabulary import STEP_MARKS, SourceKind

EXACT = ("parameters", "gradients", "cast_copies")
SCALARS = 4
"""Bytes of the step count that Adam keeps per parameter, on the CPU in every case."""
NAMES = (*measure.WORKLOADS, "lm")
CASES = [f"{name}:{precision}:bf16" for name in NAMES for precision in measure.PRECISIONS]
SCALED = [f"{name}:amp:fp16" for name in NAMES]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean_start")]
clean_start = measure.clean_start


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def left_behind() -> dict[str, list[int]]:
    """Run every case in one process; what each left in torch."""
    script = Path(__file__).parents[1] / "support/simulated_runs.py"
    done = python(script.parent, str(script), folder().name, "a100-80", *CASES, *SCALED)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


@functools.cache
def recording(case: str) -> Recording:
    left_behind()
    return read(Path(folder().name) / f"{case}.ampmem")


def at(analysis: Analysis, step: int, mark: str) -> dict[str, int]:
    position = analysis.timeline.position(getattr(analysis.marks[step], mark))
    return dict(analysis.timeline.breakdown(position))


def ops(found: Recording) -> set[str]:
    return {found.texts[op] for op in found.events.op.tolist()}


@pytest.mark.parametrize("case", CASES)
def test_static_memory_is_what_the_cpu_profiler_measures(case: str) -> None:
    name, precision, _ = case.split(":")
    simulated = analyse(recording(case))
    real, _ = precisions.workload(name, precision, steps=STEPS)
    assert len(simulated.marks) == STEPS
    for step in range(STEPS):
        for mark in STEP_MARKS:
            here, there = at(simulated, step, mark), at(real, step, mark)
            assert {key: here[key] for key in EXACT} == {key: there[key] for key in EXACT}, (step, mark)
            assert there["optimizer_state"] - here["optimizer_state"] in step_counts(name, real.recording)


def step_counts(name: str, found: Recording) -> set[int]:
    """Bytes of the step counts that the optimizers have which have updated so far; SGD and lm's own keep none."""
    if name in ("resnet", "lm"):
        return {0}
    of = Counter(each.optimizer for each in found.parameters)
    return {0, *(SCALARS * number for number in itertools.accumulate(of[key] for key in sorted(of)))}


@pytest.mark.parametrize("case", CASES)
def test_conservation_has_no_residual(case: str) -> None:
    found = recording(case)
    events = found.events
    signed = events.bytes * (1 - 2 * (events.action == Action.FREE))
    assert (signed.cumsum() == events.allocated).all()
    assert found.run.source is SourceKind.SIMULATED
    assert found.run.device_type == "cuda"


@pytest.mark.parametrize("case", [*CASES, *SCALED])
def test_torch_is_left_as_it_was(case: str) -> None:
    assert left_behind()[case] == []


EFFICIENT, FLASH = (f"aten::_scaled_dot_product_{kernel}_attention" for kernel in ("efficient", "flash"))
ATTENTION = {"gpt": FLASH, "checkpointed": FLASH, "bert": EFFICIENT}
"""What an A100 runs in low precision: flash, unless there is a mask. It has no flash for FP32."""
FOREACH = ("gpt", "bert", "resnet", "gan", "accumulate", "checkpointed")
"""The workloads that leave the choice to torch; ``reuse`` asks for the loop, ``lm`` has an optimizer of its own."""


@pytest.mark.parametrize("case", [*CASES, *SCALED])
def test_attention_runs_the_kernel_that_an_a100_would_choose(case: str) -> None:
    name, precision, _ = case.split(":")
    expected = {EFFICIENT if precision == "fp32" else ATTENTION[name]} if name in ATTENTION else set()
    assert {op for op in ops(recording(case)) if "dot_product" in op} == expected


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_use_foreach_where_a_gpu_does(name: str) -> None:
    found = recording(f"{name}:fp32:bf16")
    expected = "foreach" if name in FOREACH else "for-loop"
    assert {each.implementation for each in found.optimizers} == {expected}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "resnet"])
def test_only_foreach_holds_temporaries_of_all_parameters_at_once(name: str) -> None:
    """Adam's denominators: of all parameters together, or of one at a time. SGD has none."""
    found = recording(f"{name}:fp32:bf16")
    one = [each.bytes for each in found.parameters if each.optimizer == found.parameters[0].optimizer]
    assert (optimizer_temporaries(found) >= sum(one)) == (name in FOREACH)


def optimizer_temporaries(found: Recording) -> int:
    """The most bytes that the last step's updates hold of what they allocate and give back."""
    lives = analyse(found).lifetimes
    chosen = (lives.phase == Phase.OPTIMIZER) & (lives.step == STEPS - 1) & (lives.died_step == STEPS - 1)
    change = np.zeros(len(found.events), dtype=np.int64)
    np.add.at(change, lives.born[chosen], lives.bytes[chosen])
    np.subtract.at(change, lives.died[chosen], lives.bytes[chosen])
    return int(change.cumsum().max())


@pytest.mark.parametrize("case", SCALED)
def test_a_scaler_lets_the_optimizer_step(case: str) -> None:
    found = recording(case)
    assert [step.skipped_update for step in found.steps] == [False] * STEPS
    assert [step.loss_scale for step in found.steps] == [65536.0] * STEPS
    assert found.precision.scaler
    plain = analyse(recording(case.replace("fp16", "bf16")))
    states = [
        at(each, step, "after_optimizer")["optimizer_state"] for each in (analyse(found), plain) for step in (0, 1)
    ]
    assert states[:2] == states[2:]
    assert states[0] > 0


def test_workspaces_are_workspace() -> None:
    found = analyse(recording("gpt:fp32:bf16"))
    assert at(found, 1, "after_backward")["workspace"] == 2 * 8_519_680


def test_the_notes_say_what_is_left_out() -> None:
    found = recording("resnet:fp32:bf16")
    notes = "\n".join(found.notes)
    assert "no GPU was used" in notes
    assert "not modelled: what cuDNN keeps for batch norms" in notes
    assert found.prediction is not None
    assert list(found.prediction.bounds) == ["cuDNN's workspaces in convolutions"]
    assert "assumed: from 432.0 MiB to 608.0 MiB of the device is used outside" in notes


def test_the_layers_are_the_models_own() -> None:
    found = recording("gpt:fp32:bf16")
    assert Counter(layer.mark for layer in found.layers) == dict.fromkeys((*STEP_MARKS, "peak"), STEPS)
    for layer in found.layers:
        assert layer.requested <= layer.allocated <= layer.reserved
        assert layer.device_used == layer.reserved + (432 << 20)
