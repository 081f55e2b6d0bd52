"""The terms of a simulated run's peaks, and how much higher they are with the most that is assumed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ampmem.allocator.blocks import UNLIMITED, Block, Counters
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.gpus import Context
from ampmem.allocator.oom import OutOfMemory
from ampmem.allocator.settings import MIB, MIN_BLOCK_SIZE, Settings, get_allocation_size, round_size, round_up
from ampmem.events import PredictionRecord, TermsRecord

LESS, MORE = 17, 22
"""By how many percent what is reserved may be below and above what a run without workspaces reserves, where the
workspaces are large enough for that. A workspace that finds room in the cache adds nothing, or leaves a block there
that later tensors use; one that does not adds a segment. Which it is depends on sizes that only cuDNN knows.
``docs/simulation.md`` has the published runs that these percentages come from."""
_TWO_WORKSPACES = 260 * MIB
"""So much may be above it however little the run reserves: some engines ask for 128 MiB and a little more, by pass
(up to 130 MiB in a snapshot of ResNet-50), so the larger workspace finds no room in the segment of the smaller one."""
_SEGMENT_UNIT = 2 * MIB
"""Every segment is a multiple of this, so what is reserved is one, too."""
_TIGHT = 105
"""A run whose peak of allocated memory is so many percent below the device's is taken to fit where it did here: the
allocator gives back what it has cached before it gives up."""
WAITING = "freed blocks that other streams may still use"
"""What a device that lags behind has more of than one that keeps up."""


class Range(NamedTuple):
    """Bytes."""

    least: int
    likely: int | None
    most: int


class Peaks:
    """Follows one allocator; told after each of its mallocs.

    Its own peaks: a script may reset those of the allocator.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.workspaces: dict[str, int] = {}
        """What is held now, by the library that asked."""
        self.scratch: dict[str, int] = {}
        """The same by the op that will give it back."""
        self.allocated = self.reserved = self._terms()
        self._allocated_peak = self._reserved_peak = 0
        self.awaiting_peak = 0
        """The most bytes that were freed and awaited another stream."""
        self.allowed: int | None = None
        """What the process was allowed to take when the most was reserved; ``None`` without a limit."""

    def note(self, allowed: int | None = None) -> None:
        """Keep the terms when there has never been as much before; ``allowed`` is what the process may take now."""
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
    """A second allocator, of a device that never runs out.

    Its streams are as far behind as they may be: what they use is done when the script has waited for it, or the
    allocator has, which does so before it gives up: where more than ``room`` bytes would be taken. Where something was
    assumed it also gives back what is cached, before it has more than ``sure`` bytes, which is what the device has at
    least. Beside that it is told the same as the first one.
    """

    def __init__(self, settings: Settings, room: int, *, sure: int, oldest_first: bool = False) -> None:
        self._settings = replace(settings, memory_fraction=None)
        self._allocator = DeviceCachingAllocator(self._settings, oldest_first=oldest_first)
        self._room = room
        self._sure = sure
        self.limit: int | None = None
        """What the process may take; ``None`` without a limit."""
        self._blocks: dict[Block, Block] = {}
        self.bounds: dict[str, int] = {}
        """The largest single request that was assumed, by what it is for."""
        self._segments: dict[object, int] = {}
        """The segment that each request would have of its own, by who asks."""
        self.most_allocated = self.most_filled = 0
        """The most that was allocated while each request that was assumed took all that it may; the second of requests
        that may take all that is free."""
        self.exceeded = False
        """Whether there were more than ``sure`` bytes at once, with nothing left to give back."""

    def configure(self, settings: Settings) -> None:
        """The first allocator has these settings from now on; :attr:`limit` stands for its memory fraction."""
        self._settings = replace(settings, memory_fraction=None)
        self._allocator.configure(self._settings)

    @property
    def counters(self) -> Counters:
        """The allocator's statistics; nobody resets their peaks."""
        return self._allocator.counters

    def malloc(self, block: Block) -> None:
        """The first allocator gave ``block`` out."""
        self._blocks[block] = self._malloc(block.requested, block.segment.stream)

    def free(self, block: Block) -> None:
        """It takes ``block`` back."""
        self._allocator.free(self._blocks.pop(block))

    def record_stream(self, block: Block, stream: int) -> None:
        """``block`` of the first allocator is used on ``stream`` too."""
        self._allocator.record_stream(self._blocks[block], stream)

    def synchronize(self, until: Mapping[int, int] | None) -> None:
        """By stream, past how many of its events the device has come; past all where that is ``None``."""
        if until is None:
            self._allocator.complete_events()
            return
        for stream, events in until.items():
            self._allocator.complete_events_until(stream, events)

    def assume(self, what: str, most: int, asker: object) -> None:
        """``asker`` asks for at most ``most`` bytes now, and gives them back at once.

        Who asks does without where there is no memory. The same asker asks for the same again.
        """
        if most > 0:
            self.most_allocated = max(self.most_allocated, self._note(what, most, self.within(self._sure)))
            self._segments[asker] = get_allocation_size(round_size(most, self._settings), self._settings)

    @property
    def workspaces(self) -> int:
        """Bytes of all requests that were assumed if each had a segment of its own."""
        return sum(self._segments.values())

    def fill(self, what: str, room: int, limit: int | None) -> None:
        """The same of all that is left of ``room`` bytes, or ``limit`` of them."""
        room = self.within(room)
        left = room - self.counters.allocated
        if left > 0:
            there = self._note(what, left if limit is None else min(left, limit), room)
            self.most_filled = max(self.most_filled, there)

    def within(self, room: int) -> int:
        """``room`` bytes, or as many of them as the process may take."""
        return room if self.limit is None else min(room, self.limit)

    def _note(self, what: str, most: int, room: int) -> int:
        """What there is with ``most`` bytes more, which is no more than ``room``."""
        allocated = self.counters.allocated
        self.bounds[what] = max(most, self.bounds.get(what, 0))
        return min(allocated + round_up(most, MIN_BLOCK_SIZE), max(allocated, room))

    def _malloc(self, size: int, stream: int) -> Block:
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
        driver.total = self.within(room)
        try:
            return self._allocator.malloc(size, stream)
        finally:
            driver.total = UNLIMITED

    def empty_cache(self) -> None:
        """The script empties the cache."""
        self._allocator.empty_cache()


def prediction(
    peaks: Peaks,
    highest: Highest,
    *,
    total: int,
    context: Context,
    libraries: Mapping[str, tuple[int, int]],
    unmodelled: tuple[str, ...],
    ran_out: bool,
) -> PredictionRecord:
    """What the run has come to by now; ``libraries`` has the least and the most that each holds beside the
    ``context``.
    """
    lowest = (_allocated(peaks.allocated), _allocated(peaks.reserved) + peaks.reserved.cached)
    counters = highest.counters
    bounds = dict(highest.bounds)
    assumed = bool(bounds)
    if counters.awaiting_bytes_peak > peaks.awaiting_peak and counters.reserved_peak > lowest[1]:
        bounds[WAITING] = counters.awaiting_bytes_peak
    room = highest.within(total - context.most)
    reserved = reserved_range(highest, *lowest, room) if bounds else Range(lowest[1], None, lowest[1])
    there = counters.allocated_peak if bounds else lowest[0]
    allocated, filled = max(there, lowest[0], highest.most_allocated), highest.most_filled
    return PredictionRecord(
        total=total,
        outside=context.least,
        outside_at_most=context.most,
        allocated=peaks.allocated,
        reserved=peaks.reserved,
        highest_allocated=max(allocated, filled),
        highest_reserved=max(reserved.most, filled),
        unfilled_allocated=allocated if filled else None,
        unfilled_reserved=reserved.most if filled else None,
        bounds=bounds,
        unmodelled=unmodelled,
        ran_out=ran_out,
        libraries={what: least for what, (least, _) in libraries.items()},
        libraries_at_most={what: most for what, (_, most) in libraries.items()},
        least_reserved=reserved.least if assumed else None,
        likely_reserved=reserved.likely if assumed else None,
        allowed=peaks.allowed,
    )


def reserved_range(highest: Highest, allocated: int, reserved: int, room: int) -> Range:
    """Between which amounts the peak of reserved memory is taken to be; never below that of ``allocated`` memory.

    ``reserved`` is what a run reserves that has no workspaces and whose device keeps up; ``room`` is what the device
    has at least. The range is no wider on either side than all workspaces together.
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
    # Memory is reserved in segments, whose sizes are whole such units.
    least = round_up(max(allocated, likely - less), _SEGMENT_UNIT)
    return Range(least=min(least, likely), likely=likely, most=most)


def _allocated(terms: TermsRecord) -> int:
    return terms.tensors + sum(terms.workspaces.values()) + sum(terms.scratch.values()) + terms.rounding
