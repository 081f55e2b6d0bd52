"""All training is in two child processes, as with ``torch.multiprocessing.spawn``.

With ``--test`` there is one, and the parent evaluates.
"""

import json
import sys

import torch
import torch.multiprocessing as mp
from torch import nn


def train(rank, model):
    model(torch.randn(4, 8)).sum().backward()
    with torch.no_grad():  # by hand: each child would import half of torch for an optimizer
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def main():
    model = nn.Linear(8, 8)
    mp.spawn(train, args=(model,), nprocs=1 if "--test" in sys.argv else 2)
    if "--test" in sys.argv:
        with torch.no_grad():
            model(torch.randn(4, 8))
    print(json.dumps({}))


if __name__ == "__main__":
    main()
