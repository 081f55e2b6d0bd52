"""The thread that kineto, torch's profiler, starts with the first profile of a process, and that ampmem ends.

It looks for orders to profile, which nobody gives here. A child that is forked beside it hangs when it ends: the thread
is not there, but its condition variable still counts it, and C++ waits for it with the last destructors. With the
thread ended, a process has as many threads as it would have without ampmem. Source: ``ConfigLoader.cpp`` of
https://github.com/pytorch/kineto.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import torch

from ampmem.recorder.torch_private.general import CONFIG_LOADER, KINETO, REGISTER_CLIENT, STOP_THREAD

_SIZE = 4096
"""More bytes than a ``ConfigLoader`` has."""
_PATIENCE_S = 1.0
"""How long to wait for the thread to wait, which it does a tenth of a millisecond after it has started."""


@contextmanager
def thread_ended() -> Iterator[None]:
    """End the thread if the first profile of the process is started in here."""
    _without_client()
    before = _threads()
    yield
    started = _threads() - before
    if len(started) == 1:
        _end(started.pop())


def _without_client() -> None:
    """Let kineto start on this thread without a line on stderr, which it prints where that is not the main one.

    It would tell its client, torch, that it has started, on the thread alone that has loaded torch's libraries. Torch
    does nothing with that unless a daemon may ask for profiles. Source: ``libkineto_api.cpp``.
    """
    if threading.get_ident() == threading.main_thread().ident or "KINETO_USE_DAEMON" in os.environ:
        return
    try:
        library = _torch_cpu()
        kineto, register = getattr(library, KINETO), getattr(library, REGISTER_CLIENT)
    except (OSError, AttributeError):
        return
    kineto.restype, register.argtypes, register.restype = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p), None
    register(kineto(), None)


def _torch_cpu() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _threads() -> set[str]:
    """The ids of this process's threads."""
    return {path.name for path in Path("/proc/self/task").glob("*")}


def _end(thread: str) -> None:
    """Have kineto end its ``thread``. It goes on where this torch does not export how."""
    try:
        library = _torch_cpu()
        instance, stop = getattr(library, CONFIG_LOADER), getattr(library, STOP_THREAD)
    except (OSError, AttributeError):
        return
    instance.restype, stop.argtypes, stop.restype = ctypes.c_void_p, (ctypes.c_void_p,), None
    loader = instance()
    # It is told by a condition variable. Told before it waits there, it would sleep for minutes first.
    deadline = monotonic() + _PATIENCE_S
    while monotonic() < deadline:
        waits_for = _waits_for(thread)
        if waits_for is None:
            return
        if loader <= waits_for < loader + _SIZE:
            stop(loader)
            return
        os.sched_yield()


def _waits_for(thread: str) -> int | None:
    """What ``thread`` has asked the kernel to wait for, an address; 0 while it runs, ``None`` where nobody says."""
    try:
        call = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    except OSError:
        return None
    return int(call[1], 16) if len(call) > 1 else 0
