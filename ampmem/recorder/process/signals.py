"""Keeps the script's signal handlers waiting while ampmem is in the middle of something.

Python runs a handler between any two instructions of the main thread, also between two of ours; and handlers raise:
``KeyboardInterrupt``, a timeout by ``SIGALRM``. Half a transaction, or a hook of which nobody knows, would be left.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # ``signal`` makes an enum of each number: ten times as long
import functools
import threading
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, TypeAlias

from ampmem.own_code import OWN_FOLDERS

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

_SIGNALS = tuple(sorted(_signal.valid_signals()))


class Held:
    """While entered, handlers wait; what they raise comes out of the end. Entered again inside, it does nothing.

    Does nothing on other threads than the main one either: no handler ever runs there. A signal without a handler
    in Python does at any time what it did before.

    A handler may raise while ours is put in its place or taken away. So ours passes signals on while nothing is held,
    and one that is left over goes with the next end.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Handler] = {}
        """The script's, of those signals for which :meth:`_wait` is in place."""
        self._waiting: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if _on_main_thread():
            if self._depth == 0:
                try:
                    self._put_in_place()
                except BaseException:  # of a handler that is not to wait, since nothing has begun
                    self._put_back()
                    raise
            self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _on_main_thread():
            self._depth -= 1
            if self._depth == 0:
                self._release()

    def forget(self) -> None:
        """In a child that was forked, maybe by another thread while the main thread was in here."""
        if self._depth:
            self._depth = 0
            self._waiting.clear()
            self._put_back()

    def _put_in_place(self) -> None:
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler) and handler != self._wait:
                self._handlers[number] = handler
                _signal.signal(number, self._wait)

    def _release(self) -> None:
        try:
            self._put_back()
        except BaseException:  # of a handler that was back in its place; the others are to be, too
            self._put_back()
            raise
        finally:
            self._run()

    def _put_back(self) -> None:
        while self._handlers:
            number, handler = next(iter(self._handlers.items()))
            if _signal.getsignal(number) == self._wait:  # else the script has set another since
                _signal.signal(number, handler)
            del self._handlers[number]

    def _run(self) -> None:
        """Run what had to wait, each whatever the one before has raised."""
        while self._waiting:
            number, frame = self._waiting.pop(0)
            handler = _signal.getsignal(number)
            try:
                if callable(handler):
                    handler(number, frame)
            except BaseException:
                self._run()
                raise

    def _wait(self, number: int, frame: FrameType | None) -> None:
        """The handler of ours; called when nothing is held, it is one that could not be put back."""
        handler = self._handlers.get(number)
        if self._depth == 0 and handler is not None:
            handler(number, frame)
        else:
            self._waiting.append((number, _of_script(frame)))


HELD = Held()
"""The one of this process, as signals are."""


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _of_script(frame: FrameType | None) -> FrameType | None:
    """The frame of the script's that led to ``frame``."""
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FOLDERS):
        frame = frame.f_back
    return frame


def of_handler(error: BaseException) -> bool:
    """Whether a handler that is in place now was running when ``error`` was raised."""
    codes = {_code_of(_signal.getsignal(number)) for number in _SIGNALS} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    """What runs in Python when ``handler`` is called: a function, a method, a ``partial``, or has a ``__call__``."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not isinstance(handler, (FunctionType, MethodType)):
        handler = vars(type(handler)).get("__call__")
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None
