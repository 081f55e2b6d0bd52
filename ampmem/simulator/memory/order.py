"""On which stream memory is asked for, and what the host knows to be done on each: streams without a clock.

As in PyTorch a stream is a number, 0 the default one, and a block belongs to the stream that was current when it was
asked for. Streams run side by side; one waits for another only where the script says so.
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
"""So many streams of a priority there are; the next one is the first again (``c10/cuda/CUDAStream.cpp``)."""

Reached: TypeAlias = Mapping[int, int]
"""A point in the work of the device: by stream, how many of the allocator's events on it lie before."""


class StreamOrder:
    """The current stream of each thread, and how far each stream has come at least when another one has.

    ``recorded`` says how many events the allocator has recorded on a stream by now: between them nothing that matters
    to it happens, so they are the clock.
    """

    def __init__(self, recorded: Callable[[int], int]) -> None:
        self._recorded = recorded
        self._waited: dict[int, dict[int, int]] = {}
        """What each stream has waited for."""
        self._threads = _Threads()
        self._made: dict[bool, int] = {}
        self.several = False
        """Whether any other stream than the default one was ever current."""
        self.backward_elsewhere = False
        """Whether backward ran on any other stream."""

    def next(self, priority: int) -> int:
        """The number of the stream that a script gets when it makes one."""
        high = priority < 0
        made = self._made[high] = self._made.get(high, 0) + 1
        return (made - 1) % _POOL + 1 + high * _POOL

    def current(self) -> int:
        """The stream on which this thread works now.

        The engine runs a node of backward on the stream on which its forward ran; what the node's own code sets
        holds for it.
        """
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
        """This thread works on ``stream`` from now on."""
        if stream == self.current():
            return
        self.several = True
        thread, node = self._threads, _node()
        if node is None:
            thread.change(stream)
        else:
            thread.node, thread.in_node = node, stream

    def reached(self, stream: int) -> Reached:
        """Where ``stream`` will be when it has done all that it was given so far."""
        return {**self._waited.get(stream, {}), stream: self._recorded(stream)}

    def wait(self, stream: int, until: Reached) -> None:
        """What ``stream`` is given from now on runs after ``until``."""
        waited = self._waited.setdefault(stream, {})
        for other, events in until.items():
            waited[other] = max(events, waited.get(other, 0))


class _Threads(threading.local):
    """What each thread has set."""

    def __init__(self) -> None:
        self.current = DEFAULT
        self.node: tuple[int, int, str] | None = None
        self.in_node = DEFAULT
        self.since: list[int] = []
        """The sequence number of the next node of autograd at each change of the stream."""
        self.streams: list[int] = []

    def change(self, stream: int) -> None:
        """Nodes of autograd that are made from now on belong to ``stream``."""
        self.current, now = stream, next_sequence_number()
        if self.since and self.since[-1] == now:  # none was made since the last change
            self.since.pop(), self.streams.pop()
        if stream != (self.streams[-1] if self.streams else DEFAULT):
            self.since.append(now)
            self.streams.append(stream)

    def of_forward(self, sequence: int) -> int:
        """The stream on which the node with this sequence number was made; the current one where it has none."""
        if sequence < 0:
            return self.current
        at = bisect_right(self.since, sequence)
        return self.streams[at - 1] if at else DEFAULT


def _node() -> tuple[int, int, str] | None:
    """The node of backward that runs on this thread."""
    if not in_backward():
        return None
    name, sequence = running_node()
    return None if not name else (graph_task(), sequence, name)
