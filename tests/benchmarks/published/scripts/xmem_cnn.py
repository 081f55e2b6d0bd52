"""Trains a network of torchvision on images of 86×86, as xMem's authors did: ``xmem_cnn.py MODEL OPTIMIZER BATCH``.

Four steps; the gradients are zeroed before each batch is loaded, and what a step made is there until the next one
makes it anew.
"""

import sys
from functools import partial

import torch

try:
    from torchvision import models
except RuntimeError:  # its kernels are for another build of torch, and models need none of them
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    from torchvision import models
from torchvision.models.mobilenetv3 import MobileNetV3, _mobilenet_v3_conf

STEPS, SIDE = 4, 86
CLASSES = 10


def mobilenet_v3(size: str) -> torch.nn.Module:
    settings, last = _mobilenet_v3_conf(f"mobilenet_v3_{size}")
    return MobileNetV3(settings, last_channel=last, num_classes=CLASSES)


MODELS = {
    "ConvNeXtBase": models.convnext_base,
    "ConvNeXtTiny": models.convnext_tiny,
    "MnasNet": partial(models.MNASNet, alpha=1.0, num_classes=CLASSES),
    "MobileNetV2": models.mobilenet_v2,
    "MobileNetV3Large": partial(mobilenet_v3, "large"),
    "MobileNetV3Small": partial(mobilenet_v3, "small"),
    "RegNetX400MF": models.regnet_x_400mf,
    "RegNetY400MF": models.regnet_y_400mf,
    "ResNet101": models.resnet101,
    "ResNet152": models.resnet152,
    "VGG16": models.vgg16,
    "VGG19": models.vgg19,
}


def main() -> None:
    name, optimizer_name, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model = MODELS[name]().to("cuda").train()
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.001)
    criterion = torch.nn.CrossEntropyLoss()
    for _ in range(STEPS):
        optimizer.zero_grad()
        images, labels = torch.rand(batch, 3, SIDE, SIDE), torch.randint(CLASSES, (batch,))
        images, labels = images.to("cuda"), labels.to("cuda")
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        _, predicted = torch.max(outputs, 1)  # noqa: RUF059


if __name__ == "__main__":
    main()
