"""An encoder that classifies sequences of different lengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ampmem.workloads.common import Sizes, WorkloadOptions, batches, command, data_loader, make_optimizer, report_step

CLASSES = 4
PAD = 0
DROPOUT = 0.1


PRESETS = {
    "tiny": Sizes(vocabulary=512, length=32, layers=2, heads=4, width=128, batch_size=2),
    "small": Sizes(vocabulary=8192, length=64, layers=4, heads=5, width=320, batch_size=8),
    # BERT base.
    "full": Sizes(vocabulary=30522, length=512, layers=12, heads=12, width=768, batch_size=16),
}


class Embeddings(nn.Module):
    """Word plus position, normed."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocabulary, config.width, padding_idx=PAD)
        self.position = nn.Embedding(config.length, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``(batch, time)`` to ``(batch, time, width)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.dropout(self.norm(self.word(tokens) + self.position(positions)))
        return out


class Attention(nn.Module):
    """Self-attention over the tokens that are not padding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape; ``mask`` is bool ``(batch, 1, 1, time)``, true at real tokens."""
        q, k, v = (
            linear(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Attention, then two linear layers, each with a residual and a norm after it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape; ``mask`` as in :class:`Attention`."""
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        x = self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return x


class BertClassifier(nn.Module):
    """Embeddings, encoder layers, a pooler over the first token, and the classifier."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config.width, config.heads) for _ in range(config.layers))
        self.pooler = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(config.width, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Token ids and bool mask, both ``(batch, time)``, to logits ``(batch, CLASSES)``."""
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        logits: Tensor = self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))
        return logits


def make_data(samples: int, config: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and bool mask, both ``(samples, length)``, and class labels ``(samples,)``."""
    lengths = torch.randint(config.length // 2, config.length + 1, (samples, 1))
    mask = torch.arange(config.length) < lengths
    tokens = torch.randint(PAD + 1, config.vocabulary, (samples, config.length)).masked_fill(~mask, PAD)
    return tokens, mask, torch.randint(CLASSES, (samples,))


def build(options: WorkloadOptions) -> tuple[BertClassifier, Optimizer, DataLoader[tuple[Tensor, ...]]]:
    """The model, its optimizer, and a loader of token ids, masks and labels as :func:`make_data` gives them."""
    torch.manual_seed(options.seed)
    config = PRESETS[options.preset]
    model = BertClassifier(config).to(options.device)
    optimizer = make_optimizer(options.optimizer or "adamw", model.parameters())
    batch_size = options.batch_size or config.batch_size
    return model, optimizer, data_loader(*make_data(2 * batch_size, config), batch_size=batch_size, seed=options.seed)


def train(options: WorkloadOptions) -> None:
    """Train an encoder to classify padded sequences of random tokens."""
    model, optimizer, loader = build(options)
    scaler = options.grad_scaler()
    model.train()
    for step, batch in batches(loader, options.steps):
        tokens, mask, labels = (tensor.to(options.device) for tensor in batch)
        optimizer.zero_grad()
        with options.autocast():
            loss = F.cross_entropy(model(tokens, mask), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        report_step(step, loss.item())


main = command("bert", train, optimizer="adamw")


if __name__ == "__main__":
    main()
