"""A lazy module that runs once, and one that never does: their parameters come with the first forward."""

import json

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(10))
never = nn.LazyLinear(5)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
parameters = sum(parameter.nbytes for parameter in model.parameters())
total = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
print(json.dumps({"parameters": parameters, "total": total}))
