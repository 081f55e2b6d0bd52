"""Settings of torch's C++ that no function of torch sets: global variables exported by libc10."""

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
    """The variable ``name``; ``None`` if this torch does not export it."""
    for library in ("libc10.so", "libc10.dylib", "c10.dll"):
        path = Path(torch.__file__).parent / "lib" / library
        if path.exists():
            try:
                # The dynamic linker loads a file once: this is the library that torch uses, with its variables.
                return kind.in_dll(ctypes.CDLL(str(path)), name)
            except (OSError, ValueError):
                return None
    return None


@functools.cache
def log_level() -> ctypes.c_int | None:
    """The minimum severity that torch's C++ prints; ``None`` if it cannot be set."""
    return torch_flag(LOG_LEVEL, ctypes.c_int)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress warnings of torch's C++, where possible."""
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
    """A block in which torch begins to count the CPU's blocks.

    At the first free of a block that it does not know, and at every thousandth, torch warns on stderr. So ampmem frees
    one itself first. Source: ``ProfiledCPUMemoryReporter`` in PyTorch's ``c10/core/CPUAllocator.cpp``.
    """
    block = torch.UntypedStorage(1)
    yield
    with without_warnings():
        del block
