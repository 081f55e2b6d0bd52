"""Training without ``torch.optim``: the script subtracts the gradients itself. Counts its batches."""

import json

import torch
from torch import nn

BATCHES = 4


def train_one_batch(model):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss.item()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1))
    losses = [train_one_batch(model) for _ in range(BATCHES)]
    size = sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps({"parameters": size, "batches": BATCHES, "losses": losses}))


main()
