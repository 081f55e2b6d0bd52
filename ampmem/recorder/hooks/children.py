"""Child processes that the script starts: they are not recorded, which must not go unsaid."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING, Any

from ampmem.patching import Undo, patch

if TYPE_CHECKING:  # which has torch's types, and the command line looks here before torch is needed
    from ampmem.recorder.hooks.listener import Listener

PLACE = (BaseProcess, "start")
_NOT_TRAINING = ("torch.utils.data.", "multiprocessing.managers")
"""Modules whose children load data, or keep objects that processes share."""
_FORKING = (*_NOT_TRAINING, "multiprocessing.", "subprocess")
"""Modules whose forks are seen elsewhere, or run other programs."""


def install(listener: Listener) -> Undo:
    """Count them; returns what undoes it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(process: BaseProcess) -> Any:
            if not loads_data(sys._getframe(1)):
                listener.process_started()
            return original(process)

        return start

    return patch(*PLACE, wrap)


def forked(listener: Listener) -> None:
    """A child was forked; called in its parent, by ``os.fork``."""
    if not _within(_FORKING, sys._getframe(1)):
        listener.process_started()


def loads_data(frame: FrameType | None) -> bool:
    """Whether a process that is started from ``frame`` loads data, or keeps objects."""
    return _within(_NOT_TRAINING, frame)


def _within(modules: tuple[str, ...], frame: FrameType | None) -> bool:
    """Whether code of one of the ``modules`` called ``frame``, or is there."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(modules):
            return True
        frame = frame.f_back
    return False
