"""The DataLoader: what is born while it makes a batch belongs to phase ``data``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ampmem.patching import patch
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.torch_private import NEXT_BATCH


def install(listener: Listener) -> Callable[[], None]:
    """Wrap the iterators' ``__next__``; returns what undoes it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            if not listener.recording or not listener.on_thread():
                return original(iterator)
            before = listener.data_started()
            try:
                return original(iterator)
            finally:
                listener.data_ended(before)

        return __next__

    return patch(*NEXT_BATCH, wrap)
