"""Transformer blocks that keep only their inputs, and run again in backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ampmem.workloads.common import Sizes, WorkloadOptions, command, flag, make_optimizer, train_on_batch

FEATURES = 16
DROPOUT = 0.1


PRESETS = {
    "tiny": Sizes(length=32, layers=2, heads=4, width=128, batch_size=2),
    "small": Sizes(length=128, layers=4, heads=5, width=320, batch_size=4),
    "full": Sizes(length=1024, layers=12, heads=12, width=768, batch_size=16),
}


class Block(nn.Module):
    """Attention and two linear layers, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        x = x + self.dropout(self.attend(self.norm1(x)))
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x

    def attend(self, x: Tensor) -> Tensor:
        """Self-attention: ``(batch, time, width)`` to the same shape."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


class CheckpointedEncoder(nn.Module):
    """A linear layer in, checkpointed blocks, and a linear layer out."""

    def __init__(self, config: Sizes, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inputs = nn.Linear(FEATURES, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.outputs = nn.Linear(config.width, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, FEATURES)`` to the same shape."""
        x = self.inputs(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        out: Tensor = self.outputs(self.norm(x))
        return out


def build(
    options: WorkloadOptions, *, use_reentrant: bool = False
) -> tuple[CheckpointedEncoder, Optimizer, tuple[Tensor, Tensor]]:
    """The model, its optimizer, and the one batch: inputs and targets, both ``(batch, time, FEATURES)``."""
    torch.manual_seed(options.seed)
    config = PRESETS[options.preset]
    model = CheckpointedEncoder(config, use_reentrant=use_reentrant).to(options.device)
    optimizer = make_optimizer(options.optimizer or "adamw", model.parameters())
    inputs, targets = torch.randn(2, options.batch_size or config.batch_size, config.length, FEATURES)
    return model, optimizer, (inputs.to(options.device), targets.to(options.device))


def train(options: WorkloadOptions, *, use_reentrant: bool = False) -> None:
    """Train transformer blocks under activation checkpointing on random sequences."""
    train_on_batch(options, *build(options, use_reentrant=use_reentrant))


main = command(
    "checkpointed",
    train,
    optimizer="adamw",
    extra=[flag("--use-reentrant", "Use checkpoint's older, reentrant implementation.")],
)


if __name__ == "__main__":
    main()
