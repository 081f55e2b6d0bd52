"""Compiles the function that runs the model and its loss: no module is called but by the compiler.

With ``autocast`` the function is called under autocast.
"""

import json
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.compile(backend="aot_eager")
def loss_of(batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch), target)


losses = []
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in sys.argv):
        loss = loss_of(torch.randn(8, 64), torch.randint(0, 10, (8,)))
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
print(json.dumps({"losses": losses, "parameters": sum(parameter.nbytes for parameter in model.parameters())}))
