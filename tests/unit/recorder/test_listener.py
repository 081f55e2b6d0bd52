"""Hooks know of a session only what the listener's Protocol says: here they speak to one that writes it down."""

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
from ampmem.recorder.sources.cuda.late import LateNumber
from ampmem.recorder.steering.arms import ArmSeen


class Diary:
    """Keeps what it hears."""

    recording = True

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_thread(self) -> bool:
        return True

    def forward_started(self, module: nn.Module, *, recomputing: bool) -> None:
        self.heard.append("recomputing" if recomputing else "forward")

    def batch_seen(self, size: int) -> None:
        self.heard.append(f"batch of {size}")

    def forward_ended(self, *, raised: bool) -> None:
        self.heard.append("forward ended")

    def backward_started(self, loss: float | LateNumber | None) -> None:
        self.heard.append(f"backward of {loss}")

    def backward_ended(self, *, raised: bool, differentiable: bool) -> None:
        self.heard.append("backward ended")

    def optimizer_made(self, optimizer: Optimizer) -> None:
        self.heard.append(f"made {type(optimizer).__name__}")

    def optimizer_started(self, optimizer: str) -> None:
        self.heard.append(f"{optimizer} started")

    def updated(self, optimizer: int, *, skipped: float | LateNumber | None) -> None:
        self.heard.append(f"updated, skipped {skipped}")

    def scaled(self, scale: float | LateNumber | None) -> None:
        self.heard.append(f"scaled by {scale}")

    def data_started(self) -> Phase:
        self.heard.append("data")
        return Phase.SETUP

    def transform_started(self) -> Phase:
        self.heard.append("transform")
        return Phase.SETUP

    def function_returned(self) -> None:
        self.heard.append("function returned")

    def process_started(self) -> None:
        self.heard.append("process")

    def batch_loaded(self, samples: int | None) -> None:
        self.heard.append(f"batch of {samples}")

    def data_ended(self, before: Phase) -> None:
        self.heard.append(f"data ended in {before.name}")

    def stop_recording(self, why: str) -> None:
        self.heard.append(why)


def test_one_step_as_the_hooks_report_it() -> None:
    diary = Diary()
    listener: Listener = diary
    log = Log(RealAddresses())
    models = Models(log)
    update = RunningUpdate(log, Stacks(enabled=False))
    hooks = [
        ModuleHooks(listener, log, models, update.stacks, ArmSeen(device_type="cpu"), follow=lambda: None),
        BackwardHooks(listener, log.misses),
        OptimizerHooks(listener, log, models, update),
    ]
    undo = [*(each.install() for each in hooks), boundaries.install_data(listener, log.misses)]
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
        "made SGD",
        "data",
        "batch of 2",
        "data ended in SETUP",
        "data",
        "batch of None",
        "data ended in SETUP",
        "forward",
        "batch of 2",
        "forward ended",
        "backward of 6.0",
        "backward ended",
        "SGD started",
        "updated, skipped False",
    ]
