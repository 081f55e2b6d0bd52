"""Other threads allocate and train beside the one that trains; one leaves by ``sys.exit``, one fails."""

import sys
import threading

import torch
from _training import PATIENCE_S, Training
from torch import nn


def train_beside() -> None:
    """A model of its own."""
    with torch.random.fork_rng():
        model = nn.Linear(4, 4)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
    results.append(model.weight.grad.sum().item())


def fail() -> None:
    """What nobody hears of."""
    raise ValueError("of the thread")


threading.excepthook = lambda arguments: results.append(f"failed: {arguments.exc_value}")
results: list[object] = []
training = Training()
for target in (train_beside, sys.exit, fail):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join(PATIENCE_S)
    training.step()
print(results, threading.active_count())
