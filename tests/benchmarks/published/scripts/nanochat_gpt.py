"""nanochat's base training of depth 20, 32 rows of 2048 tokens a rank: bfloat16 autocast, compiled, Muon and AdamW.

    python nanochat_gpt.py

Each rank updates its share: AdamW a slice of the embeddings and of the output, Muon every eighth matrix of a shape.
Neither update is compiled here: torch 2.13 cannot compile a step that gathers what it has updated without gradients.
The peak is in backward, so that does not change it.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

DEPTH, ROWS, LENGTH, VOCABULARY = 20, 32, 2048, 65536
WIDTH, HEAD = DEPTH * 64, 128
HEADS = WIDTH // HEAD


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a weight."""
    return F.rms_norm(x, (x.size(-1),))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embeddings."""
    half = x.shape[3] // 2
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * cos + other * sin, one * (-sin) + other * cos], 3).to(x.dtype)


class Block(nn.Module):
    """Attention with normalized queries and keys, and squared ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(rows, length, width)."""
        x = x + self.attended(norm(x), cos, sin)
        return x + self.narrow(F.relu(self.wide(norm(x))).square())  # type: ignore[no-any-return]

    def attended(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention."""
        rows, length, _ = x.shape
        q, k, v = (each(x).view(rows, length, HEADS, HEAD) for each in (self.q, self.k, self.v))
        q, k = norm(turned(q, cos, sin)), norm(turned(k, cos, sin))
        out = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return self.out(out.transpose(1, 2).contiguous().view(rows, length, -1))  # type: ignore[no-any-return]


class Chat(nn.Module):
    """The model: embeddings in bfloat16, all else in float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name in ("cos", "sin"):
            angles = torch.zeros(1, 10 * LENGTH, 1, HEAD // 2, dtype=torch.bfloat16)
            self.register_buffer(name, angles, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """The loss."""
        cos, sin = self.cos[:, :LENGTH], self.sin[:, :LENGTH]
        x = norm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(norm(x))
        logits = (15 * torch.tanh(logits / 15)).float()
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), ignore_index=-1, reduction=reduction)


class SlicedAdamW(torch.optim.Optimizer):
    """AdamW on this rank's slice of each parameter."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Reduce, update, gather."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        sliced = []
        for parameter in (each for group in self.param_groups for each in group["params"]):
            gradient = torch.empty_like(parameter.grad[: parameter.shape[0] // ranks])
            work = dist.reduce_scatter_tensor(gradient, parameter.grad, op=dist.ReduceOp.AVG, async_op=True)
            sliced.append((parameter, gradient, work))
        gathered = []
        for parameter, gradient, work in sliced:
            work.wait()
            rows = parameter.shape[0] // ranks
            part = parameter[rank * rows : (rank + 1) * rows]
            state = self.state[parameter]
            if not state:
                state |= {"step": torch.zeros((), device="cuda", dtype=torch.int64)}
                state |= {name: torch.zeros_like(part) for name in ("mean", "square")}
            state["step"] += 1
            state["mean"].mul_(0.8).add_(gradient, alpha=0.2)
            state["square"].mul_(0.95).addcmul_(gradient, gradient, value=0.05)
            size = torch.sqrt(1 - 0.95 ** state["step"]) / (1 - 0.8 ** state["step"])
            part.add_(state["mean"].div(state["square"].sqrt().add_(1e-10)).mul_(size), alpha=-1e-3)
            gathered.append(dist.all_gather_into_tensor(parameter, part, async_op=True))
        for work in gathered:
            work.wait()


@torch.compile
def orthogonal(matrix: Tensor) -> Tensor:
    """Newton and Schulz' iteration, in bfloat16."""
    x = matrix.bfloat16()
    tall = x.size(0) > x.size(1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        product = x @ x.mT
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon: of the matrices of a shape each rank updates one of as many as there are ranks."""

    def __init__(self, parameters: Any) -> None:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for each in parameters:
            shapes.setdefault(each.shape, []).append(each)
        groups = [{"params": same, "zeros": torch.zeros_like(same[0])} for same in shapes.values()]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Reduce, update, gather."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rounds = [
            (group["params"][at : at + ranks], group["zeros"])
            for group in self.param_groups
            for at in range(0, len(group["params"]), ranks)
        ]
        works = []
        for same, zeros in rounds:
            given = [each.grad for each in same] + [zeros] * (ranks - len(same))
            into = same[rank].grad if rank < len(same) else torch.empty_like(zeros)
            works.append(dist.reduce_scatter(into, given, op=dist.ReduceOp.AVG, async_op=True))
        gathered = []
        for (same, zeros), work in zip(rounds, works, strict=True):
            work.wait()
            if rank < len(same):
                self.update(same[rank])
            into = [*same, *(torch.empty_like(zeros) for _ in range(ranks - len(same)))]
            gathered.append(dist.all_gather(into, same[rank] if rank < len(same) else zeros, async_op=True))
        for work in gathered:
            work.wait()

    def update(self, parameter: Tensor) -> None:
        """One matrix of this rank."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 0.05)
        parameter.add_(orthogonal(gradient.lerp_(state["momentum"], 0.95)), alpha=-0.02)


def batch() -> tuple[Tensor, Tensor]:
    """Random tokens and the ones after them."""
    rows = torch.randint(0, VOCABULARY, (ROWS * LENGTH + 1,))
    tokens, labels = rows[:-1].view(ROWS, LENGTH), rows[1:].view(ROWS, LENGTH)
    return tokens.to("cuda", torch.int32), labels.to("cuda", torch.int64)


def main() -> None:
    """Train."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl")
    with torch.device("meta"):
        plain = Chat()
    plain = plain.to_empty(device="cuda")
    model = torch.compile(plain, dynamic=False)
    optimizers = [
        SlicedAdamW([{"params": [plain.head.weight]}, {"params": [plain.embedding.weight]}], {}),
        Muon(plain.blocks.parameters()),
    ]
    autocast = torch.amp.autocast("cuda", torch.bfloat16)
    data = batch()
    model.eval()
    with torch.no_grad(), autocast:
        model(*data, reduction="none")
    model.train()
    for _ in range(3):
        with autocast:
            loss = model(*data)
        loss.backward()
        data = batch()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        loss.item()


if __name__ == "__main__":
    main()
