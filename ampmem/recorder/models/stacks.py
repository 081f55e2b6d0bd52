"""Python stacks: cheap to take, and turned into text only when they are written."""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_right
from collections.abc import Iterable
from functools import cache
from itertools import starmap, takewhile
from operator import itemgetter
from pathlib import Path
from types import CodeType, FrameType

from ampmem.own_code import OWN_FOLDERS, RUNNER, with_callers
from ampmem.recorder.facts.log import Texts

_HIDDEN = tuple(
    str(Path("torch", *parts))
    for parts in (
        ("nn", "modules", "module.py"),
        ("utils", "_contextlib.py"),
        ("utils", "_python_dispatch.py"),
        ("amp", "autocast_mode.py"),
        ("amp", "grad_scaler.py"),
        ("_ops.py",),
        ("_tensor.py",),
        ("autograd", "__init__.py"),
        ("autograd", "graph.py"),
        ("optim", "optimizer.py"),
    )
)
"""Files of torch between the script's line and the op that it calls: noise in every stack."""


class Stacks:
    """Interns stacks as tuples of (code id, instruction offset). Stack ids are not text ids."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._index: dict[tuple[int, ...], int] = {(): 0}
        self._codes: dict[int, CodeType] = {}  # keeps the code objects alive, so that their ids are not reused
        self._lines: dict[tuple[int, int], str] = {}
        self._ranges: dict[CodeType, Ranges] = {}
        """The text of each instruction."""
        self._text_ids: list[int] = [0]
        self._pending: list[tuple[int, ...]] = []
        self._calls: dict[int, list[tuple[int, ...]]] = {}
        """The callers of each frame that runs a module, by ``id``; filled in when first needed."""
        self._callers: set[int] = set()
        """``id`` of the code of the frames that run modules."""
        self.by_cpp = False
        """Whether the C++ extension takes the stacks, so that the callers of frames need not be kept."""

    @property
    def enabled(self) -> bool:
        """Whether stacks are taken."""
        return self._enabled

    def add(self, stack: tuple[int, ...]) -> int:
        """The id of ``stack``, which other code has taken: ``id`` of a code object and instruction in turns.

        The code objects must be alive.
        """
        known = self._index.get(stack)
        if known is not None:
            return known
        for code in {*stack[::2]} - self._codes.keys():
            self._codes[code] = code_at(code)
        return self._number(stack)

    def entered(self, frame: FrameType) -> int:
        """Note that ``frame`` runs a module until :meth:`left`; its callers stay the same until then.

        Returns the argument for :meth:`left`.
        """
        if not self._enabled:
            return 0
        number = id(frame)
        self._calls[number] = []
        self._codes[id(frame.f_code)] = frame.f_code
        self._callers.add(id(frame.f_code))
        return number

    def left(self, number: int) -> None:
        """Note that the frame for which :meth:`entered` returned ``number`` no longer runs that module."""
        self._calls.pop(number, None)

    def capture(self) -> int:
        """The id of the caller's stack; 0 when stacks are off."""
        if not self._enabled:
            return 0
        stack = self._above(sys._getframe(1))
        # Most stacks were seen before: in each step a script runs the same lines.
        known = self._index.get(stack)
        return known if known is not None else self._add_stack(stack)

    def _above(self, frame: FrameType | None) -> tuple[int, ...]:
        """``id`` of the code and instruction offset of ``frame`` and of all its callers, in turns."""
        calls, callers = self._calls, self._callers
        key: list[int] = []
        asked: list[tuple[list[tuple[int, ...]], int]] = []
        while frame is not None:
            code = id(frame.f_code)
            key.append(code)
            key.append(frame.f_lasti)
            # While a frame runs a module its callers stay the same, so they are walked only once.
            if code in callers:
                call = calls.get(id(frame))
                if call is not None:
                    if call:
                        key += call[0]
                        break
                    asked.append((call, len(key)))
            frame = frame.f_back
        stack = tuple(key)
        for call, length in asked:
            call.append(stack[length:])
        return stack

    def _add_stack(self, stack: tuple[int, ...]) -> int:
        for frame in with_callers(sys._getframe(2)):
            self._codes[id(frame.f_code)] = frame.f_code
        return self._number(stack)

    def _number(self, stack: tuple[int, ...]) -> int:
        self._index[stack] = len(self._index)
        self._pending.append(stack)
        return self._index[stack]

    def text_ids(self, texts: Texts) -> list[int]:
        """The text id in ``texts`` of each id that :meth:`capture` returned."""
        self._text_ids.extend(texts.id(self._text(stack)) for stack in self._pending)
        self._pending.clear()
        return self._text_ids

    def _text(self, stack: tuple[int, ...]) -> str:
        return _text(map(self._line, zip(stack[::2], stack[1::2], strict=True)))

    def _line(self, place: tuple[int, int]) -> str:
        """The text of an instruction; cached, since most are in many stacks."""
        known = self._lines.get(place)
        if known is None:
            code = self._codes[place[0]]
            line = line_at(code, place[1], self._ranges)
            known = self._lines[place] = _frame_text(code.co_filename, line, code.co_qualname)
        return known


_END = "\n"
"""The text of the frame that runs the script: its callers are ampmem's."""


def stack_text(frames: Iterable[tuple[str, int, str]]) -> str:
    """``frames`` (file, line, function; innermost first) as lines, outermost first, without torch's own."""
    return _text(starmap(_frame_text, frames))


@cache
def _frame_text(file: str, line: int, function: str) -> str:
    """A frame as a line; empty if it is torch's own, or ampmem's."""
    if file == RUNNER:
        return _END
    return "" if file.startswith(OWN_FOLDERS) or file.endswith(_HIDDEN) else f"{file}:{line} {function}"


def _text(lines: Iterable[str]) -> str:
    shown = list(filter(None, takewhile(_END.__ne__, lines)))
    return "\n".join(reversed(shown))


Ranges = list[tuple[int, int, int | None]]
"""The first and the last byte of each line's instructions."""


def current_stack() -> str:
    """The stack of the calling thread, as text."""
    frames = with_callers(sys._getframe(1))
    return stack_text((each.f_code.co_filename, each.f_lineno, each.f_code.co_qualname) for each in frames)


def code_at(address: int) -> CodeType:
    """The code object that is at ``address``, as ``id`` gives it."""
    # In CPython the id of an object is its address; the caller knows that the object is alive.
    code: CodeType = ctypes.cast(address, ctypes.py_object).value
    return code


def line_at(code: CodeType, offset: int, known: dict[CodeType, Ranges]) -> int:
    """The line of the instruction at ``offset`` bytes into ``code``.

    ``known`` has the ranges of codes that were asked for: a compiled graph's are thousands.
    """
    if code not in known:
        known[code] = list(code.co_lines())
    at = bisect_right(known[code], offset, key=itemgetter(0)) - 1
    return known[code][at][2] or code.co_firstlineno
