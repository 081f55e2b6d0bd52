"""Ranks x categories as a table: equal ranks in one row, and what does not fit in one column."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.ranks.ranks import Alike, CategorySpread, RankPeak, Ranks, Spread
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.text.common.layout import Column, Layout, narrowest, number, table, words
from ampmem.reporters.text.common.plain_text import wrapped
from ampmem.reporters.text.ranks.names import numbers, place
from ampmem.units import format_peak

_UNITS = (("B", 1), ("KiB", 1024), ("MiB", 1024**2), ("GiB", 1024**3), ("TiB", 1024**4))
_NAME = 12
_MOST_ROWS = 16
"""Of more classes of ranks only the worst are shown, unless all are asked for."""
_NOTABLE = 0.01
"""What is above the least of its column by less than this share is not marked."""
_MOST = "*"
_WORST = " worst"
_FEET = ("least", "median", "most", "spread")
_REST, _ROUNDING = "all else", "rounding"


def render_matrix(ranks: Ranks, layout: Layout, *, every: bool = False) -> str:
    """The table, its caption and what its marks mean; empty where no rank can be compared."""
    if ranks.peak is None or ranks.worst is None:
        return ""
    shown, left_out = _rows_of(ranks, every=every)
    unit, size = next((unit for unit in reversed(_UNITS) if ranks.peak.max >= 8 * unit[1]), _UNITS[0])
    text = _fitting(ranks, shown, size, layout)
    caption = f"the ranks at their own peaks of {_step(ranks)}, in {unit}"
    lines = [*map(layout.strong, wrapped(caption, layout.width)), "", text]
    if left_out:
        lines += wrapped(_left_out(ranks, left_out), layout.width)
    if _MOST in text:
        lines += wrapped(f"{_MOST} the most of its column, where the ranks differ by 1 % or more", layout.width)
    return "\n".join(lines)


def _step(ranks: Ranks) -> str:
    return "their last steps" if ranks.step is None else f"step {ranks.step}"


def _rows_of(ranks: Ranks, *, every: bool) -> tuple[Sequence[Alike], Sequence[Alike]]:
    """The classes that are shown, by rank, and those that are not."""
    if every or len(ranks.alike) <= _MOST_ROWS:
        return ranks.alike, ()
    largest = sorted(ranks.alike, key=lambda each: -_peak(ranks, each).said)
    kept = largest[:_MOST_ROWS]
    return [each for each in ranks.alike if each in kept], largest[_MOST_ROWS:]


def _left_out(ranks: Ranks, those: Sequence[Alike]) -> str:
    sizes = sorted(_peak(ranks, each).said for each in those)
    count = sum(len(each.ranks) for each in those)
    sizes_text = f"from {format_peak(sizes[0])} to {format_peak(sizes[-1])}"
    return f"{count} more rank{'' if count == 1 else 's'}, {sizes_text}; --all shows each"


def _peak(ranks: Ranks, alike: Alike) -> RankPeak:
    """Of the first of them."""
    peak = ranks.rank(alike.ranks[0]).peak
    assert peak is not None
    return peak


def _fitting(ranks: Ranks, shown: Sequence[Alike], unit: int, layout: Layout) -> str:
    """The table with as many categories as there is room for: the largest stay, the rest is summed up."""
    by_weight = sorted(ranks.categories, key=lambda each: (each.max, each.spread), reverse=True)
    for count in range(len(by_weight), -1, -1):
        kept = by_weight[:count]
        own = [each for each in ranks.categories if each in kept]
        columns, rows = _table(ranks, shown, own, unit)
        if narrowest(columns, rows) <= layout.width or not count:
            break
    worst = next((row[0] for row in rows if row[0].endswith(_WORST)), "")
    return table(columns, rows, layout, strong=(worst,))


def _table(
    ranks: Ranks, shown: Sequence[Alike], own: Sequence[CategorySpread], unit: int
) -> tuple[list[Column], list[list[str]]]:
    assert ranks.peak is not None
    rest = len(own) < len(ranks.categories)
    places = len({_place(ranks, each) for each in shown}) > 1
    columns = [words("rank", least=_NAME, wraps=True)]
    columns += [words("mesh", least=_NAME, rank=1)] * places
    columns += [number("peak"), *(number(_head(each.category)) for each in own), *([number(_REST)] * rest)]
    rounded = any(_peak(ranks, each).allocated is not None for each in ranks.alike)
    columns += [number(_ROUNDING)] * rounded
    rows = [_row(ranks, each, own, unit, places=places, rest=rest) for each in shown]
    rows = [[*row, *([_rounding(ranks, each, unit)] * rounded)] for row, each in zip(rows, shown, strict=True)]
    if len(ranks.alike) > 2:
        feet = [_foot(name, [ranks.peak, *own], unit, places=places, rest=rest) for name in _FEET]
        rows += [[*foot, *([""] * rounded)] for foot in feet]
    return columns, rows


def _row(
    ranks: Ranks, alike: Alike, own: Sequence[CategorySpread], unit: int, *, places: bool, rest: bool
) -> list[str]:
    assert ranks.peak is not None and ranks.worst is not None
    peak = _peak(ranks, alike)
    one = len(ranks.alike) == 1
    worst = _WORST if ranks.worst.rank in alike.ranks and not one else ""
    cells = [f"{numbers(alike.ranks)}{worst}", *([_place(ranks, alike)] * places)]
    cells.append(_cell(peak.said, unit, ranks.peak, decimals=_decimals(unit)))
    cells += [_cell(peak.categories[each.category], unit, each) for each in own]
    named: set[Category] = {each.category for each in own}
    if rest:
        cells.append(_cell(sum(size for key, size in peak.categories.items() if key not in named), unit))
    return cells


def _place(ranks: Ranks, alike: Alike) -> str:
    return place([ranks.rank(number) for number in alike.ranks])


def _foot(name: str, spreads: Sequence[Spread], unit: int, *, places: bool, rest: bool) -> list[str]:
    field = {"least": "min", "median": "median", "most": "max", "spread": "spread"}[name]
    peak, *others = [getattr(each, field) for each in spreads]
    cells = [_cell(peak, unit, decimals=_decimals(unit)), *(_cell(size, unit) for size in others)]
    return [name, *([""] * places), *cells, *([""] * rest)]


def _rounding(ranks: Ranks, alike: Alike, unit: int) -> str:
    """What of the peak is the rounding of the allocator's blocks, which is in no category."""
    peak = _peak(ranks, alike)
    return _cell(peak.said - peak.bytes, unit)


def _decimals(unit: int) -> int:
    """So many as a peak has everywhere."""
    return 3 if unit >= dict(_UNITS)["GiB"] else 1


def _cell(size: int, unit: int, of: Spread | None = None, *, decimals: int = 1) -> str:
    """``size`` in units, marked before it where it is the most of its column; something never reads as nothing."""
    text = f"{size:,}" if unit == 1 or not size else f"{size / unit:,.{decimals}f}"
    text = "<0.1" if size and text == "0.0" else text
    marked = of is not None and size == of.max and of.spread >= _NOTABLE * of.max and of.spread > 1024
    return f"{_MOST if marked else ''}{text}"


def _head(category: Category) -> str:
    return category.replace("_", "\n")
