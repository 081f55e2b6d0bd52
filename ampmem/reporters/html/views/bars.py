"""Bars of the page that need no script: a part of a bar, a row, and how a category looks in them.

Positions and widths are in per cent of a bar's track.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.reporters.html.palette import FILLS, Fill, label
from ampmem.reporters.text.common.words import signed
from ampmem.units import format_apart, format_bytes

_HATCHES = {"/": "slashes", ".": "dots"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Paint:
    """How a category looks, as a style and as classes of the page."""

    style: str
    classes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a bar; without ``paint`` it is grey. ``name`` is a class of its own."""

    left: float
    width: float
    title: str = ""
    paint: Paint | None = None
    name: str = ""

    @property
    def style(self) -> str:
        """Its place and colour."""
        place = f"left: {self.left:.3f}%; width: {self.width:.3f}%"
        return place if self.paint is None else f"{place}; {self.paint.style}"

    @property
    def classes(self) -> str:
        """What it looks like."""
        return " ".join(filter(None, ("piece", self.name, "" if self.paint is None else self.paint.classes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row: a label, a bar, and how it reads; ``note`` stands in the place of a bar."""

    label: str
    value: str = ""
    change: str = ""
    note: str = ""
    pieces: tuple[Piece, ...] = ()
    whole: bool = False
    paint: Paint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Where a waterfall begins or ends, in bytes."""

    label: str
    bytes: int


REQUESTED = ", of what was requested, without the rounding of blocks"
"""What a waterfall is of where the peaks are what an allocator had handed out."""


def stacked(sizes: Mapping[Category, int], whole: int) -> tuple[Piece, ...]:
    """The bytes of each category one after the other, in the order in which the timeline stacks them."""
    pieces, start = [], 0
    for category in CATEGORIES:
        if size := sizes.get(category, 0):
            pieces.append(piece(start, size, whole, category))
            start += size
    return tuple(pieces)


def piece(start: int, size: int, whole: int, category: Category, name: str = "") -> Piece:
    """One part, from ``start`` over ``size`` of the ``whole`` bytes of a track; ``name`` is a class of its own."""
    return Piece(
        left=100 * start / whole,
        width=100 * size / whole,
        title=f"{label(category)}: {format_bytes(size)}",
        paint=paint(category),
        name=name,
    )


def paint(category: Category) -> Paint:
    """How ``category`` looks."""
    fill: Fill = FILLS[category]
    style = f"--fill: light-dark({fill.light}, {fill.dark})"
    return Paint(style=style, classes=f"fill {_HATCHES.get(fill.pattern, '')}".rstrip())


def falls(before: End, after: End, differences: Mapping[Category, int]) -> tuple[Bar, ...]:
    """The way from ``before`` to ``after``, which all of ``differences`` lead to, in bytes.

    In stacking order, so that a bar's colour is where the eye looks for it; the ends are whole.
    """
    changes = [(category, differences[category]) for category in CATEGORIES if differences.get(category)]
    whole = _highest(before.bytes, [size for _, size in changes])
    texts = format_apart(before.bytes, after.bytes)
    rows, now = [_whole(before, texts[0], whole)], before.bytes
    for category, size in changes:
        kind = "less" if size < 0 else "more"
        change = piece(min(now, now + size), abs(size), whole, category, kind)
        rows.append(Bar(label=label(category), value=signed(size), pieces=(change,), paint=paint(category)))
        now += size
    return (*rows, _whole(after, texts[1], whole))


def _whole(end: End, text: str, whole: int) -> Bar:
    return Bar(
        label=end.label,
        value=text,
        pieces=(Piece(left=0, width=100 * end.bytes / whole, name="whole"),),
        whole=True,
    )


def _highest(start: int, changes: Iterable[int]) -> int:
    """The most that the way from one end to the other comes to."""
    return max(1, *accumulate(changes, initial=start))
