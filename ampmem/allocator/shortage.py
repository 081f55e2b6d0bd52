"""Why cached memory could not serve a request: asked of segments alone, after the fact."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ampmem.allocator.model.blocks import Block, BlockPool, Segment
from ampmem.allocator.model.layout import SnapshotBlock, SnapshotSegment
from ampmem.allocator.model.oom import Candidates
from ampmem.allocator.settings import SMALL_SIZE

_FREE, _ALLOCATED, _AWAITING = 0, 1, 2


def pack(segments: Sequence[SnapshotSegment]) -> str:
    """``segments`` as JSON: address, size, stream, small, expandable, pool, and (size, requested, state) per block."""
    rows = [
        [
            *(each.address, each.size, each.stream, int(each.is_small), int(each.expandable), list(each.pool_id)),
            [[block.size, block.requested, _state(block)] for block in each.blocks],
        ]
        for each in segments
    ]
    return json.dumps(rows, separators=(",", ":"))


def unpack(text: str) -> tuple[SnapshotSegment, ...]:
    """What :func:`pack` wrote. Raises ``ValueError`` or ``TypeError`` for anything else."""
    segments = []
    for address, size, stream, is_small, expandable, pool, rows in json.loads(text):
        blocks, place = [], int(address)
        for block_size, requested, state in rows:
            blocks.append(
                SnapshotBlock(
                    address=place,
                    size=int(block_size),
                    requested=int(requested),
                    allocated=state == _ALLOCATED,
                    awaiting=state == _AWAITING,
                )
            )
            place += int(block_size)
        segments.append(
            SnapshotSegment(
                address=int(address),
                size=int(size),
                stream=int(stream),
                is_small=bool(is_small),
                expandable=bool(expandable),
                pool_id=(int(pool[0]), int(pool[1])),
                blocks=tuple(blocks),
            )
        )
    return tuple(segments)


def candidates(segments: Sequence[SnapshotSegment], rounded: int, stream: int, pool_id: tuple[int, int]) -> Candidates:
    """The free blocks of ``segments``, by whether a request for a block of ``rounded`` bytes may use them."""
    found = Candidates(usable=[], other_stream=[], other_pool=[])
    for segment in segments:
        mine = segment.pool_id == pool_id and segment.is_small == (rounded <= SMALL_SIZE)
        group = found.other_pool if not mine else found.usable if segment.stream == stream else found.other_stream
        group.extend(_block(segment, block) for block in segment.blocks if not block.allocated and not block.awaiting)
    return found


def _block(segment: SnapshotSegment, block: SnapshotBlock) -> Block:
    """``block`` as the model's own, in a segment of its own."""
    return Segment(block.address, block.size, BlockPool(is_small=segment.is_small), segment.stream).first


def _state(block: SnapshotBlock) -> int:
    return _ALLOCATED if block.allocated else _AWAITING if block.awaiting else _FREE
