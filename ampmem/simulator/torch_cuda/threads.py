"""Other threads of the script: a dispatch mode is a thread's own, and loaders of weights work on several."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ampmem.patching import patch
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.general import THREAD_STARTS


def install(mode: SimulatedMode) -> Callable[[], None]:
    """Let threads that start from now on see the device too; returns what undoes it. Each op is one at a time."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def start(thread: threading.Thread) -> None:
            mode.shared = True
            with mode:
                original(thread)

        return start

    return patch(*THREAD_STARTS, wrapper)
