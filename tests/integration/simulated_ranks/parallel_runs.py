"""Trains in parallel on the CPU, as one of two real processes or as one simulated rank; for processes of their own.

    python parallel_runs.py real RANK FILE CASE...
    python parallel_runs.py simulated RANK FILE CASE...

Each case runs for :data:`STEPS` steps. FILE is where the processes meet. Prints as JSON, by case, the bytes of every
allocation in order with the op that it was made in, where that is known.
"""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile as torch_profile
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from ampmem.allocator.gpus import find_gpu
from ampmem.events import Action
from ampmem.simulator.start import Simulation
from ampmem.simulator.world import World

STEPS = 3
WORLD = 2
WIDTH, BATCH = 64, 12

Allocations = list[tuple[int, str]]


class Model(nn.Module):
    """Four layers, the last of which may have nothing to do."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.unused = nn.Linear(WIDTH, 2 * WIDTH) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(x))


def data_parallel(
    *, unused: bool = False, hook: Callable[..., Any] | None = None, accumulate: int = 1, zero: bool = False, **how: Any
) -> None:
    """``DistributedDataParallel`` as ``how`` says, with buckets that hold two layers."""
    model = DistributedDataParallel(Model(unused=unused), bucket_cap_mb=0.03, **how)
    if hook is not None:
        model.register_comm_hook(None, hook)
    if zero:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        for _ in range(accumulate - 1):
            with model.no_sync():
                model(torch.randn(BATCH, WIDTH)).sum().backward()
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def pipeline(schedule: type[Any], *, stages_each: int = 1) -> None:
    """Two ranks with ``stages_each`` stages each, which are told what comes in."""
    rank, count = dist.get_rank(), WORLD * stages_each
    mine = range(rank, count, WORLD)
    chunk = torch.empty(BATCH // 4, WIDTH)
    modules = [Model() for _ in mine]
    stages = [
        PipelineStage(module, index, count, torch.device("cpu"), input_args=chunk)
        for module, index in zip(modules, mine, strict=True)
    ]
    run = schedule(stages[0] if stages_each == 1 else stages, 4, loss_fn=_loss)
    optimizer = torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=1e-3)
    for _ in range(STEPS):
        batch = torch.randn(BATCH, WIDTH)
        if rank == 0:
            run.step(batch)
        else:
            run.step(target=batch)
        optimizer.step()
        optimizer.zero_grad()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


CASES: dict[str, Callable[[], None]] = {
    "ddp": data_parallel,
    "ddp-views": lambda: data_parallel(gradient_as_bucket_view=True),
    "ddp-unused": lambda: data_parallel(unused=True, find_unused_parameters=True),
    "ddp-static": lambda: data_parallel(unused=True, static_graph=True),
    "ddp-accumulate": lambda: data_parallel(accumulate=2),
    "ddp-hook": lambda: data_parallel(hook=fp16_compress_hook),
    "zero": lambda: data_parallel(zero=True),
    "gpipe": lambda: pipeline(ScheduleGPipe),
    "1f1b": lambda: pipeline(Schedule1F1B),
    "interleaved": lambda: pipeline(ScheduleInterleaved1F1B, stages_each=2),
}


def profiled(case: Callable[[], None]) -> Allocations:
    """What the CPU profiler sees of this thread."""
    with torch_profile(profile_memory=True) as profiler:
        case()
    found: list[tuple[int, int, str]] = []

    def visit(node: Any, op: str) -> None:
        if node.tag == _EventType.Allocation:
            found.append((node.start_time_ns, node.extra_fields.alloc_size, op))
        for child in node.children:
            visit(child, node.name)

    for root in profiler.kineto_results.experimental_event_tree():
        visit(root, "")
    return [(size, op) for _, size, op in sorted(found, key=lambda event: event[0]) if size > 0]


def simulated(case: Callable[[], None], rank: int) -> Allocations:
    """What the simulated device, which stands for the CPU, is asked for."""
    found: Allocations = []
    simulation = Simulation(find_gpu("h100"), label="cpu", world=World(rank=rank, size=WORLD))
    try:
        dist.init_process_group("gloo")
        simulation.device.recorder = lambda event: (
            found.append((event.bytes, event.node)) if event.action == Action.ALLOC else None
        )
        case()
    finally:
        simulation.end()
    return found


def main() -> None:
    """The command line."""
    kind, rank, file, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    found: dict[str, Allocations] = {}
    if kind == "real":
        dist.init_process_group("gloo", init_method=Path(file).as_uri(), rank=int(rank), world_size=WORLD)
    for name in cases:
        gc.collect()
        torch.manual_seed(1)
        found[name] = profiled(CASES[name]) if kind == "real" else simulated(CASES[name], int(rank))
    if kind == "real":
        dist.destroy_process_group()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
