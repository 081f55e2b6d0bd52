"""Runs pieces of scripts, each as one simulated rank; for a process of its own.

    python simulated_scripts.py < {"name": [rank, ranks, "code"]}

Prints as JSON what became of each: the bytes of every allocation on the device, or the message with which it stopped.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from ampmem.allocator.gpus import find_gpu
from ampmem.events import Action
from ampmem.simulator.device import DeviceEvent
from ampmem.simulator.start import Simulation
from ampmem.simulator.where import take_stops
from ampmem.simulator.world import World

START = """
import os, torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
def train(model, optimizer=None, steps=3):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
FILE = "train.py"


def run(rank: int, size: int, code: str) -> list[int] | str:
    """One piece, whose first line is line 1 of :data:`FILE`."""
    found: list[int] = []

    def note(event: DeviceEvent) -> None:
        if event.action == Action.ALLOC:
            found.append(event.bytes)

    FakeTensorMode.cache_clear()  # torch remembers for the process on which device a result is
    cache = TemporaryDirectory()
    simulation = Simulation(find_gpu("h100"), world=World(rank=rank, size=size), cache=Path(cache.name))
    simulation.device.recorder = note
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(START, "start.py", "exec"), names)
            found.clear()
            exec(compile(code, FILE, "exec"), names)
    except Exception as error:
        return str(error) if str(error) in take_stops() else f"{type(error).__name__}: {error}"
    finally:
        simulation.end()
        cache.cleanup()
    return found


if __name__ == "__main__":
    json.dump({name: run(*piece) for name, piece in json.load(sys.stdin).items()}, sys.stdout)
