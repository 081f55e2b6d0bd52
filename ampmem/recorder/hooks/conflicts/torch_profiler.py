"""A script that starts torch.profiler itself: PyTorch allows one profiler, so ampmem makes way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ampmem.patching import patch
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.sources.window import OTHER_PROFILER, prepared_elsewhere
from ampmem.recorder.torch_private.general import PREPARE


def install(listener: Listener) -> Callable[[], None]:
    """End the recording when the script prepares a profiler; returns what undoes it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _prepare_trace(profiler: Any) -> Any:
            if listener.on_thread():
                listener.stop_recording(OTHER_PROFILER)
                return original(profiler)
            with prepared_elsewhere():
                listener.stop_recording(OTHER_PROFILER)  # which is done on its own thread
                return original(profiler)

        return _prepare_trace

    return patch(*PREPARE, wrap)
