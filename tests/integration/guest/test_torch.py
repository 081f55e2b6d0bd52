"""What is recorded of programs that use torch in uncommon ways, or whose objects let nobody look."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.guest import beside
from torch import nn
from torch.nn.modules import module as torch_module

import ampmem
from ampmem.analysis.analyse import analyse
from ampmem.events import Fact, Phase, Recording
from ampmem.names import RAN_ON, is_warning
from ampmem.recording import read

pytestmark = pytest.mark.slow


def recorded(folder: Path, name: str) -> Recording:
    """What is recorded of the program, which ends as without ampmem."""
    both = beside(folder, name)
    assert both.differences() == []
    return read(both.recording)


LAYERS = {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("hostile_modules", {f"body.{name}" for name in LAYERS} | {f"Sequential.{name}" for name in LAYERS}),
        ("hostile_objects", LAYERS),
        ("hostile_tensors", {f"body.{name}" for name in LAYERS} | {"weight"}),
        ("lazy_modules", {"norm.weight", "norm.bias", *(f"body.{name}" for name in LAYERS)}),
        ("scripted", LAYERS | {"Linear.weight"}),
        ("tensor_kinds", {f"body.{name}" for name in LAYERS}),
    ],
)
def test_their_parameters_have_names_and_every_byte_is_told(tmp_path: Path, name: str, parameters: set[str]) -> None:
    analysis = analyse(recorded(tmp_path, name))
    assert {parameter.name for parameter in analysis.recording.parameters} >= parameters
    assert analysis.conservation.residual_bytes == 0
    assert set(analysis.recording.notes) <= {RAN_ON}  # the script is run to its end


def test_what_fails_when_it_is_looked_at_is_named_in_the_recording(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "hostile_optimizers")
    (note,) = recording.notes
    assert note.startswith(
        "warning: ampmem could not inspect an object of the script, and it is not in this recording: "
    )
    assert "ZeroDivisionError at optimizers.py" in note
    assert "hostile_optimizers.py" in note


@pytest.mark.parametrize(
    ("name", "savers"),
    [
        ("main_grad", {"Accumulating", "aten::exp"}),
        ("saved_tensors", {"aten::exp", "aten::sin", "aten::mul", "aten::addmm", "aten::tanh"}),
        ("custom_ops", {"Inner", "GeneratedBackwardFor_guest_doubled_default", "aten::tanh"}),
    ],
)
def test_what_autograd_keeps_itself_is_recorded_with_who_saved_it(tmp_path: Path, name: str, savers: set[str]) -> None:
    analysis = analyse(recorded(tmp_path, name))
    assert set(analysis.recording.notes) <= {RAN_ON}  # the script is run to its end
    facts, texts = analysis.facts, analysis.recording.texts
    assert {texts[name] for name in facts.name[facts.fact == Fact.SAVED].tolist()} >= savers


def test_what_a_gradient_of_a_gradient_saves_is_recorded(tmp_path: Path) -> None:
    analysis = analyse(recorded(tmp_path, "double_backward"))
    saved = analysis.facts.fact == Fact.SAVED
    phases = analysis.lifetimes.phase[analysis.facts.allocation[saved]]
    assert Phase.BACKWARD in phases.tolist()


def test_gradients_of_a_compiled_backward_are_recorded_but_those_that_a_hook_freed(tmp_path: Path) -> None:
    analysis = analyse(recorded(tmp_path, "compiled_autograd"))
    facts, texts = analysis.facts, analysis.recording.texts
    ended = [step.end_ns for step in analysis.recording.steps]
    named = [
        {
            texts[name]
            for name in facts.name[(facts.fact == Fact.GRADIENT) & (facts.time_ns > begin) & (facts.time_ns <= end)]
        }
        for begin, end in pairwise([0, *ended])
    ]
    assert named == [LAYERS, LAYERS, LAYERS - {"0.weight"}, LAYERS - {"0.weight"}]
    assert analysis.conservation.residual_bytes == 0
    (warned,) = (note for note in analysis.recording.notes if is_warning(note))
    assert "compiled autograd" in warned


def test_what_is_swapped_is_recorded(tmp_path: Path) -> None:
    analysis = analyse(recorded(tmp_path, "swaps"))
    assert set(analysis.recording.notes) <= {RAN_ON}  # the script is run to its end
    assert analysis.conservation.residual_bytes == 0
    assert Fact.MASTER_COPY in analysis.facts.fact.tolist()


def test_a_profiler_on_another_thread_ends_the_recording(tmp_path: Path) -> None:
    analysis = analyse(recorded(tmp_path, "profiles_on_a_thread"))
    assert len(analysis.recording.steps) == 1
    assert analysis.conservation.residual_bytes == 0


class Broken(nn.Module):
    """Is compiled in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.first(batch)
        torch._dynamo.graph_break()
        return self.last(batch)


@pytest.mark.parametrize("first", ["before", "inside"])
def test_nothing_is_compiled_again_when_a_recording_begins_or_ends(first: str) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Broken()
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        compiled(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    others = dict(torch_module._global_forward_hooks)
    if first == "before":
        step()
    with ampmem.profile() as prof:
        step()
        step()
    with torch.compiler.set_stance("fail_on_recompile"):
        step()
    assert len(graphs) == 2
    assert len(prof.summary().steps) == 2
    assert dict(torch_module._global_forward_hooks) == others


def test_dynamo_traces_a_gradient_as_without_ampmem(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows ``torch.autograd.grad`` by identity."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", True)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def gradient(weight: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((weight * weight).sum(), [weight])[0]

    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        assert gradient(torch.ones(3, requires_grad=True)).tolist() == [2, 2, 2]
        optimizer.step()

    with ampmem.profile() as prof:
        step()
        step()
    step()
    assert len(graphs) == 1
    assert len(prof.summary().steps) == 2


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_hooks_are_back_in_their_places_after_compiled_code() -> None:
    torch._dynamo.reset()
    seen: list[str] = []
    with ampmem.profile(nn.Linear(8, 8)) as prof:
        handle = torch_module.register_module_forward_pre_hook(lambda *_: seen.append("the script's"))
        before = list(torch_module._global_forward_pre_hooks)
        model = torch.compile(nn.Linear(8, 8), backend="eager")
        model(torch.ones(2, 8)).sum().backward()
        assert list(torch_module._global_forward_pre_hooks) == before
        prof.step()
        handle.remove()
    assert seen
