"""What the page has of the allocator's layers and addresses, for recordings that know the segments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampmem.analysis.allocator.addresses import address_map
from ampmem.analysis.analyse import Analysis
from ampmem.analysis.json.jsonable import Json
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.events import Column, SegmentAction

CACHED = "cached"
"""Instead of a category: memory in no block that is in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """One segment of the allocator: ``blocks`` are (offset, bytes, category or ``cached``)."""

    address: int
    bytes: int
    blocks: tuple[tuple[int, int, str], ...]


def segments_header(analysis: Analysis) -> dict[str, Json]:
    """The segments as columns: ``since`` is the first position at which a row counts.

    ``pages`` is 0 for a whole segment, else a number that pages of one expandable segment share.
    """
    segments = analysis.recording.segments
    baseline, release = segments.action == SegmentAction.BASELINE, segments.action == SegmentAction.RELEASE
    columns = {
        "since": np.where(baseline, 0, segments.position + 1),
        "bytes": np.where(release, -segments.bytes, segments.bytes),
        "address": segments.address,
        "pages": np.where(segments.expandable, 1 + 2 * _dense(segments.stream) + segments.small, 0),
    }
    return {name: column.tolist() for name, column in columns.items()}


def places_of(analysis: Analysis) -> tuple[list[Json], Column]:
    """Every address at which a block ever began, as the distance from the one before; and of each event which it is."""
    lives = analysis.lifetimes
    addresses, place = np.unique(lives.address, return_inverse=True)
    places = np.zeros(len(analysis.recording.events), dtype=np.int64)
    places[lives.born] = place
    freed = np.flatnonzero(lives.died != ALIVE)
    places[lives.died[freed]] = place[freed]
    return np.diff(addresses, prepend=0).tolist(), places


def address_map_view(analysis: Analysis, position: int) -> tuple[SegmentView, ...]:
    """The segments and what is in them at ``position``, for a page whose events come without addresses."""
    category = analysis.classes.category
    return tuple(
        SegmentView(
            address=each.extent.address,
            bytes=each.extent.size,
            blocks=tuple(
                (
                    piece.address - each.extent.address,
                    piece.bytes,
                    CACHED if piece.allocation is None else str(CATEGORIES[category[piece.allocation]]),
                )
                for piece in each.pieces
            ),
        )
        for each in address_map(analysis, position)
    )


def _dense(column: Column) -> Column:
    return np.unique(column, return_inverse=True)[1]
