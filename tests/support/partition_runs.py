"""What ranks train with a stand-in for engines that keep flat float32 slices of half parameters (ZeRO, stage 1)."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam

from support import gloo, measure

STEPS = 2
SIZES = (48, 80, 33)


class Partitioned:
    """Each rank updates its slice of all parameters laid side by side, and gathers the others'."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._ranks, self._rank = dist.get_world_size(), dist.get_rank()
        flat = torch.cat([parameter.detach().float().view(-1) for parameter in parameters])
        self._padding = -len(flat) % self._ranks
        self.mine = nn.Parameter(self._slice(flat))
        self.inner = Adam([self.mine], lr=1e-3)

    def _slice(self, flat: Tensor) -> Tensor:
        padded = torch.cat([flat, flat.new_zeros(self._padding)])
        return padded.chunk(self._ranks)[self._rank].clone()

    def step(self) -> None:
        gradients = torch.cat([parameter.grad.float().view(-1) for parameter in self._parameters])  # type: ignore[union-attr]
        dist.all_reduce(gradients)
        self.mine.grad = self._slice(gradients) / self._ranks
        del gradients
        self.inner.step()
        self.mine.grad = None
        slices = [torch.empty_like(self.mine, dtype=torch.bfloat16) for _ in range(self._ranks)]
        dist.all_gather(slices, self.mine.detach().bfloat16())
        rest = torch.cat(slices)
        for parameter in self._parameters:
            parameter.detach().copy_(rest[: parameter.numel()].view_as(parameter))
            rest = rest[parameter.numel() :]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    first, second, third = SIZES
    return nn.Sequential(nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third)).bfloat16()


def train_all(folder: Path) -> None:
    """Train on one rank."""
    with gloo.recorded(folder, "partitioned"):
        half = model()
        optimizer = Partitioned(list(half.parameters()))
        known = [_step(half, optimizer) for _ in range(STEPS)]
    gloo.keep(folder, "partitioned", known)


def _step(half: nn.Module, optimizer: Partitioned) -> dict[str, int]:
    half.zero_grad()
    half(torch.randn(4, SIZES[0]).bfloat16()).float().square().mean().backward()
    optimizer.step()
    return {
        "parameters": measure.parameters(half),
        "master_copies": measure.total([optimizer.mine]),
        "optimizer_state": measure.state(optimizer.inner),
        "gradients": measure.gradients(half) + measure.total([optimizer.mine]),  # its own is there until the step ends
    }
