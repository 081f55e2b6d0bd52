"""A progress line on a terminal, shown once the work has taken a second."""

from __future__ import annotations

import sys
import threading
from typing import Self

from ampmem.output import Terminal
from ampmem.reporters.text.plain_text import shorten

PATIENCE_S = 1.0
"""Seconds: faster work is not announced."""

_WIDTH = 78


class PageProgress:
    """One line on stderr, which changes and is removed at the end; nothing if stderr is not a terminal."""

    def __init__(self) -> None:
        self._terminal = Terminal(sys.stderr)
        self._lock = threading.RLock()
        self._text = ""
        self._shown = False
        self._timer = threading.Timer(PATIENCE_S, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if self._terminal.is_screen():
            self._timer.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._timer.cancel()
        self.say("")

    def say(self, text: str) -> None:
        """Set the text of the line; an empty text removes it."""
        with self._lock:
            self._text = text
            if self._shown:
                self._terminal.replace(shorten(f"ampmem: {text}", _WIDTH) if text else "")

    def _begin(self) -> None:
        with self._lock:
            self._shown = bool(self._text)
            self._terminal.write(self._terminal.line_start())
            self.say(self._text)
