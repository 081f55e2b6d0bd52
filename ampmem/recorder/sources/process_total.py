"""Makes torch's CPU allocator count for the whole process, whichever thread allocates or frees.

The profiler looks at one thread. The running total in its events is the process's once
``FLAGS_caffe2_report_cpu_memory_usage`` of libc10 is set: then every allocation and free is added up.
Source: ``ProfiledCPUMemoryReporter`` in PyTorch's ``c10/core/CPUAllocator.cpp``.
"""

from __future__ import annotations

import ctypes
import os

import torch

from ampmem.patching import Undo, added
from ampmem.recorder.sources.torch_flags import counting_begins, torch_flag

FLAG = "FLAGS_caffe2_report_cpu_memory_usage"
NOT_COUNTED = "what threads other than the recorded one allocate and free on the CPU is not counted: {why}"


def count_all_threads() -> tuple[Undo, str | None]:
    """Set the flag; returns what restores it, and why it could not be set where it was not."""
    # At that level torch would print a line for each allocation.
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "").upper() in ("INFO", "0"):
        return _nothing, "TORCH_CPP_LOG_LEVEL is INFO"
    flag = torch_flag(FLAG, ctypes.c_bool)
    if flag is None:
        return _nothing, f"this torch ({torch.__version__}) does not export {FLAG}"
    with counting_begins():
        before, flag.value = flag.value, True

    def restore() -> None:
        flag.value = before

    return added("libc10", FLAG, restore), None


def _nothing() -> None:
    """There is nothing to restore."""
