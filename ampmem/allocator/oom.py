"""Out of memory: the request, the allocator's state, and why it could not serve the request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampmem.allocator.blocks import Block, BlockPool, Segment, SnapshotBlock, SnapshotSegment
from ampmem.allocator.settings import SMALL_SIZE, Settings
from ampmem.errors import AmpmemError
from ampmem.units import format_bytes


class Reason(StrEnum):
    """Why a request could not be served; the first reason that applies."""

    OVERSIZE = "oversize"
    """A free block is large enough, but ``max_split_size`` excludes it for this size."""
    WRONG_STREAM = "wrong stream"
    """A free block is large enough, but belongs to another stream."""
    WRONG_POOL = "wrong pool"
    """A free block is large enough, but belongs to a private pool, or to the other of small and large pool."""
    LIMITED = "limited"
    """The device has the memory, but the process's limit is reached (``memory_fraction``)."""
    FRAGMENTED = "fragmented"
    """There is enough free memory, but in pieces that are too small and cannot be returned."""
    EXHAUSTED = "exhausted"
    """All free memory together is not enough."""


EXPLANATIONS = {
    Reason.OVERSIZE: "a cached block is large enough, but max_split_size_mb keeps it from serving this size",
    Reason.WRONG_STREAM: "a cached block is large enough, but it belongs to another stream",
    Reason.WRONG_POOL: "a cached block is large enough, but it belongs to another pool",
    Reason.LIMITED: "the device has free memory, but the process may not take that much of it",
    Reason.FRAGMENTED: "there is enough free memory, but it is too fragmented",
    Reason.EXHAUSTED: "all free memory together is not enough",
}
"""A sentence for each reason."""

_EACH_TOO_SMALL = "the cached memory is too small for it, and the device's free memory too small for a new segment"


def explanation(reason: Reason, rounded: int, cached: int) -> str:
    """``reason`` as a sentence; :data:`_EACH_TOO_SMALL` if ``rounded`` bytes are more than all ``cached`` memory."""
    return _EACH_TOO_SMALL if reason is Reason.FRAGMENTED and cached < rounded else EXPLANATIONS[reason]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryReport:
    """The state of the allocator when it gave up; all sizes in bytes.

    ``asked`` is the request, ``rounded`` the block for it and ``segment`` the request to the device: with expandable
    segments the pages for the whole block. ``outside`` is memory assumed to be held by others on the device; ``cached``
    is reserved and not in use. ``largest_free`` is the largest free block that this request may use (of its stream and
    pool); 0 for none.
    """

    reason: Reason
    asked: int
    rounded: int
    segment: int
    device_total: int
    device_free: int
    outside: int
    allowed: int | None
    allocated: int
    reserved: int
    cached: int
    largest_free: int

    @property
    def in_short(self) -> str:
        """The request and the memory left, in half a sentence."""
        left = f"{format_bytes(self.device_free)} of the device's {format_bytes(self.device_total)} was free"
        if self.allowed is not None and self.allowed - self.reserved < self.device_free:
            rest = format_bytes(max(self.allowed - self.reserved, 0))
            left = f"{rest} was left of the {format_bytes(self.allowed)} that this process may use"
        return f"out of memory: the script tried to allocate {self._size_text}, and {left}"

    @property
    def _size_text(self) -> str:
        segment = f" in a new segment of {format_bytes(self.segment)}" if self.segment != self.rounded else ""
        return f"{format_bytes(self.asked)}{segment}"

    def __str__(self) -> str:
        # It begins like PyTorch's own message: scripts and libraries search for "CUDA out of memory." in it.
        sentences = [
            "out of memory",
            f"Tried to allocate {self._size_text}",
            f"The device has {format_bytes(self.device_total)}, of which {format_bytes(self.device_free)} is free",
        ]
        if self.allowed is not None:
            left = format_bytes(max(self.allowed - self.reserved, 0))
            sentences.append(f"This process may use {format_bytes(self.allowed)}, of which {left} is left")
        cached = f"{format_bytes(self.cached)} is cached (largest usable block: {format_bytes(self.largest_free)})"
        sentences.append(
            f"This process has reserved {format_bytes(self.reserved)}: {format_bytes(self.allocated)} is allocated "
            f"and {cached}"
        )
        if self.outside:
            outside = format_bytes(self.outside)
            sentences.append(f"{outside} is assumed to be in use outside of the allocator (CUDA context, libraries)")
        sentences.append(f"Reason: {explanation(self.reason, self.rounded, self.cached)}")
        return ". ".join(sentences)


class OutOfMemory(AmpmemError):
    """The modelled allocator cannot serve a request; ``report`` says why."""

    def __init__(self, report: OutOfMemoryReport) -> None:
        super().__init__(str(report))
        self.report = report


def largest_size(blocks: Iterable[Block]) -> int:
    """Size of the largest of ``blocks``, 0 for none."""
    return max((block.size for block in blocks), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The free blocks when memory ran out, by why the request can or cannot use them."""

    usable: list[Block]
    other_stream: list[Block]
    other_pool: list[Block]

    @classmethod
    def among(cls, pools: Iterable[BlockPool], pool: BlockPool, stream: int) -> Candidates:
        """Sort the blocks of ``pools`` for a request of ``stream`` to ``pool``."""
        mine = pool.blocks()
        return cls(
            usable=[block for block in mine if block.segment.stream == stream],
            other_stream=[block for block in mine if block.segment.stream != stream],
            other_pool=[block for other in pools if other is not pool for block in other.blocks()],
        )

    def reason(self, rounded: int, segment: int, device_free: int, allowed: int | None) -> Reason:
        """Why none of the blocks served; ``allowed`` is what the process may still reserve, ``None`` for no limit."""
        if largest_size(self.usable) >= rounded:
            return Reason.OVERSIZE
        if largest_size(self.other_stream) >= rounded:
            return Reason.WRONG_STREAM
        if largest_size(self.other_pool) >= rounded:
            return Reason.WRONG_POOL
        if allowed is not None and allowed < segment <= device_free:
            return Reason.LIMITED
        within = device_free if allowed is None else min(device_free, allowed)
        everything = (*self.usable, *self.other_stream, *self.other_pool)
        if within + sum(block.size for block in everything) >= rounded:
            return Reason.FRAGMENTED
        return Reason.EXHAUSTED


def allowed_memory(settings: Settings, total: int) -> int | None:
    """The process's limit in bytes (``setMemoryFraction``)."""
    return None if settings.memory_fraction is None else int(settings.memory_fraction * total)


# Why cached memory could not serve a request, found from the segments that were recorded at the error.

_FREE, _ALLOCATED, _AWAITING = 0, 1, 2


def pack_segments(segments: Sequence[SnapshotSegment]) -> str:
    """``segments`` as JSON: address, size, stream, small, expandable, pool, and (size, requested, state) per block."""
    rows = [
        [
            *(each.address, each.size, each.stream, int(each.is_small), int(each.expandable), list(each.pool_id)),
            [
                [block.size, block.requested, _ALLOCATED if block.allocated else _AWAITING if block.awaiting else _FREE]
                for block in each.blocks
            ],
        ]
        for each in segments
    ]
    return json.dumps(rows, separators=(",", ":"))


def unpack_segments(text: str) -> tuple[SnapshotSegment, ...]:
    """The segments packed by :func:`pack_segments`. Raises ``ValueError`` or ``TypeError`` for any other text."""
    segments = []
    for address, size, stream, is_small, expandable, pool, rows in json.loads(text):
        blocks, place = [], int(address)
        for length, requested, state in rows:
            allocated, awaiting = state == _ALLOCATED, state == _AWAITING
            blocks.append(SnapshotBlock(place, int(length), int(requested), allocated, awaiting))
            place += int(length)
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
        for block in segment.blocks:
            if not block.allocated and not block.awaiting:  # a block of the model, in a segment of its own
                pool = BlockPool(is_small=segment.is_small)
                group.append(Segment(block.address, block.size, pool, segment.stream).first)
    return found
