"""Optimizers that were there before a block, of whatever kind: they do not stop it, and their state is known."""

import json
from typing import Any

import pytest
import torch
from support import measure, precisions
from torch import nn
from torch.optim import Optimizer

import ampmem
from ampmem.recorder.facts import log

pytestmark = pytest.mark.usefixtures("alone")
alone = precisions.alone


class NeverSetUp(Optimizer):
    """Passes on what it is asked to another, and is not set up itself."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        """The other's."""
        return self.inner.param_groups


class Raises(NeverSetUp):
    """Does not let its state be asked for."""

    @property
    def state(self) -> Any:
        """Nobody's."""
        raise RuntimeError("asked")


class AsList(NeverSetUp):
    """Keeps no dictionary, and has no groups."""

    param_groups: Any = None
    state: Any = ("one", "two")


def train(model: nn.Module, *optimizers: Optimizer) -> None:
    """One step of ``model``, whose input is 64 numbers wide."""
    model(torch.ones(8, 64)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> Optimizer:
    """One that has stepped."""
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return optimizer


def as_json(prof: ampmem.Profile) -> dict[str, Any]:
    """The summary."""
    found: dict[str, Any] = json.loads(prof.summary().to_json())
    return found


def last_step(prof: ampmem.Profile) -> dict[str, int]:
    """Bytes by category after the last update."""
    found: dict[str, int] = as_json(prof)["steps"][-1]["marks"]["after_optimizer"]
    return found


@pytest.mark.parametrize("kind", [NeverSetUp, Raises, AsList])
def test_an_optimizer_that_cannot_be_asked_is_left_out_with_a_note(kind: type[NeverSetUp]) -> None:
    model = nn.Linear(64, 32)
    optimizer = adamw(model)
    wrapper = kind(optimizer)
    with ampmem.profile(model) as prof:
        train(model, optimizer)
        train(model, optimizer)
    assert wrapper.inner is optimizer
    (missed,) = log.seen
    log.seen.clear()
    summary = prof.summary()
    assert missed.startswith(("AttributeError at guests.py", "RuntimeError at guests.py"))
    assert len(summary.steps) == 2
    assert any(missed in warning for warning in summary.warnings)


def test_the_state_of_an_idle_optimizer_is_that_of_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    first, second = adamw(model), torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, second)
    with ampmem.profile(model) as prof:
        for _ in range(2):
            train(model, second)
    own = {optimizer: measure.state(optimizer) for optimizer in (first, second)}
    assert last_step(prof)["optimizer_state"] == sum(own.values())
    assert last_step(prof).get("other", 0) == 0


def test_the_state_of_an_idle_optimizer_of_an_unknown_model_is_named_after_it() -> None:
    model, other = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    optimizer, idle = adamw(model), adamw(other)
    kept = []
    with ampmem.profile(model) as prof:
        for _ in range(2):
            train(model, optimizer)
            kept.append(torch.ones(10_000))
    assert last_step(prof)["optimizer_state"] == measure.state(optimizer)
    held = {each["holder"]: each["bytes"] for each in as_json(prof)["held"]}
    assert held["AdamW"] == measure.state(idle)


@pytest.mark.parametrize("updates", [1, 2, 5])
def test_a_step_whose_optimizer_is_gone_by_the_blocks_end_has_ended(updates: int) -> None:
    """A function makes the optimizer; one of before, of the same model, is still there."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = adamw(model)

    def fit() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(updates):
            train(model, optimizer)

    with ampmem.profile() as prof:
        fit()
    assert len(prof.summary().steps) == updates
    assert before.state
