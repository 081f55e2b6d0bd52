"""Which blocks there are after a trace, and by it before."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ampmem.allocator.segments import Extent
from ampmem.allocator.settings import Settings, round_size
from ampmem.allocator.snapshot import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from ampmem.events import Column
from ampmem.recorder.sources.cuda.device import Snapshot
from ampmem.recorder.sources.cuda.trace import IS_ALLOC, IS_DONE, IS_FREE, Counted, Trace, TraceEntry

_ALLOCATED, _FREE = "active_allocated", "inactive"
"""What torch calls blocks that a tensor has, and blocks that nobody has; others await streams."""


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
    def of(cls, snapshot: Snapshot, device: int) -> Blocks:
        """Those of ``device`` in a snapshot that torch has just taken."""
        found = cls({}, {})
        for segment in snapshot["segments"]:
            if segment["device"] == device:
                for block in segment["blocks"]:
                    if block["state"] != _FREE:
                        there = found.alive if block["state"] == _ALLOCATED else found.awaiting
                        there[block["address"]] = LiveBlock(block["requested_size"], block["size"], segment["stream"])
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


def extents_in(snapshot: Snapshot, device: int) -> list[Extent]:
    """The segments of ``device`` in a snapshot that torch has just taken."""
    return [
        Extent(
            segment["address"],
            segment["total_size"],
            segment["stream"],
            segment["segment_type"] == "small",
            segment.get("is_expandable") is True,
        )
        for segment in snapshot["segments"]
        if segment["device"] == device
    ]


class Chain:
    """What a trace says of each address, one after the other: allocs, frees and ends of waits, oldest first.

    ``live`` and ``awaiting`` are the blocks that there were before the trace. :attr:`place` is where an entry stands in
    the trace, :attr:`bytes` those of its block, which :meth:`size_blocks` fills in.
    """

    def __init__(self, trace: Trace, live: dict[int, LiveBlock], awaiting: dict[int, LiveBlock]) -> None:
        moves = np.flatnonzero((trace.kind >= IS_ALLOC) & (trace.kind <= IS_DONE))
        self.place = moves[np.argsort(trace.address[moves], kind="stable")]
        self.address, self.kind, self.size = (each[self.place] for each in (trace.address, trace.kind, trace.size))
        self._seen = trace.block[self.place]
        changes = self.address[1:] != self.address[:-1]
        some = np.ones(min(1, len(moves)), dtype=bool)
        self._first, self._last = np.concatenate([some, changes]), np.concatenate([changes, some])
        self._live, self._awaiting = live, awaiting
        touched = self.address[self._first].tolist()
        self._before = [live.get(address) or awaiting.get(address) or _NO_BLOCK for address in touched]
        self._kind_before = [IS_ALLOC if at in live else IS_FREE if at in awaiting else IS_DONE for at in touched]
        self.bytes = self._with_known(np.zeros_like(self.size), [block.size for block in self._before])
        self.stream = np.where(self.kind == IS_ALLOC, trace.stream[self.place], 0)
        self.stream = self._handed_on(self._with_known(self.stream, [block.stream for block in self._before]))

    def leads_to(self, final: Blocks) -> bool:
        """Whether the entries go on from what there was without a gap, and end with the blocks of ``final``."""
        kind = self._with_known(np.roll(self.kind, 1), self._kind_before, always=True)
        size = self._with_known(np.roll(self.size, 1), [block.requested for block in self._before], always=True)
        goes_on = (self.kind == _NEXT[kind]) & ((self.kind == IS_ALLOC) | (self.size == size))
        return bool(goes_on.all()) and final.same(*self.after())

    def after(self) -> Blocks:
        """The blocks that there are then."""
        blocks = Blocks(dict(self._live), dict(self._awaiting))
        last = (self.address, self.kind, self.size, self.bytes, self.stream)
        for address, kind, *block in zip(*(column[self._last].tolist() for column in last), strict=True):
            blocks.alive.pop(address, None)
            blocks.awaiting.pop(address, None)
            if kind != IS_DONE:
                (blocks.alive if kind == IS_ALLOC else blocks.awaiting)[address] = LiveBlock(*block)
        return blocks

    def size_blocks(self, final: Blocks, settings: Settings) -> None:
        """Fill in the bytes of the blocks: as the profiler saw one come or go, or as it is in ``final``.

        Of the others the rounded request is the best guess: a block of the large pool may be up to 1 MiB larger.
        """
        born = self.kind == IS_ALLOC
        later = np.where(self._last, 0, np.roll(self._seen, -1))
        left = np.flatnonzero(self._last & born)
        later[left] = [final.alive[address].size for address in self.address[left].tolist()]
        found = np.where(self._seen > 0, self._seen, np.where(later >= self.size, later, 0))
        guessed = np.flatnonzero(born & (found == 0))
        found[guessed] = [round_size(size, settings) for size in self.size[guessed].tolist()]
        self.bytes = self._handed_on(np.where(born, found, self.bytes))

    def _with_known(self, column: Column, known: list[int], *, always: bool = False) -> NDArray[np.int64]:
        """``column`` with what was ``known`` before in each address's first row, unless that is an alloc."""
        column = column.astype(np.int64)
        of_first = np.array(known, dtype=np.int64)
        column[self._first] = np.where(always | (self.kind[self._first] != IS_ALLOC), of_first, column[self._first])
        return column

    def _handed_on(self, column: NDArray[np.int64]) -> NDArray[np.int64]:
        """``column`` with what an alloc has in its free, and that in the end of the wait."""
        for kind in (IS_FREE, IS_DONE):
            rows = np.flatnonzero((self.kind == kind) & ~self._first)
            column[rows] = column[rows - 1]
        return column


_NO_BLOCK = LiveBlock(0, 0, 0)
_NEXT = np.array([0, IS_FREE, IS_DONE, IS_ALLOC])
"""What comes at an address after each of the kinds."""


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
