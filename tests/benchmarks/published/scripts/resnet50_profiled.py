"""ResNet-50 on one made-up image in FP32, as PyTorch's text on understanding GPU memory trains it.

    python resnet50_profiled.py sgd|momentum|adam

The labels are probabilities, and gradients are set to none after the update.
"""

import sys

import torch
from resnet50 import resnet50
from torch.nn import functional


def main() -> None:
    """Train."""
    model = resnet50().cuda()
    image = torch.randn(1, 3, 224, 224, device="cuda")
    labels = torch.rand_like(model(image))
    optimizers = {
        "sgd": lambda: torch.optim.SGD(model.parameters()),
        "momentum": lambda: torch.optim.SGD(model.parameters(), momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters()),
    }
    optimizer = optimizers[sys.argv[1]]()
    for _ in range(4):
        predicted = model(image)
        functional.cross_entropy(predicted, labels).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
