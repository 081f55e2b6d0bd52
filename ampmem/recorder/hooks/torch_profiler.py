"""A script that starts torch.profiler itself: PyTorch allows one profiler, so ampmem makes way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ampmem.patching import patch
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.torch_private import PREPARE


def install(listener: Listener) -> Callable[[], None]:
    """End the recording when the script prepares a profiler; returns what undoes it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _prepare_trace(profiler: Any) -> Any:
            listener.stop_recording("the script started torch.profiler, and PyTorch allows only one profiler at a time")
            return original(profiler)

        return _prepare_trace

    return patch(*PREPARE, wrap)
