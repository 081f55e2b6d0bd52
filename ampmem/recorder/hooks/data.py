"""The DataLoader: what is born while it makes a batch belongs to phase ``data``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ampmem.patching import patch
from ampmem.recorder.torch_private import NEXT_BATCH

if TYPE_CHECKING:
    from ampmem.recorder.session import Session


def install(session: Session) -> Callable[[], None]:
    """Wrap the iterators' ``__next__``; returns what undoes it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            if not session.recording or not session.on_thread():
                return original(iterator)
            before = session.data_started()
            try:
                return original(iterator)
            finally:
                session.data_ended(before)

        return __next__

    return patch(*NEXT_BATCH, wrap)
