"""A small model in training, and waiting for children, for programs that do something else besides."""

from __future__ import annotations

import os
import select
import signal

import torch
from torch import nn

PATIENCE_S = 60


class Training:
    """A model and its optimizer, the same in every run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
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
