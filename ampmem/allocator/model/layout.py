"""Segments and blocks as frozen values: in a torch snapshot, and of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ampmem.allocator.model.blocks import ALLOCATED, AWAITING, UNMAPPED, Block, Segment
from ampmem.allocator.model.state import State

PoolId: TypeAlias = tuple[int, int]

DEFAULT_POOL: PoolId = (0, 0)
"""``segment_pool_id`` of what is in no private pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlock:
    """A block: ``allocated``, or ``awaiting`` other streams, or else free.

    ``requested`` is the block's size where a snapshot does not say.
    """

    address: int
    size: int
    requested: int
    allocated: bool
    awaiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSegment:
    """A segment; of an expandable one, a range with memory behind it."""

    address: int
    size: int
    stream: int
    is_small: bool
    expandable: bool
    pool_id: PoolId
    blocks: tuple[SnapshotBlock, ...]


def snapshot_segments(state: State) -> tuple[SnapshotSegment, ...]:
    """The segments with memory, by address (``DeviceCachingAllocator::snapshot``)."""
    found = [each for segment in state.segments.values() for each in _mapped_ranges(segment)]
    return tuple(sorted(found, key=lambda segment: segment.address))


def _mapped_ranges(segment: Segment) -> Iterator[SnapshotSegment]:
    blocks: list[Block] = []
    for block in segment.blocks():
        if block.state != UNMAPPED:
            blocks.append(block)
        elif blocks:
            yield _snapshot_segment(segment, blocks)
            blocks = []
    if blocks:
        yield _snapshot_segment(segment, blocks)


def _snapshot_segment(segment: Segment, blocks: list[Block]) -> SnapshotSegment:
    return SnapshotSegment(
        address=blocks[0].address,
        size=sum(block.size for block in blocks),
        stream=segment.stream,
        is_small=segment.pool.is_small,
        expandable=segment.page_size > 0,
        pool_id=DEFAULT_POOL if segment.pool.private is None else (0, segment.pool.private),
        blocks=tuple(
            SnapshotBlock(
                address=block.address,
                size=block.size,
                requested=block.requested,
                allocated=block.state == ALLOCATED,
                awaiting=block.state == AWAITING,
            )
            for block in blocks
        ),
    )
