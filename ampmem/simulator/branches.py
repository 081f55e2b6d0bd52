"""What the running code does after "yes" and after "no" to a question about unknown values, such as to raise."""

from __future__ import annotations

import dis
import functools
import sys
from bisect import bisect_right
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import NamedTuple

from ampmem.own_code import OWN_FOLDERS, is_torch, with_callers

_ASKS = tuple(f"/torch/{folder}/" for folder in ("amp", "distributions", "nn", "optim"))
"""Folders of torch whose code asks its own questions; other code of torch passes on the script's."""
_MOST = 400
"""Maximum number of instructions followed."""
_RAISES, _REPEATS = "raises", "repeats"


def answer_that_goes_on(usual: object) -> bool | None:
    """The answer to the yes-or-no question that the running code asks, if the other one would raise.

    Also "no" if "yes", the ``usual`` answer, would run the body of a ``while`` once more, for ever. Otherwise ``None``.
    """
    frame = _asking()
    if frame is None:
        return None
    yes, no = _courses(frame.f_code, frame.f_lasti)
    if (yes == _RAISES) != (no == _RAISES):
        return no == _RAISES
    return False if usual and yes == _REPEATS != no else None


def _asking() -> FrameType | None:
    """The frame that asks: the innermost one that is neither ampmem's nor a part of torch that passes questions on."""
    for frame in with_callers(sys._getframe(1)):
        file = frame.f_code.co_filename
        passes_on = is_torch(file) and not any(folder in file for folder in _ASKS)
        if not passes_on and not file.startswith((*OWN_FOLDERS, "<frozen")):
            return frame
    return None


class _Code(NamedTuple):
    """The instructions of a code object, and the index of each by its offset."""

    instructions: Sequence[dis.Instruction]
    places: dict[int, int]

    def at(self, offset: int) -> int:
        """The index of the instruction that runs at ``offset``, which may be that of its inline cache or PRECALL."""
        place = bisect_right(list(self.places), offset) - 1
        return place + (self.instructions[place].opname == "PRECALL")


@functools.cache
def _code(code: CodeType) -> _Code:
    instructions = list(dis.get_instructions(code))
    return _Code(instructions, {each.offset: place for place, each in enumerate(instructions)})


@functools.cache
def _courses(code: CodeType, offset: int) -> tuple[str, str]:
    """What ``code`` does after "yes" and after "no" to the question of the instruction at ``offset``.

    Either is :data:`_RAISES`, :data:`_REPEATS` or empty for something else; both are empty if it does not branch there.
    """
    instructions, _ = _code(code)
    place = _code(code).at(offset)
    if not _jumps_if(instructions, place):  # it reads the answer, and later instructions branch
        place += 1
    turned = False
    while place < len(instructions) and instructions[place].opname in ("UNARY_NOT", "TO_BOOL"):
        turned ^= instructions[place].opname == "UNARY_NOT"
        place += 1
    when = _jumps_if(instructions, place)
    if not when:
        return "", ""
    jump, stay = _course(code, instructions[place].argval, offset), _course_from(code, place + 1, offset)
    return (jump, stay) if (when == "TRUE") != turned else (stay, jump)


def _jumps_if(instructions: Sequence[dis.Instruction], place: int) -> str:
    """``TRUE`` or ``FALSE`` for an instruction that jumps if the answer is that; otherwise empty."""
    name = instructions[place].opname if place < len(instructions) else ""
    return next((when for when in ("TRUE", "FALSE") if "JUMP" in name and f"IF_{when}" in name), "")


def _course(code: CodeType, target: int, asked: int) -> str:
    """What ``code`` does from the offset ``target`` on."""
    instructions, places = _code(code)
    if target <= asked:  # the next round of a `for` may bring another answer, that of a `while` does not
        return "" if instructions[places[target]].opname == "FOR_ITER" else _REPEATS
    return _course_from(code, places[target], asked)


def _course_from(code: CodeType, place: int, asked: int) -> str:
    """What ``code`` does from the instruction at ``place`` on, up to the next branch."""
    instructions, places = _code(code)
    for _ in range(_MOST):
        if place >= len(instructions):
            return ""
        name, target = instructions[place].opname, instructions[place].argval
        if name == "RAISE_VARARGS":
            return _RAISES
        if name.startswith("JUMP_BACKWARD"):
            return _course(code, target, asked) if target <= asked else ""
        if name in ("JUMP_FORWARD", "JUMP_ABSOLUTE"):
            place = places[target]
        elif "JUMP" in name or name.startswith(("RETURN", "RERAISE", "FOR_ITER", "YIELD")):
            return ""
        else:
            place += 1
    return ""
