"""What ranks train with FSDP2 and tensor parallel, in every way that those have memory of their own."""

import gc
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import AdamW

from support import gloo, measure

STEPS = 2
WIDTH, CLASSES, LAYERS, BATCH = 48, 21, 2, 16


class Block(nn.Module):
    """A residual block whose parameters divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


class Model(nn.Module):
    """Its head does not divide by two: the last shard is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train: ``explicit`` says that forward names what is to be gathered next."""

    options: dict[str, Any] = field(default_factory=dict)
    amp: bool = False
    micro_batches: int = 1
    explicit: bool = False
    forwards: int = 1


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHARDED = {
    "fp32": Run(),
    "kept": Run(options={"reshard_after_forward": False}),
    "policy": Run(options={"mp_policy": _BF16}),
    "amp": Run(amp=True),
    "offload": Run(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "accumulated": Run(micro_batches=2),
    "prefetched": Run(explicit=True),
    "twice": Run(forwards=2),
}
"""Of FSDP2 on two ranks."""


def train_sharded(folder: Path) -> None:
    """Every run of FSDP2's in turn, and one with tensor parallel, on one of two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    for name, run in SHARDED.items():
        _train(folder, name, run, lambda run=run: _shard(Model(), mesh, run))
    _train(folder, "tensor-parallel", Run(), lambda: _split(Model(), mesh))
    _train(folder, "tensor-parallel-amp", Run(amp=True), lambda: _split(Model(), mesh))
    _compare_allocations(folder, mesh)


def train_both(folder: Path) -> None:
    """Parameters that are split by tensor parallel and sharded by FSDP2, on one of four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, run in {"fp32": Run(), "policy": SHARDED["policy"]}.items():
        _train(folder, name, run, lambda run=run: _shard(_split(Model(), mesh["tp"]), mesh["dp"], run))


def _shard(model: Model, mesh: DeviceMesh, run: Run) -> Model:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **run.options)
    fully_shard(model, mesh=mesh, **run.options)
    if run.explicit:
        for layer, following in zip(model.layers, model.layers[1:], strict=False):
            assert isinstance(layer, FSDPModule)
            layer.set_modules_to_forward_prefetch([following])
    return model


def _split(model: Model, mesh: DeviceMesh) -> Model:
    plan = {f"layers.{number}.{name}": style for number in range(LAYERS) for name, style in _STYLES.items()}
    parallelize_module(model, mesh, plan)
    return model


_STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _train(folder: Path, name: str, run: Run, make: Callable[[], Model]) -> None:
    torch.manual_seed(0)
    with gloo.recorded(folder, name):
        model = make()
        optimizer = AdamW(model.parameters())
        known = [_step(run, model, optimizer) for _ in range(STEPS)]
    gloo.keep(folder, name, known)
    del model, optimizer


def _step(run: Run, model: Model, optimizer: AdamW) -> dict[str, dict[str, int]]:
    """One step; what the tensors add up to at its marks."""
    known: dict[str, dict[str, int]] = {}
    for left in reversed(range(run.micro_batches)):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(not left)
        with torch.autocast("cpu", enabled=run.amp) if run.amp else nullcontext():
            outputs = [model(torch.randn(BATCH, WIDTH)) for _ in range(run.forwards)]
        loss = sum(each.float().square().mean() for each in outputs)
        known["after_forward"] = _sums(optimizer)
        loss.backward()
    known["after_backward"] = _sums(optimizer)
    gloo.settle()
    optimizer.step()
    known["after_optimizer"] = _sums(optimizer)
    optimizer.zero_grad()
    return known


def _sums(optimizer: AdamW) -> dict[str, int]:
    """Bytes of this rank's tensors: those that the optimizer has, whatever modules have in their place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(each.grad for each in parameters if each.grad is not None),
        "optimizer_state": _bytes(measure.tensors_in(dict(optimizer.state))),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return measure.total(each.to_local() if isinstance(each, DTensor) else each for each in tensors)


def whole_bytes(module: nn.Module, itemsize: int = 4, ranks: int = 2, *, padded: bool = True) -> int:
    """Bytes of the parameters of ``module``, each as long as its shards together."""
    return sum(_whole(each.shape, ranks if padded else 1) * itemsize for each in module.parameters())


def _whole(shape: torch.Size, ranks: int) -> int:
    return -(-shape[0] // ranks) * ranks * prod(shape[1:])


def _compare_allocations(folder: Path, mesh: DeviceMesh) -> None:
    """Write down what one training allocates without ampmem and with it."""

    def train() -> None:
        torch.manual_seed(0)
        model = _shard(Model(), mesh, SHARDED["policy"])
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        del model, optimizer
        gc.collect()

    train()
    without = measure.plain(train)
    dist.barrier()
    with_ampmem = measure.observed(train)[0]
    gloo.keep(folder, "allocations", [list(without.allocs), list(with_ampmem.allocs)])
