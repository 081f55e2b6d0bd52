"""``torch.cuda`` as it is with one GPU of the named kind: availability, properties, streams, memory statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ampmem.recorder.simulated.device import CONTEXT, SimulatedDevice
from ampmem.recorder.simulated.mode import NotSimulated
from ampmem.recorder.simulated.private import FakeTensor
from ampmem.recorder.simulated.where import script_line

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stream:
    """A stream; all work of a simulated device is done at once."""

    stream_id = cuda_stream = 0
    device_index = 0
    device_type = 1
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """Whether everything is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured: there are none."""
        return False

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        event = event if event is not None else Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


class Event:
    """An event; its time is this machine's, which says nothing about a GPU's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = perf_counter()

    def record(self, stream: Any = None) -> None:
        """It happens now."""
        self._time = perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the two on this machine."""
        return (end._time - self._time) * 1000


class _Region:
    """``torch.cuda.device(...)`` and ``torch.cuda.stream(...)``: regions in which nothing is different."""

    idx = prev_idx = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Any = None

    def __enter__(self) -> _Region:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


def install(device: SimulatedDevice) -> Callable[[], None]:
    """Replace what a script may ask of ``torch.cuda``; returns what undoes it."""
    undo = ExitStack()
    for owner, names in ((torch.cuda, _queries(device)), (torch.cuda, _actions(device))):
        for name, value in names.items():
            undo.callback(_replace(owner, name, value))
    for name, value in _memory(device).items():
        undo.callback(_replace(torch.cuda, name, value))
        undo.callback(_replace(torch.cuda.memory, name, value))
    for name, value in _random().items():
        undo.callback(_replace(torch.cuda, name, value))
        undo.callback(_replace(torch.cuda.random, name, value))
    for name in ("range_push", "mark", "range_start"):
        undo.callback(_replace(torch.cuda.nvtx, name, lambda *_, **__: 0))
    undo.callback(_replace(torch.cuda.nvtx, "range_pop", lambda: 0))
    undo.callback(_replace(torch.cuda.nvtx, "range", _nothing_range))
    undo.callback(_replace(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor))
    undo.callback(_replace(torch.Tensor, "is_pinned", lambda tensor, device=None: False))
    undo.callback(_replace(torch.Tensor, "record_stream", lambda tensor, stream: None))
    undo.callback(_replace(FakeTensor, "__format__", _format))
    undo.callback(_replace(FakeTensor, "data_ptr", lambda tensor: 0))  # torch warns, and clones where it is 0
    undo.callback(_replace(torch, "save", _save(device, torch.save)))
    undo.callback(_replace(torch, "compile", _no_compiler))
    for name, value in _accelerator(device).items():
        undo.callback(_replace(torch.accelerator, name, value))
    undo.callback(_replace(torch.backends.cudnn, "is_available", lambda: True))
    undo.callback(_replace(torch.backends.cudnn, "is_acceptable", lambda tensor: False))
    return undo.close


def properties(device: SimulatedDevice) -> SimpleNamespace:
    """What ``torch.cuda.get_device_properties`` gives; an A100's numbers where the GPU's are not known."""
    major, minor = device.gpu.compute_capability or (8, 0)
    return SimpleNamespace(
        name=device.gpu.name,
        major=major,
        minor=minor,
        total_memory=device.gpu.total_memory,
        multi_processor_count=device.gpu.sm_count or 108,
        is_integrated=False,
        is_multi_gpu_board=False,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=166912,
        shared_memory_per_multiprocessor=167936,
        L2_cache_size=41943040,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
    )


def _queries(device: SimulatedDevice) -> dict[str, Any]:
    found = properties(device)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda callable, **kwargs: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: found.name,
        "get_device_capability": lambda device=None: (found.major, found.minor),
        "get_device_properties": lambda device=None: found,
        "is_bf16_supported": lambda including_emulation=True: found.major >= 8,
        "is_tf32_supported": lambda: found.major >= 8,
        "get_arch_list": lambda: [f"sm_{found.major}{found.minor}"],
        "can_device_access_peer": lambda device, peer_device: False,
        "utilization": lambda device=None: 0,
        "temperature": lambda device=None: 0,
        "power_draw": lambda device=None: 0,
    }


def _actions(device: SimulatedDevice) -> dict[str, Any]:
    stream = Stream()
    return {
        "set_device": lambda device: None,
        "device": _Region,
        "device_of": _Region,
        "_DeviceGuard": _Region,
        "stream": _Region,
        "StreamContext": _Region,
        "set_stream": lambda stream: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "Stream": Stream,
        "Event": Event,
        "synchronize": lambda device=None: None,
        "ipc_collect": lambda: None,
        "set_sync_debug_mode": lambda debug_mode: None,
        "get_sync_debug_mode": lambda: 0,
        "_sleep": lambda cycles: None,
        "is_current_stream_capturing": lambda: False,
    }


def _memory(device: SimulatedDevice) -> dict[str, Any]:
    allocator = device.allocator
    counters = allocator.counters

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return max(total - CONTEXT - counters.reserved, 0), total

    total = device.gpu.total_memory
    return {
        "memory_allocated": lambda device=None: counters.allocated,
        "max_memory_allocated": lambda device=None: counters.allocated_peak,
        "memory_reserved": lambda device=None: counters.reserved,
        "max_memory_reserved": lambda device=None: counters.reserved_peak,
        "memory_cached": lambda device=None: counters.reserved,
        "max_memory_cached": lambda device=None: counters.reserved_peak,
        "memory_stats": lambda device=None: allocator.statistics().memory_stats(),
        "reset_peak_memory_stats": lambda device=None: counters.reset_peaks(),
        "reset_max_memory_allocated": lambda device=None: counters.reset_peaks(),
        "reset_max_memory_cached": lambda device=None: counters.reset_peaks(),
        "reset_accumulated_memory_stats": lambda device=None: None,
        "empty_cache": allocator.empty_cache,
        "mem_get_info": mem_get_info,
        "memory_summary": lambda device=None, abbreviated=False: str(allocator.statistics()),
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "get_allocator_backend": lambda: "native",
        "_record_memory_history": lambda *_, **__: None,
    }


def _random() -> dict[str, Any]:
    """The random numbers of a device that computes none: a state that can be kept and set, and that is all."""
    return {
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "seed": lambda: None,
        "seed_all": lambda: None,
        "initial_seed": lambda: 0,
        "get_rng_state": lambda device="cuda": _state(),
        "get_rng_state_all": lambda: [_state()],
        "set_rng_state": lambda new_state, device="cuda": None,
        "set_rng_state_all": lambda new_states: None,
    }


def _accelerator(device: SimulatedDevice) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "set_device_index": lambda device: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: Stream(),
        "empty_cache": device.allocator.empty_cache,
        "memory_allocated": lambda device_index=None: device.allocator.counters.allocated,
        "max_memory_allocated": lambda device_index=None: device.allocator.counters.allocated_peak,
        "memory_reserved": lambda device_index=None: device.allocator.counters.reserved,
        "max_memory_reserved": lambda device_index=None: device.allocator.counters.reserved_peak,
        "reset_peak_memory_stats": lambda device_index=None: device.allocator.counters.reset_peaks(),
    }


def _state() -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _format(tensor: FakeTensor, spec: str) -> str:
    """As that of a plain tensor, which leaves subclasses out."""
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)


def _no_compiler(*_: Any, **__: Any) -> Any:
    raise NotSimulated(
        f"{script_line()}: what compiled code allocates is decided by the kernels that torch.compile makes for a GPU, "
        "and there is none; leave torch.compile out to see what the plain run needs"
    )


def _save(device: SimulatedDevice, original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.save`` that leaves out what has no values to save."""

    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = obj.parameters() if isinstance(obj, torch.nn.Module) else tree_leaves(obj)
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            device.assume(f"torch.save wrote nothing, since tensors had no values, at {script_line()}")
            return None
        return original(obj, *args, **kwargs)

    return save


@contextmanager
def _nothing_range(msg: str, *_: Any, **__: Any) -> Iterator[None]:
    yield


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Put ``value`` into ``owner``; returns what puts the former value back."""
    missing = object()
    former = vars(owner).get(name, missing)
    if former is missing and not hasattr(owner, name):
        return lambda: None  # a name that this version of torch does not have
    setattr(owner, name, value)

    def undo() -> None:
        if former is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, former)

    return undo
