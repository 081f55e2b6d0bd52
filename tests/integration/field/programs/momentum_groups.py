"""One SGD with two groups, of which only one has momentum."""

import json

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128))
groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "momentum": 0.9}]
optimizer = torch.optim.SGD(groups, lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
kept = [state["momentum_buffer"] for state in optimizer.state.values() if state.get("momentum_buffer") is not None]
print(json.dumps({"state": sum(4 * tensor.numel() for tensor in kept)}))
