"""An optimizer that makes its state anew in every update."""

import json

import torch
from torch import nn


class Averages(torch.optim.Optimizer):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["average"] = 0.9 * state["average"] + parameter.grad if state else parameter.grad.clone()
            parameter.sub_(state["average"], alpha=0.01)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = Averages(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
print(json.dumps({"state": sum(state["average"].untyped_storage().nbytes() for state in optimizer.state.values())}))
