"""Delays the script's signal handlers while code of ampmem runs, so that their exceptions reach the script.

Python runs a handler between any two instructions of the main thread, also between two of ampmem's; and handlers raise:
``KeyboardInterrupt``, a timeout by ``SIGALRM``. In a hook that would leave half a fact, or be taken for an error of the
hook; in the callback of a weak reference Python only prints it. So while a script is recorded or simulated, a gate
replaces each handler: it looks at the stack where the signal arrived, and if that is ampmem's code, it makes Python ask
again at its next instruction. Without signals this costs nothing.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what ``signal`` itself asks, which makes an enum of each number
import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeAlias, TypeVar

from ampmem.own_code import RECORDING_CODE
from ampmem.patching import Undo, patch

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])
Handler: TypeAlias = Callable[[int, FrameType | None], Any]

_SIGNALS = tuple(sorted(_signal.valid_signals()))
_ASKED_BY_SIGNAL = (signal, "_signal")
"""The attribute of Python's module ``signal`` for the C module through which it reads and sets handlers."""
_NO_FILE = -1
"""The value for "no file descriptor" in ``set_wakeup_fd``."""

# Without Python code in between, which would run a handler while another run of it is requested.
_again: Handler = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.py_object)(
    ("PyErr_SetInterruptEx", ctypes.pythonapi)
)
"""Makes the signal arrive again: Python runs its handler at the next instruction that checks for signals."""
_add_pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object)(
    ("Py_AddPendingCall", ctypes.pythonapi)
)
_is_true = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)
"""A pending call that runs ``__bool__`` on the main thread, where its exceptions come out."""

_open: set[CodeType] = set()
_WEAK_FILES = tuple(
    kind.__init__.__code__.co_filename
    for kind in (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
)
_KEEPS_ERRORS: dict[str, tuple[str, ...]] = {
    "remove": _WEAK_FILES,
    "_remove": _WEAK_FILES,
    "__call__": _WEAK_FILES,  # weakref.finalize
    # Torch's C++ calls it for each op under a dispatch mode, such as ampmem's: an exception ends the process.
    "find_torch_dispatch_rule": (str(Path("torch", "_library", "simple_registry.py")),),
    # Callbacks of dynamo's own weak dictionary and set, which have tensors, modules and code.
    "<lambda>": (str(Path("torch", "_dynamo", "utils.py")), str(Path("torch", "_dynamo", "convert_frame.py"))),
    "_remove_id": (str(Path("torch", "_dynamo", "utils.py")),),
    # It takes any exception for a failed import.
    "_maybe_cupti_monitor": (str(Path("torch", "autograd", "profiler.py")),),
}
"""Functions outside of ampmem, by name and file, from which no exception reaches the script."""


def let_in(function: _FunctionT) -> _FunctionT:
    """Let handlers run in the frame of ``function``: it and its callers in ampmem clean up after an exception."""
    _open.add(function.__code__)
    return function


class _Gate:
    """Replaces the script's handler of one signal: Python calls ``__call__``, which is usually the handler.

    ``__call__`` is a property, so that no frame of ampmem's is between the script's and its handler's.
    """

    def __init__(self, signals: Signals, number: int, handler: Handler) -> None:
        self.handler = handler
        self._signals = signals
        self._number = number

    def _handler(self) -> Handler:
        return self._signals.choose(self._number, self.handler, sys._getframe().f_back)

    __call__ = property(_handler)


class _SignalModule:
    """Replaces ``_signal`` in the module ``signal``, so that the script sees its own handlers and no gate."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    def __getattr__(self, name: str) -> Any:
        return getattr(_signal, name)

    def signal(self, number: int, handler: Any) -> Any:
        """Set the script's handler and return the one before, as ``signal.signal`` does."""
        return _own(_signal.signal(number, _Gate(self._signals, number, handler) if callable(handler) else handler))

    def getsignal(self, number: int) -> Any:
        """The script's handler, as ``signal.getsignal`` returns it."""
        return _own(_signal.getsignal(number))


def _own(handler: Any) -> Any:
    """The script's handler behind ``handler``."""
    return handler.handler if type(handler) is _Gate else handler


class Signals:
    """The gates of this process. Entered (``with``), it makes waiting cheaper: Python asks again only at the end.

    Handlers run on the main thread only; entering does nothing on other threads.
    """

    def __init__(self) -> None:
        self._users = 0
        self._depth = 0
        self._waiting: set[int] = set()
        """The signals whose handlers wait."""
        self._silent: set[int] = set()
        """Waiting signals that Python asks about again only when the outermost ``with`` ends."""
        self._wakeup = _NO_FILE
        """The script's wakeup descriptor while Python asks repeatedly, as it was notified once."""
        self._untold: set[int] = set()
        """The signals that have arrived since the descriptor was taken away; it is notified once it is back."""
        self._unpatch: Undo | None = None

    def hold(self) -> Undo:
        """Delay handlers in ampmem's code from now on; returns the undo, which takes effect once no such code runs."""
        ended: list[None] = []

        def undo() -> None:
            if not ended:
                ended.append(None)
                self._users -= 1
                if self._users == 0 and self._depth == 0:
                    self._soon()

        self._users += 1
        try:
            if _on_main_thread():
                self._put_in_place()
            else:
                self._soon()
        except BaseException:  # raised by a handler that has no gate yet
            undo()
            raise
        return undo

    def waiting(self) -> bool:
        """Whether a handler waits, so that work that is not urgent can be skipped."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Reset the state in a forked child; another thread may have forked while the main thread was in here."""
        self._depth = 0
        for numbers in (self._waiting, self._silent, self._untold):  # Python forgets the arrived signals there
            numbers.clear()
        self._tell()

    def _soon(self) -> None:
        """Have ``__bool__`` called on the main thread soon."""
        _add_pending(_is_true, self)

    def __bool__(self) -> bool:
        """Put the gates in place, or restore the handlers once no gate is needed. Always false."""
        if self._users:
            self._put_in_place()
        elif is_ours(sys._getframe().f_back) and not _traced():
            self._soon()
        else:
            self._put_back()
        return False

    def __enter__(self) -> None:
        if _on_main_thread():
            self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _on_main_thread():
            self._depth -= 1
            if self._depth == 0 and self._users == 0 and self._unpatch is not None:
                self._soon()
            while self._depth == 0 and self._silent:
                self._hush()
                _again(self._silent.pop(), None)

    def choose(self, number: int, handler: Handler, frame: FrameType | None) -> Handler:
        """The handler to call for the signal that has arrived at ``frame``."""
        if self._wakeup != _NO_FILE and number not in self._waiting:
            self._untold.add(number)
        if not is_ours(frame):
            self._waiting.discard(number)
            self._tell()
            return handler
        self._waiting.add(number)
        if self._depth:
            self._silent.add(number)
            return _nothing
        if _traced():
            self._waiting.discard(number)
            return handler
        self._hush()
        return _again

    def _hush(self) -> None:
        """Take the script's wakeup descriptor away while Python is asked again."""
        found = _signal.set_wakeup_fd(_NO_FILE)
        if found != _NO_FILE:
            self._wakeup = found

    def _tell(self) -> None:
        if self._wakeup != _NO_FILE:
            wakeup, self._wakeup = self._wakeup, _NO_FILE
            with suppress(OSError, ValueError):  # the script has closed it
                _signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
                untold, self._untold = self._untold, set()
                for number in untold:
                    os.write(wakeup, bytes([number]))

    def _put_in_place(self) -> None:
        if self._unpatch is None:
            self._unpatch = patch(*_ASKED_BY_SIGNAL, lambda _: _SignalModule(self))
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler) and type(handler) is not _Gate:
                _signal.signal(number, _Gate(self, number, handler))

    def _put_back(self) -> None:
        """Restore the handlers; one that is back may raise already, but the others must be restored too."""
        try:
            for number in _SIGNALS:
                gate = _signal.getsignal(number)
                if type(gate) is _Gate:
                    _signal.signal(number, gate.handler)
        except BaseException:
            self._put_back()
            raise
        self._waiting.clear()
        self._tell()
        if self._unpatch is not None:
            self._unpatch()
            self._unpatch = None


SIGNALS = Signals()
"""The gates of this process, as handlers belong to a process."""


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _traced() -> bool:
    """Whether a debugger, coverage or a profiler follows this thread: then Python must not be asked repeatedly.

    Python 3.11 starts the current function anew as long as something is pending, so it would never go on.
    """
    return sys.gettrace() is not None or sys.getprofile() is not None


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: the handler waits."""


def is_ours(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs for ampmem: its code is, or was called by, ampmem's code that does not pass calls on.

    Replacements of torch's functions pass calls on: the code that they call is the script's, and they have no frames
    here (``patching.unseen``). The callbacks of weak sets and dictionaries may belong to ampmem's.
    """
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(RECORDING_CODE):
            return code not in _open
        if code.co_name in _KEEPS_ERRORS and file.endswith(_KEEPS_ERRORS[code.co_name]):
            return True
        frame = frame.f_back
    return False
