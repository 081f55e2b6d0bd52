"""Private torch APIs for recording a CUDA device; the others are in ``general.py``.

They are looked up at each call, because a simulated device may have replaced them when this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampmem.recorder.torch_private.entries import Place, Use, attribute, patched

HISTORY: Place = patched(
    "torch.cuda.memory",
    "_record_memory_history",
    "to stop recording when the script records its own history: a process has only one",
    without="if the script records memory history itself, ampmem loses the allocator events",
    use=Use.CUDA,
)
_CAPTURES = "to know whether a thread captures a CUDA graph: synchronizing would break the capture"
_SPOILED = "a CUDA graph that another thread captures while a step ends becomes invalid"
_GRAPH = "torch.cuda.graphs.CUDAGraph"
BEGIN_CAPTURE: Place = patched(_GRAPH, "capture_begin", _CAPTURES, without=_SPOILED, use=Use.CUDA)
END_CAPTURE: Place = patched(_GRAPH, "capture_end", _CAPTURES, without=_SPOILED, use=Use.CUDA)
_PEAKS = "to reset the peak for each phase of a watched run, and to hide these resets from the script"
_UNWATCHED = "ampmem watch does not know the peak of a step"
ASKS_STATS, RESETS_PEAKS = (
    tuple(patched("torch._C", name, _PEAKS, without=_UNWATCHED, use=Use.CUDA) for name in names)
    for names in (
        ("_cuda_memoryStats", "_accelerator_getDeviceStats"),
        ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"),
    )
)
"""Functions that read the allocator's statistics, and those that reset their peaks, in script and torch."""
for _owner, _name, _why in (
    ("torch.cuda", "_lazy_call", "to start recording when the script initializes CUDA"),
    (
        "torch.cuda.memory",
        "_record_memory_history_impl",
        "to switch the allocator's history on and off without ampmem's own patch",
    ),
    ("torch.cuda.memory", "_snapshot", "to read the allocator's segments and trace"),
):
    attribute(_owner, _name, _why, use=Use.CUDA)
for _name, _why, _without in (
    (
        "_cuda_isHistoryEnabled",
        "to know whether the script records memory history",
        "a memory history that the script started before ampmem has ended",
    ),
    (
        "_cuda_attach_out_of_memory_observer",
        "to notice that memory ran out",
        "what ran out of memory, and where, is not in the recording",
    ),
    (
        "_cuda_setMemoryMetadata",
        "to tag allocator events with a time",
        "ops are matched to allocator events by time alone",
    ),
    (
        "_accelerator_setAllocatorSettings",
        "to apply allocator settings that the script makes before it imports torch",
        "allocator settings that the script makes before it imports torch may not be in force",
    ),
    (
        "_accelerator_getAllocatorSettings",
        "to know which allocator settings are in force",
        "allocator settings of the script may not be in force",
    ),
    (
        "_cuda_cudaCachingAllocator_is_enabled",
        "to know whether the script has turned the caching allocator off",
        "memory allocated after torch.cuda.caching_allocator_enable(False) is missing without a warning",
    ),
    ("_cuda_getMemoryMetadata", "to keep the script's own tags", "ops are matched to allocator events by time alone"),
):
    attribute("torch._C", _name, _why, without=_without, use=Use.CUDA)


def when_cuda_is_ready(action: Callable[[], None]) -> None:
    """Call ``action`` right after the script has initialized CUDA."""
    torch.cuda._lazy_call(action)


# Called through the module at each call, as the simulated device replaces some of these functions.
def record_history(*arguments: Any, **options: Any) -> None:
    """Switch the allocator's history on or off, without ampmem's patch of the public function."""
    torch.cuda.memory._record_memory_history_impl(*arguments, **options)


def cuda_snapshot() -> Any:
    """Segments and traces of all devices."""
    return torch.cuda.memory._snapshot()


def history_is_on() -> bool:
    """Whether the allocator's history is recorded; ``False`` if this torch cannot be asked."""
    asks = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(asks is not None and asks())


def allocator_is_on() -> bool:
    """Whether the caching allocator is in use; ``True`` if this torch cannot be asked."""
    asks = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    return asks is None or bool(asks())


def settings_in_force() -> str | None:
    """The allocator's settings as text; ``None`` if torch does not say. Reading them too early would fix them."""
    found = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return None if found is None else str(found())


def set_settings(text: str) -> None:
    """Set the allocator's settings, if this torch can."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is not None:
        change(text)


def observe_out_of_memory(observer: Callable[[int, int, int, int], None]) -> None:
    """Call ``observer`` whenever memory runs out, until the process ends, if this torch can."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(observer)


def metadata_setter() -> Callable[[str], None] | None:
    """A function that tags the calling thread's events; ``None`` if torch cannot, or the script uses the tags."""
    setter, getter = (getattr(torch._C, f"_cuda_{verb}MemoryMetadata", None) for verb in ("set", "get"))
    if setter is None or getter is None or getter():
        return None
    return setter  # type: ignore[no-any-return]


def memory_stats() -> Callable[[int], Any]:
    """The function for the allocator's statistics of a device, without ampmem's patch."""
    return vars(torch._C)["_cuda_memoryStats"]  # type: ignore[no-any-return]


def reset_peaks() -> Callable[[int], None]:
    """The function that resets the peaks of a device, without ampmem's patch."""
    return vars(torch._C)["_cuda_resetPeakMemoryStats"]  # type: ignore[no-any-return]
