"""A gradient penalty: backward's own graph is kept, and more is computed from gradients outside of any module."""

import json

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved: dict[int, int] = {}


def pack(tensor: torch.Tensor) -> torch.Tensor:
    saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return tensor.detach()


for step in range(2):
    batch = torch.randn(1024, 256, requires_grad=True)
    score = model(batch).sum()
    (gradient,) = torch.autograd.grad(score, batch, create_graph=True)
    if step == 1 and __name__ == "__count__":
        break
    norm = gradient.pow(2).sum(1)
    penalty = (norm - 1).pow(2).mean()
    optimizer.zero_grad()
    penalty.backward()
    optimizer.step()
kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (gradient, norm)}
print(json.dumps({"gradient": gradient.nbytes, "norm": norm.nbytes, "batch": batch.nbytes}))
