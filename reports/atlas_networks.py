"""The networks of the atlas that no library has, or only a package that does not load with this torch.

Each is written from its publication.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TransformerOfTorch(nn.Module):
    """``nn.Transformer`` in its base size, with token and position embeddings and a head."""

    def __init__(self, vocabulary: int = 37_000, width: int = 512, length: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.transformer = nn.Transformer(width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(
            self.embedding(source) + self.places,
            self.embedding(target) + self.places,
            tgt_mask=mask.to(self.places.dtype),
            tgt_is_causal=True,
        )
        logits: Tensor = self.head(hidden)
        return logits


class LstmLanguageModel(nn.Module):
    """Embeddings, two layers of LSTM, dropout and a head: Zaremba's large model."""

    def __init__(self, vocabulary: int = 10_000, width: int = 1500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.65, batch_first=True)
        self.dropout = nn.Dropout(0.65)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(ids)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


class MixerBlock(nn.Module):
    """One block of an MLP-Mixer: over the patches, then over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.over_patches = nn.Sequential(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.over_channels(self.norms[1](x))
        return mixed


class Mixer(nn.Module):
    """MLP-Mixer B/16 for 224 x 224 pixels."""

    def __init__(self, width: int = 768, depth: int = 12, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(MixerBlock((224 // patch) ** 2, width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


def layers_of(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, each with a ReLU."""
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())))


class Dlrm(nn.Module):
    """A recommender: 26 tables of 100,000 rows, dot products between all features, and two small MLPs."""

    def __init__(self, tables: int = 26, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = layers_of(13, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(layers_of(width + pairs, 1024, 1024, 512, 256), nn.Linear(256, 1))
        places = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("rows", places[0])
        self.register_buffer("columns", places[1])

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        low = self.bottom(dense)
        found = [table(indices[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([low, *(each.to(low.dtype) for each in found)], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.rows, self.columns]
        logits: Tensor = self.top(torch.cat([low, products], dim=1))
        return logits


class UnetBlock(nn.Module):
    """Two convolutions with group norms, and a residual connection."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.around(x) + self.second(self.first(x))
        return out


class Unet(nn.Module):
    """A U-Net in a diffusion model's usual shape, without attention."""

    def __init__(self, widths: tuple[int, ...] = (128, 256, 256, 512)) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        befores = (widths[0], *widths[:-1])
        self.down = nn.ModuleList(map(UnetBlock, befores, widths))
        self.middle = UnetBlock(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            UnetBlock(2 * width, before) for before, width in zip(befores[::-1], widths[::-1], strict=True)
        )
        self.last = nn.Sequential(nn.GroupNorm(32, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 3, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        x, skips = self.first(images), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        out: Tensor = self.last(x)
        return out


def vgg16() -> nn.Module:
    """VGG-16 as published, with ReLUs in place."""
    widths: tuple[int, ...] = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
    layers: list[nn.Module] = []
    before = 3
    for width in widths:
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
        before = width
    hidden = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    hidden += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Flatten(), *hidden, nn.Linear(4096, 1000))


def normed(before: int, after: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution of Darknet: with a batch norm and a leaky ReLU in place."""
    convolution = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.LeakyReLU(0.1, inplace=True))


class DarknetBlock(nn.Module):
    """Two convolutions and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(normed(width, width // 2, 1), normed(width // 2, width, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inside(x)
        return out


class Yolo(nn.Module):
    """YOLOv3: Darknet-53 and three heads, the second and third of which also use the head before; 80 classes."""

    def __init__(self, values: int = 85) -> None:
        super().__init__()
        self.first = normed(3, 32, 3)
        self.stages = nn.ModuleList()
        for width, blocks in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
            block = [DarknetBlock(width) for _ in range(blocks)]
            self.stages.append(nn.Sequential(normed(width // 2, width, 3, 2), *block))
        self.necks, self.heads, self.ways = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for width, more in ((512, 512), (256, 256), (128, 128)):
            before = 1024 if width == 512 else 3 * more
            pair = (normed(width, 2 * width, 3), normed(2 * width, width, 1))
            again = (normed(width, 2 * width, 3), normed(2 * width, width, 1))
            self.necks.append(nn.Sequential(normed(before, width, 1), *pair, *again))
            self.heads.append(nn.Sequential(normed(width, 2 * width, 3), nn.Conv2d(2 * width, 3 * values, 1)))
            self.ways.append(normed(width, width // 2, 1) if width > 128 else nn.Identity())
        self.values = values

    def forward(self, images: Tensor) -> dict[int, Tensor]:
        x, seen = self.first(images), []
        for stage in self.stages:
            x = stage(x)
            seen.append(x)
        found: dict[int, Tensor] = {}
        for neck, head, way, before in zip(self.necks, self.heads, self.ways, (None, seen[3], seen[2]), strict=True):
            if before is not None:
                x = torch.cat([F.interpolate(x, scale_factor=2), before], dim=1)
            x = neck(x)
            grid = head(x)
            batch, _, size, _ = grid.shape
            found[size] = grid.view(batch, 3, self.values, size, size).permute(0, 1, 3, 4, 2)
            x = way(x)
        return found


class DenseLayer(nn.Module):
    """One layer of a dense block: its input, and 32 more channels."""

    def __init__(self, before: int, growth: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(before),
            nn.ReLU(inplace=True),
            nn.Conv2d(before, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], dim=1)


class DenseNet(nn.Module):
    """DenseNet-121 for 224 x 224 pixels."""

    def __init__(self, depths: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        layers.append(nn.MaxPool2d(3, 2, 1))
        for place, depth in enumerate(depths):
            layers += [DenseLayer(width + growth * i, growth) for i in range(depth)]
            width += depth * growth
            layers.append(nn.BatchNorm2d(width))
            layers.append(nn.ReLU(inplace=True))
            if place < len(depths) - 1:
                layers += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
                width //= 2
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images).mean(dim=(2, 3)))
        return logits


class SageLayer(nn.Module):
    """A GraphSAGE layer with the mean over neighbours."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.own = nn.Linear(before, after)
        self.neighbours = nn.Linear(before, after, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        total = torch.zeros_like(x).index_add(0, target, x[source])
        ones = torch.ones(len(target), 1, dtype=x.dtype, device=x.device)
        degree = torch.zeros(len(x), 1, dtype=x.dtype, device=x.device).index_add(0, target, ones)
        out: Tensor = self.own(x) + self.neighbours(total / degree.clamp(min=1))
        return out


class GraphSage(nn.Module):
    """Three GraphSAGE layers of 512, with ReLU and dropout between them."""

    def __init__(self, features: int = 50, width: int = 512, labels: int = 121) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SageLayer(features, width), SageLayer(width, width), SageLayer(width, labels)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.dropout(F.relu(layer(x, edges)), training=self.training)
        logits: Tensor = self.layers[-1](x, edges)
        return logits


class DeepSpeech(nn.Module):
    """Deep Speech 2: two convolutions over time and frequency, five GRUs in both directions, a head for 29 letters."""

    def __init__(self, width: int = 800, letters: int = 29) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5), bias=False),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5), bias=False),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
        )
        self.recurrent = nn.GRU(32 * 41, width, num_layers=5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, letters)

    def forward(self, sound: Tensor) -> Tensor:
        heard = self.convolutions(sound).permute(0, 3, 1, 2).flatten(2)
        hidden, _ = self.recurrent(heard)
        logits: Tensor = self.head(hidden)
        return logits
