"""Plain data as a pickle, written piece by piece with the few opcodes that PyTorch's memory viewer knows."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import BinaryIO, Final, TypeAlias

Item: TypeAlias = "bool | int | str | tuple[Item, ...] | Iterable[Item] | Mapping[str, Item] | Once"

_BATCH: Final = 1000
"""Items per opcode; the viewer passes them as the arguments of one call."""


class Once:
    """A value that is written where it is first met, and referred to from then on."""

    def __init__(self, value: Item) -> None:
        self.value = value


class PickleWriter:
    """Writes one pickle of protocol 4 to ``stream``."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._memo: dict[str | int, bytes] = {}
        """How to refer to what was written already: to texts by themselves, to others by their id."""
        self._kept: list[Once] = []
        stream.write(b"\x80\x04")

    def end(self) -> None:
        """Finish the pickle: its value is the one thing that was written."""
        self._stream.write(b".")

    def mapping(self, items: Iterable[tuple[str, Iterable[Item]]]) -> None:
        """Write a dict of lists, whose items are taken one by one."""
        self._stream.write(b"}(")
        for key, values in items:
            self.value(key)
            self.items(values)
        self._stream.write(b"u")

    def items(self, values: Iterable[Item]) -> None:
        """Write a list, taking its items one by one."""
        write = self._stream.write
        write(b"]")
        rest = iter(values)
        while batch := list(islice(rest, _BATCH)):
            write(b"(")
            for value in batch:
                self.value(value)
            write(b"e")

    def value(self, value: Item) -> None:
        """Write one value that is small enough to be there whole."""
        if isinstance(value, str):
            self._text(value)
        elif isinstance(value, bool):
            self._stream.write(b"\x88" if value else b"\x89")
        elif isinstance(value, int):
            self._integer(value)
        elif isinstance(value, Once):
            self._once(value)
        elif isinstance(value, Mapping):
            self._dict(value)
        elif isinstance(value, tuple):
            self._stream.write(b"(")
            for item in value:
                self.value(item)
            self._stream.write(b"t")
        else:
            self.items(value)

    def _integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._stream.write(struct.pack("<BB", ord("K"), value))
        elif -(1 << 31) <= value < 1 << 31:
            self._stream.write(struct.pack("<Bi", ord("J"), value))
        else:
            # The viewer reads up to eight bytes; addresses and times need no more.
            raw = value.to_bytes(8, "little", signed=True)
            self._stream.write(struct.pack("<BB", 0x8A, len(raw)) + raw)

    def _text(self, text: str) -> None:
        known = self._memo.get(text)
        if known is not None:
            self._stream.write(known)
            return
        raw = text.encode("utf-8", "replace")
        self._stream.write(struct.pack("<BI", ord("X"), len(raw)) + raw)
        self._memoize(text)

    def _once(self, once: Once) -> None:
        known = self._memo.get(id(once))
        if known is not None:
            self._stream.write(known)
            return
        self.value(once.value)
        self._memoize(id(once))
        self._kept.append(once)  # or another one could get its id

    def _memoize(self, key: str | int) -> None:
        """From now on, what was written last is referred to."""
        place = len(self._memo)
        short = place < 1 << 8
        self._memo[key] = struct.pack("<BB", ord("h"), place) if short else struct.pack("<BI", ord("j"), place)
        self._stream.write(b"\x94")

    def _dict(self, items: Mapping[str, Item]) -> None:
        self._stream.write(b"}(")
        for key, value in items.items():
            self.value(key)
            self.value(value)
        self._stream.write(b"u")
