"""A few steps of training, for programs whose kind is something else."""

from __future__ import annotations

import torch
from torch import nn


def train(steps: int = 2) -> nn.Module:
    """Train a small model and print its losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item(), flush=True)
    return model
