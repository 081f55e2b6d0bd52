"""A loss that is infinite in one step and no number in the next. Prints the losses as Python writes them."""

import json

import torch
from torch import nn

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for factor in (1.0, float("inf"), float("nan")):
    loss = (model(torch.randn(4, 8)) ** 2 + 1).mean() * factor
    losses.append(str(loss.item()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(json.dumps(losses))
