"""The few calls to torch that source ``cuda`` makes; tests replace them with an object of their own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from ampmem.allocator.settings import UNCACHED, VARIABLES, backend_of_environment
from ampmem.patching import Undo, patch_call, undone_together
from ampmem.recorder.torch_private import cuda as torch_private
from ampmem.recorder.torch_private.general import in_backward

Snapshot = Mapping[str, Any]
"""The value of ``torch.cuda.memory._snapshot()``."""

OomObserver = Callable[[int, int, int, int], None]
"""Called with the device, the bytes requested, the device's total (or the process's limit), and the free bytes."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of one device, as ``torch.cuda.memory_stats`` has them, all pools together.

    ``blocks`` is the number of blocks in use, ``uses`` of allocations and frees since the process started.
    """

    blocks: int
    requested: int
    allocated: int
    active: int
    reserved: int
    allocated_peak: int
    uses: int = 0


class TorchCuda:
    """The calls to a CUDA build of torch that the source needs."""

    def __init__(self) -> None:
        self._asks_nvml = True

    def problem(self) -> str | None:
        """Why this build, driver or allocator cannot be recorded; ``None`` if it can."""
        if not cuda_available():
            why = "this torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
            return f"cuda cannot be recorded: {why}; record on the CPU with --device cpu (device='cpu' in Python)"
        if os.environ.get(UNCACHED) == "1":
            return (
                f"{UNCACHED}=1 turns PyTorch's caching allocator off, so it keeps no memory history; unset {UNCACHED}"
            )
        backend = torch.cuda.memory.get_allocator_backend()
        if backend != "native":
            return (
                f"torch uses the allocator {backend!r}, which keeps no memory history; to record PyTorch's own "
                f"allocator, unset {' and '.join(VARIABLES)}, or remove the pluggable allocator"
            )
        asked = backend_of_environment(os.environ)
        if asked != backend:
            return (
                f"the script asks for the allocator {asked!r} after torch was imported with {backend!r}; remove the "
                "backend from the script's settings"
            )
        return None

    def when_ready(self, action: Callable[[], None]) -> None:
        """Call ``action`` now, or right after the script has initialized CUDA."""
        # Initializing CUDA here would be before the script has set CUDA_VISIBLE_DEVICES, for one.
        if torch.cuda.is_initialized():
            action()
        else:
            torch_private.when_cuda_is_ready(action)

    settings_in_force = staticmethod(torch_private.settings_in_force)
    set_settings = staticmethod(torch_private.set_settings)
    caches = staticmethod(torch_private.allocator_is_on)
    """Whether the caching allocator is in use; if not, allocations are missing in the history."""
    metadata_setter = staticmethod(torch_private.metadata_setter)

    def history_is_on(self) -> bool:
        """Whether memory history is being recorded already."""
        return torch.cuda.is_initialized() and torch_private.history_is_on()

    def history(self, *, on: bool, entries: int, stacks: bool) -> None:
        """Switch memory history off, or on with an empty trace."""
        if not on:
            torch_private.record_history(None)
            return
        torch_private.record_history(
            "all",
            context="alloc" if stacks else None,
            stacks="python",
            max_entries=entries,
            clear_history=True,
            # Switched on inside backward, a callback of this thread would be gone with it, and torch would miss it.
            global_record_annotations=in_backward(),
        )

    def snapshot(self) -> Snapshot:
        """Segments and traces of all devices."""
        return torch_private.cuda_snapshot()  # type: ignore[no-any-return]

    def stats(self, device: int) -> Stats:
        """The allocator's statistics for ``device``."""
        nested = torch.cuda.memory_stats_as_nested_dict(device)
        current = {name: int(nested[f"{name}_bytes"]["all"]["current"]) for name in _STATS}
        return Stats(
            **current,
            blocks=int(nested["allocation"]["all"]["current"]),
            allocated_peak=int(nested["allocated_bytes"]["all"]["peak"]),
            uses=sum(int(nested["allocation"]["all"][count]) for count in ("allocated", "freed")),
        )

    def changes(self, device: int) -> tuple[int, ...]:
        """Counters that grow with each event of the device's trace: if equal twice, there was none in between."""
        nested = torch.cuda.memory_stats_as_nested_dict(device)
        return tuple(int(nested[name]["all"][count]) for name in _CHANGES for count in ("allocated", "freed"))

    def memory_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)

    def process_used(self, device: int) -> int | None:
        """Bytes of the device that the driver counts for this process; ``None`` if NVML cannot be asked."""
        if not self._asks_nvml:
            return None
        try:
            nvml, handle = _nvml(device)
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            used = next((int(each.usedGpuMemory) for each in processes if each.pid == os.getpid()), None)
        except Exception:  # no pynvml, no permission, not supported: NVML has many errors
            used = None
        self._asks_nvml = used is not None  # NVML may not find this process, since containers hide process ids
        return used

    def current_device(self) -> int:
        """The index of the calling thread's device."""
        return torch.cuda.current_device()

    def device_count(self) -> int:
        """Number of devices."""
        return torch.cuda.device_count()

    def device_name(self, device: int) -> str:
        """The name of ``device``."""
        return torch.cuda.get_device_name(device)

    def synchronize(self, device: int) -> None:
        """Wait for all work on the device."""
        torch.cuda.synchronize(device)

    @undone_together
    def follow_captures(self) -> Iterator[Undo]:
        """Follow the CUDA graphs that any thread captures; returns the undo."""

        def wrap_begin(original: Callable[..., Any]) -> Callable[..., Any]:
            def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(graph, *args, **kwargs)
                _captured.add(id(graph))
                return result

            return capture_begin

        def wrap_end(original: Callable[..., Any]) -> Callable[..., Any]:
            def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    return original(graph, *args, **kwargs)
                finally:
                    _captured.discard(id(graph))

            return capture_end

        yield _captured.clear
        yield patch_call(*torch_private.BEGIN_CAPTURE, wrap_begin)
        yield patch_call(*torch_private.END_CAPTURE, wrap_end)

    def capturing(self) -> bool:
        """Whether any thread is capturing a CUDA graph: a call that synchronizes would end the capture."""
        return bool(_captured) or torch.cuda.is_current_stream_capturing()

    def observe_oom(self, observer: OomObserver) -> None:
        """Call ``observer`` whenever memory runs out, until :func:`forget_observer`."""
        # One list for the process, with at most one observer: torch's own entry asks it.
        _observer[:] = [observer]
        _attach_once()


def cuda_available() -> bool:
    """Whether torch can use CUDA, according to NVML if that is installed.

    A call of CUDA itself would fix ``CUDA_VISIBLE_DEVICES`` before the script can set it.
    """
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    if name in os.environ:
        return torch.cuda.is_available()
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        del os.environ[name]


_STATS = ("requested", "allocated", "active", "reserved")
_CHANGES = ("allocation", "active", "reserved_bytes")
"""Statistics that change with allocations and frees, waits for other streams, and segments."""

_captured: set[int] = set()
"""``id`` of each graph that is being captured."""


_observer: list[OomObserver] = []
"""The current observer: torch's own list of observers only grows, so it gets one entry, once."""


@functools.cache
def _attach_once() -> None:
    torch_private.observe_out_of_memory(_observed)


def forget_observer(observer: OomObserver) -> None:
    """Stop calling ``observer``."""
    if observer in _observer:
        _observer.remove(observer)


def _observed(device: int, segment: int, total: int, free: int) -> None:
    # An error here would replace the script's OutOfMemoryError.
    try:
        for observer in list(_observer):
            observer(device, segment, total, free)
    except Exception:
        return


@functools.cache
def _nvml(device: int) -> tuple[Any, Any]:
    """The NVML module and its handle of ``device``. NVML stays initialized, as in torch, since that is slow."""
    nvml: Any = import_module("pynvml")
    nvml.nvmlInit()
    return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
