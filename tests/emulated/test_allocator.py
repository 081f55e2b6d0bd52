"""The model of the caching allocator beside PyTorch's own: the same requests get the same addresses."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from ampmem.allocator.gpus import find_gpu

GPU = find_gpu("a100-80")
MIB = 1 << 20
CALLS = 600
SETTINGS = ("", "max_split_size_mb:24,roundup_power2_divisions:4", "expandable_segments:True")


def calls(seed: int) -> Iterator[tuple[str, int, int]]:
    """What is asked for: few sizes, so that many free blocks are equally large, on two streams."""
    draw = random.Random(seed)
    sizes = [512, 9_000, 300_000, 512 * 1024, MIB, MIB + 1, 1_179_648, 1_572_864, 3 * MIB, 12 * MIB, 30 * MIB]
    alive = 0
    for _ in range(CALLS):
        what = draw.choices(("malloc", "free", "empty_cache"), (50, 30 + alive, 1))[0]
        if what == "malloc":
            alive += 1
            yield what, draw.choice(sizes), draw.randrange(8) // 7
        elif what == "free" and alive:
            alive -= 1
            yield what, draw.randrange(alive + 1), 0
        elif what == "empty_cache":
            yield what, 0, 0


def of_pytorch(seed: int) -> Iterator[tuple[int, int]]:
    """The address of each request, and what is reserved then."""
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    held = []
    for what, number, stream in calls(seed):
        if what == "malloc":
            with torch.cuda.stream(streams[stream]):
                held.append(torch.empty(number, dtype=torch.uint8, device="cuda"))
            yield held[-1].data_ptr(), torch.cuda.memory_reserved()
        elif what == "free":
            held.pop(number)
        else:
            torch.cuda.empty_cache()


def of_model(seed: int) -> Iterator[tuple[int, int]]:
    """The same of the simulated device's allocator."""
    from ampmem.allocator.settings import settings_of_environment
    from ampmem.simulator.device import SimulatedDevice

    allocator = SimulatedDevice(GPU, settings_of_environment(os.environ)).allocator
    held = []
    for what, number, stream in calls(seed):
        if what == "malloc":
            held.append(allocator.malloc(number, stream))
            yield held[-1].address, allocator.counters.reserved
        elif what == "free":
            allocator.free(held.pop(number))
        else:
            allocator.empty_cache()


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_requests_get_the_same_addresses(settings: str) -> None:
    """In a process of its own, which has nothing on the device."""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": settings, "EMULATED_CUDA_MEMORY": str(GPU.total_memory)}
    if not settings:
        del environment["PYTORCH_CUDA_ALLOC_CONF"]
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["equal"] * 4, done.stderr


def main() -> None:
    """Lay both beside each other, for four sequences of calls."""
    for seed in range(4):
        real, modelled = list(of_pytorch(seed)), list(of_model(seed))
        moved = real[0][0] - modelled[0][0]
        expected = [(at + moved, reserved) for at, reserved in modelled]
        found = zip(real, expected, strict=True)
        print(
            next(
                (f"{seed}: {place}: {one} {other}" for place, (one, other) in enumerate(found) if one != other), "equal"
            )
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
