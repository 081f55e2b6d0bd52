"""A GPT of 124 million parameters whose layers are written out by hand, as a book teaches it, three steps of training.

    python book_gpt.py [--bfloat16] [--native]

Eight samples of 1,024 tokens, dropout, AdamW; after the first step it is evaluated on a batch of either set. With
``--bfloat16`` the weights are of that type, the causal mask is made on the fly and AdamW is fused; with ``--native``
the norms and the activation function are PyTorch's.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, TOKENS, WIDTH, HEADS, LAYERS, DROPOUT, BATCH = 50_257, 1024, 768, 12, 12, 0.1, 8


class Norm(nn.Module):
    """Layer norm of plain operations."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        normed: Tensor = self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift
        return normed


class Gelu(nn.Module):
    """The approximation with the hyperbolic tangent, of plain operations."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2 / math.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    """With the whole matrix of scores, masked in place."""

    def __init__(self, keep_mask: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS).triu(1) if keep_mask else None)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        keys, queries, values = (
            layer(x).view(samples, tokens, HEADS, -1).transpose(1, 2) for layer in (self.key, self.query, self.value)
        )
        scores = queries @ keys.transpose(2, 3)
        mask = torch.ones(tokens, tokens, device=x.device).triu(1) if self.mask is None else self.mask
        scores.masked_fill_(mask.bool()[:tokens, :tokens], -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        mixed = (weights @ values).transpose(1, 2)
        mixed = mixed.reshape(samples, tokens, WIDTH)
        out: Tensor = self.out(mixed)
        return out


class Block(nn.Module):
    """Attention and two linear layers, each with a norm before and a residual around."""

    def __init__(self, keep_mask: bool, native: bool) -> None:
        super().__init__()
        self.attention = Attention(keep_mask)
        gelu = nn.GELU(approximate="tanh") if native else Gelu()
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(norm(native) for _ in range(2))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        for layer, before in zip((self.attention, self.hidden), self.norms, strict=True):
            kept = x
            x = before(x)
            x = layer(x)
            x = self.dropout(x)
            x = x + kept
        return x


class Gpt(nn.Module):
    """The model."""

    def __init__(self, keep_mask: bool, native: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(keep_mask, native) for _ in range(LAYERS)))
        self.norm, self.head = norm(native), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.tokens(ids)
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        x = embedded + places
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        return logits


def norm(native: bool) -> nn.Module:
    """PyTorch's, or that by hand."""
    return nn.LayerNorm(WIDTH) if native else Norm()


def loss_of(model: nn.Module) -> Tensor:
    """On a batch of its own."""
    ids, following = (torch.randint(VOCABULARY, (BATCH, TOKENS)).cuda() for _ in range(2))
    logits = model(ids)
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--native", action="store_true")
    options = parser.parse_args()
    model = Gpt(keep_mask=not options.bfloat16, native=options.native).cuda()
    if options.bfloat16:
        model = model.to(torch.bfloat16)
    fused = True if options.bfloat16 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=fused)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        if step == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    loss_of(model).item()
            model.train()


if __name__ == "__main__":
    main()
