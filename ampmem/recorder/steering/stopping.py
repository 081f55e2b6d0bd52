"""Stops the script once the recording is complete, also one that catches everything and goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from os import getpid  # taken now: a script may put another in its place

import torch

from ampmem.own_code import script_line
from ampmem.patching import Undo, hook
from ampmem.recorder.script import StopScript, stops_in
from ampmem.recorder.torch_private.general import on_module_before


class Stopper:
    """Raises :class:`StopScript` in the script, and again whenever it runs a module after it has caught that.

    ``on_give_up`` is called when it has caught :data:`TRIES` of them: it is then let run to its end.
    """

    TRIES = 5

    def __init__(self, on_give_up: Callable[[], None] = lambda: None) -> None:
        self._on_give_up = on_give_up
        self._undo: Undo = lambda: None
        self._runner = (0, 0)
        self._raised = 0
        self.caught = 0
        """How many of the stops the script has caught without ending, once it has ended."""
        self.stopped = False
        """Whether the last one has ended it."""
        self.spared = ""
        """Why the script was not to be stopped, where it was not: other ranks may wait for it."""
        self.device_failed = False
        """Whether it was not stopped since its device has failed."""
        self.line = ""
        """Where the last one met the script."""

    def stop(self) -> None:
        """Stop the script, which runs in this thread.

        Where a kernel of the script's has failed on the device, and the script does not know yet, it is left alone:
        its next call raises the error, and stopping it would hide that.
        """
        self.device_failed = _device_failed()
        if self.device_failed:
            return
        self._runner = _runner()
        self._undo = hook(on_module_before, self._again)
        self._raise()

    def ended(self, error: BaseException | None) -> None:
        """The script has ended, with ``error`` where it raised one."""
        self._undo()
        met = stops_in(error)
        self.stopped, self.caught = met > 0, self._raised - met

    def _again(self, *_: object) -> None:
        if torch.compiler.is_compiling() or _runner() != self._runner:
            return
        if self._raised < self.TRIES:
            self._raise()
        self._undo()
        self._on_give_up()

    def _raise(self) -> None:
        self._raised += 1
        self.line = script_line()
        raise StopScript


def _device_failed() -> bool:
    """Whether the CUDA device in use has failed; waits for it."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _runner() -> tuple[int, int]:
    """The process and the thread that runs now: a forked worker has the hooks too."""
    return getpid(), threading.get_ident()
