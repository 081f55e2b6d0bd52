"""Small training programs, in plain torch or of ampmem.workloads: what steps.py trains on both sides.

Each is a function of a precision that trains three steps on ``cuda``. In FP32; under float16 autocast with a gradient
scaler, with autocast's cache (``amp``) and without it (``amp-nocache``); or with all tensors in bfloat16 (``bf16``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ampmem.workloads import bert, checkpointed, gan, gpt, resnet
from ampmem.workloads.common import WorkloadOptions

PRECISIONS = ("fp32", "amp", "amp-nocache", "bf16")
STEPS = 3
RANKS = 8
WIDTH, HEADS, LAYERS, TOKENS, BATCH, WORDS = 256, 8, 4, 128, 4, 3000


def workload(train: Callable[[WorkloadOptions], None], **options: Any) -> Callable[[str], None]:
    """A program of :mod:`ampmem.workloads`."""

    def run(precision: str) -> None:
        autocast = precision if precision != "bf16" else "fp32"
        cuda = torch.device("cuda")
        train(WorkloadOptions(device=cuda, precision=autocast, dtype=torch.float16, steps=STEPS, **options))

    return run


def train(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    precision: str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    clip: float | None = 1.0,
) -> None:
    """The usual loop: batches come to the device, the gradients are scaled and clipped, the optimizer updates."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(parameters)
    autocast = precision.startswith("amp")
    scaler = torch.amp.GradScaler("cuda", enabled=autocast)
    for batch in batches:
        given = [each.cuda(non_blocking=True) for each in batch]
        with torch.autocast("cuda", dtype=torch.float16, enabled=autocast, cache_enabled=precision != "amp-nocache"):
            loss = loss_of(model, *given)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def loaded(*tensors: Tensor, batch: int = BATCH) -> Iterable[tuple[Tensor, ...]]:
    """Batches by way of pinned memory."""
    return DataLoader(TensorDataset(*tensors), batch, pin_memory=True)


def words(*, length: int = TOKENS) -> Tensor:
    """So many sequences that there is a batch for each step."""
    return torch.randint(WORDS, (STEPS * BATCH, length))


def next_word(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of a language model."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class GroupedAttention(nn.Module):
    """Attention with fewer heads of keys than of queries, and rotary positions."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        query, key, value = (
            layer(x).unflatten(2, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        repeats = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (turned(key), value))
        found = F.scaled_dot_product_attention(turned(query), key, value, is_causal=True)
        out: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return out


def turned(x: Tensor) -> Tensor:
    """Rotary positions for ``(batch, heads, time, size)``."""
    half = x.shape[-1] // 2
    rates = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), rates).repeat(1, 2)
    other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * angles.cos().to(x.dtype) + other * angles.sin().to(x.dtype)


class LlamaBlock(nn.Module):
    """Attention and a gated MLP, behind RMSNorm."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = GroupedAttention(width, heads, heads // 4)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Language(nn.Module):
    """An embedding, blocks and a head; ``kept`` says whether blocks keep what they compute."""

    def __init__(self, block: Callable[[], nn.Module], *, kept: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.kept = kept

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``(batch, time)`` to logits."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x) if self.kept else checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


def llama(precision: str) -> None:
    """RMSNorm, SiLU, grouped queries, rotary positions."""
    train(Language(LlamaBlock).cuda(), loaded(words()), next_word, precision)


def checkpointed_gpt(precision: str) -> None:
    """A GPT whose blocks run again in backward."""
    model = Language(lambda: gpt.Block(WIDTH, HEADS), kept=False).cuda()
    train(model, loaded(words()), next_word, precision)


class T5Attention(nn.Module):
    """Attention with a bias that is trained, written by hand."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.positions = nn.Embedding(32, HEADS) if bias else None

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        """``(batch, time, width)`` to the same shape; keys and values are of ``source``."""
        query, key, value = (
            layer(of).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for layer, of in ((self.query, x), (self.key, source), (self.value, source))
        )
        scores = query @ key.transpose(2, 3)
        if self.positions is not None:
            here = torch.arange(x.shape[1], device=x.device)
            distance = (here[:, None] - here[None, :]).clamp(-15, 15) + 15
            scores = scores + self.positions(distance).permute(2, 0, 1)[None]
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        weights = F.dropout(scores.float().softmax(-1).type_as(scores), 0.1, self.training)
        out: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return out


class T5Block(nn.Module):
    """Attention to itself, to the encoder where there is one, and an MLP; RMSNorm written by hand."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.itself = T5Attention(bias=True)
        self.other = T5Attention(bias=False) if decodes else None
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(3))

    def norm(self, x: Tensor, which: int) -> Tensor:
        """T5's, which computes in FP32."""
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.scales[which] * (x * scale).to(x.dtype)

    def forward(self, x: Tensor, source: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        y = self.norm(x, 0)
        x = x + F.dropout(self.itself(y, y, mask), 0.1, self.training)
        if self.other is not None and source is not None:
            x = x + F.dropout(self.other(self.norm(x, 1), source, None), 0.1, self.training)
        return x + F.dropout(self.down(F.relu(self.up(self.norm(x, 2)))), 0.1, self.training)


class T5(nn.Module):
    """Encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(T5Block(decodes=False) for _ in range(2))
        self.decoder = nn.ModuleList(T5Block(decodes=True) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Token ids, both ``(batch, time)``, to logits of the target."""
        x, y = self.tokens(source), self.tokens(target)
        for block in self.encoder:
            x = block(x)
        here = torch.arange(y.shape[1], device=y.device)
        for block in self.decoder:
            y = block(y, x, here[:, None] < here[None, :])
        return y @ self.tokens.weight.t()


def t5(precision: str) -> None:
    """Attention by hand with a trained bias, dropout, tied embeddings; Adafactor."""

    def loss_of(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        logits = model(source, target[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    model = T5().cuda()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, loaded(words(), words(length=65)), loss_of, precision, optimizer=optimizer)


class ViT(nn.Module):
    """Patches, torch's own encoder layers, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 65, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, images: Tensor) -> Tensor:
        """Images ``(batch, 3, 64, 64)`` to logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1) + self.positions
        logits: Tensor = self.head(self.encoder(x)[:, 0])
        return logits


def class_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of a classifier."""
    return F.cross_entropy(model(images), labels)


def pictures(batch: int, size: int) -> Iterable[tuple[Tensor, ...]]:
    """Images and labels."""
    return loaded(torch.randn(STEPS * batch, 3, size, size), torch.randint(100, (STEPS * batch,)), batch=batch)


def vit(precision: str) -> None:
    """A vision transformer."""
    train(ViT().cuda(), pictures(8, 64), class_of, precision)


def twice(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with group norms."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Three levels down and up, with what is on the way kept."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList((twice(3, 32), twice(32, 64)))
        self.middle = twice(64, 128)
        self.up = nn.ModuleList((nn.ConvTranspose2d(128, 64, 2, stride=2), nn.ConvTranspose2d(64, 32, 2, stride=2)))
        self.joined = nn.ModuleList((twice(128, 64), twice(64, 32)))
        self.out = nn.Conv2d(32, 100, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits of each pixel."""
        kept = []
        for level in self.down:
            kept.append(level(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat((kept.pop(), up(x)), dim=1))
        logits: Tensor = self.out(x)
        return logits


def unet(precision: str) -> None:
    """Convolutions with bias, group norms, skip connections; RMSprop."""
    data = loaded(torch.randn(STEPS * 4, 3, 64, 64), torch.randint(100, (STEPS * 4, 64, 64)))
    model = UNet().cuda()
    train(model, data, class_of, precision, optimizer=torch.optim.RMSprop(model.parameters()))


class Recurrent(nn.Module):
    """An embedding, two layers of LSTM with dropout between them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``(batch, time)`` to logits."""
        logits: Tensor = self.head(self.lstm(self.tokens(tokens))[0])
        return logits


def lstm(precision: str) -> None:
    """A recurrent language model; SGD with momentum."""
    model = Recurrent().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, loaded(words()), next_word, precision, optimizer=optimizer)


class Adapted(nn.Module):
    """A frozen linear layer beside two small ones that are trained."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        """What the frozen layer says, and what was learnt."""
        out: Tensor = self.linear(x) + 2.0 * self.up(self.down(self.dropout(x)))
        return out


def lora(precision: str) -> None:
    """Adapters on the linear layers of a frozen Llama."""
    model = Language(LlamaBlock).requires_grad_(False)
    for block in model.blocks:
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(module, Adapted):
                    setattr(module, name, Adapted(child))
    train(model.cuda(), loaded(words()), next_word, precision)


@contextmanager
def one_of_many() -> Iterator[None]:
    """The default process group: rank 0 of :data:`RANKS`, on NCCL. No other rank is there, on neither side."""
    dist.init_process_group("nccl", rank=0, world_size=RANKS, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fsdp2(precision: str) -> None:
    """Sharded parameters over 8 ranks; amp is FSDP2's own policy of bfloat16, and nocache one that keeps parameters."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with one_of_many():
        low = precision.startswith("amp")
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
        model = Language(lambda: gpt.Block(WIDTH, HEADS)).cuda()
        for part in (*model.blocks, model):
            fully_shard(part, mp_policy=policy, reshard_after_forward=precision != "amp-nocache")
        train(model, loaded(words()), next_word, precision if precision == "bf16" else "fp32")


def ddp(precision: str) -> None:
    """Replicas on 8 ranks, with gradients in buckets."""
    with one_of_many():
        model = Language(lambda: gpt.Block(WIDTH, HEADS)).cuda()
        parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=4, init_sync=False)
        train(parallel, loaded(words()), next_word, precision)


@contextmanager
def compiled(*, blocks: bool) -> Iterator[None]:
    """A block in which ``torch.compile`` compiles each model's forward when it comes to the device.

    With ``blocks`` it compiles each of the model's blocks instead, as one does below FSDP2.
    """

    def compiling(moves: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def moved(model: nn.Module, *given: Any, **how: Any) -> nn.Module:
            for each in getattr(model, "blocks", ()) if blocks else (model,):
                each.forward = torch.compile(each.forward)
            return moves(model, *given, **how)

        return moved

    former = {name: getattr(nn.Module, name) for name in ("cuda", "to")}
    for name, moves in former.items():
        setattr(nn.Module, name, compiling(moves))
    try:
        yield
    finally:
        for name, moves in former.items():
            setattr(nn.Module, name, moves)


PROGRAMS: dict[str, Callable[[str], None]] = {
    "gpt": workload(gpt.train),
    "llama": llama,
    "bert": workload(bert.train),
    "t5": t5,
    "vit": vit,
    "resnet": workload(resnet.train),
    "unet": unet,
    "lstm": lstm,
    "gan": workload(gan.train),
    "lora": lora,
    "fsdp2": fsdp2,
    "ddp": ddp,
    "checkpointed": workload(checkpointed.train),
    "checkpointed gpt": checkpointed_gpt,
}
DISTRIBUTED = ("fsdp2", "ddp")


def run(name: str, precision: str) -> None:
    """One of them."""
    torch.manual_seed(0)
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if precision == "bf16" else torch.float32)
    try:
        PROGRAMS[name](precision)
    finally:
        torch.set_default_dtype(former)
