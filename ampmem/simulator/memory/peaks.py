"""What a simulated run's peaks consist of, and how much higher they can be with the largest assumed requests."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ampmem.allocator.blocks import UNLIMITED, Block, Counters
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.gpus import GpuSpec
from ampmem.allocator.oom import OutOfMemory
from ampmem.allocator.settings import MIB, MIN_BLOCK_SIZE, Settings, get_allocation_size, round_size, round_up
from ampmem.events import PredictionRecord, TermsRecord

LESS, MORE = 17, 22
"""Percent by which reserved memory may be below and above that of a run without workspaces.

The range applies if the workspaces are large enough. A workspace that fits into the cache adds nothing, or leaves a
block there that later tensors use; one that does not fit adds a segment. Which it is depends on sizes that only cuDNN
knows. ``docs/simulation.md`` has the published runs that these percentages come from.
"""
_TWO_WORKSPACES = 260 * MIB
"""Minimum range above it in bytes, however little the run reserves.

Some engines request 128 MiB and a little more, by pass (up to 130 MiB in a snapshot of ResNet-50), so the larger
workspace does not fit into the segment of the smaller one.
"""
_SEGMENT_UNIT = 2 * MIB
"""Every segment is a multiple of this, so reserved memory is, too."""
_TIGHT = 105
"""A run is assumed to fit if this percentage of its peak of allocated memory does.

The allocator frees cached memory before it gives up.
"""
WAITING = "freed blocks that other streams may still use"
"""The name for freed blocks that a device that lags behind cannot reuse yet."""


class Range(NamedTuple):
    """Minimum and maximum bytes."""

    least: int
    likely: int | None
    most: int


class Peaks:
    """Follows one allocator's peaks; called after each malloc.

    The peaks are its own, because a script may reset those of the allocator.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.workspaces: dict[str, int] = {}
        """Bytes held now, by library."""
        self.scratch: dict[str, int] = {}
        """Scratch bytes held now, by op."""
        self.allocated = self.reserved = self._terms()
        self._allocated_peak = self._reserved_peak = 0
        self.awaiting_peak = 0
        """Peak of freed bytes that awaited another stream."""
        self.allowed: int | None = None
        """The process's limit in bytes at the peak of reserved memory; ``None`` without a limit."""

    def note(self, allowed: int | None = None) -> None:
        """Keep the terms if this is a new peak; ``allowed`` is the process's current limit."""
        counters = self._counters
        if counters.reserved >= self._reserved_peak and (allowed is None or counters.reserved <= allowed):
            self.allowed = allowed
        if counters.allocated > self._allocated_peak:
            self._allocated_peak = counters.allocated
            self.allocated = self._terms()
        if counters.reserved > self._reserved_peak:
            self._reserved_peak = counters.reserved
            self.reserved = self._terms()
        self.awaiting_peak = max(self.awaiting_peak, counters.awaiting_bytes)

    def _terms(self) -> TermsRecord:
        counters = self._counters
        others = sum(self.workspaces.values()) + sum(self.scratch.values())
        requested = counters.requested - counters.awaiting_requested
        return TermsRecord(
            tensors=requested - others,
            workspaces=dict(self.workspaces),
            scratch=dict(self.scratch),
            rounding=counters.allocated - requested,
            cached=counters.reserved - counters.allocated,
        )


class Highest:
    """A second allocator, of a device that never runs out, for the upper bound of the peaks.

    Its streams lag as far behind as they may: their work is completed when the script has waited for it, or the
    allocator has, which it does before it gives up: if more than ``room`` bytes would be reserved. If anything was
    assumed, it also frees cached memory before it has more than ``sure`` bytes, the device's minimum. Otherwise it gets
    the same calls as the first allocator.
    """

    def __init__(self, settings: Settings, room: int, *, sure: int, oldest_first: bool = False) -> None:
        self._settings = replace(settings, memory_fraction=None)
        self._allocator = DeviceCachingAllocator(self._settings, oldest_first=oldest_first)
        self._room = room
        self._sure = sure
        self.limit: int | None = None
        """The process's limit in bytes; ``None`` without a limit."""
        self._blocks: dict[Block, Block] = {}
        self.bounds: dict[str, int] = {}
        """The largest single assumed request, by purpose."""
        self._segments: dict[object, int] = {}
        """The segment that each request would have of its own, by who requests it."""
        self.most_allocated = self.most_filled = 0
        """Peak of allocated memory with each assumed request at its maximum.

        ``most_filled`` is that with requests that may take all free memory.
        """
        self.exceeded = False
        """Whether there were more than ``sure`` bytes at once, with nothing left to free."""

    def configure(self, settings: Settings) -> None:
        """Apply the first allocator's settings; :attr:`limit` stands for its memory fraction."""
        self._settings = replace(settings, memory_fraction=None)
        self._allocator.configure(self._settings)

    @property
    def counters(self) -> Counters:
        """The allocator's statistics; their peaks are never reset."""
        return self._allocator.counters

    def malloc(self, block: Block) -> None:
        """Follow an allocation: the first allocator allocated ``block``."""
        self._blocks[block] = self._malloc(block.requested, block.segment.stream)

    def free(self, block: Block) -> None:
        """Follow a free: the first allocator freed ``block``."""
        self._allocator.free(self._blocks.pop(block))

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that ``block`` of the first allocator is used on ``stream``, too."""
        self._allocator.record_stream(self._blocks[block], stream)

    def synchronize(self, until: Mapping[int, int] | None) -> None:
        """Complete events up to the number given for each stream; all if ``None``."""
        if until is None:
            self._allocator.complete_events()
            return
        for stream, events in until.items():
            self._allocator.streams.complete_until(stream, events)

    def assume(self, what: str, most: int, asker: object) -> None:
        """Allocate at most ``most`` bytes for ``asker``, and free them at once.

        Without memory the request is skipped. The same asker always requests the same size.
        """
        if most > 0:
            self.most_allocated = max(self.most_allocated, self._note(what, most, self.within(self._sure)))
            self._segments[asker] = get_allocation_size(round_size(most, self._settings), self._settings)

    @property
    def workspaces(self) -> int:
        """Bytes of all assumed requests if each had its own segment."""
        return sum(self._segments.values())

    def fill(self, what: str, room: int, limit: int | None) -> None:
        """Allocate all that is left of ``room`` bytes, or ``limit`` of them, and free it at once."""
        room = self.within(room)
        left = room - self.counters.allocated
        if left > 0:
            there = self._note(what, left if limit is None else min(left, limit), room)
            self.most_filled = max(self.most_filled, there)

    def within(self, room: int) -> int:
        """``room`` bytes, or the process's limit if that is smaller."""
        return room if self.limit is None else min(room, self.limit)

    def _note(self, what: str, most: int, room: int) -> int:
        """Note a request of ``most`` bytes; returns the allocated memory with it, at most ``room``."""
        allocated = self.counters.allocated
        self.bounds[what] = max(most, self.bounds.get(what, 0))
        return min(allocated + round_up(most, MIN_BLOCK_SIZE), max(allocated, room))

    def _malloc(self, size: int, stream: int) -> Block:
        # The first device may have more room than is sure: once anything was assumed, the cache is freed before.
        if self.bounds:
            try:
                return self._malloc_within(self._sure, size, stream)
            except OutOfMemory:
                self.exceeded = True
        elif self.counters.awaiting:
            with suppress(OutOfMemory):
                return self._malloc_within(self._room, size, stream)
        return self._allocator.malloc(size, stream)

    def _malloc_within(self, room: int, size: int, stream: int) -> Block:
        driver = self._allocator.driver
        # The model asks its driver at each request, so each may have other room.
        driver.total = self.within(room)
        try:
            return self._allocator.malloc(size, stream)
        finally:
            driver.total = UNLIMITED

    def empty_cache(self) -> None:
        """Follow the script's ``empty_cache``."""
        self._allocator.empty_cache()


def prediction(
    peaks: Peaks, highest: Highest, gpu: GpuSpec, libraries: Mapping[str, tuple[int, int]]
) -> PredictionRecord:
    """The prediction for the run so far on ``gpu``, as if nothing was left out, and no request had failed.

    ``libraries`` has the minimum and maximum that each library holds besides the CUDA context.
    """
    lowest = (_allocated(peaks.allocated), _allocated(peaks.reserved) + peaks.reserved.cached)
    counters = highest.counters
    bounds = dict(highest.bounds)
    assumed = bool(bounds)
    if counters.awaiting_bytes_peak > peaks.awaiting_peak and counters.reserved_peak > lowest[1]:
        bounds[WAITING] = counters.awaiting_bytes_peak
    room = highest.within(gpu.total_memory - gpu.context.most)
    reserved = reserved_range(highest, *lowest, room) if bounds else Range(lowest[1], None, lowest[1])
    there = counters.allocated_peak if bounds else lowest[0]
    allocated, filled = max(there, lowest[0], highest.most_allocated), highest.most_filled
    return PredictionRecord(
        total=gpu.total_memory,
        outside=gpu.context.least,
        outside_at_most=gpu.context.most,
        allocated=peaks.allocated,
        reserved=peaks.reserved,
        highest_allocated=max(allocated, filled),
        highest_reserved=max(reserved.most, filled),
        unfilled_allocated=allocated if filled else None,
        unfilled_reserved=reserved.most if filled else None,
        bounds=bounds,
        unmodelled=(),
        ran_out=False,
        libraries={what: least for what, (least, _) in libraries.items()},
        libraries_at_most={what: most for what, (_, most) in libraries.items()},
        least_reserved=reserved.least if assumed else None,
        likely_reserved=reserved.likely if assumed else None,
        allowed=peaks.allowed,
    )


def reserved_range(highest: Highest, allocated: int, reserved: int, room: int) -> Range:
    """The range of the peak of reserved memory; never below that of ``allocated`` memory.

    ``reserved`` is the peak without workspaces on a device that keeps up; ``room`` is the device's minimum. Neither
    side of the range is wider than all workspaces together.
    """
    behind = highest.counters.reserved_peak
    likely = max(min(behind, reserved), allocated)
    whole = highest.workspaces
    less = min(likely * LESS // 100, whole)
    behind = max(behind, likely)
    more = min(max(behind * MORE // 100, _TWO_WORKSPACES), whole)
    most = max(behind + more, highest.most_allocated)
    if not highest.exceeded and max(allocated, highest.counters.allocated_peak) * _TIGHT // 100 <= room:
        most = max(min(most, room), likely)
    # Memory is reserved in segments, whose sizes are multiples of this unit.
    least = round_up(max(allocated, likely - less), _SEGMENT_UNIT)
    return Range(least=min(least, likely), likely=likely, most=most)


def _allocated(terms: TermsRecord) -> int:
    return terms.tensors + sum(terms.workspaces.values()) + sum(terms.scratch.values()) + terms.rounding
