"""Compiles ``torch.func.grad``, which refuses to run under saved-tensor hooks, and its loss."""

import json

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = torch.compile(lambda output: output.square().mean(), backend="aot_eager")


@torch.compile(backend="aot_eager")
def sensitivity(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda inputs: (inputs @ weight).square().mean())(x)


total = 0.0
for _ in range(3):
    x = torch.randn(4, 64)
    loss(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    total += sensitivity(x, torch.ones(64, 8)).abs().sum().item()
parameters = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"parameters": parameters, "total": total}))
