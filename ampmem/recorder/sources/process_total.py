"""Makes torch's CPU allocator count for the whole process, whichever thread allocates or frees.

The profiler looks at one thread. The running total in its events is the process's once
``FLAGS_caffe2_report_cpu_memory_usage`` of libc10 is set: then every allocation and free is added up.
Source: ``ProfiledCPUMemoryReporter`` in PyTorch's ``c10/core/CPUAllocator.cpp``.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from ampmem.patching import Undo, added

FLAG = "FLAGS_caffe2_report_cpu_memory_usage"
NOT_COUNTED = "what threads other than the recorded one allocate and free on the CPU is not counted: {why}"


def count_all_threads() -> tuple[Undo, str | None]:
    """Set the flag; returns what restores it, and why it could not be set where it was not."""
    # At that level torch would print a line for each allocation.
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "").upper() in ("INFO", "0"):
        return _nothing, "TORCH_CPP_LOG_LEVEL is INFO"
    flag = _flag()
    if flag is None:
        return _nothing, f"this torch ({torch.__version__}) does not export {FLAG}"
    before, flag.value = flag.value, True

    def restore() -> None:
        flag.value = before

    return added("libc10", FLAG, restore), None


def _flag() -> ctypes.c_bool | None:
    for name in ("libc10.so", "libc10.dylib", "c10.dll"):
        library = Path(torch.__file__).parent / "lib" / name
        if library.exists():
            try:
                return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), FLAG)
            except (OSError, ValueError):
                return None
    return None


def _nothing() -> None:
    """There is nothing to restore."""
