"""Optimizers that people write themselves: their state is whole at every mark, and judged by its tensors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ampmem
from ampmem.analysis.timeline.categories import Category
from ampmem.vocabulary import STEP_MARKS


class AdamW(torch.optim.Optimizer):
    """Named as torch's, with other keys; all of its state is made anew by every update."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                self.update(state, parameter)
                parameter.sub_(group["lr"] * state["m"].float())

    def update(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        state["m"] = 0.1 * parameter.grad + 0.9 * state.get("m", 0)
        state["v"] = 0.01 * parameter.grad**2 + 0.99 * state.get("v", 0)


class Half(AdamW):
    """Keeps one moment, in half the bytes."""

    def update(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        state["m"] = (0.1 * parameter.grad + 0.9 * state.get("m", 0)).bfloat16()


class Factored(AdamW):
    """Keeps a matrix for each dimension, in a list."""

    def update(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        eyes = [torch.eye(size, device=parameter.device) for size in parameter.shape]
        state["factors"] = [former + eye for former, eye in zip(state.get("factors", eyes), eyes, strict=True)]
        state["m"] = parameter.grad.clone()


PER_ELEMENT = {AdamW: 8, Half: 2, Factored: 4}
FACTORS = 3 * (64**2 + 32**2) * 4
"""Of two weights and two biases."""


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    def parts(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list)):
            for part in value.values() if isinstance(value, dict) else value:
                yield from parts(part)

    return sum(part.numel() * part.element_size() for each in optimizer.state.values() for part in parts(each))


def train(kind: type[AdamW], device: str) -> tuple[int, list[tuple[int, int, int]]]:
    """Four steps; the elements of the model, and of each step the bytes of state at its marks."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)).to(device)
    optimizer = kind(model.parameters())
    found = []
    for _ in range(4):
        before = state_bytes(optimizer)
        model(torch.ones(8, 64, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((before, before, state_bytes(optimizer)))
    return sum(parameter.numel() for parameter in model.parameters()), found


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("kind", PER_ELEMENT)
def test_state_that_every_update_replaces_is_whole_at_every_mark(kind: type[AdamW], device: str, skip: int) -> None:
    with ampmem.profile(device=device, skip=skip) as prof:
        elements, found = train(kind, "cuda" if device == "sim" else device)
    summary = prof.summary()
    seen = [tuple(getattr(step.marks, mark)["optimizer_state"] for mark in STEP_MARKS) for step in summary.steps]
    assert seen == found[skip:]
    assert found[-1][2] == PER_ELEMENT[kind] * elements + (FACTORS if kind is Factored else 0)
    assert summary.conservation.residual_bytes == 0
    assert summary.static_recipe is not None
    assert summary.static_recipe.optimizer == (f"{kind.__name__}, as seen",)
    if kind is not Factored:
        assert summary.static_recipe.bytes_per_param == 8 + PER_ELEMENT[kind]
    assert all(component.holds for component in summary.static_model)


def test_state_is_known_in_a_recording_that_begins_with_a_skipped_update() -> None:
    model = nn.Linear(64, 64)
    optimizer, scaler = AdamW(model.parameters()), torch.amp.GradScaler("cpu")

    def step(factor: float) -> None:
        scaler.scale(model(torch.ones(8, 64)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step(1.0)
    with ampmem.profile(model, device="cpu") as prof:
        for factor in (float("inf"), 1.0, 1.0):
            step(factor)
    summary = prof.summary()
    assert [each.skipped_update for each in summary.steps] == [True, False, False]
    sizes = {getattr(each.marks, mark)["optimizer_state"] for each in summary.steps for mark in STEP_MARKS}
    assert sizes == {2 * (64 * 64 + 64) * 4}


class MasterInState(torch.optim.Optimizer):
    """Keeps a float32 master of each half parameter in its state, by the name that the class gives it."""

    key = "master_param"

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state[self.key] = parameter.float()
                state["exp_avg"] = torch.zeros_like(state[self.key])
            state["exp_avg"].lerp_(parameter.grad.float(), 0.1)
            state[self.key].sub_(state["exp_avg"], alpha=1e-3)
            parameter.copy_(state[self.key])


class UnnamedMaster(MasterInState):
    """Only the values say what it is."""

    key = "fp32"


@pytest.mark.parametrize("kind", [MasterInState, UnnamedMaster])
def test_a_master_copy_in_the_state_is_a_master_copy(kind: type[MasterInState]) -> None:
    with ampmem.profile() as prof:
        model = nn.Linear(64, 32).bfloat16()
        optimizer = kind(model.parameters())
        for _ in range(3):
            model(torch.ones(8, 64, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    elements = sum(parameter.numel() for parameter in model.parameters())
    for step in prof.summary().steps:
        live = step.marks.after_optimizer
        assert live is not None
        assert live[Category.MASTER_COPIES] == live[Category.OPTIMIZER_STATE] == 4 * elements
