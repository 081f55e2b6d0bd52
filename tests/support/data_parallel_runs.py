"""What ranks train with DistributedDataParallel, in every way that it has memory of its own for communication."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from support import gloo

STEPS = 3


class Model(nn.Module):
    """Has buffers, and a layer that ``branch`` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(96, 160)
        self.norm = nn.BatchNorm1d(160)
        self.last = nn.Linear(160, 96)
        self.unused = nn.Linear(96, 32)

    def forward(self, inputs: Tensor, *, whole: bool = True) -> Tensor:
        outputs = self.last(torch.relu(self.norm(self.first(inputs))))
        return self.unused(outputs) if whole else outputs


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train. ``skip`` steps pass before the recording, ``before``: the model is made before it."""

    options: dict[str, Any] = field(default_factory=dict)
    amp: bool = False
    compressed: bool = False
    micro_batches: int = 1
    whole: bool = True
    skip: int = 0
    before: bool = False


RUNS = {
    "fp32": Run(),
    "amp": Run(amp=True),
    "fp32-view": Run(options={"gradient_as_bucket_view": True}),
    "amp-view": Run(amp=True, options={"gradient_as_bucket_view": True}),
    "unused": Run(whole=False, options={"find_unused_parameters": True}),
    "static": Run(options={"static_graph": True}),
    "compressed": Run(compressed=True),
    "accumulated": Run(micro_batches=2),
    "skipped": Run(skip=3),
    "skipped-view": Run(skip=3, options={"gradient_as_bucket_view": True}),
    "before": Run(before=True),
}


def train_all(folder: Path) -> None:
    """Every run in turn, on one rank."""
    for name, run in RUNS.items():
        model = _parallel(run) if run.before else None
        with gloo.recorded(folder, name, skip=run.skip):
            model = _parallel(run) if model is None else model
            optimizer = AdamW(model.parameters())
            known = [_step(run, model, optimizer) for _ in range(run.skip + STEPS)]
        gloo.keep(folder, name, known[run.skip :])


def _parallel(run: Run) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.06, **run.options)
    if run.compressed:
        model.register_comm_hook(None, fp16_compress_hook)
    return model


def _step(run: Run, model: DistributedDataParallel, optimizer: AdamW) -> dict[str, int]:
    """One step; what the tensors add up to after its update."""
    optimizer.zero_grad()
    for left in reversed(range(run.micro_batches)):
        with model.no_sync() if left else nullcontext():
            with torch.autocast("cpu", enabled=run.amp):
                loss = model(torch.randn(8, 96), whole=run.whole).square().mean()
            loss.backward()
    optimizer.step()
    return gloo.sums(model, optimizer)
