"""Gradient accumulation with loss scaling and gradient clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from click import UsageError
from torch import Tensor, nn
from torch.optim import Optimizer

from ampmem.workloads.common import WorkloadOptions, choice, command, count, flag, make_optimizer, report_step

ACCUMULATION = 4
MAX_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the model and of one micro-batch."""

    layers: int
    width: int
    batch_size: int


PRESETS = {
    "tiny": Config(layers=2, width=128, batch_size=8),
    "small": Config(layers=4, width=512, batch_size=64),
    "full": Config(layers=24, width=2048, batch_size=512),
}


class Block(nn.Module):
    """Two linear layers behind a norm and around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, width)`` to the same shape."""
        x = x + self.down(F.relu(self.up(self.norm(x))))
        return x


class Regressor(nn.Module):
    """Blocks and a linear head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, width)`` to the same shape."""
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def build(
    options: WorkloadOptions, *, accumulation: int = ACCUMULATION
) -> tuple[Regressor, Optimizer, list[tuple[Tensor, Tensor]]]:
    """The model, its optimizer, and ``accumulation`` micro-batches: inputs and targets, both ``(batch, width)``."""
    torch.manual_seed(options.seed)
    config = PRESETS[options.preset]
    model = Regressor(config).to(options.device)
    optimizer = make_optimizer(options.optimizer or "adamw", model.parameters())
    batch_size = options.batch_size or config.batch_size
    data = torch.randn(accumulation, 2, batch_size, config.width).to(options.device)
    return model, optimizer, [(inputs, targets) for inputs, targets in data]


def build_scaler(options: WorkloadOptions, scaler: str = "auto") -> torch.amp.GradScaler:
    """The scaler: ``on`` scales in every precision, ``off`` in none, ``auto`` when autocast casts to fp16."""
    enabled = options.needs_scaler if scaler == "auto" else scaler == "on"
    return torch.amp.GradScaler(options.device.type, enabled=enabled)


def update(
    options: WorkloadOptions,
    model: Regressor,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    *,
    overflow: bool = False,
) -> float:
    """One optimizer step on all the micro-batches; returns their mean loss.

    ``overflow`` makes the gradients infinite, as an unlucky batch does, and so the scaler skips the step.
    """
    total = 0.0
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        with options.autocast():
            loss = F.mse_loss(model(inputs), targets) / len(micro_batches)
        total += loss.item()
        if overflow:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)
    scaler.update()
    return total


def train(
    options: WorkloadOptions, *, accumulation: int = ACCUMULATION, scaler: str = "auto", skip_first: bool = False
) -> None:
    """Train with gradient accumulation, loss scaling and gradient clipping; a step is one update."""
    grad_scaler = build_scaler(options, scaler)
    if skip_first and not grad_scaler.is_enabled():
        raise UsageError(
            "--skip-first needs a GradScaler, which skips the step: add --precision amp --dtype fp16, or --scaler on"
        )
    model, optimizer, micro_batches = build(options, accumulation=accumulation)
    model.train()
    for step in range(options.steps):
        overflow = skip_first and step == 0
        loss = update(options, model, optimizer, grad_scaler, micro_batches, overflow=overflow)
        report_step(step, loss)


main = command(
    "accumulate",
    train,
    optimizer="adamw",
    extra=[
        count("--accumulation", ACCUMULATION, "Micro-batches per step."),
        choice(
            "--scaler", ("auto", "on", "off"), "auto", ("Loss scaling; auto turns it on if autocast casts to fp16.")
        ),
        flag("--skip-first", "Make the first step's gradients infinite, so that the scaler skips it."),
    ],
)


if __name__ == "__main__":
    main()
