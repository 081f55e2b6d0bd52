"""The training that most of these programs have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def small_model() -> nn.Sequential:
    """Two layers, the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss_of: Callable[[Tensor], Tensor] | None = None,
    steps: int = 3,
) -> None:
    """Print the loss of each step; ``loss_of`` is given the batch."""
    torch.manual_seed(1)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        batch = torch.randn(4, 8)
        loss = model(batch).square().mean() if loss_of is None else loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
