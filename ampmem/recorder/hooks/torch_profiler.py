"""A script that starts torch.profiler itself: PyTorch allows one profiler, so ampmem makes way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ampmem.patching import patch
from ampmem.recorder.torch_private import PREPARE

if TYPE_CHECKING:
    from ampmem.recorder.session import Session


def install(session: Session) -> Callable[[], None]:
    """End the recording when the script prepares a profiler; returns what undoes it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _prepare_trace(profiler: Any) -> Any:
            if session.options.device != "sim":  # whose recording needs none
                session.stop_recording(
                    "the script started torch.profiler, and PyTorch allows only one profiler at a time"
                )
            return original(profiler)

        return _prepare_trace

    return patch(*PREPARE, wrap)
