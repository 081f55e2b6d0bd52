"""What the ranks of a pipeline train: each has a stage, several micro-batches are under way at once."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.optim import AdamW

from support import gloo, measure

STEPS = 2
MICRO_BATCHES = 4
BATCH, WIDTH = 16, 48


@dataclass(frozen=True, kw_only=True)
class Run:
    """One schedule; ``chunks`` stages on each rank."""

    schedule: type[_PipelineSchedule]
    chunks: int = 1
    amp: bool = False


RUNS = {
    "gpipe": Run(schedule=ScheduleGPipe),
    "gpipe-amp": Run(schedule=ScheduleGPipe, amp=True),
    "1f1b": Run(schedule=Schedule1F1B),
    "interleaved": Run(schedule=ScheduleInterleaved1F1B, chunks=2),
}


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def train_all(folder: Path) -> None:
    """Every schedule in turn, on one rank."""
    for name, run in RUNS.items():
        with gloo.recorded(folder, name):
            known = _train(run)
        gloo.keep(folder, name, known)


def _train(run: Run) -> list[dict[str, int]]:
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    models = nn.ModuleList(block() for _ in range(run.chunks))
    numbers = [rank + chunk * ranks for chunk in range(run.chunks)]
    stages = [
        PipelineStage(model, number, ranks * run.chunks, torch.device("cpu"))
        for model, number in zip(models, numbers, strict=True)
    ]
    given = stages if run.chunks > 1 else stages[0]
    schedule = run.schedule(given, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    optimizer = AdamW(models.parameters())
    known = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        arguments = (torch.randn(BATCH, WIDTH),) if stages[0].is_first else ()
        targets = {"target": torch.randn(BATCH, WIDTH)} if stages[-1].is_last else {}
        with torch.autocast("cpu", enabled=run.amp):
            schedule.step(*arguments, **targets)
        del arguments, targets
        optimizer.step()
        known.append(gloo.sums(models, optimizer) | {"communication": _received(stages)})
    return known


def _received(stages: list[PipelineStage]) -> int:
    """Bytes of the buffers that other ranks send to."""
    infos = [
        info
        for stage in stages
        for kind in (stage.args_recv_info, stage.grad_recv_info)
        for row in kind.values()
        for info in row
    ]
    return measure.total(info.buffer for info in infos if getattr(info, "buffer", None) is not None)
