"""Which phase the script is in, by what runs, and under which grad mode."""

import gc
from itertools import groupby
from pathlib import Path

import pytest
import torch
from support.commands import python
from torch import nn

import ampmem
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import Category
from ampmem.errors import UsageError
from ampmem.events import Phase, Recording
from ampmem.names import FUNCTIONAL
from ampmem.recorder import script_listener
from ampmem.recording import read


class Normalize(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return (image - 0.5) * 2


class Wrapper(nn.Module):
    """Runs a model that is no child of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.models = [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.models[0](x)
        return output


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def phases(recording: Recording, step: int) -> list[str]:
    """The phases of a step, in order."""
    rows = recording.phases.phase[recording.phases.step == step].tolist()
    return [Phase(code).name.lower() for code, _ in groupby(rows) if code != Phase.BETWEEN]


def test_a_transform_in_the_loop_is_data_and_its_loss_is_forward() -> None:
    model, optimizer = make()
    normalize, criterion = Normalize(), nn.MSELoss()
    with ampmem.profile(model, optimizer) as prof:
        for _ in range(2):
            image = normalize(torch.rand(4, 8))
            optimizer.zero_grad()
            criterion(model(image), image).backward()
            optimizer.step()
    recording = prof.recording()
    assert phases(recording, 1) == ["data", "forward", "backward", "optimizer"]
    assert not any("Normalize" in text for text in recording.texts)


def test_the_batch_is_what_the_model_is_fed_and_not_the_loss() -> None:
    model, optimizer = make()
    criterion = nn.MSELoss()
    with ampmem.profile(model, optimizer) as prof:
        for _ in range(3):
            criterion(model(torch.rand(4, 8)).view(-1), torch.rand(32)).backward()
            optimizer.step()
            optimizer.zero_grad()
            nn.Linear(8, 8)  # what is registered makes ampmem look anew
    assert [step.batch_size for step in prof.recording().steps] == [4, 4, 4]


def test_a_model_inside_what_looks_like_a_transform_starts_forward() -> None:
    model, optimizer = make()
    wrapper = Wrapper(model)
    with ampmem.profile(model, optimizer) as prof:
        for _ in range(2):
            wrapper(torch.rand(4, 8)).sum().backward()
            optimizer.step()
    assert phases(prof.recording(), 1) == ["data", "forward", "backward", "optimizer"]


def test_a_teacher_is_evaluation_inside_a_forward_that_goes_on() -> None:
    model, optimizer = make()
    teacher = nn.Linear(8, 8)
    with ampmem.profile(model, optimizer) as prof:
        for _ in range(2):
            output = model(torch.rand(4, 8))
            with torch.no_grad():
                target = teacher(torch.rand(6, 8))[:4]
            (output - target).square().mean().backward()
            optimizer.step()
    recording = prof.recording()
    assert phases(recording, 1) == ["forward", "evaluation", "forward", "backward", "optimizer"]
    assert [step.batch_size for step in recording.steps] == [4, 4]
    seen = {recording.texts[op] for op in recording.events.op[recording.events.phase == Phase.FORWARD]}
    assert "aten::sub" in seen  # the loss is observed after the teacher, too


def test_evaluation_before_training_is_in_no_step() -> None:
    model, optimizer = make()
    with ampmem.profile(model, optimizer) as prof:
        with torch.inference_mode():
            model.eval()(torch.rand(512, 8))
        model.train()(torch.rand(4, 8)).sum().backward()
        optimizer.step()
    recording = prof.recording()
    assert phases(recording, 0) == ["forward", "backward", "optimizer"]
    assert "evaluation" in phases(recording, -1)
    assert [step.batch_size for step in recording.steps] == [4]


def test_inference_in_code() -> None:
    gc.collect()  # models of other tests of this process would count, as all that are alive do
    model, _ = make()
    with ampmem.profile(model, step_on="forward", steps=2) as prof, torch.no_grad():
        for _ in range(3):
            model(torch.rand(4, 8))
    summary = prof.summary()
    assert [step.index for step in summary.steps] == [0, 1]
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert {part.component: part.measured_bytes for part in summary.static_model if part.measured_bytes} == {
        "parameters": size,
        "total": size,
    }
    assert [module.name for module in summary.modules][:1] == ["(model)"]


def test_of_inference_so_many_forwards_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may serve for weeks before it is known that nothing trains."""
    monkeypatch.setattr(script_listener, "MOST_STEPS", 2)
    model, _ = make()
    with ampmem.profile(model) as prof, torch.no_grad():
        for _ in range(4):
            model(torch.rand(4, 8))
    assert [step.index for step in prof.summary().steps] == [0, 1]
    assert prof.summary().conservation.residual_bytes == 0


def test_what_ends_a_step_must_be_something() -> None:
    with pytest.raises(UsageError, match="step_on=epoch: give backward"), ampmem.profile(step_on="epoch"):
        pass


def test_a_step_of_ones_own_wins_over_backward() -> None:
    weight = nn.Linear(8, 8)
    with ampmem.profile(weight) as prof:
        for _ in range(2):
            for _ in range(3):
                weight(torch.rand(4, 8)).sum().backward()
            weight.zero_grad()
            prof.step()
    assert [step.backwards for step in prof.recording().steps][-1:] == [3]


@pytest.mark.parametrize("step_on", ["forward", "backward"])
def test_what_raises_ends_no_step(step_on: str) -> None:
    model, _ = make()
    with ampmem.profile(model, step_on=step_on) as prof:
        model(torch.rand(4, 8)).sum().backward()
        with pytest.raises(RuntimeError):
            model(torch.rand(4, 9)) if step_on == "forward" else model(torch.rand(4, 8)).backward()
    assert len(prof.recording().steps) == 1


TORCH_FUNC = """
import sys
import torch
from torch import nn
import ampmem

net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
params = {name: value.detach() for name, value in net.named_parameters()}

def loss(params, x, y):
    return (torch.func.functional_call(net, params, (x,)) - y).square().mean()

with ampmem.profile(net, output="run.ampmem") as prof:
    for _ in range(4):
        x = torch.randn(64, 32)
        grads, _ = torch.func.grad_and_value(loss)(params, x, x.sum(1, keepdim=True))
        params = {name: value - 0.01 * grads[name] for name, value in params.items()}
        if "own-steps" in sys.argv:
            prof.step()
"""


@pytest.mark.parametrize("given", [("own-steps",), ()])
def test_training_with_torch_func(tmp_path: Path, given: tuple[str, ...]) -> None:
    """The model runs with tensors in the places of its parameters; what follows its gradients is no forward.

    In a process of its own: what earlier tests have left alive would be counted.
    """
    (tmp_path / "train.py").write_text(TORCH_FUNC)
    done = python(tmp_path, "train.py", *given)
    assert done.returncode == 0, done.stderr
    recording = read(tmp_path / "run.ampmem")
    summary = summarize(recording)
    size = (32 * 64 + 64 + 64 + 1) * 4
    assert [step.backwards for step in summary.steps] == [1] * 4
    assert phases(recording, 2) == ["forward", "backward"]
    assert (summary.parameters.bytes, summary.last_step.peak.categories[Category.PARAMETERS]) == (size, size)
    assert (summary.conservation.residual_bytes, summary.findings) == (0, ())
    assert FUNCTIONAL in summary.notes
    assert all(component.holds for component in summary.static_model)
    # The batch and, where the step has its own end, the weights, beside the gradients of one step or of two.
    assert {each.holder: each.bytes for each in summary.held if each.holder != "grads"} == (
        {"x": 64 * 32 * 4} | ({"params": size} if given else {})
    )


def test_gradients_of_torch_func_in_a_loss_are_followed_by_forward() -> None:
    """A step into the inner loop of meta learning: only the backward of the loss ends it."""
    model, optimizer = make()

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(model, params, (x,))
        return output.square().mean()

    with ampmem.profile(model, optimizer) as prof:
        for _ in range(2):
            x, params = torch.randn(4, 8), dict(model.named_parameters())
            grads = torch.func.grad(loss)(params, x)
            loss({name: value - 0.1 * grads[name] for name, value in params.items()}, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.backwards for step in prof.summary().steps] == [2, 2]
    assert phases(prof.recording(), 1) == ["forward", "backward", "forward", "backward", "optimizer"]
