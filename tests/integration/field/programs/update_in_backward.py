"""Each parameter is updated as soon as its gradient is there, and the gradient dropped: no zero_grad anywhere."""

import json

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}


def update(parameter: torch.Tensor) -> None:
    optimizers[parameter].step()
    parameter.grad = None


for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
for _ in range(3):
    model(torch.randn(8, 64)).square().mean().backward()
print(json.dumps({"parameters": sum(4 * p.numel() for p in model.parameters())}))
