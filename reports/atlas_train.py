"""Trains one model of the atlas for two steps, on a GPU or on a simulated one.

ampmem profile --gpu h100 reports/atlas_train.py "BERT base" --batch 8 --precision amp --optimizer adamw
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from shlex import quote
from typing import Any

import torch
from atlas_models import BY_NAME, AtlasModel
from torch import nn

FP32, AMP, NO_CACHE, BF16 = "fp32", "amp", "amp-nocache", "bf16"
PRECISIONS = (FP32, AMP, NO_CACHE, BF16)
ADAMW, SGD = "adamw", "sgd"
OPTIMIZERS = (ADAMW, SGD)
STEPS = 2
GPU = "h100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run: the model, and how it is trained."""

    model: str
    optimizer: str
    checkpointing: bool
    precision: str
    batch: int

    @property
    def command(self) -> str:
        """The command that makes the run again, from the root of the repository."""
        options = f"--batch {self.batch} --precision {self.precision} --optimizer {self.optimizer}"
        more = " --checkpointing" if self.checkpointing else ""
        return f"ampmem profile --gpu {GPU} reports/atlas_train.py {quote(self.model)} {options}{more}"


def train(setting: Setting, *, compiled: bool = False) -> None:
    """Train for two steps as ``setting`` says; ``compiled`` compiles the model, as a whole."""
    model = BY_NAME[setting.model]
    network = built(model, setting)
    if compiled:
        network.compile()
    optimizer = optimizer_of(network, setting.optimizer)
    autocast = torch.autocast(
        "cuda",
        dtype=torch.bfloat16,
        enabled=setting.precision in (AMP, NO_CACHE),
        cache_enabled=setting.precision != NO_CACHE,
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(model, setting)
        with autocast:
            loss = model.loss(network, batch)
        loss.backward()
        optimizer.step()


def built(model: AtlasModel, setting: Setting) -> nn.Module:
    """The model on the GPU, with weights in bfloat16 for :data:`BF16`, else in FP32."""
    with default_dtype(torch.bfloat16 if setting.precision == BF16 else torch.float32), torch.device("cuda"):
        network = model.build()
    network.train()
    if setting.precision == BF16:
        network.to(torch.bfloat16)
    if setting.checkpointing:
        if model.checkpointing is None:
            raise SystemExit(f"{model.library} offers no activation checkpointing for {model.name}")
        model.checkpointing(network)
    return network


def batch_of(model: AtlasModel, setting: Setting) -> dict[str, torch.Tensor]:
    """A synthetic batch on the GPU; its floating-point tensors have the weights' type."""
    with torch.device("cuda"), default_dtype(torch.bfloat16 if setting.precision == BF16 else torch.float32):
        return model.batch(setting.batch)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have the type ``dtype`` inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def optimizer_of(network: nn.Module, name: str) -> torch.optim.Optimizer:
    """The optimizer called ``name`` for all weights of ``network``."""
    if name == ADAMW:
        return torch.optim.AdamW(network.parameters(), lr=1e-4)
    return torch.optim.SGD(network.parameters(), lr=1e-2, momentum=0.9)


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(BY_NAME), metavar="MODEL", help=", ".join(BY_NAME))
    parser.add_argument("--batch", type=int, default=1, metavar="N")
    parser.add_argument("--precision", choices=PRECISIONS, default=FP32)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=ADAMW)
    parser.add_argument(
        "--checkpointing", action="store_true", help="activation checkpointing, as the library offers it"
    )
    parser.add_argument("--compiled", action="store_true", help="model.compile()")
    given: dict[str, Any] = vars(parser.parse_args())
    train(compiled=given.pop("compiled"), setting=Setting(**given))


if __name__ == "__main__":
    main()
