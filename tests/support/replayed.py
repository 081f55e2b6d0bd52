"""Replaying a torch snapshot through the model, and how far the two agree."""

from collections import defaultdict, deque
from dataclasses import dataclass

from ampmem.allocator.blocks import (
    ALLOCATED,
    AWAITING,
    Block,
    CallKind,
    Counters,
    DriverCall,
    Segment,
    SnapshotSegment,
)
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.settings import Settings
from ampmem.allocator.snapshot import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    DeviceSnapshot,
    SnapshotEvent,
    rebuild,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A snapshot's trace, recorded and modelled.

    ``moved`` counts the allocations that got another address than the recorded one, ``first_moved`` is the
    first one's event; ``resized`` counts the blocks that have another size at the end.
    """

    events: int
    allocations: int
    moved: int
    first_moved: int | None
    resized: int
    recorded_calls: tuple[DriverCall, ...]
    modelled_calls: tuple[DriverCall, ...]
    recorded_peak_reserved: int
    modelled_peak_reserved: int
    counters: Counters


def replay(snapshot: DeviceSnapshot, settings: Settings | None = None) -> Replay:
    """Make the trace's calls in the state in which it starts, and compare what comes out.

    ``settings`` are those of the recorded run, by default what the snapshot says. The model's device never
    runs out: where the recorded one did, the trace shows the segments that were freed for it. Raises
    :class:`~ampmem.allocator.snapshot.NotReplayable`.
    """
    settings = settings or snapshot.settings or Settings()
    initial = rebuild(snapshot, settings)
    recorded = _recorded_calls(snapshot)
    addresses = _Addresses(recorded)
    allocator = DeviceCachingAllocator(settings, addresses=addresses)
    addresses.allocator = allocator
    player = _Player(snapshot, allocator, _seed(allocator, initial))
    player.play()
    return Replay(
        events=len(snapshot.events),
        allocations=player.allocations,
        moved=player.moved,
        first_moved=player.first_moved,
        resized=player.resized(),
        recorded_calls=recorded,
        modelled_calls=tuple(allocator.driver.calls),
        recorded_peak_reserved=_peak(sum(segment.size for segment in initial), recorded),
        modelled_peak_reserved=allocator.counters.reserved_peak,
        counters=allocator.counters,
    )


def _recorded_calls(snapshot: DeviceSnapshot) -> tuple[DriverCall, ...]:
    kinds = {call.value: call for call in CallKind}
    return tuple(
        DriverCall(call=kinds[event.action], address=event.address, size=event.size, stream=event.stream)
        for event in snapshot.events
        if event.action in kinds
    )


def _peak(reserved: int, calls: tuple[DriverCall, ...]) -> int:
    peak = reserved
    for call in calls:
        reserved += call.size if call.call == CallKind.SEGMENT_ALLOC else -call.size
        peak = max(peak, reserved)
    return peak


class _Addresses:
    """Puts each new segment where the recorded one of that size went; anywhere once there are no more."""

    def __init__(self, calls: tuple[DriverCall, ...]) -> None:
        self.allocator: DeviceCachingAllocator | None = None
        self._by_size: dict[int, deque[int]] = defaultdict(deque)
        for call in calls:
            if call.call == CallKind.SEGMENT_ALLOC:
                self._by_size[call.size].append(call.address)

    def __call__(self, size: int) -> int:
        recorded = self._by_size[size]
        if recorded:
            return recorded.popleft()
        return self.allocator.driver.reserve_addresses(size)


def _seed(allocator: DeviceCachingAllocator, initial: tuple[SnapshotSegment, ...]) -> dict[int, Block]:
    """Put the initial segments into an empty allocator; gives the blocks in use by address."""
    live: dict[int, Block] = {}
    for each in initial:
        segment = Segment(each.address, each.size, allocator.small if each.is_small else allocator.large, each.stream)
        allocator.segments[each.address] = segment
        allocator.driver.in_use += each.size
        allocator.counters.reserved += each.size
        allocator.counters.segments += 1
        _carve(allocator, segment, each, live)
    allocator.counters.reset_peaks()
    return live


def _carve(
    allocator: DeviceCachingAllocator, segment: Segment, initial: SnapshotSegment, live: dict[int, Block]
) -> None:
    """Cut a new segment into the initial blocks in use and the free ones between them."""
    counters = allocator.counters
    rest = segment.first
    free = []
    left = initial.size
    for each in initial.blocks:
        gap = each.address - rest.address
        if gap:
            free.append(rest)
            rest, left = rest.splice_after(gap), left - gap
        block = rest
        left -= each.size
        if left:
            rest = block.splice_after(each.size)
        block.state = AWAITING if each.awaiting else ALLOCATED
        block.requested = each.requested
        counters.requested += each.requested
        if each.awaiting:
            counters.awaiting += 1
            counters.awaiting_bytes += each.size
            counters.awaiting_requested += each.requested
        else:
            counters.allocations += 1
            counters.allocated += each.size
        live[each.address] = block
    if left:
        free.append(rest)
    for block in free:
        segment.pool.insert(block)
        if block.is_split():
            counters.change_inactive_split(1, block.size)


class _Player:
    """Makes the trace's calls and counts what differs."""

    def __init__(self, snapshot: DeviceSnapshot, allocator: DeviceCachingAllocator, live: dict[int, Block]) -> None:
        self.allocations = 0
        self.moved = 0
        self.first_moved: int | None = None
        self._snapshot = snapshot
        self._allocator = allocator
        self._live = live

    def play(self) -> None:
        events = self._snapshot.events
        before = ""
        for number, event in enumerate(events):
            if event.action == ALLOC:
                self._malloc(number, event)
            elif event.action == FREE_REQUESTED:
                after = events[number + 1] if number + 1 < len(events) else None
                if after is None or after.action != FREE_COMPLETED or after.address != event.address:
                    self._await_events(self._live[event.address])
            elif event.action == FREE_COMPLETED:
                block = self._live.pop(event.address)
                if block.state == AWAITING:
                    self._finish(block)
                else:
                    self._allocator.free(block)
            elif event.action == CallKind.SEGMENT_FREE and before != CallKind.SEGMENT_FREE:
                # A user's empty_cache, or a retry before cudaMalloc: both free all that is free.
                self._allocator.empty_cache()
            before = event.action

    def resized(self) -> int:
        """How many of the blocks in use at the end have another size than recorded, or are missing."""
        recorded = {
            block.address: block.size
            for segment in self._snapshot.segments
            for block in segment.blocks
            if block.allocated or block.awaiting
        }
        modelled = {address: block.size for address, block in self._live.items()}
        return len(dict(recorded.items() ^ modelled.items()))

    def _await_events(self, block: Block) -> None:
        """Free ``block``, whose memory other streams use until :meth:`_finish`."""
        self._allocator.counters.allocations -= 1
        self._allocator.counters.allocated -= block.size
        self._allocator.streams.await_events(self._allocator, block)

    def _finish(self, block: Block) -> None:
        """Free one waiting block now, whatever it waits for: the device is known to have come that far."""
        streams = self._allocator.streams
        streams.uses.pop(block, None)
        for stream, queue in streams._queues.items():
            while block in queue:
                if queue.index(block) < streams._finished.get(stream, 0):
                    streams._finished[stream] -= 1
                queue.remove(block)
        streams._event_count[block] = 1
        streams._event_done(self._allocator, block)

    def _malloc(self, number: int, event: SnapshotEvent) -> None:
        block = self._allocator.malloc(event.size, event.stream)
        self.allocations += 1
        self._live[event.address] = block
        if block.address != event.address:
            self.moved += 1
            if self.first_moved is None:
                self.first_moved = number
