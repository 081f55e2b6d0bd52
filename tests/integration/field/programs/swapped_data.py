"""Puts new memory into its parameters between forward and backward, as engines do that gather and offload weights."""

import json

import torch
from torch import nn

torch.manual_seed(0)


class Scaled(nn.Module):
    """Its backward needs the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


model = nn.Sequential(Scaled(), Scaled())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(8, 256)).square().mean()
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
parameters = sum(parameter.nbytes for parameter in model.parameters())
total = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
print(json.dumps({"parameters": parameters, "total": total}))
