"""Hooks know of a session only what the listener's Protocol says: here they speak to one that writes it down."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ampmem.events import Phase
from ampmem.recorder.facts.addresses import RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks import boundaries
from ampmem.recorder.hooks.backward import BackwardHooks
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.hooks.modules import ModuleHooks
from ampmem.recorder.hooks.optimizers import OptimizerHooks
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.running import RunningUpdate
from ampmem.recorder.steering.precision import PrecisionSeen


class Diary:
    """Keeps what it hears: only what the Protocol has, with the arguments that it names."""

    recording = True

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.log = Log(RealAddresses())
        self.models = Models(self.log)
        self.update = RunningUpdate(self.log, Stacks(enabled=False))
        self.precision_seen = PrecisionSeen(device_type="cpu")

    def __getattr__(self, name: str) -> Any:
        return partial(self._hear, name, inspect.signature(vars(Listener)[name]))

    def _hear(self, name: str, signature: inspect.Signature, *given: object, **named: object) -> object:
        signature.bind(self, *given, **named)
        said = (*(() if name == "updated" else given), *named.values())  # of an update, not the number of its optimizer
        if name != "on_thread":
            self.heard.append(" ".join((name, *map(_in_short, said))))
        return {"on_thread": True, "data_started": Phase.SETUP, "transform_started": Phase.SETUP}.get(name)


def _in_short(value: object) -> str:
    return type(value).__name__ if isinstance(value, (nn.Module, Optimizer)) else getattr(value, "name", str(value))


def test_one_step_as_the_hooks_report_it() -> None:
    diary = Diary()
    listener: Listener = diary
    hooks = [ModuleHooks(listener, follow=lambda: None), BackwardHooks(listener), OptimizerHooks(listener)]
    undo = [*(each.install() for each in hooks), boundaries.install_data(listener)]
    try:
        model = torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False))
        torch.nn.init.ones_(model[0].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (batch,) = DataLoader([torch.ones(3), torch.ones(3)], batch_size=2)  # type: ignore[arg-type]
        model(batch).sum().backward()
        optimizer.step()
    finally:
        for each in reversed(undo):
            each()
    model(batch)
    assert diary.heard == [
        "optimizer_made SGD",
        *(
            "data_started",
            "batch_loaded 2",
            "data_ended SETUP",
            "data_started",
            "batch_loaded None",
            "data_ended SETUP",
        ),
        *("forward_started Sequential False", "batch_seen 2", "forward_ended False"),
        *("backward_started 6.0", "backward_ended False False", "optimizer_started SGD", "updated False"),
    ]
