"""A decoder-only language model, trained to predict the next token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ampmem.workloads.common import (
    Sizes,
    WorkloadOptions,
    batches,
    command,
    data_loader,
    flag,
    make_optimizer,
    report_step,
)

PRESETS = {
    "tiny": Sizes(vocabulary=512, length=32, layers=2, heads=4, width=128, batch_size=2),
    "small": Sizes(vocabulary=8192, length=128, layers=4, heads=6, width=384, batch_size=4),
    # GPT-2's sizes: 124 M parameters with --tied, 163 M without.
    "full": Sizes(vocabulary=50257, length=1024, layers=12, heads=12, width=768, batch_size=8),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, time, width))
        return out


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Token and position embeddings, blocks, a last norm and the head."""

    def __init__(self, config: Sizes, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``(batch, time)`` to logits ``(batch, time, vocabulary)``."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(options: WorkloadOptions, *, tied: bool = False) -> tuple[GPT, Optimizer, DataLoader[tuple[Tensor, ...]]]:
    """The model, its optimizer, and a loader of one tensor per batch: token ids ``(batch, length + 1)``."""
    torch.manual_seed(options.seed)
    config = PRESETS[options.preset]
    model = GPT(config, tied=tied).to(options.device)
    optimizer = make_optimizer(options.optimizer or "adamw", model.parameters())
    batch_size = options.batch_size or config.batch_size
    text = torch.randint(config.vocabulary, (2 * batch_size, config.length + 1))
    return model, optimizer, data_loader(text, batch_size=batch_size, seed=options.seed)


def train(options: WorkloadOptions, *, tied: bool = False) -> None:
    """Train a decoder-only language model on random tokens."""
    model, optimizer, loader = build(options, tied=tied)
    scaler = options.grad_scaler()
    model.train()
    for step, (text,) in batches(loader, options.steps):
        text = text.to(options.device)
        inputs, targets = text[:, :-1], text[:, 1:]
        optimizer.zero_grad()
        with options.autocast():
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        report_step(step, loss.item())


main = command(
    "gpt", train, optimizer="adamw", extra=[flag("--tied", "Let the head share the token embedding's weight.")]
)


if __name__ == "__main__":
    main()
