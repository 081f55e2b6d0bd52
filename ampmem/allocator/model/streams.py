"""Blocks that other streams use: ``record_stream`` and the events that delay a free."""

from __future__ import annotations

from collections import deque

from ampmem.allocator.model.blocks import AWAITING, Block
from ampmem.allocator.model.state import State


class StreamUses:
    """Which streams use which blocks, and the events to wait for (``stream_uses``, ``cuda_events``).

    The model has no clock: ``complete`` says that the device has come past the events of a stream. As
    in PyTorch, a block is given back only when the allocator next looks (``process_events``). ``uses`` has
    the other streams of each block, ``recorded`` how many events each stream was given by now.
    """

    __slots__ = ("_deferred", "_event_count", "_finished", "_queues", "recorded", "uses")

    def __init__(self) -> None:
        self.uses: dict[Block, set[int]] = {}
        self.recorded: dict[int, int] = {}
        self._event_count: dict[Block, int] = {}
        self._queues: dict[int, deque[Block]] = {}
        self._finished: dict[int, int] = {}
        self._deferred: list[Block] = []

    def record_stream(self, block: Block, stream: int) -> None:
        """``recordStream``; use on the block's own stream needs no event."""
        if stream != block.segment.stream:
            self.uses.setdefault(block, set()).add(stream)

    def delay_free(self, state: State, block: Block) -> bool:
        """Make a freed block wait for its other streams; ``False`` where it has none."""
        if block not in self.uses:
            return False
        self.await_events(state, block)
        if state.captures:
            # Events recorded while a graph is captured may not be queried: theirs are recorded afterwards.
            self._deferred.append(block)
        else:
            self._insert_events(block)
        return True

    @staticmethod
    def await_events(state: State, block: Block) -> None:
        """Count a block as active though its owner has freed it."""
        block.state = AWAITING
        counters = state.counters
        counters.awaiting += 1
        counters.awaiting_bytes += block.size
        counters.awaiting_requested += block.requested
        counters.awaiting_bytes_peak = max(counters.awaiting_bytes_peak, counters.awaiting_bytes)

    def complete(self, stream: int | None) -> None:
        """The device has finished what was queued on ``stream`` so far, or on every stream."""
        for each in list(self._queues) if stream is None else [stream]:
            self.complete_until(each, self.recorded.get(each, 0))

    def complete_until(self, stream: int, events: int) -> None:
        """The device has come past the first ``events`` of all that ``stream`` was given."""
        waiting = len(self._queues.get(stream, ()))
        done = waiting - (self.recorded.get(stream, 0) - events)
        if done > self._finished.get(stream, 0):
            self._finished[stream] = done

    def process_events(self, state: State) -> None:
        """Free what waited only for finished events (``process_events``)."""
        self._insert_deferred()
        for stream in [stream for stream, finished in self._finished.items() if finished]:
            queue = self._queues[stream]
            for _ in range(self._finished.pop(stream)):
                self._event_done(state, queue.popleft())

    def synchronize_and_free_events(self, state: State) -> None:
        """Wait for every event and free what waited (``synchronize_and_free_events``)."""
        state.counters.num_sync_all_streams += 1
        self._insert_deferred()
        for queue in self._queues.values():
            while queue:
                self._event_done(state, queue.popleft())
        self._queues.clear()
        self._finished.clear()

    def finish(self, state: State, block: Block) -> None:
        """Free one waiting block now, whatever it waits for: the device is known to have come that far."""
        if block in self._deferred:
            self._deferred.remove(block)
        self.uses.pop(block, None)
        self._event_count.pop(block, None)
        for stream, queue in self._queues.items():
            while block in queue:
                if queue.index(block) < self._finished.get(stream, 0):
                    self._finished[stream] -= 1
                queue.remove(block)
        self._free(state, block)

    def _insert_events(self, block: Block) -> None:
        streams = self.uses.pop(block)
        self._event_count[block] = len(streams)
        for stream in sorted(streams):
            self._queues.setdefault(stream, deque()).append(block)
            self.recorded[stream] = self.recorded.get(stream, 0) + 1

    def _insert_deferred(self) -> None:
        for block in self._deferred:
            self._insert_events(block)
        self._deferred.clear()

    def _event_done(self, state: State, block: Block) -> None:
        self._event_count[block] -= 1
        if self._event_count[block] == 0:
            del self._event_count[block]
            self._free(state, block)

    @staticmethod
    def _free(state: State, block: Block) -> None:
        state.counters.awaiting -= 1
        state.counters.awaiting_bytes -= block.size
        state.counters.awaiting_requested -= block.requested
        state.free_block(block)
