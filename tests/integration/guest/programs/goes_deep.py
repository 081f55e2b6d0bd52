"""Goes as deep as its recursion limit lets it: in calls, and in modules that hold modules."""

import sys

import torch
from _training import train_alone
from torch import nn


def depth(calls: int = 0) -> int:
    try:
        return depth(calls + 1)
    except RecursionError:
        return calls


def refused(limit: int) -> str:
    try:
        sys.setrecursionlimit(limit)
    except (RecursionError, ValueError) as error:
        return str(error)
    return "taken"


def nested(levels: int) -> nn.Module:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(levels):
        model = nn.Sequential(model)
    return model


print(sys.getrecursionlimit(), depth())
model = nested(235)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print(sys.getrecursionlimit(), depth())
sys.setrecursionlimit(500)
print(sys.getrecursionlimit(), depth(), refused(1), refused(0))
train_alone()
print(sys.getrecursionlimit(), depth())
sys.setrecursionlimit(60)
