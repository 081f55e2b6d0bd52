"""Which variables of the script hold memory: what a reader deletes to give that memory back.

Looked at where the script waits for ampmem anyway, a few times per step. No tensor may live longer because ampmem
looked at its variable: before Python 3.13 ``frame.f_locals`` of a function is a dictionary that stays in the frame,
with everything that the variables held when it was asked for.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from functools import cached_property
from inspect import CO_OPTIMIZED
from itertools import compress, islice, pairwise
from operator import itemgetter, not_
from time import time_ns
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ampmem.events import Fact
from ampmem.own_code import OWN_FOLDERS, RECORDING_CODE, RUNNER, is_torch
from ampmem.recorder.facts.guests import attributes_of, is_parameter, is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.models.live import collection_paused

_FRAMES = 40
"""So many of the script's frames are looked at, the innermost first."""
_NAMES = 2000
"""A namespace with more names is not looked at."""
_ITEMS = 16
"""So many of the items or attributes of one object are looked at: of a list the last."""
_TENSORS = 200
"""So many variables are logged at most when the script is looked at once."""
_NO_HOLDERS = frozenset((ModuleType, type, FunctionType, BuiltinFunctionType, str, int, float, bool, type(None)))
"""Types whose objects hold no results of the model; most variables are of these."""
_NO_HOLDERS_EITHER = (nn.Module, ModuleType, type)
"""The same of their subclasses: what modules keep is known by other ways."""
_SNAPSHOTS = sys.version_info < (3, 13)
"""Whether ``f_locals`` of a function is a dictionary that the frame keeps."""
_TAKE_SNAPSHOTS = frozenset({"locals", "eval", "exec"})
_TAKE_SNAPSHOTS_ALONE = frozenset({"vars", "dir"})
"""Functions by which a script asks for that dictionary itself, the second where they are called without arguments."""
_REFERENCES = 3
"""Those to a dictionary that only its frame and ampmem have: the frame's, ours, and that of the question."""


class Variables:
    """Logs which variables of the script hold which tensors."""

    def __init__(self, log: Log, texts: Texts) -> None:
        self._log = log
        self._texts = texts
        self._codes: dict[int, _Code] = {}
        """By ``id``, the code that was met: to look it up by itself takes as long as it is large."""
        self.note = log.misses.guarded(self._note)
        """Log a fact for each variable of a running frame of the script, and of its module, that holds a tensor."""

    def _note(self) -> None:
        now = time_ns()
        with collection_paused():
            for name, root, tensor, frame in islice(self._found(sys._getframe(1)), _TENSORS):
                place = self._texts.id(self._place(root, frame))
                self._log.about(Fact.VARIABLE, tensor, self._texts.id(name), place, at=now)

    def _found(self, start: FrameType | None) -> Iterator[tuple[str, str, torch.Tensor, FrameType]]:
        """Each variable, the name that it starts with, its tensor, and a frame that sees it."""
        frames = list(islice(self._frames(start), _FRAMES))
        spaces: list[tuple[FrameType, Any]] = []
        for frame in frames:
            code = frame.f_code
            if not code.co_flags & CO_OPTIMIZED:
                spaces.append((frame, frame.f_locals))
            elif not (_SNAPSHOTS and self._code(code).asks_for_locals):
                yield from _of_function(frame)
        seen: set[int] = set()
        for frame, space in (*spaces, *((frame, frame.f_globals) for frame in frames)):
            if type(space) is dict and id(space) not in seen and len(space) <= _NAMES:
                seen.add(id(space))
                for held, name, tensor in _tensors(space):
                    yield held, name, tensor, frame

    def _frames(self, frame: FrameType | None) -> Iterator[FrameType]:
        """The frames of the script and its libraries, the innermost first, down to the one that runs the script."""
        codes = self._codes
        while frame is not None:
            code = codes.get(id(frame.f_code)) or self._code(frame.f_code)
            if code.is_script:
                yield frame
            elif code.runs_script:
                return
            frame = frame.f_back

    def _code(self, code: CodeType) -> _Code:
        found = self._codes.get(id(code))
        if found is None:
            found = self._codes[id(code)] = _Code(code)
        return found

    def _place(self, name: str, frame: FrameType) -> str:
        """``FILE:LINE FUNCTION`` of the line that gave ``name`` its value, as far as the frame's code has it."""
        code = frame.f_code
        known = self._code(code)
        if name not in known.names:  # a variable of the module, seen from a function
            return f"{code.co_filename}:0 <module>"
        mine = known.assignments.get(name, [code.co_firstlineno])
        before = [line for line in mine if line <= (frame.f_lineno or 0)]
        return f"{code.co_filename}:{(before or mine)[-1]} {code.co_qualname}"


def _of_function(frame: FrameType) -> list[tuple[str, str, torch.Tensor, FrameType]]:
    """The variables of a function that hold tensors; what Python wrote down to answer is gone afterwards."""
    variables = frame.f_locals
    found = [(held, name, tensor, frame) for held, name, tensor in _tensors(variables)]
    if _SNAPSHOTS and sys.getrefcount(variables) <= _REFERENCES:
        variables.clear()
    return found


def _tensors(space: Any) -> list[tuple[str, str, torch.Tensor]]:
    """What holds a tensor in ``space`` (``outputs.logits``), the name that this starts with, and the tensor."""
    found: list[tuple[str, str, torch.Tensor]] = []
    items = list(space.items())
    # Without Python's own loop: most variables are of types that hold nothing.
    holds_nothing = map(_NO_HOLDERS.__contains__, map(type, map(itemgetter(1), items)))
    for name, value in compress(items, map(not_, holds_nothing)):
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            found.append((name, name, value))
        elif not issubclass(kind, _NO_HOLDERS_EITHER):
            found += ((f"{name}{part}", name, item) for part, item in _parts(value))
    return [each for each in found if not is_parameter(each[2])]


def _parts(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that ``value`` holds, and how the script writes each. Its class is not asked."""
    kind = type(value)
    if issubclass(kind, dict):
        plain = kind is dict  # an output of a model library has its items as attributes, too
        for key, item in list(islice(dict.items(value), _ITEMS)):
            if type(key) is str and is_tensor(item):
                yield f"[{key!r}]" if plain or not key.isidentifier() else f".{key}", item
    elif issubclass(kind, tuple):
        held = tuple.__getitem__(value, slice(_ITEMS))
        if any(map(is_tensor, held)):
            fields = next((base.__dict__["_fields"] for base in kind.__mro__ if "_fields" in base.__dict__), ())
            for index, item in enumerate(held):
                if is_tensor(item):
                    yield f".{fields[index]}" if index < len(fields) else f"[{index}]", item
    elif issubclass(kind, list):
        first = max(list.__len__(value) - _ITEMS, 0)
        for index, item in enumerate(list.__getitem__(value, slice(first, None)), first):
            if is_tensor(item):
                yield f"[{index}]", item
    else:
        for key, item in islice(list(attributes_of(value).items()), _ITEMS):
            if is_tensor(item):
                yield f".{key}", item


class _Code:
    """What there is to know of code that a frame runs."""

    def __init__(self, code: CodeType) -> None:
        self._code = code  # kept alive, so that its id stays its own
        file = code.co_filename
        self.runs_script = file == RUNNER
        """Whether its frame is the one that runs the script."""
        self.is_script = not (
            self.runs_script or is_torch(file) or file.startswith((*OWN_FOLDERS, *RECORDING_CODE, "<frozen"))
        )
        """Whether it is the script's or that of a library."""
        self.names = frozenset(_names(code))
        """Its variables."""

    @cached_property
    def asks_for_locals(self) -> bool:
        """Whether the script may have the dictionary of this function's variables: then that is left as it is."""
        return _asks_for_locals(self._code)

    @cached_property
    def assignments(self) -> dict[str, list[int]]:
        """The lines that assign each of its variables."""
        return _assignments(self._code)


def _names(code: CodeType) -> tuple[str, ...]:
    """The variables of ``code`` itself; of a module those that it names."""
    if not code.co_flags & CO_OPTIMIZED:
        return code.co_names
    return (*code.co_varnames, *code.co_cellvars, *code.co_freevars)


def _assignments(code: CodeType) -> dict[str, list[int]]:
    """The lines that give each variable a value, in their order."""
    found: dict[str, set[int]] = {}
    for instruction in dis.get_instructions(code):
        line = None if instruction.positions is None else instruction.positions.lineno
        if line is not None and instruction.opname.startswith(("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_D")):
            stored = instruction.argval  # since Python 3.13 one instruction may store two
            for name in stored if type(stored) is tuple else (stored,):
                found.setdefault(str(name), set()).add(line)
    return {name: sorted(lines) for name, lines in found.items()}


def _asks_for_locals(code: CodeType) -> bool:
    if _TAKE_SNAPSHOTS.intersection(code.co_names):
        return True
    if not _TAKE_SNAPSHOTS_ALONE.intersection(code.co_names):
        return False
    instructions = list(dis.get_instructions(code))
    return any(
        first.argval in _TAKE_SNAPSHOTS_ALONE and call.opname in ("PRECALL", "CALL") and call.arg == 0
        for first, call in pairwise(instructions)
    )
