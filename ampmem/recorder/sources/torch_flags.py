"""The settings of torch's C++ that no function of torch's sets: global variables that libc10 exports."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from ampmem.recorder.torch_private.general import LOG_LEVEL

_ERRORS = 2
"""The level of :data:`LOG_LEVEL` at which torch prints no warnings."""
_CellT = TypeVar("_CellT", ctypes.c_bool, ctypes.c_int)


def torch_flag(name: str, kind: type[_CellT]) -> _CellT | None:
    """The variable ``name``; ``None`` where this torch does not export it."""
    for library in ("libc10.so", "libc10.dylib", "c10.dll"):
        path = Path(torch.__file__).parent / "lib" / library
        if path.exists():
            try:
                return kind.in_dll(ctypes.CDLL(str(path)), name)
            except (OSError, ValueError):
                return None
    return None


@functools.cache
def log_level() -> ctypes.c_int | None:
    """How grave what torch's C++ prints has to be; ``None`` where that cannot be set."""
    return torch_flag(LOG_LEVEL, ctypes.c_int)


@contextmanager
def without_warnings() -> Iterator[None]:
    """What torch's C++ would warn of in here is not printed, where that can be had."""
    level = log_level()
    if level is None:
        yield
        return
    before, level.value = level.value, max(level.value, _ERRORS)
    try:
        yield
    finally:
        level.value = before


@contextmanager
def counting_begins() -> Iterator[None]:
    """In here torch begins to count the CPU's blocks.

    The first time that one is freed which it does not know, and every thousandth time, it warns on stderr. So the
    first is a block of ours. Source: ``ProfiledCPUMemoryReporter`` in PyTorch's ``c10/core/CPUAllocator.cpp``.
    """
    block = torch.UntypedStorage(1)
    yield
    with without_warnings():
        del block
