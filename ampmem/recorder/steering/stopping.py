"""Stops the script once the recording is complete, even one that catches every exception."""

from __future__ import annotations

import threading
from collections.abc import Callable
from os import getpid  # imported now: a script may patch os

import torch

from ampmem.own_code import script_line
from ampmem.patching import Undo, hook
from ampmem.recorder.script import StopScript, stops_in
from ampmem.recorder.torch_private.general import on_module_before


class Stopper:
    """Raises :class:`StopScript` in the script, and again at its next module if the script catches it.

    ``on_give_up`` is called when it has caught :data:`TRIES` of them; it then runs to completion.
    """

    TRIES = 5

    def __init__(self, on_give_up: Callable[[], None] = lambda: None) -> None:
        self._on_give_up = on_give_up
        self._undo: Undo = lambda: None
        self._runner = (0, 0)
        self._raised = 0
        self.caught = 0
        """Number of stops that the script caught, known once it has ended."""
        self.stopped = False
        """Whether the last stop ended the script."""
        self.spared = ""
        """Why the script must not be stopped, if so: other ranks may wait for it."""
        self.device_failed = False
        """Whether the script was not stopped because its device has failed."""
        self.line = ""
        """The line of the script at the last stop."""

    def stop(self) -> None:
        """Stop the script, which runs on this thread.

        If a kernel of the script has failed on the device, and the script does not know yet, it is not stopped: its
        next call raises the error, which the stop would hide.
        """
        self.device_failed = _device_failed()
        if self.device_failed:
            return
        self._runner = _runner()
        self._undo = hook(on_module_before, self._raise_again)
        self._raise()

    def ended(self, error: BaseException | None) -> None:
        """Note that the script has ended, with ``error`` if it raised one."""
        self._undo()
        met = stops_in(error)
        self.stopped, self.caught = met > 0, self._raised - met

    def _raise_again(self, *_: object) -> None:
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
    """Whether the current CUDA device has failed; synchronizes."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _runner() -> tuple[int, int]:
    """The current process and thread: a forked worker has the hooks, too."""
    return getpid(), threading.get_ident()
