"""Which autograd node ran when: names and sequence numbers for what backward allocates.

The CPU profiler follows a backward pass onto the engine's own threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ampmem.events import Column
from ampmem.recorder.sources.window import COLLECTIVES, MARKER, MARKERS, ProfileLost, Window, shift_between
from ampmem.recorder.torch_private import TORCH_OP


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """From ``since_ns`` on, until the next row, the node ``op`` (an index into ``ops``) with ``sequence`` runs."""

    since_ns: Column
    op: Column
    sequence: Column
    ops: tuple[str, ...]

    def name_at(self, instant_ns: int) -> str:
        """The op at one instant; empty where none runs."""
        return self.ops[int(self.at(np.array([instant_ns]))[0][0])]

    def at(self, times: Column) -> tuple[Column, Column]:
        """The op and the sequence number at each of ``times``; 0 and -1 where no node runs."""
        if len(self.since_ns) == 0:
            return np.zeros_like(times), np.full_like(times, -1)
        place = np.searchsorted(self.since_ns, times, side="right") - 1
        running = place >= 0
        return np.where(running, self.op[place], 0), np.where(running, self.sequence[place], -1)


NO_NODES = Nodes(
    since_ns=np.zeros(0, dtype=np.int64),
    op=np.zeros(0, dtype=np.int64),
    sequence=np.zeros(0, dtype=np.int64),
    ops=("",),
)


class NodeRecorder:
    """Follows the nodes from one :meth:`take` to the next."""

    def __init__(self) -> None:
        self._window = Window(memory=False)
        self.running = False
        """Whether nodes are followed."""

    def start(self) -> None:
        """Begin."""
        self._window.open()
        self.running = True

    def abandon(self) -> None:
        """End in a child that was forked."""
        if self.running:
            self.running = False
            self._window.abandon()

    def take(self, *, go_on: bool) -> Nodes:
        """The nodes since the last call, or since :meth:`start`."""
        if not self.running:
            return NO_NODES
        self.running = False
        try:
            result, marks = self._window.close()
        except ProfileLost:
            return NO_NODES
        if go_on:
            self.start()
        walk = _Walk(result.experimental_event_tree())
        if len(walk.markers) < 2 * MARKERS:  # without them there is no telling when the nodes ran
            return NO_NODES
        return nodes_of(walk.spans, shift_between(walk.markers, marks))


class _Walk:
    """Reads the nodes out of a profile's event tree."""

    def __init__(self, roots: list[Any]) -> None:
        self.markers: list[int] = []
        self.spans: list[tuple[int, int, str, int]] = []
        """(start, end, name, sequence number), parents before children."""
        pending = list(reversed(roots))
        while pending:
            node = pending.pop()
            if node.tag != TORCH_OP:  # a call of CUDA's runtime
                continue
            name = node.name
            if name == MARKER:
                self.markers.append(node.start_time_ns)
                continue
            if not name.startswith(COLLECTIVES):
                sequence = getattr(node.extra_fields, "sequence_number", -1)
                self.spans.append((node.start_time_ns, node.end_time_ns, name, sequence))
            pending += reversed(node.children)


def nodes_of(spans: list[tuple[int, int, str, int]], shift: Any = None) -> Nodes:
    """``spans`` (start, end, name, sequence number), which may lie in each other, as what runs innermost when."""
    names: dict[str, int] = {"": 0}
    rows: list[tuple[int, int, int]] = []
    open_spans: list[tuple[int, int, int]] = []

    def close(until: int) -> None:
        while open_spans and open_spans[-1][0] <= until:
            end = open_spans.pop()[0]
            rows.append((end, *open_spans[-1][1:]) if open_spans else (end, 0, -1))

    # The engine's threads take turns where one device is in play, so one stack does for all of them.
    for start, end, name, sequence in sorted(spans, key=lambda span: (span[0], -span[1])):
        close(start)
        op = names.setdefault(name, len(names))
        # What a node calls has no number of its own.
        number = sequence if sequence >= 0 or not open_spans else open_spans[-1][2]
        rows.append((start, op, number))
        open_spans.append((min(end, open_spans[-1][0]) if open_spans else end, op, number))
    close(2**62)
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    since, ops, numbers = np.ascontiguousarray(table.T)
    return Nodes(since_ns=since if shift is None else shift(since), op=ops, sequence=numbers, ops=tuple(names))
