"""Where each rank's peak is, what each has of the model, and the ranks by stage and by mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ampmem.analysis.ops import plain_op
from ampmem.analysis.ranks.ranks import Rank, RankGroup, RankPeak, Ranks
from ampmem.names import layers_named, of_all_layers
from ampmem.reporters.text.common.layout import Layout, number, table, words
from ampmem.reporters.text.common.plain_text import ABSENT, wrapped
from ampmem.reporters.text.ranks.names import group_name, numbers
from ampmem.units import format_count, format_peak

_NAME = 12
_MOST_ROWS = 16


def render_places(ranks: Ranks, layout: Layout, *, every: bool = False) -> str:
    """A row for all ranks whose peak is at the same place; empty where no rank can be compared."""
    alike: dict[tuple[str, ...], list[Rank]] = {}
    for rank in ranks.compared:
        assert rank.peak is not None
        phase, module, *others = _cells(rank, rank.peak)
        alike.setdefault((phase, of_all_layers(module), *others), []).append(rank)
    rows = [(_together(cells, those), [rank.rank for rank in those]) for cells, those in alike.items()]
    shown = rows if every else rows[:_MOST_ROWS]
    if not shown:
        return ""
    columns = [
        words("rank", least=_NAME, wraps=True),
        words("peak in"),
        words("module", least=_NAME),
        words("op", least=_NAME, rank=2),
        number("parameters"),
        number("reserved", rank=1),
        number("batch", rank=3),
        number("steps", rank=4),
    ]
    kept = [i for i in range(len(columns)) if not i or any(cells[i - 1] != ABSENT for cells, _ in shown)]
    lines = [[numbers(those), *cells] for cells, those in shown]
    text = table([columns[i] for i in kept], [[line[i] for i in kept] for line in lines], layout)
    found = [layout.strong("where each peak is"), "", text]
    if len(shown) < len(rows):
        count = sum(len(those) for _, those in rows[_MOST_ROWS:])
        found += wrapped(f"{count} more ranks; --all shows each", layout.width)
    return "\n".join(found)


def _together(cells: tuple[str, ...], ranks: Sequence[Rank]) -> tuple[str, ...]:
    """The cells of ranks whose peaks are in equal layers."""
    modules = list(dict.fromkeys(rank.peak.module for rank in ranks if rank.peak is not None and rank.peak.module))
    phase, _, *others = cells
    return phase, layers_named(modules) if modules else ABSENT, *others


def _cells(rank: Rank, peak: RankPeak) -> tuple[str, ...]:
    return (
        peak.phase,
        peak.module or ABSENT,
        plain_op(peak.op) if peak.op else ABSENT,
        _parameters(rank),
        ABSENT if rank.reserved is None else format_peak(rank.reserved),
        ABSENT if rank.batch_size is None else str(rank.batch_size),
        str(rank.finished_steps),
    )


def _parameters(rank: Rank) -> str:
    own, whole = rank.parameters.count, rank.parameters.global_count
    return format_count(own) if whole is None else f"{format_count(own)} of {format_count(whole)}"


def render_groups(ranks: Ranks, layout: Layout) -> str:
    """The stages, and the places on each axis of the mesh.

    Of an axis along which no peak changes there is nothing to show, nor where each place has but one rank.
    """
    texts = []
    for _, those in groupby(ranks.groups, key=lambda group: (group.kind, group.axis)):
        groups = list(those)
        sizes = {(group.peak.min, group.peak.median, group.peak.max) for group in groups}
        if len(sizes) > 1 and any(len(group.ranks) > 1 for group in groups):
            texts.append(_groups(groups, layout))
    return "\n\n".join(texts)


def _groups(groups: Sequence[RankGroup], layout: Layout) -> str:
    what = groups[0].axis or "stage"
    columns = [
        words(what, least=_NAME),
        words("ranks", least=_NAME, wraps=True),
        number("least"),
        number("median"),
        number("most"),
        number("worst rank"),
    ]
    rows = [
        [
            group_name(group),
            numbers(group.ranks),
            *map(format_peak, (group.peak.min, group.peak.median, group.peak.max)),
            str(group.peak.worst),
        ]
        for group in groups
    ]
    caption = "by stage" if groups[0].axis is None else "by axis of the mesh"
    return "\n".join([layout.strong(f"peaks {caption}"), "", table(columns, rows, layout)])
