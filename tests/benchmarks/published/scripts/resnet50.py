"""ResNet-50 of He et al. (arXiv 1512.03385, the stride in the 3x3 convolutions), trained on made-up images.

    python resnet50.py BATCH [--amp float16|bfloat16]

SGD with momentum, gradients set to none before forward; under autocast with a gradient scaler. The peak is that of the
steps after the first two.
"""

import argparse

import torch
from torch import Tensor, nn

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks and stride of each."""
EXPANSION = 4


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Without bias, with its batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Block(nn.Module):
    """1x1, 3x3, 1x1, and what came in."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.narrow = convolution(inputs, width, 1)
        self.spread = convolution(width, width, 3, stride)
        self.widen = convolution(width, outputs, 1)
        self.shortcut = convolution(inputs, outputs, 1, stride) if (inputs, stride) != (outputs, 1) else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.narrow(x))
        out = self.relu(self.spread(out))
        out = self.widen(out)
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


def resnet50(classes: int = 1000) -> nn.Sequential:
    """25,557,032 parameters."""
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = 64
    for width, blocks, stride in STAGES:
        for index in range(blocks):
            layers.append(Block(inputs, width, stride if index == 0 else 1))
            inputs = EXPANSION * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batch", type=int)
    parser.add_argument("--amp", choices=["float16", "bfloat16"])
    options = parser.parse_args()
    model = resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=options.amp is not None)
    images = torch.randn(options.batch, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (options.batch,), device="cuda")
    for step in range(4):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        with torch.autocast("cuda", getattr(torch, options.amp or "float16"), enabled=options.amp is not None):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss.item()


if __name__ == "__main__":
    main()
