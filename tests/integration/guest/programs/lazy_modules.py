"""Lazy modules: one that comes to be in its first forward, one that never runs and goes into no optimizer."""

import torch
from _training import train
from torch import nn


class Lazy(nn.Module):
    """Has a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LazyBatchNorm1d()
        self.body = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3))
        self.unused = nn.LazyLinear(2)
        self.batches = nn.UninitializedBuffer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(x))


torch.manual_seed(0)
model = Lazy()
optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
model(torch.ones(4, 8))
optimizer.add_param_group({"params": [*model.norm.parameters(), *model.body.parameters()]})
train(model, optimizer)
print([type(each).__name__ for each in model.parameters()])
print(type(model.unused).__name__, type(model.body[0]).__name__)
