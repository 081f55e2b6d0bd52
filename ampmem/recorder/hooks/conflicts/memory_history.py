"""A script that records memory history itself: PyTorch keeps only one, so ampmem makes way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ampmem.patching import patch
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.torch_private.cuda import HISTORY


def install(listener: Listener) -> Callable[[], None]:
    """End the recording when the script calls ``_record_memory_history``; returns what undoes it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _record_memory_history(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("record_cuda", True):  # or else of pinned memory of the host alone, which is another history
                listener.stop_recording("the script called _record_memory_history, and PyTorch keeps only one history")
            return original(*args, **kwargs)

        return _record_memory_history

    return patch(*HISTORY, wrap)
