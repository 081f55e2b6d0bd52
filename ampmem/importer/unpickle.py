"""Reads plain data from a pickle, by an interpreter of the two dozen opcodes that plain data needs.

None of them can look up a name, so the file cannot run anything; every other opcode is refused. The memory that a file
may occupy is bounded by its size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from ampmem.errors import RecordingError, UsageError
from ampmem.units import format_bytes

Plain: TypeAlias = "bool | int | float | str | tuple[Plain, ...] | list[Plain] | dict[str | int, Plain] | None"

MAX_FILE_BYTES: Final = 1 << 30
"""Maximum size of a file; larger ones are refused unread."""

_FREE_BYTES: Final = 64 << 20
_BYTES_PER_BYTE: Final = 20
_MAX_HELD_BYTES: Final = 8 << 30
_MAX_INTEGER_BYTES: Final = 16
_PROTOCOLS: Final = range(2, 6)

# CPython's memory for each, roughly, including the slot that points to it.
_CONTAINER: Final = 72
_ENTRY: Final = 64
_SCALAR: Final = 40
_SLOT: Final = 9
_HELD_SCALAR: Final = _SCALAR + _SLOT
_HELD_CONTAINER: Final = _CONTAINER + _SLOT

_FOREIGN: Final = (
    (b"\x1f\x8b", "it is compressed by gzip; unpack it first"),
    (b"PK\x03\x04", "it is a zip archive, as torch.save writes; torch.cuda.memory._dump_snapshot writes plain pickles"),
    (b"SQLite format 3", "it is an SQLite database; ampmem show reads recordings"),
    (b"{", "it is text, perhaps JSON"),
    (b"[", "it is text, perhaps JSON"),
)


class Refused(Exception):
    """Why a pickle is refused, as one line for the user."""


def load_plain(path: Path) -> Plain:
    """The plain data in the pickle at ``path``.

    Raises :class:`UsageError` for a file that is missing or too large, :class:`RecordingError` for one that is damaged,
    or contains anything but plain data.
    """
    data = _contents(path)
    for magic, complaint in _FOREIGN:
        if data.startswith(magic):
            raise RecordingError(f"{path} is not a memory snapshot: {complaint}")
    try:
        return loads(data)
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
    """Runs one pickle. A mark sets the stack aside and starts a new one, so an item is never a mark."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 2
        self._stack: list[Plain] = []
        self._marked: list[list[Plain]] = []
        # Every pickler numbers its memo from 0 on.
        self._memo: list[Plain] = []
        self._held = 0
        self._limit = min(_FREE_BYTES + _BYTES_PER_BYTE * len(data), _MAX_HELD_BYTES)

    def run(self) -> Plain:
        """The value that the pickle builds. Raises :class:`Refused`."""
        if len(self._data) < 2 or self._data[0] != _PROTO:
            raise Refused("it is not a pickle of protocol 2 or newer")
        if self._data[1] not in _PROTOCOLS:
            raise Refused(f"it has pickle protocol {self._data[1]}; ampmem reads 2 to 5")
        self._run()
        if len(self._stack) != 1 or self._marked:
            raise self._damaged()
        return self._stack[0]

    def _run(self) -> None:
        """Run until STOP. The opcodes that a snapshot has by the million are inlined here."""
        data, memo, steps, limit = self._data, self._memo, _STEPS, self._limit
        marked, integer, index_at = self._marked, int.from_bytes, _INDEX.unpack_from
        keys: list[str | int] = []
        stack, held, at = self._stack, self._held, self._at
        try:
            while True:
                code = data[at]
                if code == _BINGET:  # small: bounded by the number of opcodes
                    stack.append(memo[data[at + 1]])
                    at += 2
                    continue
                if code == _LONG_BINGET:
                    stack.append(memo[index_at(data, at + 1)[0]])
                    at += 5
                    continue
                if code == _LONG1:
                    width = data[at + 1]
                    if width > _MAX_INTEGER_BYTES:
                        raise Refused(f"it holds an integer of {width} bytes")
                    at += 2 + width
                    stack.append(integer(data[at - width : at], "little", signed=True))
                    held += _HELD_SCALAR
                elif code == _BININT:
                    stack.append(integer(data[at + 1 : at + 5], "little", signed=True))
                    at += 5
                    held += _HELD_SCALAR
                elif code == _BININT1:
                    stack.append(data[at + 1])
                    at += 2
                    held += _SLOT
                elif code == _MEMOIZE:
                    memo.append(stack[-1])
                    at += 1
                    held += _SLOT
                elif code == _EMPTY_DICT:
                    stack.append({})
                    at += 1
                    held += _HELD_CONTAINER
                elif code == _MARK:
                    marked.append(stack)
                    stack = []
                    at += 1
                    held += _HELD_CONTAINER
                elif code == _SETITEMS:
                    self._at = at
                    items, stack = stack, marked.pop()
                    if items[::2] != keys:  # usually records have the same keys as the one before
                        keys = self._keys(items)
                    self._set(stack[-1], keys, items[1::2])
                    at += 1
                    held += _ENTRY * len(keys) - _HELD_CONTAINER
                elif code == _STOP:
                    self._at, self._stack = at, stack
                    return
                elif code in steps:
                    self._at, self._stack, self._held = at + 1, stack, held
                    steps[code](self)
                    at, stack, held = self._at, self._stack, self._held
                else:
                    raise Refused(f"it uses the opcode {code:#04x} at byte {at}, which plain data does not need")
                if held > limit:
                    raise self._too_much()
        except (IndexError, struct.error):
            # An opcode this near the end may lack its argument.
            if at >= len(data) - 4:
                raise Refused("it ends too early") from None
            raise self._damaged() from None

    def _damaged(self) -> Refused:
        return Refused(f"it is damaged at byte {self._at}")

    # Reading

    def _read_bytes(self, count: int) -> bytes:
        """The next ``count`` bytes; refuses a truncated file."""
        end = self._at + count
        if end > len(self._data):
            raise Refused("it ends too early")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, width: int) -> int:
        return int.from_bytes(self._read_bytes(width), "little")

    # Holding

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > self._limit:
            raise self._too_much()

    def _too_much(self) -> Refused:
        return Refused(f"its contents would take more than {format_bytes(self._limit)}")

    def _push(self, value: Plain, size: int) -> None:
        self._hold(size + _SLOT)
        self._stack.append(value)

    def _pop_to_mark(self) -> list[Plain]:
        """The items above the topmost mark, which is removed, too."""
        items = self._stack
        self._stack = self._marked.pop()
        self._held -= _HELD_CONTAINER
        return items

    def _memoize(self, index: int) -> None:
        if index != len(self._memo):
            raise self._damaged()
        self._hold(_SLOT)
        self._memo.append(self._stack[-1])

    # Opcodes

    def frame(self) -> None:
        if self._number(8) > len(self._data) - self._at:
            raise Refused("it ends too early")

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_to_mark()

    def _text(self, width: int) -> None:
        try:
            text = self._read_bytes(width).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise Refused(f"it contains invalid text at byte {self._at}") from None
        # A text takes up to four bytes per character.
        self._push(text, _SCALAR + len(text) * (1 if text.isascii() else 4))

    def _make_tuple(self, count: int) -> None:
        items = [self._stack.pop() for _ in range(count)]
        self._push(tuple(reversed(items)), _CONTAINER + _SLOT * count)

    def tuple(self) -> None:
        items = self._pop_to_mark()
        self._push(tuple(items), _CONTAINER + _SLOT * len(items))

    def _extend(self, items: list[Plain]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise self._damaged()
        self._hold(_SLOT * len(items))
        target += items

    def setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._hold(_ENTRY)
        self._set(self._stack[-1], self._keys([key]), [value])

    def _keys(self, items: list[Plain]) -> list[str | int]:
        """Every other item: the keys of a dictionary."""
        keys: list[str | int] = []
        for key in items[::2]:
            # Long integers can be chosen so that they all collide in a dict.
            if not isinstance(key, str) and not (isinstance(key, int) and -(2**60) < key < 2**60):
                raise Refused(f"it has a {type(key).__name__} as a key at byte {self._at}")
            keys.append(key)
        return keys

    def _set(self, target: Plain, keys: list[str | int], values: list[Plain]) -> None:
        if not isinstance(target, dict) or len(keys) != len(values):
            raise self._damaged()
        target.update(zip(keys, values, strict=True))


_PROTO: Final = 0x80
_STOP: Final = ord(".")
_BINGET: Final = ord("h")
_LONG_BINGET: Final = ord("j")
_LONG1: Final = 0x8A
_BININT: Final = ord("J")
_BININT1: Final = ord("K")
_MEMOIZE: Final = 0x94
_EMPTY_DICT: Final = ord("}")
_MARK: Final = ord("(")
_SETITEMS: Final = ord("u")
_INDEX: Final = struct.Struct("<I")
_STEPS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x95: _Machine.frame,
    ord("0"): _Machine.pop,
    ord("q"): lambda machine: machine._memoize(machine._number(1)),  # BINPUT
    ord("r"): lambda machine: machine._memoize(machine._number(4)),  # LONG_BINPUT
    ord("N"): lambda machine: machine._push(None, 0),  # NONE
    0x88: lambda machine: machine._push(True, 0),  # NEWTRUE
    0x89: lambda machine: machine._push(False, 0),  # NEWFALSE
    ord("M"): lambda machine: machine._push(machine._number(2), _SCALAR),  # BININT2
    ord("G"): lambda machine: machine._push(struct.unpack(">d", machine._read_bytes(8))[0], _SCALAR),  # BINFLOAT
    0x8C: lambda machine: machine._text(machine._number(1)),  # SHORT_BINUNICODE
    ord("X"): lambda machine: machine._text(machine._number(4)),  # BINUNICODE
    0x8D: lambda machine: machine._text(machine._number(8)),  # BINUNICODE8
    ord(")"): lambda machine: machine._push((), 0),  # EMPTY_TUPLE
    0x85: lambda machine: machine._make_tuple(1),  # TUPLE1
    0x86: lambda machine: machine._make_tuple(2),  # TUPLE2
    0x87: lambda machine: machine._make_tuple(3),  # TUPLE3
    ord("t"): _Machine.tuple,
    ord("]"): lambda machine: machine._push([], _CONTAINER),  # EMPTY_LIST
    ord("a"): lambda machine: machine._extend([machine._stack.pop()]),  # APPEND
    ord("e"): lambda machine: machine._extend(machine._pop_to_mark()),  # APPENDS
    ord("s"): _Machine.setitem,
}
