"""The training that most of these programs have in common, and waiting for children."""

import os
import select
import signal
from collections.abc import Callable

import torch
from torch import Tensor, nn

PATIENCE_S = 60


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
        print("loss", loss.item(), flush=True)


def train_alone(steps: int = 2) -> nn.Module:
    """A model of its own, which is returned; prints its losses."""
    model = small_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=steps)
    return model


class Training:
    """A model and its optimizer, trained step by step beside something else."""

    def __init__(self) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, name: str = "loss") -> None:
        """One step; prints its loss."""
        loss = self.model(torch.randn(4, 8)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        print(name, loss.item(), flush=True)


def print_end_of(child: int) -> None:
    """Print how the process ``child`` ended; end it where it does not."""
    ended, _, _ = select.select([os.pidfd_open(child)], [], [], PATIENCE_S)
    if not ended:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("the child ended with", status if ended else "nothing: it hung", flush=True)
