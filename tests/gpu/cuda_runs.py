"""Training on the GPU, with and without ampmem, and what the tests know of it for themselves."""

import gc
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support import measure
from torch import Tensor, nn
from torch.optim import Optimizer

import ampmem
from ampmem.events import Action, Recording
from ampmem.vocabulary import SourceKind

WORKLOADS = ("gpt", "bert", "resnet", "reuse", "gan")
PRECISIONS = ("fp32", "amp", "amp-nocache")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def on_gpu(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages of those of ``tensors`` that are on the GPU."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None and tensor.is_cuda]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def parameters(*models: nn.Module) -> int:
    return on_gpu(p for model in models for p in model.parameters())


def gradients(*models: nn.Module) -> int:
    return on_gpu(p.grad for model in models for p in model.parameters())


def state(*optimizers: Optimizer) -> int:
    """Adam's step counts are on the host unless it is fused or capturable: those are not the GPU's."""
    return on_gpu(t for optimizer in optimizers for t in measure.tensors_in(dict(optimizer.state)))


def train(name: str, precision: str, dtype: str = "bf16", **rest: Any) -> measure.Run:
    """A workload's own training, tiny, on the GPU."""
    return measure.train(name, precision, device=torch.device("cuda"), dtype=DTYPES[dtype], **rest)


@dataclass(frozen=True)
class Seen:
    """A run as the allocator and the script saw it."""

    allocs: list[int]
    frees: list[int]
    result: Any
    rng: tuple[Any, ...]


def seed() -> None:
    gc.collect()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def rng() -> tuple[Any, ...]:
    return tuple(torch.get_rng_state().tolist()), tuple(torch.cuda.get_rng_state().tolist()), random.getstate()


def plain(function: Callable[[], Any]) -> Seen:
    """``function`` under PyTorch's own memory history, without ampmem."""
    seed()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", clear_history=True)
    try:
        result = function()
        gc.collect()
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)
    allocs = [entry["size"] for entry in trace if entry["action"] == "alloc"]
    frees = sorted(entry["size"] for entry in trace if entry["action"] == "free_requested")
    return Seen(allocs, frees, result, rng())


def observed(function: Callable[[], Any]) -> tuple[Seen, Recording]:
    """``function`` under ampmem."""
    seed()
    with ampmem.profile(device="cuda") as profile:
        result = function()
        gc.collect()
    recording = profile.recording()
    assert recording.run.source == SourceKind.CUDA
    events = recording.events
    allocs = events.bytes[events.action == Action.ALLOC].tolist()
    frees = sorted(events.bytes[events.action == Action.FREE].tolist())
    return Seen(allocs, frees, result, rng()), recording


def assert_conserved(profile: ampmem.Profile) -> None:
    """The categories are the allocator's total at every event, and its own count at every mark."""
    summary, recording = profile.summary(), profile.recording()
    assert summary.source == "cuda"
    assert summary.conservation.residual_bytes == 0
    assert summary.conservation.reserved_residual_bytes == 0
    assert {row.mark for row in recording.layers} == {"after_forward", "after_backward", "after_optimizer", "peak"}
    layers = summary.allocator
    assert layers.reserved is not None and layers.cached is not None and layers.outside is not None
    assert layers.requested + layers.rounding == layers.allocated
    assert layers.allocated + layers.cached == layers.reserved
    assert layers.cached >= 0 and layers.outside > 0
    assert layers.outside_process is None or 0 < layers.outside_process <= layers.outside
    assert recording.allocator.peaks[recording.allocator.device] >= layers.allocated
    assert not any("lost" in note for note in recording.notes)
