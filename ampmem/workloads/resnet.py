"""ResNet-50 on random images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ampmem.workloads.common import WorkloadOptions, batches, command, data_loader, make_optimizer, report_step

EXPANSION = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the model and of one batch; images are ``image`` pixels wide and high."""

    layers: tuple[int, int, int, int]
    width: int
    classes: int
    image: int
    batch_size: int


PRESETS = {
    "tiny": Config(layers=(1, 1, 1, 1), width=16, classes=10, image=32, batch_size=4),
    # ResNet-50, on small images.
    "small": Config(layers=(3, 4, 6, 3), width=64, classes=100, image=64, batch_size=4),
    # ResNet-50 on ImageNet's sizes.
    "full": Config(layers=(3, 4, 6, 3), width=64, classes=1000, image=224, batch_size=64),
}


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a residual; ``stride`` is that of the 3x3 convolution."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or channels != out
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, channels, h, w)`` to ``(batch, 4 * width, h / stride, w / stride)``."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.downsample(x)
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks, average pool and classifier."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(width, width, config.layers[0], stride=1)
        self.layer2 = _stage(4 * width, 2 * width, config.layers[1], stride=2)
        self.layer3 = _stage(8 * width, 4 * width, config.layers[2], stride=2)
        self.layer4 = _stage(16 * width, 8 * width, config.layers[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32 * width, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(batch, 3, image, image)`` to logits ``(batch, classes)``."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def _stage(channels: int, width: int, blocks: int, *, stride: int) -> nn.Sequential:
    first = Bottleneck(channels, width, stride)
    return nn.Sequential(first, *(Bottleneck(EXPANSION * width, width, 1) for _ in range(blocks - 1)))


def build(options: WorkloadOptions) -> tuple[ResNet, Optimizer, DataLoader[tuple[Tensor, ...]]]:
    """The model, its optimizer, and a loader of images ``(batch, 3, image, image)`` and labels ``(batch,)``."""
    torch.manual_seed(options.seed)
    config = PRESETS[options.preset]
    model = ResNet(config).to(options.device)
    optimizer = make_optimizer(options.optimizer or "sgd-momentum", model.parameters())
    batch_size = options.batch_size or config.batch_size
    images = torch.randn(2 * batch_size, 3, config.image, config.image)
    labels = torch.randint(config.classes, (2 * batch_size,))
    return model, optimizer, data_loader(images, labels, batch_size=batch_size, seed=options.seed)


def train(options: WorkloadOptions) -> None:
    """Train ResNet-50 on random images."""
    model, optimizer, loader = build(options)
    scaler = options.grad_scaler()
    model.train()
    for step, (images, labels) in batches(loader, options.steps):
        images, labels = images.to(options.device), labels.to(options.device)
        optimizer.zero_grad()
        with options.autocast():
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        report_step(step, loss.item())


main = command("resnet", train, optimizer="sgd-momentum")


if __name__ == "__main__":
    main()
