"""Weights that threads allocate, as loaders do, and a thread that keeps memory of its own meanwhile."""

import json
import threading

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 200, device="meta"), nn.ReLU(), nn.Linear(200, 10, device="meta"))
held = []


def load(layer: nn.Linear) -> None:
    for name, weight in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.randn(weight.shape)))


torch.zeros(1)
for target in (lambda: load(model[0]), lambda: load(model[2]), lambda: held.append(torch.zeros(5000))):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(8, 300)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
parameters = sum(p.untyped_storage().nbytes() for p in model.parameters())
print(json.dumps({"parameters": parameters, "elsewhere": held[0].untyped_storage().nbytes()}))
