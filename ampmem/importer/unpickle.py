"""Plain data out of a pickle, by an interpreter that knows the two dozen opcodes that plain data needs.

There is no opcode here that could look up a name, so there is nothing that a file could run; every other
opcode is refused. What a file may make this process hold is bounded by its size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from ampmem.errors import RecordingError, UsageError
from ampmem.units import format_bytes

Plain: TypeAlias = "bool | int | float | str | tuple[Plain, ...] | list[Plain] | dict[str | int, Plain] | None"

MAX_FILE_BYTES: Final = 1 << 30
"""Larger files are refused before they are read."""

_FREE_BYTES: Final = 64 << 20
_BYTES_PER_BYTE: Final = 12
_MAX_HELD_BYTES: Final = 8 << 30
_MAX_INTEGER_BYTES: Final = 16
_PROTOCOLS: Final = range(2, 6)

# What CPython needs for each, roughly; with the slot that points to it.
_CONTAINER: Final = 72
_ENTRY: Final = 100
_SCALAR: Final = 40
_SLOT: Final = 9

_FOREIGN: Final = (
    (b"\x1f\x8b", "it is compressed by gzip; unpack it first"),
    (b"PK\x03\x04", "it is a zip archive, as torch.save writes; torch.cuda.memory._dump_snapshot writes plain pickles"),
    (b"SQLite format 3", "it is an SQLite database; ampmem show reads recordings"),
    (b"{", "it is text, perhaps JSON"),
    (b"[", "it is text, perhaps JSON"),
)


class Refused(Exception):
    """Why a pickle is not read; one line for a person."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a run of stacked items starts."""


_MARK: Final = _Mark()


def load(path: Path) -> Plain:
    """The plain data in the pickle at ``path``.

    Raises :class:`UsageError` for a file that is not there or too large, :class:`RecordingError` for one that
    is damaged, or holds or could do anything but plain data.
    """
    data = _contents(path)
    for magic, complaint in _FOREIGN:
        if data.startswith(magic):
            raise RecordingError(f"{path} is not a memory snapshot: {complaint}")
    try:
        return _Machine(data).run()
    except Refused as reason:
        raise RecordingError(f"{path} is not a memory snapshot that can be read: {reason}") from None


def _contents(path: Path) -> bytes:
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {format_bytes(MAX_FILE_BYTES)}; record fewer events (max_entries)")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def loads(data: bytes) -> Plain:
    """The plain data in ``data``. Raises :class:`Refused`."""
    return _Machine(data).run()


class _Machine:
    """Runs one pickle."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        # Everything on the stack is a value of type Plain, or the mark.
        self._stack: list[Plain | _Mark] = []
        self._memo: dict[int, Plain] = {}
        self._held = 0
        self._limit = min(_FREE_BYTES + _BYTES_PER_BYTE * len(data), _MAX_HELD_BYTES)

    def run(self) -> Plain:
        self._header()
        try:
            return self._run()
        except (IndexError, KeyError):
            if self._at >= len(self._data):
                raise Refused("it ends too early") from None
            raise self._damaged() from None

    def _run(self) -> Plain:
        data, stack, memo, steps = self._data, self._stack, self._memo, _STEPS
        while True:
            code = data[self._at]
            self._at += 1
            if code == _BINGET:  # two of three opcodes of a snapshot; what they hold is bounded by their number
                stack.append(memo[data[self._at]])
                self._at += 1
            elif code == _STOP:
                return self._result()
            elif code in steps:
                steps[code](self)
            else:
                where = f"the opcode {code:#04x} at byte {self._at - 1}"
                raise Refused(f"it asks for {where}, which plain data does not need")

    def _header(self) -> None:
        if len(self._data) < 2 or self._data[0] != _PROTO:
            raise Refused("it is no pickle of protocol 2 or newer")
        if self._data[1] not in _PROTOCOLS:
            raise Refused(f"it has pickle protocol {self._data[1]}, known are 2 to 5")
        self._at = 2

    def _damaged(self) -> Refused:
        return Refused(f"it is damaged at byte {self._at}")

    def _result(self) -> Plain:
        if len(self._stack) != 1:
            raise self._damaged()
        return self._pop()

    # Reading

    def _take(self, count: int) -> bytes:
        """The next ``count`` bytes, which the file must have."""
        end = self._at + count
        if end > len(self._data):
            raise Refused("it ends too early")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    # Holding

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > self._limit:
            raise Refused(f"its contents would take more than {format_bytes(self._limit)}")

    def _push(self, value: Plain | _Mark, size: int) -> None:
        self._hold(size + _SLOT)
        self._stack.append(value)

    def _pop(self) -> Plain:
        value = self._stack.pop()
        if isinstance(value, _Mark):
            raise self._damaged()
        return value

    def _pop_to_mark(self) -> list[Plain]:
        """The items above the topmost mark, which goes too."""
        stack = self._stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise self._damaged()
        items = stack[place + 1 :]
        del stack[place:]
        return items  # type: ignore[return-value]  # none above the topmost mark is one

    def _memoize(self, index: int) -> None:
        value = self._stack[-1]
        if isinstance(value, _Mark):
            raise self._damaged()
        self._hold(_ENTRY)
        self._memo[index] = value

    # Opcodes

    def frame(self) -> None:
        if self._number(8) > len(self._data) - self._at:
            raise Refused("it ends too early")

    def mark(self) -> None:
        self._push(_MARK, 0)

    def pop(self) -> None:
        self._stack.pop()

    def memoize(self) -> None:
        self._memoize(len(self._memo))

    def binput(self) -> None:
        self._memoize(self._number(1))

    def long_binput(self) -> None:
        self._memoize(self._number(4))

    def long_binget(self) -> None:
        self._stack.append(self._memo[self._number(4)])

    def none(self) -> None:
        self._push(None, 0)

    def true(self) -> None:
        self._push(True, 0)

    def false(self) -> None:
        self._push(False, 0)

    def binint(self) -> None:
        self._push(int.from_bytes(self._take(4), "little", signed=True), _SCALAR)

    def binint1(self) -> None:
        self._push(self._number(1), 0)

    def binint2(self) -> None:
        self._push(self._number(2), _SCALAR)

    def long1(self) -> None:
        width = self._number(1)
        if width > _MAX_INTEGER_BYTES:
            raise Refused(f"it holds an integer of {width} bytes")
        self._push(int.from_bytes(self._take(width), "little", signed=True), _SCALAR)

    def binfloat(self) -> None:
        self._push(float(struct.unpack(">d", self._take(8))[0]), _SCALAR)

    def short_binunicode(self) -> None:
        self._text(self._number(1))

    def binunicode(self) -> None:
        self._text(self._number(4))

    def binunicode8(self) -> None:
        self._text(self._number(8))

    def _text(self, width: int) -> None:
        try:
            text = self._take(width).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise Refused(f"it holds broken text at byte {self._at}") from None
        # A text takes up to four bytes per character.
        self._push(text, _SCALAR + len(text) * (1 if text.isascii() else 4))

    def empty_tuple(self) -> None:
        self._push((), 0)

    def tuple1(self) -> None:
        self._make_tuple([self._pop()])

    def tuple2(self) -> None:
        second, first = self._pop(), self._pop()
        self._make_tuple([first, second])

    def tuple3(self) -> None:
        third, second, first = self._pop(), self._pop(), self._pop()
        self._make_tuple([first, second, third])

    def tuple(self) -> None:
        self._make_tuple(self._pop_to_mark())

    def _make_tuple(self, items: list[Plain]) -> None:
        self._push(tuple(items), _CONTAINER + _SLOT * len(items))

    def empty_list(self) -> None:
        self._push([], _CONTAINER)

    def append(self) -> None:
        item = self._pop()
        self._list().append(item)

    def appends(self) -> None:
        items = self._pop_to_mark()
        self._hold(_SLOT * len(items))
        self._list().extend(items)

    def _list(self) -> list[Plain]:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise self._damaged()
        return target

    def empty_dict(self) -> None:
        self._push({}, _CONTAINER)

    def setitem(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def setitems(self) -> None:
        self._set(self._pop_to_mark())

    def _set(self, items: list[Plain]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise self._damaged()
        self._hold(_ENTRY * (len(items) // 2))
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Long integers can be chosen so that they all collide in a dict.
            if not isinstance(key, str) and not (isinstance(key, int) and -(2**60) < key < 2**60):
                raise Refused(f"it has a {type(key).__name__} as a key at byte {self._at}")
            target[key] = value


_PROTO: Final = 0x80
_STOP: Final = ord(".")
_BINGET: Final = ord("h")
_STEPS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("0"): _Machine.pop,
    0x94: _Machine.memoize,
    ord("q"): _Machine.binput,
    ord("r"): _Machine.long_binput,
    ord("j"): _Machine.long_binget,
    ord("N"): _Machine.none,
    0x88: _Machine.true,
    0x89: _Machine.false,
    ord("J"): _Machine.binint,
    ord("K"): _Machine.binint1,
    ord("M"): _Machine.binint2,
    0x8A: _Machine.long1,
    ord("G"): _Machine.binfloat,
    0x8C: _Machine.short_binunicode,
    ord("X"): _Machine.binunicode,
    0x8D: _Machine.binunicode8,
    ord(")"): _Machine.empty_tuple,
    0x85: _Machine.tuple1,
    0x86: _Machine.tuple2,
    0x87: _Machine.tuple3,
    ord("t"): _Machine.tuple,
    ord("]"): _Machine.empty_list,
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("}"): _Machine.empty_dict,
    ord("s"): _Machine.setitem,
    ord("u"): _Machine.setitems,
}
