"""Llama 3.2 3B, whole, in bfloat16: two packed rows of 4096 tokens, as torchtune's table of optimization flags has it.

    python llama_tune.py [--compile] [--chunked] [--checkpoint] [--step-in-backward]

Attention over packed rows is flex attention, which is compiled in each case. ``--compile`` compiles each layer, and the
loss of a chunk: the recipe throws the compiled loss of the whole away. ``--chunked`` has logits and loss in eight
chunks. AdamW is fused: what the runs with checkpoints took has no room for the temporaries of another one.
"""

import argparse
import gc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS, HEADS, PAIRS, HIDDEN, VOCABULARY = 3072, 28, 24, 8, 8192, 128256
ROWS, LENGTH, HEAD, CHUNKS = 2, 4096, 128, 8
IGNORED = -100

compiled_attention = torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable(recursive=False)
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Compiled for itself, in compiled layers too."""
    return compiled_attention(q, k, v, block_mask=mask)  # type: ignore[no-any-return]


class Norm(nn.Module):
    """RMSNorm in plain ops, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Normalized over the last dimension."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.scale


class Turns(nn.Module):
    """Rotary embeddings, at the places that each token has in its own sample."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(131_072, HEAD // 2, 2, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """(batch, length, heads, width)."""
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        turns = self.cache[places].view(-1, pairs.size(1), 1, pairs.size(3), 2)
        turned = [
            pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1],
            pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1],
        ]
        return torch.stack(turned, -1).flatten(3).type_as(x)


class Layer(nn.Module):
    """One layer; the turns are the same module in all of them."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns = turns
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, PAIRS * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, PAIRS * HEAD, bias=False)
        self.output_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.sa_norm, self.mlp_norm = Norm(), Norm()

    def forward(self, x: Tensor, mask: Any, places: Tensor) -> Tensor:
        """(batch, length, width)."""
        h = self.attended(self.sa_norm(x), mask, places) + x
        wide = self.mlp_norm(h)
        return h + self.w2(F.silu(self.w1(wide)) * self.w3(wide))  # type: ignore[no-any-return]

    def attended(self, x: Tensor, mask: Any, places: Tensor) -> Tensor:
        """Attention with grouped keys and values, which are repeated."""
        rows, length, _ = x.shape
        q = self.turns(self.q_proj(x).view(rows, length, HEADS, HEAD), places).transpose(1, 2)
        k, v = self.k_proj(x).view(rows, length, -1, HEAD), self.v_proj(x).view(rows, length, -1, HEAD)
        k, v = self.turns(k, places).transpose(1, 2), v.transpose(1, 2)
        wide = (rows, PAIRS, HEADS // PAIRS, -1, HEAD)
        k, v = (each.unsqueeze(2).expand(wide).flatten(1, 2) for each in (k, v))
        out = attention(q, k, v, mask).transpose(1, 2).contiguous().view(rows, length, -1)
        return self.output_proj(out)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The model; its output has the embeddings' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        turns = Turns()
        self.layers = nn.ModuleList(Layer(turns) for _ in range(LAYERS))
        self.norm = Norm()
        self.checkpointed = False
        self.chunks = 0

    def forward(self, tokens: Tensor, mask: Any, places: Tensor) -> list[Tensor]:
        """Logits: one tensor in float32, or as many as chunks in bfloat16."""
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            if self.checkpointed:
                h = checkpoint(layer, h, mask, places, use_reentrant=False, preserve_rng_state=True)
            else:
                h = layer(h, mask, places)
        h = self.norm(h)
        if self.chunks:
            return [F.linear(part, self.tok_embeddings.weight) for part in h.chunk(self.chunks, dim=1)]
        return [F.linear(h, self.tok_embeddings.weight).float()]


class Loss(nn.Module):
    """Cross entropy, over all logits or one chunk after another."""

    def part(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over one chunk."""
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")

    def forward(self, logits: list[Tensor], labels: Tensor) -> Tensor:
        """The mean over all labels."""
        parts = [part.reshape(-1) for part in labels.chunk(len(logits), dim=1)]
        flat = [part.reshape(-1, part.size(-1)) for part in logits]
        total: Any = 0.0
        for logit, label in zip(flat, parts, strict=True):
            total += self.part(logit, label)
        return total / (labels != IGNORED).sum()  # type: ignore[no-any-return]


def batch() -> dict[str, Any]:
    """Two rows of four samples each, on the device."""
    samples = torch.arange(LENGTH, device="cuda") // (LENGTH // 4)
    samples = samples.expand(ROWS, LENGTH).contiguous()

    def same_sample(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (samples[row, query] == samples[row, key])

    mask = create_block_mask(same_sample, ROWS, None, LENGTH, LENGTH, device="cuda")
    places = torch.arange(LENGTH).remainder(LENGTH // 4).expand(ROWS, LENGTH).contiguous()
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    return {"tokens": tokens.cuda(), "labels": tokens.cuda(), "places": places.cuda(), "mask": mask}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--compile", "--chunked", "--checkpoint", "--step-in-backward"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Llama()
    model.checkpointed, model.chunks = options.checkpoint, CHUNKS * options.chunked
    loss_of: Any = Loss() if options.chunked else nn.CrossEntropyLoss()
    if options.compile:
        for layer in model.layers:
            layer.compile()
        if options.chunked:
            loss_of.part = torch.compile(loss_of.part)
    optimizers: dict[Tensor, torch.optim.Optimizer] = {}
    if options.step_in_backward:

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for each in model.parameters():
            optimizers[each] = torch.optim.AdamW([each], lr=2e-5, fused=True)
            each.register_post_accumulate_grad_hook(update)
        optimizer = None
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    ignored = torch.full((ROWS, 1), IGNORED, device="cuda")
    for _ in range(3):
        data = batch()
        gc.collect()  # making the mask leaves 144 MiB to it, which would go at a moment of chance
        labels = data.pop("labels")
        tokens = (labels != IGNORED).sum()
        logits = model(**data)
        labels = torch.hstack((labels[..., 1:], ignored))
        if options.chunked:
            loss = loss_of(logits, labels)
        else:
            loss = loss_of(logits.pop().reshape(-1, VOCABULARY), labels.reshape(-1))
        del logits
        loss = loss * tokens
        loss.backward()
        if optimizer is not None:
            for parameter in model.parameters():
                parameter.grad *= 1 / tokens
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()


if __name__ == "__main__":
    main()
