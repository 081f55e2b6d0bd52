"""A language model written from first principles: einsum layers, RMSNorm, RoPE, SwiGLU, an AdamW of its own.

No fused kernels: attention is an explicit softmax over a masked matrix of scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from click import UsageError
from torch import Tensor, nn
from torch.optim import Optimizer

from ampmem.workloads.common import WorkloadOptions, command, count, flag, make_optimizer, report_step

ROPE_BASE = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the model and of one batch; ``hidden`` is the width between the feed-forward's two halves."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    hidden: int
    batch_size: int


PRESETS = {
    "tiny": Config(vocabulary=512, context=32, layers=2, heads=4, width=128, hidden=256, batch_size=2),
    "small": Config(vocabulary=8192, context=128, layers=4, heads=6, width=384, hidden=1024, batch_size=4),
    # 423 M parameters.
    "full": Config(vocabulary=10_000, context=128, layers=24, heads=16, width=1024, hidden=4096, batch_size=4),
}


class Linear(nn.Module):
    """A matrix without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        std = math.sqrt(2 / (inputs + outputs))
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(outputs, inputs), std=std, a=-3 * std, b=3 * std))

    def forward(self, x: Tensor) -> Tensor:
        """``(..., inputs)`` to ``(..., outputs)``."""
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """One vector per token."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(vocabulary, width), a=-3, b=3))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids of any shape to that shape with one more dimension, the width."""
        return self.weight[tokens]


class RMSNorm(nn.Module):
    """Scales every vector to a root mean square of 1."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """``(..., width)`` to the same shape."""
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = x * scale
        return (self.weight * x).to(dtype)


class RoPE(nn.Module):
    """Turns pairs of neighbouring elements by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        rates = ROPE_BASE ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(context), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., time, width)`` to the same shape."""
        time = x.shape[-2]
        cos, sin = self.cos[:time], self.sin[:time]
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * cos - odd * sin
        other = even * sin + odd * cos
        return torch.stack((turned, other), dim=-1).flatten(-2)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension."""
    shifted = x - x.max(dim=-1, keepdim=True).values
    exponentials = shifted.exp()
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention: ``(batch, heads, time, width)`` each, and a bool mask ``(time, time)``, to the same shape."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(query.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    return torch.einsum("...qk,...kd->...qd", softmax(scores), value)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int, rope: RoPE) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.output = Linear(width, width)
        self.rope = rope

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        time = x.shape[1]
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in (query, key, value))
        query = self.rope(query)
        key = self.rope(key)
        positions = torch.arange(time, device=x.device)
        mask = positions[:, None] >= positions
        out: Tensor = self.output(attend(query, key, value, mask).transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """A gated feed-forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden)
        self.down = Linear(hidden, width)
        self.up = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., width)`` to the same shape."""
        gate = self.gate(x)
        out: Tensor = self.down(gate * torch.sigmoid(gate) * self.up(x))
        return out


class Block(nn.Module):
    """Attention, then the feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: Config, rope: RoPE) -> None:
        super().__init__()
        self.attention = Attention(config.width, config.heads, rope)
        self.feed_forward = SwiGLU(config.width, config.hidden)
        self.norm1 = RMSNorm(config.width)
        self.norm2 = RMSNorm(config.width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        attended = self.attention(self.norm1(x))
        x = x + attended
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class LM(nn.Module):
    """Token embeddings, blocks, a last norm and the head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocabulary, config.width)
        rope = RoPE(config.width // config.heads, config.context)
        self.blocks = nn.ModuleList(Block(config, rope) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = Linear(config.width, config.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``(batch, time)`` to logits ``(batch, time, vocabulary)``."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of ``(batch, time, vocabulary)`` against token ids ``(batch, time)``; a scalar."""
    logits = logits - logits.max(dim=-1, keepdim=True).values
    logits = logits - logits.exp().sum(dim=-1, keepdim=True).log()
    return (-logits).gather(-1, targets.unsqueeze(-1)).mean()


class AdamW(Optimizer):
    """AdamW after the paper, one parameter at a time, with a new tensor for every term."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update; returns the result of ``closure``, ``None`` without one."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad.data
                step = state.get("step", 1)
                parameter.data -= lr * group["weight_decay"] * parameter.data
                first = state.get("first", torch.zeros_like(parameter.data))
                second = state.get("second", torch.zeros_like(parameter.data))
                next_first = beta1 * first + (1 - beta1) * gradient
                next_second = beta2 * second + (1 - beta2) * gradient**2
                rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
                parameter.data -= rate * next_first / (torch.sqrt(next_second) + group["eps"])
                state["first"], state["second"], state["step"] = next_first, next_second, step + 1
        return loss


def build(options: WorkloadOptions, **sizes: int | None) -> tuple[LM, Optimizer, tuple[Tensor, Tensor]]:
    """The model, its optimizer, and the one batch: inputs and targets, both ``(batch, context)``.

    ``sizes`` are fields of :class:`Config`; ``None`` keeps the preset's value.
    """
    torch.manual_seed(options.seed)
    config = replace(PRESETS[options.preset], **{name: size for name, size in sizes.items() if size is not None})
    if config.width % (2 * config.heads):
        raise UsageError(f"--width {config.width} cannot be divided into {config.heads} heads of an even width")
    model = LM(config).to(options.device)
    name = options.optimizer or "adamw"
    optimizer = AdamW(model.parameters()) if name == "adamw" else make_optimizer(name, model.parameters())
    inputs, targets = torch.randint(config.vocabulary, (2, options.batch_size or config.batch_size, config.context))
    return model, optimizer, (inputs.to(options.device), targets.to(options.device))


def train(options: WorkloadOptions, *, inference: bool = False, **sizes: int | None) -> None:
    """Train a language model that is written from first principles on random tokens."""
    model, optimizer, (inputs, targets) = build(options, **sizes)
    if inference:
        infer(options, model, inputs)
        return
    scaler = options.grad_scaler()
    model.train()
    for step in range(options.steps):
        optimizer.zero_grad()
        with options.autocast():
            logits = model(inputs)
        loss = cross_entropy(logits, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        report_step(step, loss.item())


@torch.inference_mode()
def infer(options: WorkloadOptions, model: LM, inputs: Tensor) -> None:
    """Predict the tokens after ``inputs``, once per step."""
    model.eval()
    for step in range(options.steps):
        with options.autocast():
            model(inputs)
        print(f"batch {step}", flush=True)


main = command(
    "lm",
    train,
    optimizer="adamw",
    extra=[
        count("--context", None, "Tokens per sample; default: the preset's."),
        count("--layers", None, "Blocks; default: the preset's."),
        count("--heads", None, "Attention heads; default: the preset's."),
        count("--width", None, "Elements per token; default: the preset's."),
        count("--hidden", None, "Width inside the feed-forward; default: the preset's."),
        flag("--inference", "Do not train: only run the model, without gradients."),
    ],
)


if __name__ == "__main__":
    main()
