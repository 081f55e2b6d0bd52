"""What simulated ops compute, against ``torch.utils.flop_counter`` over the real ones, and what they move."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ampmem.allocator.gpus import find_gpu
from ampmem.simulator.start import Simulation


def simulated(train: Callable[[str], None]) -> tuple[int, int]:
    simulation = Simulation(find_gpu("h100"))
    try:
        train("cuda")
    finally:
        simulation.end()
    return simulation.work.flops, simulation.work.recomputed_flops


def counted(train: Callable[[str], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        train("cpu")
    return int(counter.get_total_flops())


def convolutions(device: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)).to(device)
    model(torch.randn(2, 3, 16, 16, device=device)).sum().backward()


def products(device: str) -> None:
    weights = [torch.randn(6, 6, device=device, requires_grad=True) for _ in range(2)]
    batch = torch.randn(5, 3, 6, device=device)
    torch.bmm(batch @ weights[0], (batch @ weights[1]).mT).square().mean().backward()


def with_penalty(device: str) -> None:
    """A gradient's gradient: backward runs with gradients on, and computes nothing again."""
    model, x = nn.Linear(8, 8).to(device), torch.randn(4, 8, device=device, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


@pytest.mark.parametrize("train", [convolutions, products])
def test_counts_are_those_of_torch(train: Callable[[str], None]) -> None:
    assert simulated(train) == (counted(train), 0)
    assert simulated(train)[0] > 0


def test_what_forwards_compute_is_counted_by_module() -> None:
    simulation, running = Simulation(find_gpu("h100")), "outside"
    simulation.work.where = lambda: running
    try:
        first, second = (nn.Linear(8, 8).to("cuda") for _ in range(2))
        x = torch.randn(4, 8, device="cuda")
        running = "a"
        hidden = checkpoint(first, x, use_reentrant=False)
        running = "b"
        loss = second(second(hidden)).sum()
        with torch.no_grad():  # is not what checkpointing would compute again
            second(hidden)
        running = "c"
        loss.backward()
    finally:
        simulation.end()
    product = 2 * 4 * 8 * 8
    assert simulation.work.forward_flops == {"a": product, "b": 2 * product}


def test_a_double_backward_computes_nothing_again() -> None:
    total, recomputed = simulated(with_penalty)
    assert total > 0 and recomputed == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_is_counted_apart(reentrant: bool) -> None:
    def train(device: str) -> None:
        first, second = nn.Linear(8, 32).to(device), nn.Linear(32, 4).to(device)

        def block(x: Tensor) -> Tensor:
            return second(first(x).relu()).relu()

        x = torch.randn(16, 8, device=device, requires_grad=True)
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()

    once = 2 * 16 * 8 * 32 + 2 * 16 * 32 * 4
    assert simulated(train) == (4 * once, once)
    assert counted(train) == 4 * once


def test_attention_is_counted() -> None:
    def train(device: str) -> None:
        query = torch.randn(2, 4, 64, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()

    product = 2 * (2 * 4) * 64 * 64 * 32
    assert simulated(train) == (2 * product + 5 * product, 0)  # backward computes the scores again, by itself


def test_what_goes_to_the_device_and_back_is_moved() -> None:
    simulation = Simulation(find_gpu("h100"))
    try:
        there = torch.ones(1000).to("cuda")
        there.copy_(there.double().clone().to("cuda", torch.half))  # on the device
        back = there.cpu()
        there[:10].copy_(back[:10])
        torch.ones(5).copy_(there[:5].half())
    finally:
        simulation.end()
    assert simulation.work.moved_bytes == 4000 + 4000 + 40 + 10
