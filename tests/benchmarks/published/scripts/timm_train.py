"""A model of timm, trained under autocast on made-up images.

    python timm_train.py MODEL BATCH [--size N] [--like benchmark|deit] [--drop-path P]

``benchmark``: as timm's own benchmark of its time does: SGD with Nesterov momentum, backward inside of autocast, no
scaler. ``deit``: as DeiT's training does: AdamW, a gradient scaler, a label for each class. Both let cuDNN try all its
algorithms, and in both ``zero_grad`` fills with zeros, as it did before torch 2.0. timm imports torchvision for its
images alone, which are not needed: where it is not there, hollow modules stand in.
"""

import argparse
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import ClassVar

import torch
from torch import nn

STEPS = 3


class Hollow(ModuleType):
    """A module with any class that is asked for."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"NEAREST": 0, "BILINEAR": 2, "BICUBIC": 3, "BOX": 4, "HAMMING": 5, "LANCZOS": 1})


class HollowFinder(MetaPathFinder, Loader):
    """Finds torchvision."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if find_spec("torchvision") is None:
    sys.meta_path.append(HollowFinder())

import timm  # noqa: E402


def benchmark(model: nn.Module, images: torch.Tensor) -> None:
    """As timm's benchmark.py of version 0.6.6."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.float16):
            scores = model(images)
            labels = torch.empty(len(images), device="cuda", dtype=torch.long).random_(1000)
            nn.functional.cross_entropy(scores, labels).backward()
        optimizer.step()


def deit(model: nn.Module, images: torch.Tensor) -> None:
    """As DeiT's main.py with its defaults."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, foreach=False)
    scaler = torch.amp.GradScaler("cuda")
    labels = torch.rand(len(images), 1000, device="cuda")
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.float16):
            scores = model(images)
            loss = torch.sum(-labels * nn.functional.log_softmax(scores, dim=-1), dim=-1).mean()
        loss.item()
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--like", choices=["benchmark", "deit"], default="benchmark")
    parser.add_argument("--drop-path", type=float)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    model = timm.create_model(options.model, drop_path_rate=options.drop_path).cuda().train()
    images = torch.randn(options.batch, 3, options.size, options.size, device="cuda")
    {"benchmark": benchmark, "deit": deit}[options.like](model, images)


if __name__ == "__main__":
    main()
