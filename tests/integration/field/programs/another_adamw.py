"""A class that is called AdamW and keeps other states than PyTorch's: ``m`` in float32, ``v`` in bfloat16."""

import json

import torch
from torch import nn


class AdamW(torch.optim.Optimizer):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["m"] = torch.zeros_like(parameter)
                state["v"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["m"].lerp_(parameter.grad, 0.1)
            state["v"].lerp_(parameter.grad.square().bfloat16(), 0.01)
            parameter.sub_(state["m"] / (state["v"].float().sqrt() + 1e-8), alpha=1e-3)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
kept = [tensor for state in optimizer.state.values() for tensor in state.values()]
print(json.dumps({"state": sum(tensor.untyped_storage().nbytes() for tensor in kept)}))
