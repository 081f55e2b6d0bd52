"""Llama 3.1 8B under FSDP2, as torchtitan trains it: bfloat16 parameters gathered, gradients reduced in float32.

    python llama_fsdp2.py BATCH LENGTH none|full|selective [--compile] [--fused]

One group for each block, and one for embeddings, the last norm and the output together. ``selective`` saves, of a
block, the results of attention and of every second matrix product. AdamW on float32 shards, gradients' norm clipped.
Attention is the flash kernel's, as on an H100 then; torch 2.13 prefers cuDNN's, whose result is not among those saved.
Three steps: the second reserves more, because the optimizer has state, and the third no more.
"""

import argparse
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

WIDTH, LAYERS, HEADS, PAIRS, HIDDEN, VOCABULARY = 4096, 32, 32, 8, 14336, 128256
HEAD = WIDTH // HEADS


class Norm(nn.Module):
    """RMSNorm in plain ops, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Normalized over the last dimension."""
        wide = x.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embeddings, in complex numbers."""
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * turns[None, : x.shape[1], None]).flatten(3).type_as(x)


class Attention(nn.Module):
    """Attention with grouped keys and values, which are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, PAIRS * HEAD, bias=False)
        self.wv = nn.Linear(WIDTH, PAIRS * HEAD, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """(batch, length, width)."""
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, HEAD) for each in (self.wq, self.wk, self.wv))
        q, k = turned(q, turns), turned(k, turns)
        k, v = (self.repeated(each) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))  # type: ignore[no-any-return]

    @staticmethod
    def repeated(x: Tensor) -> Tensor:
        """Each head as often as there are queries for it."""
        batch, length, heads, width = x.shape
        wide = x[:, :, :, None].expand(batch, length, heads, HEADS // PAIRS, width)
        return wide.reshape(batch, length, HEADS, width)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = Norm(), Norm()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """(batch, length, width)."""
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The model; its turns of rotary embeddings are a buffer."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(each): Block() for each in range(LAYERS)})
        self.norm = Norm()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("turns", torch.ones(length, HEAD // 2, dtype=torch.complex64))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return self.output(self.norm(h))  # type: ignore[no-any-return]


def contexts() -> Any:
    """What selective checkpointing saves: attention, and every second matrix product."""
    aten = torch.ops.aten
    saved = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }
    products: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **rest: Any) -> CheckpointPolicy:
        if op == aten.mm.default:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = op in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def sharded(length: int, checkpoint: str, compiled: bool) -> nn.Module:
    """The model, over all ranks."""
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    with torch.device("meta"):
        model = Llama(length)
    options: dict[str, Callable[[], Any]] = {"context_fn": contexts} if checkpoint == "selective" else {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, block in list(model.layers.items()):
        layer: Any = block
        if checkpoint != "none":
            layer = checkpoint_wrapper(layer, preserve_rng_state=False, **options)
        if compiled:
            layer = torch.compile(layer, fullgraph=True)
        model.layers[name] = layer
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=int(name) < LAYERS - 1)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.to_empty(device="cuda").train()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("checkpoint", choices=["none", "full", "selective"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fused", action="store_true")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = sharded(options.length, options.checkpoint, options.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=options.fused or None)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        rows = torch.randint(0, VOCABULARY, (options.batch, options.length + 1))
        tokens, labels = rows[:, :-1].cuda(), rows[:, 1:].cuda()
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


if __name__ == "__main__":
    main()
