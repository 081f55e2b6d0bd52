"""An average of the weights, kept in two ways: a deep copy of the model, and an object with a list of tensors."""

import copy
import json

import torch
from torch import nn


class Average:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.shadow = [parameter.detach().clone() for parameter in parameters]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
teacher = copy.deepcopy(model)
average = Average(list(model.parameters()))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    loss = model(torch.randn(8, 128)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for old, shadow, new in zip(teacher.parameters(), average.shadow, model.parameters(), strict=True):
            old.lerp_(new, 0.1)
            shadow.lerp_(new, 0.1)
size = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"parameters": size, "untrained": size, "other": size}))
