"""What lived when: the trace walked backwards from the final state, then forwards with a running total."""

from __future__ import annotations

from dataclasses import dataclass

from ampmem.allocator.rounding import round_size
from ampmem.allocator.settings import VARIABLES, Settings, parse_settings
from ampmem.errors import RecordingError, UsageError
from ampmem.importer.snapshot import ALLOC, FREE_COMPLETED, FREE_REQUESTED, RESERVING, Block, Event, Snapshot

ALIVE = -1
"""Value of :attr:`Allocation.died` for what is alive when the snapshot is taken."""

BEFORE = -1
"""Value of :attr:`Allocation.born` for what was alive before the trace starts."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One life of a block. ``born`` and ``died`` are indices into :attr:`Replay.events`."""

    address: int
    bytes: int
    block_bytes: int
    stream: int
    born: int
    died: int

    @property
    def throughout(self) -> bool:
        """Whether it was there before the trace and is there after it."""
        return self.born == BEFORE and self.died == ALIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Allocs and frees in order, and the allocations in order of birth, those from before first.

    ``allocation`` says for each event whose it is. ``checked`` says that the running total of the trace,
    added up by itself, ends at what the segments hold; ``strangers`` counts the blocks in which the two differ.
    """

    events: tuple[Event, ...]
    allocation: tuple[int, ...]
    allocations: tuple[Allocation, ...]
    baseline_bytes: int
    peak_reserved: int
    checked: bool
    strangers: int


def _settings(snapshot: Snapshot) -> Settings:
    """Those that the process had, where the snapshot says so and this version of ampmem knows them."""
    for variable in VARIABLES:
        text = snapshot.settings.get(variable)
        if isinstance(text, str) and text:
            try:
                return parse_settings(text)
            except UsageError:
                break
    return Settings()


def replay(snapshot: Snapshot) -> Replay:
    """Raises :class:`RecordingError` when the trace contradicts itself."""
    events = _lives_only(snapshot.events)
    final = {block.address: block for block in snapshot.blocks}
    before, strangers = _rewind(events, final)
    allocations, owner = _forward(events, before, final, _settings(snapshot))
    born_bytes = sum(allocation.bytes for allocation in allocations if allocation.born == BEFORE)
    total = born_bytes + sum(event.size if event.action == ALLOC else -event.size for event in events)
    return Replay(
        events=tuple(events),
        allocation=tuple(owner),
        allocations=tuple(allocations),
        baseline_bytes=born_bytes,
        peak_reserved=_peak_reserved(snapshot),
        checked=strangers == 0 and total == sum(block.requested for block in snapshot.blocks),
        strangers=strangers,
    )


def _lives_only(events: tuple[Event, ...]) -> list[Event]:
    """Allocs, and the event of each pair of frees at which the memory stops counting as allocated."""
    # A completion whose request the ring has lost is of a block that was no longer allocated.
    free = FREE_REQUESTED if any(event.action == FREE_REQUESTED for event in events) else FREE_COMPLETED
    return [event for event in events if event.action in (ALLOC, free)]


def _rewind(events: list[Event], final: dict[int, Block]) -> tuple[dict[int, Event | Block], int]:
    """What was alive before the first event, by address, and in how many blocks trace and final state differ.

    They differ when recording was stopped before the snapshot was taken: the last events are missing then.
    """
    alive: dict[int, Event | Block] = dict(final)
    settled: set[int] = set()
    """Addresses that an event seen so far is about: a difference there is a contradiction."""
    strangers = 0
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        there = event.address in alive
        if there != (event.action == ALLOC):
            if event.address in settled:
                raise _contradiction(index, event)
            strangers += 1
        if event.action == ALLOC:
            alive.pop(event.address, None)
        else:
            alive[event.address] = event
        settled.add(event.address)
    return alive, strangers


def _contradiction(index: int, event: Event) -> RecordingError:
    what = "allocated twice" if event.action == ALLOC else "freed twice"
    return RecordingError(
        f"the snapshot is damaged: the event {index} of its trace says that {event.address:#x} was {what}"
    )


def _forward(
    events: list[Event], before: dict[int, Event | Block], final: dict[int, Block], settings: Settings
) -> tuple[list[Allocation], list[int]]:
    births: list[tuple[int, int, int, int]] = []
    died: dict[int, int] = {}
    alive: dict[int, int] = {}
    for address in sorted(before):
        state = before[address]
        size = state.size if isinstance(state, Event) else state.requested
        alive[address] = len(births)
        births.append((address, size, state.stream, BEFORE))
    owner: list[int] = []
    for index, event in enumerate(events):
        if event.action == ALLOC:
            alive[event.address] = len(births)
            owner.append(len(births))
            births.append((event.address, event.size, event.stream, index))
        else:
            owner.append(alive.pop(event.address))
            died[owner[-1]] = index
    allocations = []
    for number, (address, size, stream, born) in enumerate(births):
        block = final.get(address) if number not in died else None
        block_bytes = block.size if block is not None else round_size(size, settings)
        allocations.append(Allocation(address, size, block_bytes, stream, born, died.get(number, ALIVE)))
    return allocations, owner


def _peak_reserved(snapshot: Snapshot) -> int:
    """The most that the segments ever were, walked backwards from what they are."""
    reserved = peak = snapshot.reserved
    for event in reversed(snapshot.events):
        reserved -= RESERVING.get(event.action, 0) * event.size
        peak = max(peak, reserved)
    return peak
