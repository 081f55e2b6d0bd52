"""What the tests know for themselves: sums over tensors, and what torch.profiler says without ampmem."""

import gc
import importlib
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile as torch_profile
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import ampmem
from ampmem.events import OTHER_THREADS, UNKNOWN, Action, Recording
from ampmem.workloads import common
from ampmem.workloads.common import WorkloadOptions

WORKLOADS = ("gpt", "bert", "resnet", "reuse", "gan", "accumulate", "checkpointed")
PRECISIONS = ("fp32", "amp", "amp-nocache")
EXTRA: dict[str, dict[str, int]] = {"reuse": {"width": 128}}
"""What ``train`` is given besides the options, to stay small."""


@pytest.fixture
def clean_start() -> None:
    """No optimizers of earlier tests."""
    gc.collect()
    gc.freeze()  # what outlived its test is there to stay: later collections need not look at it


# -- sums over tensors ------------------------------------------------------------------------


def total(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages of ``tensors``."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def parameters(*models: nn.Module) -> int:
    return total(p for model in models for p in model.parameters())


def gradients(*models: nn.Module) -> int:
    return total(p.grad for model in models for p in model.parameters())


def buffers(*models: nn.Module) -> int:
    return total(b for model in models for b in model.buffers())


def state(*optimizers: Optimizer) -> int:
    return total(t for optimizer in optimizers for t in tensors_in(dict(optimizer.state)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in the values of dictionaries, in sequences, and in the fields of dataclasses and objects."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, dict):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, deque)):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, item.name) for item in fields(value)]
    else:
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from tensors_in(part)


# -- what ampmem must agree with --------------------------------------------------------------


def assert_conserved(profile: ampmem.Profile) -> None:
    """The categories, and the sum of the events, are the allocator's own total, at every event.

    ``profile`` may be anything with its ``summary`` and ``recording``.
    """
    summary, events = profile.summary(), profile.recording().events
    assert summary.conservation.residual_bytes == 0
    known = events.allocated != UNKNOWN
    assert known.sum() > 0
    running = np.cumsum(np.where(events.action == Action.FREE, -events.bytes, events.bytes))
    assert (running[known] == events.allocated[known]).all()


@dataclass
class Run:
    """A workload's models and optimizers, its losses, and the bytes of gradients when each update began."""

    models: tuple[nn.Module, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    losses: list[float] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)


def workload(name: str) -> ModuleType:
    return importlib.import_module(f"ampmem.workloads.{name}")


def options(precision: str, **rest: Any) -> WorkloadOptions:
    return WorkloadOptions(preset="tiny", precision=precision, **({"steps": 2} | rest))


@contextmanager
def watched(module: ModuleType, *, keep: bool = True) -> Iterator[Run]:
    """A workload's losses while its ``train`` runs here; and, to ``keep``, what it builds."""
    run = Run()
    reporting = module if hasattr(module, "report_step") else common  # some share a loop, which is in common
    build, report = module.build, reporting.report_step

    def watch_build(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        if keep:
            run.models, run.optimizers = _tuple(built[0]), _tuple(built[1])
            for optimizer in run.optimizers:
                optimizer.register_step_pre_hook(lambda *_: run.gradients.append(gradients(*run.models)))
        return built

    module.build, reporting.report_step = watch_build, lambda step, loss: run.losses.append(loss)
    try:
        yield run
    finally:
        module.build, reporting.report_step = build, report


def train(name: str, precision: str, **rest: Any) -> Run:
    """Run a workload's own ``train`` and return what it kept alive."""
    module = workload(name)
    with watched(module) as run:
        module.train(options(precision, **rest), **EXTRA.get(name, {}))
    return run


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


# -- cast copies, counted without ampmem ------------------------------------------------------


class CastCounter(TorchDispatchMode):
    """Weak references to the storages of all casts of ``parameters``."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self._of = {p.untyped_storage().data_ptr() for model in models for p in model.parameters()}
        self._copies: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and args[0].dtype != result.dtype
        if cast and args[0].untyped_storage().data_ptr() in self._of:
            self._copies.append(weakref.ref(result.untyped_storage()))
        return result

    def alive(self) -> int:
        """Bytes of the copies that have not died."""
        return sum(storage.nbytes() for copy in self._copies if (storage := copy()) is not None)


def count_casts(name: str, precision: str) -> int:
    """Bytes of the cast copies alive when the last backward of a workload starts, as a dispatch mode sees it."""
    module = workload(name)
    seen: list[int] = []
    counter: CastCounter | None = None
    backward = torch.autograd.backward

    def count(*args: Any, **kwargs: Any) -> Any:
        if counter is not None:
            seen.append(counter.alive())
        return backward(*args, **kwargs)

    forwards: list[Any] = []
    with watched(module) as run:
        build = module.build

        def count_build(*args: Any, **kwargs: Any) -> Any:
            nonlocal counter
            built = build(*args, **kwargs)
            counter = CastCounter(_tuple(built[0]))
            for model in _tuple(built[0]):
                forwards.append(model.register_forward_pre_hook(lambda *_: counter.__enter__() and None))
                forwards.append(
                    model.register_forward_hook(lambda *_: counter.__exit__(None, None, None), always_call=True)
                )
            return built

        module.build, torch.autograd.backward = count_build, count
        try:
            module.train(options(precision), **EXTRA.get(name, {}))
        finally:
            torch.autograd.backward = backward
        assert run.losses
    return seen[-1]


# -- what torch.profiler says without ampmem --------------------------------------------------

SCALAR = 16
"""Scalar wrappers of up to this many bytes come and go under a dispatch mode; nothing else may."""


@dataclass(frozen=True)
class Observed:
    """A run as the allocator and the script saw it."""

    both: list[int]
    """Bytes of allocs and frees in their order, those of frees negative."""
    allocs: list[int]
    frees: list[int]
    result: Any
    rng: tuple[Any, ...]


def plain(function: Callable[[], Any], *, scalar: int = SCALAR) -> Observed:
    """``function`` under torch.profiler alone; blocks of up to ``scalar`` bytes are left out."""
    _seed()
    with torch_profile(profile_memory=True) as profiler:
        result = function()
        gc.collect()
        rng = _rng()
    events: list[tuple[int, int]] = []

    def visit(node: Any) -> None:
        if node.tag == _EventType.Allocation:
            events.append((node.start_time_ns, node.extra_fields.alloc_size))
        for child in node.children:
            visit(child)

    for root in profiler.kineto_results.experimental_event_tree():
        visit(root)
    events.sort(key=lambda event: event[0])
    sizes = [size for _, size in events if abs(size) > scalar]
    frees = sorted(-size for size in sizes if size < 0)
    return Observed(sizes, [size for size in sizes if size > 0], frees, result, rng)


def observed(function: Callable[[], Any], *, scalar: int = SCALAR) -> tuple[Observed, Recording]:
    """``function`` under ampmem; blocks of up to ``scalar`` bytes are left out."""
    _seed()
    with ampmem.profile() as profile:
        result = function()
        gc.collect()
        rng = _rng()
    recording = profile.recording()
    allocs, frees = (sizes_of(recording, action, scalar=scalar) for action in (Action.ALLOC, Action.FREE))
    return Observed(sizes_of(recording, scalar=scalar), allocs, sorted(frees), result, rng), recording


def sizes_of(recording: Recording, action: Action | None = None, *, scalar: int = SCALAR) -> list[int]:
    """Bytes of every alloc or free of the recorded thread, in order, but for scalar wrappers; of both, frees negative.

    The threads on which a kernel runs take scratch too, as many bytes at a time as chance has it.
    """
    events = recording.events
    mine = (events.address != OTHER_THREADS) & (events.bytes > scalar)
    if action is None:
        return list(np.where(events.action == Action.FREE, -events.bytes, events.bytes)[mine].tolist())
    return list(events.bytes[mine & (events.action == action)].tolist())


def _seed() -> None:
    gc.collect()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def _rng() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return tuple(torch.get_rng_state().tolist()), random.getstate(), kind, tuple(keys.tolist()), *rest
