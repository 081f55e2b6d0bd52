"""A gradient penalty: backward's own graph is kept, and more is computed from gradients outside of any module.

With an argument it counts for itself what autograd saves until the last backward starts.
"""

import json
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved: list[torch.Tensor] = []


def pack(tensor: torch.Tensor) -> torch.Tensor:
    saved.append(tensor.detach())
    return tensor


def unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


for _ in range(2):
    batch = torch.randn(1024, 256)
    with saved_tensors_hooks(pack, unpack) if len(sys.argv) > 1 else nullcontext():
        mixed = (batch * 0.5).requires_grad_()
        score = model(mixed).sum()
        (gradient,) = torch.autograd.grad(score, mixed, create_graph=True)
        norm = gradient.pow(2).sum(1)
        penalty = (norm - 1).pow(2).mean()
    given = {tensor.untyped_storage().data_ptr() for tensor in (mixed, *model.parameters())}
    made = [*saved, score, norm, penalty]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in made}
    activations = sum(size for address, size in storages.items() if address not in given)
    saved.clear()
    del made
    optimizer.zero_grad()
    penalty.backward(inputs=list(model.parameters()))
    optimizer.step()
print(json.dumps({"activations": activations, "batch": batch.nbytes}))
