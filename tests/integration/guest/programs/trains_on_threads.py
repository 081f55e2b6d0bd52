"""Trains four models on four threads at once, one of them the main thread, as long as nothing else is said.

Each thread sees its own losses. Threads change as often as Python can, so that they meet in the middle of everything.
"""

import sys
import threading

import torch
from _training import PATIENCE_S
from torch import nn

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 10


def make() -> nn.Sequential:
    """A model with many parameters, each of which gets a gradient in each step."""
    layers = (layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)))
    return nn.Sequential(*layers)


def train(place: int) -> None:
    """Train one of the models."""
    model, batch = models[place], torch.ones(4, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    losses[place] = loss.item()


torch.manual_seed(0)
torch.set_num_threads(1)
models = [make() for _ in range(4)]
losses = [0.0] * len(models)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=train, args=(place,)) for place in range(1, len(models))]
for thread in threads:
    thread.start()
train(0)
for thread in threads:
    thread.join(PATIENCE_S)
print(losses)
