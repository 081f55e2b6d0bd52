"""What ranks train whose optimizers divide their state between them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from support import gloo

STEPS = 2
WIDTH = 72
RUNS: dict[str, dict[str, Any]] = {"redundancy": {}, "views": {"parameters_as_bucket_view": True}}
"""By name, the options of torch's ZeroRedundancyOptimizer: each rank keeps the state of its own parameters only."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH))


def train_all(folder: Path) -> None:
    """Every run in turn, on one rank."""
    for name, options in RUNS.items():
        with gloo.recorded(folder, name):
            parallel = DistributedDataParallel(model(), gradient_as_bucket_view=bool(options))
            optimizer = ZeroRedundancyOptimizer(parallel.parameters(), optimizer_class=Adam, lr=1e-3, **options)
            known = [_step(parallel, optimizer) for _ in range(STEPS)]
        gloo.keep(folder, name, known)
        mine = {id(parameter) for group in optimizer.optim.param_groups for parameter in group["params"]}
        others = [parameter.numel() for parameter in parallel.parameters() if id(parameter) not in mine]
        gloo.keep(folder, f"{name}-others", sum(others))


def _step(parallel: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[str, int]:
    """One step; what the tensors add up to after its update."""
    optimizer.zero_grad()
    parallel(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    return gloo.sums(parallel, optimizer.optim)
