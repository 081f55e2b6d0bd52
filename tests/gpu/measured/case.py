"""Trains one model for some steps: the script that ``truth.py`` measures, records and simulates, unchanged.

    python tests/gpu/measured/case.py CASE PRECISION [--steps 3] [--device cuda]

PRECISION is fp32, amp (bfloat16) or amp-nocache. Nothing of ampmem is used but the models of its workloads. Models of
torchvision and transformers are made from their configurations, with random weights; where the package is missing it
exits with 3.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOT_INSTALLED: Final = 3
_Step = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model; ``build`` gives it with a function that computes a loss, on the device that it is given."""

    build: Callable[[torch.device], tuple[nn.Module, _Step]]
    adam: bool = True


def _workload(name: str, preset: str, **extra: Any) -> Callable[[Any], None]:
    """One of ampmem's own, which trains itself."""

    def train(options: argparse.Namespace) -> None:
        common = import_module("ampmem.workloads.common")
        chosen = common.WorkloadOptions(
            preset=preset, device=torch.device(options.device), precision=options.precision, steps=options.steps
        )
        import_module(f"ampmem.workloads.{name}").train(chosen, **extra)

    return train


def _images(model: nn.Module, device: torch.device, batch: int, size: int = 224, classes: int = 1000) -> _Step:
    x = torch.randn(batch, 3, size, size).to(device)
    labels = torch.randint(classes, (batch,)).to(device)
    return lambda: F.cross_entropy(model(x), labels)


def _vision(name: str, batch: int, size: int = 224) -> Case:
    def build(device: torch.device) -> tuple[nn.Module, _Step]:
        model = getattr(import_module("torchvision.models"), name)(weights=None).to(device)
        return model, _images(model, device, batch, size)

    return Case(build=build, adam=False)


def _gpt2(batch: int, length: int) -> Case:
    def build(device: torch.device) -> tuple[nn.Module, _Step]:
        hub: Any = import_module("transformers")
        config = hub.GPT2Config(use_cache=False)
        model = hub.GPT2LMHeadModel(config).to(device)
        tokens = torch.randint(config.vocab_size, (batch, length)).to(device)
        return model, lambda: model(input_ids=tokens, labels=tokens).loss

    return Case(build=build)


def _bert(batch: int, length: int) -> Case:
    def build(device: torch.device) -> tuple[nn.Module, _Step]:
        hub: Any = import_module("transformers")
        config = hub.BertConfig()
        model = hub.BertForMaskedLM(config).to(device)
        tokens = torch.randint(config.vocab_size, (batch, length)).to(device)
        return model, lambda: model(input_ids=tokens, labels=tokens).loss

    return Case(build=build)


class _Small(nn.Module):
    """Convolutions, norms and a classifier, for trying out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        return self.classifier(self.norm(self.conv(x)).relu().mean((2, 3)))


def _small(device: torch.device) -> tuple[nn.Module, _Step]:
    model = _Small().to(device)
    return model, _images(model, device, 4, 32, 10)


CASES: Final[dict[str, Case | Callable[[Any], None]]] = {
    "gpt-124m": _workload("gpt", "full", tied=True),
    "resnet50": _workload("resnet", "full"),
    "hf-gpt2": _gpt2(8, 1024),
    "tv-convnext": _vision("convnext_tiny", 64),
    "bert": _workload("bert", "full"),
    "tv-mobilenet": _vision("mobilenet_v3_large", 128),
    "checkpointed": _workload("checkpointed", "full"),
    "tv-resnet18": _vision("resnet18", 128),
    "hf-bert": _bert(32, 256),
    "gpt-small": _workload("gpt", "small"),
    "tv-resnet50": _vision("resnet50", 32),
    "accumulate": _workload("accumulate", "full"),
    "gan": _workload("gan", "full"),
    "reuse": _workload("reuse", "full"),
    "tv-vit": _vision("vit_b_16", 32),
    "tv-efficientnet": _vision("efficientnet_b0", 64),
    "tiny-gpt": _workload("gpt", "tiny"),
    "tiny-cnn": Case(build=_small),
}
"""What is worth most first: the time may be over after some of them."""
TINY: Final = ("tiny-gpt", "tiny-cnn")
"""For trying this out; left out unless they are named."""


def train(case: Case, options: argparse.Namespace) -> None:
    """A training loop as people write it."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    model, step = case.build(device)
    model.train()
    rates: dict[str, Any] = {"lr": 1e-4}
    optimizer = (
        torch.optim.AdamW(model.parameters(), **rates)
        if case.adam
        else torch.optim.SGD(model.parameters(), momentum=0.9, **rates)
    )
    for number in range(options.steps):
        optimizer.zero_grad()
        with torch.autocast(
            device.type,
            dtype=torch.bfloat16,
            enabled=options.precision != "fp32",
            cache_enabled=options.precision != "amp-nocache",
        ):
            loss = step()
        loss.backward()
        optimizer.step()
        print(f"step {number} loss {loss.item():.4f}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("precision", choices=("fp32", "amp", "amp-nocache"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    case = CASES[options.case]
    try:
        if isinstance(case, Case):
            train(case, options)
        else:
            case(options)
    except ModuleNotFoundError as error:
        print(f"not installed: {error.name}")
        sys.exit(NOT_INSTALLED)


if __name__ == "__main__":
    main()
