"""``torch.cuda`` as it is with one GPU of the named kind: availability, properties, streams, memory statistics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ampmem.errors import UsageError
from ampmem.own_code import script_line
from ampmem.patching import replace_all
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.general import (
    ACCELERATOR_SETTINGS,
    DEVICE_GUARD,
    DUMP_SNAPSHOT,
    LAZY_CALL,
    LAZY_INIT,
    RECORD_HISTORY,
    SET_SETTINGS,
    SLEEP,
    SNAPSHOT,
)
from ampmem.simulator.torch_cuda import compiled, derivatives, streams, tensors, threads, unsupported
from ampmem.simulator.torch_cuda.streams import Region, check_device
from ampmem.simulator.where import stop
from ampmem.simulator.world import here

_SNAPSHOTS = "a simulated device has no snapshot; ampmem profile --snapshot FILE writes one of what was recorded"

if TYPE_CHECKING:
    from collections.abc import Iterator


def install(mode: SimulatedMode, *, alone: bool) -> Callable[[], None]:
    """Replace what a script may ask of ``torch.cuda``, and of tensors on it; returns what undoes it.

    ``alone`` when there are no other ranks, not even on paper.
    """
    device = mode.device_model
    with ExitStack() as undo:
        undo.callback(replace_all((torch.cuda,), _queries(device) | _actions()))
        undo.callback(replace_all((torch.cuda, torch.cuda.memory), _memory(device)))
        owner, sets, gets = ACCELERATOR_SETTINGS
        undo.callback(replace_all((owner,), {sets: _settings(device), gets: lambda: device.in_force[1]}))
        undo.callback(replace_all((torch.cuda, torch.cuda.random), _random(device)))
        undo.callback(replace_all((torch.cuda.nvtx,), _nvtx()))
        undo.callback(replace_all((torch.accelerator,), _accelerator(device)))
        undo.callback(streams.install(device))
        undo.callback(replace_all((torch.backends.cudnn,), _cudnn()))
        undo.callback(tensors.install(mode))
        undo.callback(derivatives.install(mode))
        undo.callback(threads.install(mode))
        undo.callback(compiled.install(device, mode.assumed))
        undo.callback(unsupported.install(alone=alone))
        return undo.pop_all().close


def properties(device: SimulatedDevice) -> SimpleNamespace:
    """What ``torch.cuda.get_device_properties`` gives; an A100's numbers where the GPU's are not known.

    The L2 cache, on which no allocation depends, is an A100's on all.
    """
    major, minor = device.gpu.compute_capability or (8, 0)
    return SimpleNamespace(
        name=device.gpu.name,
        major=major,
        minor=minor,
        total_memory=device.gpu.total_memory,
        multi_processor_count=device.gpu.sm_count or 108,
        is_integrated=False,
        is_multi_gpu_board=False,
        max_threads_per_multi_processor=device.gpu.threads_per_sm,
        max_threads_per_block=1024,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=device.gpu.shared_memory_per_block,
        shared_memory_per_multiprocessor=device.gpu.shared_memory_per_sm,
        L2_cache_size=41943040,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
    )


def _queries(device: SimulatedDevice) -> dict[str, Any]:
    found = properties(device)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        LAZY_INIT: lambda: None,
        LAZY_CALL: lambda callable, **kwargs: None,
        "init": lambda: None,
        "device_count": lambda: here().local_size,
        "current_device": lambda: here().local_rank,
        "get_device_name": lambda device=None: found.name,
        "get_device_capability": lambda device=None: (found.major, found.minor),
        "get_device_properties": lambda device=None: found,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or found.major >= 8,
        "is_tf32_supported": lambda: found.major >= 8,
        "get_arch_list": lambda: [f"sm_{found.major}{found.minor}"],
        "can_device_access_peer": lambda device, peer_device: False,
        "utilization": lambda device=None: 0,
        "temperature": lambda device=None: 0,
        "power_draw": lambda device=None: 0,
    }


def _actions() -> dict[str, Any]:
    return {
        "set_device": check_device,
        "device": Region,
        "device_of": Region,
        DEVICE_GUARD: Region,
        "ipc_collect": lambda: None,
        "set_sync_debug_mode": lambda debug_mode: None,
        "get_sync_debug_mode": lambda: 0,
        SLEEP: lambda cycles: None,
        "is_current_stream_capturing": lambda: False,
    }


def _memory(device: SimulatedDevice) -> dict[str, Any]:
    allocator = device.allocator
    counters = allocator.counters

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return max(allocator.driver.free, 0), total

    def set_fraction(fraction: float, device: Any = None) -> None:
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        simulated.set_memory_fraction(fraction)

    def no_history(enabled: Any = "all", *_: Any, **__: Any) -> None:
        # Said here, too: the recording may stop the script before it gets to its dump.
        if enabled:
            simulated.not_written(
                f"torch.cuda.memory.{RECORD_HISTORY} has no effect at {script_line()}, and {DUMP_SNAPSHOT} writes "
                f"nothing: {_SNAPSHOTS}",
                aloud=True,
            )

    def no_snapshot(filename: str = "dump_snapshot.pickle", **_: Any) -> None:
        simulated.not_written(
            f"torch.cuda.memory.{DUMP_SNAPSHOT} wrote nothing at {script_line()}: {_SNAPSHOTS}", aloud=True
        )

    def empty_snapshot(*_: Any, **__: Any) -> dict[str, Any]:
        simulated.not_written(f"torch.cuda.memory.{SNAPSHOT} was empty at {script_line()}: {_SNAPSHOTS}", aloud=True)
        return {"segments": [], "device_traces": [[]], "allocator_settings": {}}

    total = device.gpu.total_memory
    simulated = device
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
        "empty_cache": device.empty_cache,
        "mem_get_info": mem_get_info,
        "memory_summary": lambda device=None, abbreviated=False: str(allocator.statistics()),
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda device=None: allocator.settings.memory_fraction or 1.0,
        "get_allocator_backend": lambda: "native",
        "memory_snapshot": lambda *_, **__: [],
        RECORD_HISTORY: no_history,
        SNAPSHOT: empty_snapshot,
        SET_SETTINGS: _settings(device),
        DUMP_SNAPSHOT: no_snapshot,
    }


def _settings(device: SimulatedDevice) -> Callable[[str], None]:
    """What changes the allocator's settings while the script runs."""

    def set_settings(env: str) -> None:
        try:
            device.configure(env, f"torch.cuda.memory.{SET_SETTINGS}")
        except UsageError as error:
            raise stop(str(error)) from None

    return set_settings


def _random(device: SimulatedDevice) -> dict[str, Any]:
    """The random numbers of a device that computes none: a state that can be kept and set, and that is all."""
    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), device.seeded),
        "initial_seed": lambda: 0,
        "get_rng_state": lambda device="cuda": _state(),
        "get_rng_state_all": lambda: [_state()],
        **dict.fromkeys(("set_rng_state", "set_rng_state_all"), device.seeded),
    }


def _accelerator(device: SimulatedDevice) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: here().local_size,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: here().local_rank,
        "set_device_index": check_device,
        "set_device_idx": check_device,
        "current_device_idx": lambda: here().local_rank,
        "empty_cache": device.empty_cache,
        "memory_allocated": lambda device_index=None: device.allocator.counters.allocated,
        "max_memory_allocated": lambda device_index=None: device.allocator.counters.allocated_peak,
        "memory_reserved": lambda device_index=None: device.allocator.counters.reserved,
        "max_memory_reserved": lambda device_index=None: device.allocator.counters.reserved_peak,
        "reset_peak_memory_stats": lambda device_index=None: device.allocator.counters.reset_peaks(),
    }


def _state() -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


def _nvtx() -> dict[str, Any]:
    @contextmanager
    def nothing(msg: str, *_: Any, **__: Any) -> Iterator[None]:
        yield

    marks = dict.fromkeys(("range_push", "mark", "range_start"), lambda *_, **__: 0)
    return {**marks, "range_pop": lambda: 0, "range": nothing}


def _cudnn() -> dict[str, Any]:
    return {"is_available": lambda: True, "is_acceptable": lambda tensor: False}
