"""Streams without a clock: on which stream memory is allocated, and which work is known to be completed.

As in PyTorch a stream is a number, 0 the default one, and a block belongs to the stream that was current at its
allocation. Streams run concurrently; one waits for another only if the script says so.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import TypeAlias

from ampmem.simulator.private.general import graph_task, in_backward, next_sequence_number, running_node

DEFAULT = 0
"""The default stream."""
_POOL = 32
"""Number of streams per priority; the next one is the first again (``c10/cuda/CUDAStream.cpp``)."""

Reached: TypeAlias = Mapping[int, int]
"""A point in the device's work: by stream, the number of the allocator's events before it."""


class StreamOrder:
    """The current stream of each thread, and how far each stream has come when another one has.

    ``recorded`` returns the number of events that the allocator has recorded on a stream so far: nothing else matters
    to it, so they are the clock.
    """

    def __init__(self, recorded: Callable[[int], int]) -> None:
        self._recorded = recorded
        self._waited: dict[int, dict[int, int]] = {}
        """The points that each stream has waited for."""
        self._threads = _Threads()
        self._made: dict[bool, int] = {}
        self.several = False
        """Whether any stream other than the default one was ever current."""
        self.backward_elsewhere = False
        """Whether backward ran on a stream other than the default one."""

    def next(self, priority: int) -> int:
        """The number of a new stream with ``priority``."""
        high = priority < 0
        made = self._made[high] = self._made.get(high, 0) + 1
        return (made - 1) % _POOL + 1 + high * _POOL

    def current(self) -> int:
        """The current stream of the calling thread.

        The engine runs a node of backward on the stream of its forward; a stream that the node's own code sets comes
        first.
        """
        # Asking the engine for its node takes longer than all else here.
        if not self.several:
            return DEFAULT
        thread, node = self._threads, _node()
        if node is None:
            return thread.current
        if thread.node == node:
            return thread.in_node
        stream = thread.of_forward(node[1])
        self.backward_elsewhere |= stream != DEFAULT
        return stream

    def set(self, stream: int) -> None:
        """Set the calling thread's stream."""
        if stream == self.current():
            return
        self.several = True
        thread, node = self._threads, _node()
        if node is None:
            thread.change(stream)
        else:
            thread.node, thread.in_node = node, stream

    def reached(self, stream: int) -> Reached:
        """The point at which ``stream`` has completed all its work so far."""
        return {**self._waited.get(stream, {}), stream: self._recorded(stream)}

    def wait(self, stream: int, until: Reached) -> None:
        """Let later work of ``stream`` run after ``until``."""
        waited = self._waited.setdefault(stream, {})
        for other, events in until.items():
            waited[other] = max(events, waited.get(other, 0))


class _Threads(threading.local):
    """The stream set by each thread."""

    def __init__(self) -> None:
        self.current = DEFAULT
        self.node: tuple[int, int, str] | None = None
        self.in_node = DEFAULT
        self.since: list[int] = []
        """The sequence number of the next autograd node at each change of the stream."""
        self.streams: list[int] = []

    def change(self, stream: int) -> None:
        """Set the stream of autograd nodes made from now on."""
        self.current, now = stream, next_sequence_number()
        if self.since and self.since[-1] == now:  # no node was made since the last change
            self.since.pop(), self.streams.pop()
        if stream != (self.streams[-1] if self.streams else DEFAULT):
            self.since.append(now)
            self.streams.append(stream)

    def of_forward(self, sequence: int) -> int:
        """The stream of the node's forward, by sequence number; the current stream for nodes without one."""
        if sequence < 0:
            return self.current
        at = bisect_right(self.since, sequence)
        return self.streams[at - 1] if at else DEFAULT


def _node() -> tuple[int, int, str] | None:
    """The backward node that runs on the calling thread."""
    if not in_backward():
        return None
    name, sequence = running_node()
    return None if not name else (graph_task(), sequence, name)
