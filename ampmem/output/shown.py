"""How a value shows itself: one line wherever Python prints it, tables where a notebook or IPython shows it alone.

Recordings and summaries are values of the lower layers, and what puts them into words lies above those. So a value asks
here for its tables, and the layer above has said who makes them. Where nobody has, the line is all there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Bundle: TypeAlias = dict[str, str]
"""One value in several formats, by their MIME types."""

_MOST = 300
"""So many characters of a line, whatever the names in it."""

_tables: list[Callable[[Any], Bundle]] = []


def tables_by(make: Callable[[Any], Bundle]) -> None:
    """From now on ``make`` makes the tables of every :class:`Shown`."""
    _tables[:] = [make]


def one_line(text: str) -> str:
    """``text`` as a line that no terminal acts on."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= _MOST else clean[: _MOST - 1] + "…"


def in_short(source: str, device: str, arm: tuple[str, str | None], steps: int, place: tuple[int, int]) -> str:
    """What every line on a run says; ``arm`` is its name and type, ``place`` the rank and of how many."""
    rank, ranks = place
    words = [source, device, " ".join(filter(None, arm)), f"rank {rank} of {ranks}" if ranks > 1 else ""]
    return ", ".join([*filter(None, words), f"{steps} step{'' if steps == 1 else 's'}"])


class Shown:
    """A value that says in one line what it is; ``repr`` of it is short, and never raises."""

    __slots__ = ()

    def _in_short(self) -> str:
        """What to say after the name of the class."""
        raise NotImplementedError

    def __repr__(self) -> str:
        name = type(self).__name__
        try:
            return one_line(f"<{name}: {self._in_short()}>")
        except Exception:  # a value that contradicts itself, or is not whole yet
            return f"<{name}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Bundle:
        """Text and HTML, for IPython and what follows its protocol; the line alone where there are no tables."""
        line = repr(self)
        if not _tables:
            return {"text/plain": line}
        try:
            return _tables[0](self)
        except Exception as error:
            return {"text/plain": f"{line}\n{one_line(str(error))}"}
