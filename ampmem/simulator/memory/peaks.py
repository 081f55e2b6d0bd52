"""The terms of a simulated run's peaks, and how much higher they are with the most that is assumed."""

from __future__ import annotations

from collections.abc import Mapping

from ampmem.allocator.model.blocks import Block
from ampmem.allocator.model.caching import DeviceCachingAllocator
from ampmem.allocator.model.driver import UNLIMITED
from ampmem.allocator.model.oom import OutOfMemory
from ampmem.allocator.model.statistics import Counters
from ampmem.allocator.settings import Settings
from ampmem.events import PredictionRecord, TermsRecord

WAITING = "freed blocks that other streams may still use"
"""What a device that lags behind has more of than one that keeps up."""


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

    def note(self) -> None:
        """Keep the terms when there has never been as much before."""
        counters = self._counters
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
    """A second allocator, of a device that never runs out, where what is not known takes the most that is assumed.

    Its streams are as far behind as they may be: what they use is done when the script has waited for it, or the
    allocator has, which does so before it gives up: where more than ``room`` bytes would be taken. Beside that it is
    told the same as the first one.
    """

    def __init__(self, settings: Settings, room: int) -> None:
        self._allocator = DeviceCachingAllocator(settings)
        self._room = room
        self._blocks: dict[Block, Block] = {}
        self.bounds: dict[str, int] = {}
        """The largest single request that was assumed, by what it is for."""

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

    def assume(self, what: str, size: int, stream: int) -> None:
        """Up to ``size`` bytes may be asked for on ``stream`` now, and be given back at once."""
        if size > 0:
            self.bounds[what] = max(size, self.bounds.get(what, 0))
            self._allocator.free(self._malloc(size, stream))

    def _malloc(self, size: int, stream: int) -> Block:
        driver = self._allocator.driver
        if self.counters.awaiting:
            driver.total = self._room
            try:
                return self._allocator.malloc(size, stream)
            except OutOfMemory:
                pass
            finally:
                driver.total = UNLIMITED
        return self._allocator.malloc(size, stream)

    def empty_cache(self) -> None:
        """The script empties the cache."""
        self._allocator.empty_cache()


def prediction(
    peaks: Peaks,
    highest: Highest,
    *,
    total: int,
    outside: int,
    libraries: Mapping[str, tuple[int, int]],
    unmodelled: tuple[str, ...],
    ran_out: bool,
) -> PredictionRecord:
    """What the run has come to by now; ``libraries`` has the least and the most that each holds beside ``outside``."""
    lowest = (_allocated(peaks.allocated), _allocated(peaks.reserved) + peaks.reserved.cached)
    counters = highest.counters
    bounds = dict(highest.bounds)
    if counters.awaiting_bytes_peak > peaks.awaiting_peak and counters.reserved_peak > lowest[1]:
        bounds[WAITING] = counters.awaiting_bytes_peak
    there = (counters.allocated_peak, counters.reserved_peak) if bounds else lowest
    return PredictionRecord(
        total=total,
        outside=outside,
        allocated=peaks.allocated,
        reserved=peaks.reserved,
        highest_allocated=max(there[0], lowest[0]),
        highest_reserved=max(there[1], lowest[1]),
        bounds=bounds,
        unmodelled=unmodelled,
        ran_out=ran_out,
        libraries={what: least for what, (least, _) in libraries.items()},
        libraries_at_most={what: most for what, (_, most) in libraries.items()},
    )


def _allocated(terms: TermsRecord) -> int:
    return terms.tensors + sum(terms.workspaces.values()) + sum(terms.scratch.values()) + terms.rounding
