"""YOLOv5s of version 6.0, forward and backward as its AutoBatch times them, written from its table of layers.

    python yolov5s.py BATCH

640x640 images that ask for gradients themselves, three times; the sum of all that comes out goes backward. Before the
batch, as AutoBatch does, each smaller power of two is run, all of them inside of one float16 autocast. On the GPU is
also the model that is to be trained, of which AutoBatch uses a copy; not the checkpoint that it was loaded from: with
it there would be more allocated at batch 1 than was reserved.
"""

import sys
from copy import deepcopy

import torch
from torch import Tensor, nn

CLASSES, ANCHORS, IMAGE = 80, 3, 640


class Conv(nn.Sequential):
    """Convolution, batch norm and SiLU."""

    def __init__(self, inputs: int, outputs: int, size: int = 1, stride: int = 1, padding: int | None = None) -> None:
        around = size // 2 if padding is None else padding
        super().__init__(
            nn.Conv2d(inputs, outputs, size, stride, around, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03),
            nn.SiLU(inplace=True),
        )


class Bottleneck(nn.Module):
    """1x1 and 3x3, and what came in where that is asked for."""

    def __init__(self, width: int, *, shortcut: bool) -> None:
        super().__init__()
        self.first, self.second, self.shortcut = Conv(width, width), Conv(width, width, 3), shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.first(x))
        return x + out if self.shortcut else out


class C3(nn.Module):
    """Two halves, one through bottlenecks, and three 1x1 convolutions."""

    def __init__(self, inputs: int, outputs: int, bottlenecks: int, *, shortcut: bool = True) -> None:
        super().__init__()
        half = outputs // 2
        self.deep, self.flat, self.last = Conv(inputs, half), Conv(inputs, half), Conv(outputs, outputs)
        self.bottlenecks = nn.Sequential(*(Bottleneck(half, shortcut=shortcut) for _ in range(bottlenecks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat((self.bottlenecks(self.deep(x)), self.flat(x)), dim=1))


class Pyramid(nn.Module):
    """Three poolings in a row, all that they give side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow, self.widen = Conv(width, width // 2), Conv(width * 2, width)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.narrow(x)]
        for _ in range(3):
            levels.append(self.pool(levels[-1]))
        return self.widen(torch.cat(levels, dim=1))


class Yolo(nn.Module):
    """7,235,389 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Conv(3, 32, 6, 2, 2), Conv(32, 64, 3, 2), C3(64, 64, 1), Conv(64, 128, 3, 2))
        self.eighth = C3(128, 128, 2)
        self.sixteenth = nn.Sequential(Conv(128, 256, 3, 2), C3(256, 256, 3))
        self.bottom = nn.Sequential(Conv(256, 512, 3, 2), C3(512, 512, 1), Pyramid(512))
        self.up1, self.merge1 = Conv(512, 256), C3(512, 256, 1, shortcut=False)
        self.up2, self.merge2 = Conv(256, 128), C3(256, 128, 1, shortcut=False)
        self.down1, self.merge3 = Conv(128, 128, 3, 2), C3(256, 256, 1, shortcut=False)
        self.down2, self.merge4 = Conv(256, 256, 3, 2), C3(512, 512, 1, shortcut=False)
        self.enlarge = nn.Upsample(scale_factor=2)
        outputs = ANCHORS * (CLASSES + 5)
        self.heads = nn.ModuleList(nn.Conv2d(width, outputs, 1) for width in (128, 256, 512))

    def forward(self, x: Tensor) -> list[Tensor]:
        eighth = self.eighth(self.stem(x))
        sixteenth = self.sixteenth(eighth)
        low = self.up1(self.bottom(sixteenth))
        middle = self.up2(self.merge1(torch.cat((self.enlarge(low), sixteenth), dim=1)))
        small = self.merge2(torch.cat((self.enlarge(middle), eighth), dim=1))
        medium = self.merge3(torch.cat((self.down1(small), middle), dim=1))
        large = self.merge4(torch.cat((self.down2(medium), low), dim=1))
        return [self._head(head, level) for head, level in zip(self.heads, (small, medium, large), strict=True)]

    def _head(self, head: nn.Module, level: Tensor) -> Tensor:
        batch, _, height, width = level.shape
        found: Tensor = head(level).view(batch, ANCHORS, CLASSES + 5, height, width)
        return found.permute(0, 1, 3, 4, 2).contiguous()


def main() -> None:
    """The command line."""
    most = int(sys.argv[1])
    trained = Yolo().cuda()
    model = deepcopy(trained).train()
    with torch.autocast("cuda", torch.float16):
        for batch in (1, 2, 4, 8, 16):
            if batch <= most:
                images = torch.randn(batch, 3, IMAGE, IMAGE).cuda()
                images.requires_grad = True
                for _ in range(3):
                    sum(level.sum() for level in model(images)).sum().backward()


if __name__ == "__main__":
    main()
