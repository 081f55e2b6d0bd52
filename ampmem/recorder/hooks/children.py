"""Child processes that the script starts: they are not recorded, and a note says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING, Any

from ampmem.own_code import with_callers
from ampmem.patching import Undo, patch_call

if TYPE_CHECKING:  # the command line imports this module before torch, and the listener's types need torch
    from ampmem.recorder.hooks.listener import Listener

PLACE = (BaseProcess, "start")
_NOT_TRAINING = ("torch.utils.data.", "multiprocessing.managers")
"""Modules whose child processes only load data or hold shared objects."""
_FORKING = (*_NOT_TRAINING, "multiprocessing.", "subprocess")
"""Modules whose forks are counted elsewhere, or run other programs."""


def install(listener: Listener) -> Undo:
    """Count child processes; returns the undo."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def start(process: BaseProcess) -> Any:
            # Workers of a DataLoader and servers of a Manager start here, too: they run no model.
            if not loads_data(sys._getframe(1)):
                listener.process_started()
            return original(process)

        return start

    return patch_call(*PLACE, wrap)


def forked(listener: Listener) -> None:
    """Count a forked child; called in the parent after ``os.fork``."""
    if not _within(_FORKING, sys._getframe(1)):
        listener.process_started()


def loads_data(frame: FrameType | None) -> bool:
    """Whether the process started from ``frame`` only loads data or holds shared objects."""
    return _within(_NOT_TRAINING, frame)


def _within(modules: tuple[str, ...], frame: FrameType | None) -> bool:
    """Whether ``frame``, or any of its callers, is in one of the ``modules``."""
    return any(str(each.f_globals.get("__name__", "")).startswith(modules) for each in with_callers(frame))
