"""A language model of four blocks whose every part is written by hand, three steps, from an empty GPU.

    python lm_by_hand.py [--amp]

Written from a recording of such a run: which ops allocate what, and in which order. With ``--amp`` one bfloat16
autocast lies around all three steps, their optimizer included, so its cached copies live on from step to step.
"""

import sys
from contextlib import nullcontext

import torch
from torch import Tensor, nn

VOCABULARY, CONTEXT, WIDTH, HIDDEN, LAYERS, HEADS, BATCH, STEPS = 10_000, 200, 512, 1344, 4, 16, 10, 3
GPU = torch.device("cuda")


class Linear(nn.Module):
    """A matrix without bias, made on the GPU, and filled in place (as ``trunc_normal_`` did until torch 2.6)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=GPU))
        nn.init.uniform_(self.weight, -0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """A vector for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH, device=GPU))
        nn.init.uniform_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Norm(nn.Module):
    """By the root of the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device=GPU))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        return x / scale * self.weight


class Rotation(nn.Module):
    """Of the two halves of each head; its tables stay on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH // HEADS
        angles = torch.outer(torch.arange(CONTEXT), 10_000.0 ** (-torch.arange(0, width, 2) / width))
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        sin = self.sin.to(x.device)
        cos = self.cos.to(x.device)
        one = x[..., ::2] * cos - x[..., 1::2] * sin
        other = x[..., ::2] * sin + x[..., 1::2] * cos
        return torch.cat((one, other), dim=-1)


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension; the exponentials are taken twice."""
    highest = torch.max(x, dim=-1, keepdim=True).values
    return torch.exp(x - highest) / torch.sum(torch.exp(x - highest), dim=-1, keepdim=True)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention; the mask comes from the CPU."""
    mask = torch.tril(torch.ones(CONTEXT, CONTEXT)).to(GPU)
    products = torch.einsum("...qd,...kd->...qk", query, key)
    scores = products / torch.sqrt(torch.tensor(query.shape[-1]).to(GPU))
    scores.masked_fill_(~mask.bool(), float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    """Of sixteen heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.rotation = Rotation()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (query, key, value))
        query = self.rotation(query)
        key = self.rotation(key)
        out = attend(query, key, value)
        out = out.transpose(1, 2).flatten(2)
        return self.output(out)


def silu(x: Tensor) -> Tensor:
    """As it is defined."""
    return x * torch.sigmoid(x)


class Gated(nn.Module):
    """The feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH), Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate = silu(self.gate(x))
        return self.down(gate * self.up(x))


class Block(nn.Module):
    """Each part behind a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attention = Attention()
        self.gated = Gated()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        attended = self.attention(normed)
        x = x + attended
        normed_again = self.norm2(x)
        fed = self.gated(normed_again)
        return x + fed


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of_last(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the last token's logits ``(batch, vocabulary)``, by a mask of the right answers."""
    highest = torch.max(logits, dim=-1, keepdim=True).values
    logs = logits - highest - torch.log(torch.sum(torch.exp(logits - highest), dim=-1, keepdim=True))
    right = torch.zeros_like(logs)
    right.scatter_(1, targets.unsqueeze(1), 1.0)
    return -torch.sum(logs * right) / logits.shape[0]


class Adam(torch.optim.Optimizer):
    """Every term a tensor of its own; the last parameter's old moments live on in the names of the loop."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:
            self.state[parameter] = {"m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            first = state["m"]
            next_first = 0.9 * first + 0.1 * parameter.grad
            second = state["v"]
            next_second = 0.999 * second + 0.001 * parameter.grad**2
            parameter.data = parameter.data - 1e-3 * (next_first / (torch.sqrt(next_second) + 1e-8))
            parameter.data = parameter.data - 1e-5 * parameter.data
            state["m"], state["v"] = next_first, next_second


def last_token(logits: Tensor) -> Tensor:
    """``logits[:, -1, :]`` as torch 2.6 ran it: newer versions leave the two whole slices out."""
    return logits.narrow(0, 0, BATCH).select(1, -1).narrow(1, 0, VOCABULARY)


def main() -> None:
    """Three steps on one batch."""
    model = Model()
    optimizer = Adam(list(model.parameters()))
    inputs = torch.randint(VOCABULARY, (BATCH, CONTEXT)).to(GPU)
    targets = torch.randint(VOCABULARY, (BATCH,)).to(GPU)
    with torch.autocast("cuda", torch.bfloat16) if "--amp" in sys.argv else nullcontext():
        for _ in range(STEPS):
            optimizer.zero_grad()
            logits = model(inputs)
            loss = loss_of_last(last_token(logits), targets)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
