"""Blocks, the segments that they tile, and the pools that hold the free ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TypeAlias

FREE = 0
"""In its pool; can be handed out, merged and released."""
ALLOCATED = 1
AWAITING = 2
"""Freed by its owner, but other streams may still use it (``record_stream``)."""
UNMAPPED = 3
"""Address space of an expandable segment without memory behind it."""
GONE = 4
"""Merged into another block, or its segment went back to the device."""


class Segment:
    """Memory that came from the device in one piece, or the address space of an expandable segment.

    ``size`` is that of the address space; ``page_size`` is 0 unless the segment is expandable.
    ``first`` is its first block; the others follow through ``next``.
    """

    __slots__ = ("address", "first", "free", "page_size", "pool", "size", "stream")

    def __init__(self, address: int, size: int, pool: BlockPool, stream: int, page_size: int = 0) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.stream = stream
        self.page_size = page_size
        self.free = pool.of_stream(stream)
        self.first = Block(address, size, self, None, None)

    def blocks(self) -> Iterator[Block]:
        """Its blocks, by address."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next

    def has_memory(self) -> bool:
        """Whether there is memory behind any of it."""
        return self.first.state != UNMAPPED or self.first.next is not None


class Block:
    """A part of a segment. ``address`` and ``size`` in bytes; ``requested`` is what its owner asked for."""

    __slots__ = ("address", "gc_count_base", "next", "prev", "requested", "segment", "size", "state")

    def __init__(self, address: int, size: int, segment: Segment, prev: Block | None, next: Block | None) -> None:
        self.address = address
        self.size = size
        self.segment = segment
        self.prev = prev
        self.next = next
        self.state = FREE
        self.requested = 0
        self.gc_count_base = 0

    @property
    def offset(self) -> int:
        """Where it lies in its segment."""
        return self.address - self.segment.address

    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    def splice_after(self, size: int) -> Block:
        """Cut all but the first ``size`` bytes off, into a new block right behind this one."""
        rest = Block(self.address + size, self.size - size, self.segment, self, self.next)
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Take the following block over; the caller keeps the pools right."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self
        gone.state = GONE


FreeList: TypeAlias = list[tuple[int, int, Block]]
"""Free blocks of one stream as (size, address, block), sorted: the first that is large enough fits best."""


class BlockPool:
    """The free blocks of the small or the large pool, default or private (``struct BlockPool``).

    PyTorch orders a pool by (stream, size, address); here each stream has a sorted list of its own.
    ``unmapped`` holds the unmapped parts of expandable segments per stream, sorted by address.
    """

    __slots__ = ("free", "get_free_blocks_call_count", "is_small", "private", "unmapped")

    def __init__(self, *, is_small: bool, private: int | None = None) -> None:
        self.is_small = is_small
        self.private = private
        self.free: dict[int, FreeList] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.get_free_blocks_call_count = 0

    def of_stream(self, stream: int) -> FreeList:
        """The free blocks of ``stream``; the same list every time."""
        return self.free.setdefault(stream, [])

    def blocks(self) -> list[Block]:
        """All free blocks in PyTorch's order; a copy that may be walked while the pool changes."""
        return [block for stream in sorted(self.free) for _, _, block in self.free[stream]]

    def insert(self, block: Block) -> None:
        """``insert_into_blocks``."""
        block.state = FREE
        block.gc_count_base = self.get_free_blocks_call_count
        insort(block.segment.free, (block.size, block.address, block))

    def erase(self, block: Block) -> None:
        """Take a free block out."""
        free = block.segment.free
        del free[bisect_left(free, (block.size, block.address))]

    def insert_unmapped(self, block: Block) -> None:
        """Put address space without memory in."""
        block.state = UNMAPPED
        insort(self.unmapped.setdefault(block.segment.stream, []), (block.address, block))

    def erase_unmapped(self, block: Block) -> None:
        """Take address space without memory out."""
        unmapped = self.unmapped[block.segment.stream]
        del unmapped[bisect_left(unmapped, (block.address,))]

    def gc_count(self, block: Block) -> int:
        """How often this pool was searched since ``block`` became free."""
        return self.get_free_blocks_call_count - block.gc_count_base
