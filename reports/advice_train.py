"""The small models of reports/advice.md: six blocks each, small enough to try every choice of blocks.

    python reports/advice_train.py even|uneven

trains one of them for two steps on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ampmem.workloads.common import Sizes
from ampmem.workloads.gpt import GPT, MLP

SIZES = Sizes(vocabulary=2048, length=256, layers=6, heads=4, width=256, batch_size=4)
WIDTHS = (1, 8, 2, 6, 3, 4)
"""The width of each block's hidden layer over the model's width, if the blocks are uneven."""
STEPS = 2
NAMES = ("even", "uneven")


def build(name: str) -> GPT:
    """A GPT with six blocks; the blocks of ``uneven`` have hidden layers of different widths."""
    torch.manual_seed(0)
    model = GPT(SIZES)
    if name == "uneven":
        for block, times in zip(model.blocks, WIDTHS, strict=True):
            block.mlp = Hidden(SIZES.width, times)
    return model


class Hidden(MLP):
    """An MLP whose hidden layer is ``times`` as wide as the model."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__(width)
        self.up, self.down = nn.Linear(width, times * width), nn.Linear(times * width, width)


def checkpointed(name: str, blocks: Iterable[int]) -> GPT:
    """The model of :func:`build`, with activation checkpointing of ``blocks``."""
    model = build(name)
    for number in blocks:
        checkpoint_module(model.blocks[number])
    return model


def checkpoint_module(module: nn.Module, **how: Any) -> None:
    """Run ``module`` under activation checkpointing; ``how`` are further arguments of ``checkpoint``."""
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, **how)


def tokens() -> Tensor:
    """A batch of token ids."""
    return torch.randint(SIZES.vocabulary, (SIZES.batch_size, SIZES.length))


def loss_of(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """The loss of predicting the batch from itself."""
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def train(model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> None:
    """Train ``model`` for a few steps; ``forward`` is called in its place, such as its compiled form."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        loss_of(model if forward is None else forward, tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(build(sys.argv[1]))
