"""Four micro-batches for each update. Counts the loss of each micro-batch."""

import json

import torch
from torch import nn

MICRO_BATCHES = 4


def main():
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append([])
        for _ in range(MICRO_BATCHES):
            loss = model(torch.randn(8, 16)).square().mean() / MICRO_BATCHES
            loss.backward()
            losses[-1].append(loss.item())
        optimizer.step()
    print(json.dumps(losses))


main()
