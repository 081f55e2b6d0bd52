"""Keeps the script's signal handlers waiting while code of ampmem runs: what a handler raises reaches the script.

Python runs a handler between any two instructions of the main thread, also between two of ampmem's; and handlers raise:
``KeyboardInterrupt``, a timeout by ``SIGALRM``. In a hook that would leave half a fact, or be taken for a fault of the
hook's; in the callback of a weak reference Python only prints it. So while a script is recorded or simulated, a gate
stands in front of each handler: it looks at the stack where the signal arrived, and where that is ampmem's code, it has
Python ask again at its next instruction. Where no signal arrives this costs nothing.
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
from ampmem.patching import PASSED_OVER, Undo, patch

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])
Handler: TypeAlias = Callable[[int, FrameType | None], Any]

_SIGNALS = tuple(sorted(_signal.valid_signals()))
_ASKED_BY_SIGNAL = (signal, "_signal")
"""Where Python's module ``signal`` has the one in C, which it asks and sets handlers by."""
_NO_FILE = -1
"""What stands for no descriptor that Python writes the numbers of signals to."""

# C alone, so that Python runs no handler while it asks for one to be run.
_again: Handler = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.py_object)(
    ("PyErr_SetInterruptEx", ctypes.pythonapi)
)
"""As if the signal arrived once more: Python runs its handler at the next instruction that looks."""
_add_pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object)(
    ("Py_AddPendingCall", ctypes.pythonapi)
)
_is_true = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)
"""As a pending call it runs ``__bool__`` on the main thread, and what that raises comes out there."""

_open: set[CodeType] = set()
_WEAK_FILES = tuple(
    kind.__init__.__code__.co_filename
    for kind in (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
)
_KEEPS_ERRORS: dict[str, tuple[str, ...]] = {
    "remove": _WEAK_FILES,
    "_remove": _WEAK_FILES,
    "__call__": _WEAK_FILES,  # of weakref.finalize
    # Torch's C++ asks it for each op under a dispatch mode, such as ampmem's: what is raised there ends the process.
    "find_torch_dispatch_rule": (str(Path("torch", "_library", "simple_registry.py")),),
    # The callbacks of dynamo's own weak dictionary, which has tensors, modules and code, and of its set.
    "<lambda>": (str(Path("torch", "_dynamo", "utils.py")), str(Path("torch", "_dynamo", "convert_frame.py"))),
    "_remove_id": (str(Path("torch", "_dynamo", "utils.py")),),
    # It takes what is raised for a failed import.
    "_maybe_cupti_monitor": (str(Path("torch", "autograd", "profiler.py")),),
}
"""Functions that are not ampmem's, by name and file, from which no exception reaches the script."""


def let_in(function: _FunctionT) -> _FunctionT:
    """Let handlers run in the frame of ``function``: it and its callers in ampmem clean up after what they raise."""
    _open.add(function.__code__)
    return function


class _Gate:
    """In the place of the script's handler of one signal: Python calls what ``__call__`` gives, the handler as a rule.

    A property, so that no frame of ampmem's lies between the script's and that of its handler.
    """

    def __init__(self, signals: Signals, number: int, handler: Handler) -> None:
        self.handler = handler
        self._signals = signals
        self._number = number

    def _chosen(self) -> Handler:
        return self._signals.choose(self._number, self.handler, sys._getframe().f_back)

    __call__ = property(_chosen)


class _SignalModule:
    """What the module ``signal`` asks in place of ``_signal``: the script sees its own handlers and no gate."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    def __getattr__(self, name: str) -> Any:
        return getattr(_signal, name)

    def signal(self, number: int, handler: Any) -> Any:
        """As Python's: sets the handler, and returns the one before."""
        return _own(_signal.signal(number, _Gate(self._signals, number, handler) if callable(handler) else handler))

    def getsignal(self, number: int) -> Any:
        """As Python's."""
        return _own(_signal.getsignal(number))


def _own(handler: Any) -> Any:
    """The script's handler behind ``handler``."""
    return handler.handler if type(handler) is _Gate else handler


class Signals:
    """The gates of this process. Entered (``with``), it only makes waiting cheaper: nobody asks again before the end.

    Handlers run on the main thread alone; on another one nothing is entered.
    """

    def __init__(self) -> None:
        self._users = 0
        self._depth = 0
        self._waiting: set[int] = set()
        """Numbers of signals whose handlers wait."""
        self._silent: set[int] = set()
        """Those of them for which nobody asks before the outermost ``with`` ends."""
        self._wakeup = _NO_FILE
        """The script's descriptor for signals, as long as Python asks again and again: it was told once."""
        self._untold: set[int] = set()
        """Numbers of signals that have arrived since it was taken away: it is told when it is back."""
        self._unpatch: Undo | None = None

    def hold(self) -> Undo:
        """From now on no handler runs in ampmem's code; returns what ends it, once no code of ampmem's runs."""
        ended: list[None] = []

        def undo() -> None:
            if not ended:
                ended.append(None)
                self._users -= 1
                if self._users == 0:
                    self._soon()

        self._users += 1
        try:
            if _on_main_thread():
                self._put_in_place()
            else:
                self._soon()
        except BaseException:  # of a handler without its gate
            undo()
            raise
        return undo

    def waiting(self) -> bool:
        """Whether a handler waits: what is not urgent may be left."""
        return bool(self._waiting)

    def forget(self) -> None:
        """In a child that was forked, maybe by another thread while the main thread was in here."""
        self._depth = 0
        for numbers in (self._waiting, self._silent, self._untold):  # Python forgets there what has arrived
            numbers.clear()
        self._tell()

    def _soon(self) -> None:
        """Have ``__bool__`` called on the main thread."""
        _add_pending(_is_true, self)

    def __bool__(self) -> bool:
        """Put the gates in place, or away once nobody needs them. Always false."""
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
            while self._depth == 0 and self._silent:
                self._hush()
                _again(self._silent.pop(), None)

    def choose(self, number: int, handler: Handler, frame: FrameType | None) -> Handler:
        """What to call of the signal that has arrived at ``frame``."""
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
        """Write no number to the script's descriptor while Python is asked again."""
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
        """Handlers that are back in their places may raise here already; the others are to be, too."""
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
"""The one of this process, as handlers are."""


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _traced() -> bool:
    """Whether a debugger, coverage or a profiler follows this thread: then Python must not be asked again and again.

    Python 3.11 starts the function at hand anew until it has nothing more to run, so it would never go on.
    """
    return sys.gettrace() is not None or sys.getprofile() is not None


def _nothing(number: int, frame: FrameType | None) -> None:
    """The handler waits."""


def is_ours(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs for ampmem: its code is, or was called by, code of ampmem's that does not pass calls on.

    What replaces a function of torch's passes calls on: what it calls in turn is the script's. The callbacks of weak
    sets and dictionaries may be those of ampmem's.
    """
    innermost = frame
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(RECORDING_CODE):
            if code in _open:
                return False
            if frame is innermost or not file.endswith(PASSED_OVER):
                return True
        elif code.co_name in _KEEPS_ERRORS and file.endswith(_KEEPS_ERRORS[code.co_name]):
            return True
        frame = frame.f_back
    return False
