"""The one way to say something of ampmem's own on a terminal: clean, and dropped where nobody can hear it."""

from __future__ import annotations

import os
import re
import select
import textwrap
from contextlib import suppress
from typing import TextIO

# Taken now: a script may put others in their place.
_write, _poll, _size_of, _wrap = os.write, select.poll, os.get_terminal_size, textwrap.wrap

_STYLE = re.compile(r"(\x1b\[[0-9;]*m)")
"""What makes the text after it bold or coloured, or plain again, and nothing else."""


def printable(text: str) -> str:
    """``text`` with a question mark for each character that a terminal might act on, or that has no bytes."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


class Terminal:
    """Speaks on ``stream``, which is ``None`` where Python has found the descriptor closed.

    A line that cannot be said is no error, and stays in no buffer: Python would try it again at its end, fail, and
    exit with 120.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def say(self, message: str) -> None:
        """One line, whose beginning says that it is ampmem's; on a screen it is :meth:`broken`."""
        self.write("\n".join(self.broken(f"ampmem: {printable(message)}")) + "\n")

    def broken(self, line: str) -> list[str]:
        """``line`` in lines that the screen has room for, as it would break numbers itself; elsewhere whole."""
        width = self._columns()
        if not width or len(line) <= width:
            return [line]
        return _wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

    def _columns(self) -> int:
        """How wide the screen is; 0 where that is not known, or where there is no screen."""
        try:
            return _size_of(self._stream.fileno()).columns if self._stream is not None and self.is_screen() else 0
        except (OSError, ValueError):
            return 0

    def show(self, text: str) -> None:
        """Lines that need no name before them."""
        self.write(_printable_lines(text) + "\n")

    def show_styled(self, text: str) -> None:
        """The same for a text of ampmem's own making, whose styles are kept."""
        parts = _STYLE.split(text)  # every other one is a style
        self.write("".join(part if i % 2 else _printable_lines(part) for i, part in enumerate(parts)) + "\n")

    def step(self, message: str, *, last: bool) -> None:
        """Over the line before, where there is a screen."""
        if self.is_screen():
            self.write(f"\rampmem: {printable(message)}" + "\n" * last)

    def replace(self, text: str) -> None:
        """On a screen, ``text`` in place of the line that the cursor is on; it is for the next text to go on or not."""
        if self.is_screen():
            self.write(f"\r\x1b[K{printable(text)}")

    def is_screen(self) -> bool:
        """Whether what is written can be written over."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):  # it is closed
            return False

    def write(self, text: str) -> None:
        """``text`` as it is, after all that is on its way there already."""
        stream = self._stream
        if stream is None:
            return
        with suppress(OSError, ValueError):
            stream.flush()
            if _has_descriptor(stream):
                _write_all(stream.fileno(), text.encode(stream.encoding, "backslashreplace"))
            else:
                stream.write(text)


def _has_descriptor(stream: TextIO) -> bool:
    try:
        stream.fileno()
    except OSError:  # a stream in memory; ValueError says that it is closed
        return False
    return True


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        # Asked first: where the script has SIGPIPE end it, writing for a reader that is gone would.
        asked = _poll()
        asked.register(descriptor, select.POLLOUT)
        if any(state & (select.POLLERR | select.POLLNVAL) for _, state in asked.poll(0)):
            return
        data = data[_write(descriptor, data) :]
