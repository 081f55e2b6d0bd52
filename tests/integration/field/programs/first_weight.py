"""A first layer that is most of the model: its input needs no gradient, so nothing keeps the copy of its weight.

With ``checkpointed`` the second layer runs in a checkpoint, so nothing keeps its copies either until backward.
"""

import json
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
first, second, third = nn.Linear(2048, 1024), nn.Linear(1024, 64), nn.Linear(64, 8)
model = nn.ModuleDict({"first": first, "second": second, "third": third})
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first(x).relu()
        x = checkpoint(second, x, use_reentrant=False) if "checkpointed" in sys.argv else second(x)
        return third(x.relu())


net = Net()
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(torch.randn(16, 2048)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
kept = [third.weight] if "checkpointed" in sys.argv else [second.weight, third.weight]
print(json.dumps({"kept": sum(2 * p.numel() for p in kept), "first": 2 * first.weight.numel()}))
