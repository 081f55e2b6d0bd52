"""Trains without a module and without an optimizer: there is nothing to record."""

import torch

torch.manual_seed(0)
weight = torch.randn(8, 4, requires_grad=True)
for _ in range(3):
    loss = (torch.randn(2, 8) @ weight).square().mean()
    loss.backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad  # type: ignore[operator]
        weight.grad = None
    print("loss", loss.item())
