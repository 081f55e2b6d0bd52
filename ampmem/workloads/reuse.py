"""A few wide layers that each forward uses twice, the case that autocast's weight cache is for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampmem.workloads.common import WorkloadOptions, command, count, make_optimizer, train_on_batch

LAYERS = 4
WIDTH = 1024
USES = 2
BATCH_SIZE = 8


class Reuse(nn.Module):
    """``layers`` linear layers without bias, gone through from first to last ``USES`` times."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        for parameter in self.parameters():
            # Keeps the signal's magnitude from layer to layer.
            nn.init.normal_(parameter, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, width)`` to the same shape."""
        for _ in range(USES):
            for layer in self.layers:
                x = layer(x)
        return x


def build(
    options: WorkloadOptions, *, layers: int = LAYERS, width: int = WIDTH
) -> tuple[Reuse, Optimizer, tuple[Tensor, Tensor]]:
    """The model, its optimizer, and the one batch: inputs and targets, both ``(batch, width)``."""
    torch.manual_seed(options.seed)
    model = Reuse(layers, width).to(options.device)
    optimizer = make_optimizer(options.optimizer or "adam", model.parameters(), foreach=False)
    inputs, targets = torch.randn(2, options.batch_size or BATCH_SIZE, width)
    return model, optimizer, (inputs.to(options.device), targets.to(options.device))


def train(options: WorkloadOptions, *, layers: int = LAYERS, width: int = WIDTH) -> None:
    """Train a few wide layers that each forward uses twice; the same sizes in every preset."""
    train_on_batch(options, *build(options, layers=layers, width=width))


main = command(
    "reuse",
    train,
    optimizer="adam",
    extra=[count("--layers", LAYERS, "Linear layers."), count("--width", WIDTH, "Inputs and outputs of a layer.")],
)


if __name__ == "__main__":
    main()
