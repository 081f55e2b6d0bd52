"""Trains under FSDP2 as one simulated rank, then the same on the CPU under PyTorch's own tracker; prints both as JSON.

    python fsdp2.py CASE WORLD_SIZE RANK [CASE WORLD_SIZE RANK]...

For a process of its own: the simulation has to come before the first backward. Both have nobody on the other side.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ampmem.allocator.gpus import find_gpu
from ampmem.events import Action
from ampmem.patching import in_place
from ampmem.simulator.device import DeviceEvent
from ampmem.simulator.start import Simulation
from ampmem.simulator.world import World

WIDTH, HIDDEN, LAYERS = 100, 404, 3
STEPS = 2


class Block(nn.Module):
    """A residual network of two layers; 100 rows do not divide by 8 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Wide(nn.Module):
    """The same with sizes that tensor parallelism divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.up = nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def sharded(case: str, device: str) -> nn.Module:
    """The model of ``case``."""
    how: dict[str, Any] = {}
    if case == "bf16":
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case == "kept":
        how["reshard_after_forward"] = False
    if case == "halved":
        how["reshard_after_forward"] = 2
    if case == "offload":
        how["offload_policy"] = CPUOffloadPolicy()
    if case == "hybrid":
        how["mesh"] = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))
    if case == "tensors":
        return tensor_parallel(device)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)]).to(device)
    for block in model:
        if case == "nested":
            fully_shard(block.up, **how)
        if case == "ignored":
            how["ignored_params"] = {block.up.weight}
        fully_shard(block, **how)
    if case == "ignored":
        how["ignored_params"] = {block.up.weight for block in model}
    return fully_shard(model, **how)


def tensor_parallel(device: str) -> nn.Module:
    """Columns and rows over 4 ranks, the batch and the shards over the rest."""
    size = int(os.environ["WORLD_SIZE"]) if device == "cuda" else dist.get_world_size()
    mesh = init_device_mesh(device, (size // 4, 4), mesh_dim_names=("data", "tensors"))
    model = nn.Sequential(*[Wide() for _ in range(LAYERS)]).to(device)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["tensors"], plan)
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def train(case: str, device: str, watch: Callable[[nn.Module, Any, Callable[[], None]], None]) -> dict[str, Any]:
    """Two steps; what is local of each parameter, in bytes."""
    torch.manual_seed(0)
    _clear_fast_path_sharding_prop_cache()  # which goes by the names of groups, as if there were one world
    _clear_python_sharding_prop_cache()
    model = sharded(case, device)
    if case == "adam":
        optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=case != "ignored")

    def step() -> None:
        shape = (2048, 128) if case == "tensors" else (8, WIDTH)  # where what is reduced counts
        x = torch.ones(*shape, device=device)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    watch(model, optimizer, step)
    locals_ = {name: _local(parameter) for name, parameter in model.named_parameters()}
    return {
        name: [tensor.device.type, tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()]
        for name, tensor in locals_.items()
    }


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def simulate(case: str, size: int, rank: int) -> dict[str, Any]:
    """The most bytes of tensors that were alive at once in the steps, without workspaces, scratch and rounding."""
    before = len(in_place())
    simulation = Simulation(find_gpu("h100"), world=World(rank=rank, size=size))
    device = simulation.device
    events: list[DeviceEvent] = []
    others: set[int] = set()
    started: list[int] = []
    device.recorder = events.append
    device.on_scratch = device.on_workspace = lambda address, name: others.add(len(events) - 1)
    try:
        if case != "tensors":  # whose mesh starts it
            dist.init_process_group("nccl")

        def watch(model: nn.Module, optimizer: Any, step: Callable[[], None]) -> None:
            started.append(len(events))
            for _ in range(STEPS):
                step()

        shards = train(case, "cuda", watch)
    finally:
        simulation.end()
    return {"peak": _peak(events, others, started[0]), "shards": shards, "left": len(in_place()) - before}


def _peak(events: list[DeviceEvent], others: set[int], start: int) -> int:
    alive: dict[int, int] = {}
    now = most = 0
    for i, event in enumerate(events):
        if event.action == Action.ALLOC:
            alive[event.address] = 0 if i in others else event.bytes
            now += alive[event.address]
        else:
            now -= alive.pop(event.address)
        most = max(most, now) if i >= start else now
    return most


def track(case: str, size: int, rank: int) -> int:
    """The same as ``FSDPMemTracker`` counts it on the CPU, where nothing is rounded."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    peak: dict[str, int] = {}

    def watch(model: nn.Module, optimizer: Any, step: Callable[[], None]) -> None:
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            for _ in range(STEPS):
                step()
        peak.update(next(iter(tracker.get_tracker_snapshot("peak").values())))

    try:
        train(case, "cpu", watch)
    finally:
        dist.destroy_process_group()
    return peak["Total"]


def main() -> None:
    """The command line."""
    words = sys.argv[1:]
    cases = [(case, int(size), int(rank)) for case, size, rank in zip(*[iter(words)] * 3, strict=True)]
    found = {" ".join(map(str, case)): simulate(*case) for case in cases}
    for case in cases:
        if case[0] != "offload":
            found[" ".join(map(str, case))]["tracked"] = track(*case)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
