"""The allocator's address space: which segment holds which blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ampmem.allocator.segments import Extent, Held
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.events import SegmentAction, SegmentColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a segment: the block of an ``allocation``, or what no block takes, where that is ``None``."""

    address: int
    bytes: int
    allocation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMap:
    """A segment, and the pieces that fill it from its start to its end."""

    extent: Extent
    pieces: tuple[Piece, ...]


def segments_at(segments: SegmentColumns, position: int | None) -> list[Extent]:
    """What was reserved right after the first ``position`` events, or at the very end, by address."""
    held = Held()
    there = np.ones(len(segments), dtype=np.bool_)
    if position is not None:
        there = (segments.action == SegmentAction.BASELINE) | (segments.position < position)
    columns = (segments.action, segments.address, segments.bytes, segments.stream, segments.small, segments.expandable)
    for action, address, size, stream, small, expandable in zip(
        *(each[there].tolist() for each in columns), strict=True
    ):
        held.remove(address, size)
        if action != SegmentAction.RELEASE:
            held.add(Extent(address, size, stream, bool(small), bool(expandable)))
    return held.joined()


def address_map(history: MemoryHistory, position: int | None) -> Iterator[SegmentMap]:
    """The segments and blocks right after the first ``position`` events, or at the very end, by address."""
    lives = history.lifetimes
    alive = np.flatnonzero(lives.alive_at(len(history.recording.events) if position is None else position))
    alive = alive[np.argsort(lives.address[alive], kind="stable")]
    starts = lives.address[alive]
    for extent in segments_at(history.recording.segments, position):
        first, last = np.searchsorted(starts, [extent.address, extent.end]).tolist()
        yield segment_map(history, extent, alive[first:last].tolist())


def segment_map(history: MemoryHistory, extent: Extent, inside: list[int]) -> SegmentMap:
    """``extent`` with the blocks of the allocations ``inside`` it, which are in order of their addresses."""
    return SegmentMap(extent=extent, pieces=tuple(_pieces(history, extent, inside)))


def _pieces(history: MemoryHistory, extent: Extent, inside: list[int]) -> Iterator[Piece]:
    lives, at = history.lifetimes, extent.address
    starts = [int(lives.address[allocation]) for allocation in inside]
    for allocation, address, limit in zip(inside, starts, [*starts[1:], extent.end], strict=False):
        if address > at:
            yield Piece(address=at, bytes=address - at, allocation=None)
        # How large a block was that is gone by now may have been guessed; it ends where the next one starts.
        at = min(address + int(lives.block_bytes[allocation]), limit)
        if at > address:
            yield Piece(address=address, bytes=at - address, allocation=allocation)
    if at < extent.end:
        yield Piece(address=at, bytes=extent.end - at, allocation=None)
