"""Which blocks there are after a trace, and by it before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ampmem.allocator.blocks import SnapshotSegment
from ampmem.allocator.snapshot import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from ampmem.recorder.sources.cuda.trace import Counted, TraceEntry


class LiveBlock(NamedTuple):
    """What is alive at an address: asked and set-aside bytes, and the stream it belongs to."""

    requested: int
    size: int
    stream: int


class Blocks(NamedTuple):
    """The blocks that a tensor has, and those that await other streams."""

    alive: dict[int, LiveBlock]
    awaiting: dict[int, LiveBlock]

    @classmethod
    def of(cls, segments: Iterable[SnapshotSegment]) -> Blocks:
        """Those of a snapshot."""
        found = cls({}, {})
        for segment in segments:
            for block in segment.blocks:
                if block.allocated or block.awaiting:
                    there = found.alive if block.allocated else found.awaiting
                    there[block.address] = LiveBlock(block.requested, block.size, segment.stream)
        return found

    @property
    def counted(self) -> Counted:
        """What torch counts of them."""
        return Counted(len(self.alive), sum(block.requested for blocks in self for block in blocks.values()))

    def same(self, alive: dict[int, LiveBlock], awaiting: dict[int, LiveBlock]) -> bool:
        """Whether these are the blocks, but for what their sizes are rounded to."""
        return all(
            mine.keys() == theirs.keys() and all(theirs[at].requested == block.requested for at, block in mine.items())
            for mine, theirs in zip(self, (alive, awaiting), strict=True)
        )


def rewound_blocks(entries: list[TraceEntry], final: Blocks) -> Blocks:
    """What there was before the first entry: the final state with every entry undone, the newest first."""
    before = Blocks(dict(final.alive), dict(final.awaiting))
    for entry in reversed(entries):
        if entry.action == ALLOC:
            before.alive.pop(entry.address, None)
        elif entry.action == FREE_REQUESTED:
            before.awaiting.pop(entry.address, None)
            before.alive[entry.address] = LiveBlock(entry.size, entry.block, entry.stream)
        elif entry.action == FREE_COMPLETED:
            before.awaiting[entry.address] = LiveBlock(entry.size, 0, entry.stream)
    return before


def true_sizes(entries: list[TraceEntry], final: dict[int, LiveBlock]) -> dict[int, int]:
    """Block sizes of the allocs, by index: as the profiler saw the block come or go, or as it is in the end.

    Of the others the rounded request is the best guess: a block of the large pool may be up to 1 MiB larger.
    """
    sizes: dict[int, int] = {}
    later: dict[int, int] = {address: block.size for address, block in final.items()}
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if entry.action == FREE_REQUESTED:
            later[entry.address] = entry.block
        elif entry.action == ALLOC:
            known = later.pop(entry.address, 0)
            sizes[index] = entry.block or (known if known >= entry.size else 0)
    return sizes
