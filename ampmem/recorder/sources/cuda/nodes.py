"""Autograd nodes: when each ran and which blocks were allocated in it, to name what backward allocates.

The CPU profiler follows a backward pass onto the autograd engine's own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ampmem.events import Column
from ampmem.recorder.sources.cuda.trace import NO_BLOCKS, SeenBlocks, devices_by_thread
from ampmem.recorder.sources.extension import NOTHING_OBSERVED, CompiledExtension, Observed
from ampmem.recorder.sources.torch_flags import counting_begins
from ampmem.recorder.sources.window import ProfileLost, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Rows of nodes: from ``since_ns`` to the next row, node ``op`` (an index into ``ops``) with ``sequence`` runs."""

    since_ns: Column
    op: Column
    sequence: Column
    ops: tuple[str, ...]

    def name_at(self, instant_ns: int) -> str:
        """The op at ``instant_ns``; empty if none was running."""
        return self.ops[int(self.at(np.array([instant_ns]))[0][0])]

    def at(self, times: Column) -> tuple[Column, Column]:
        """The op and the sequence number at each of ``times``; 0 and -1 if no node was running."""
        if len(self.since_ns) == 0:
            return np.zeros_like(times), np.full_like(times, -1)
        place = np.searchsorted(self.since_ns, times, side="right") - 1
        running = place >= 0
        return np.where(running, self.op[place], 0), np.where(running, self.sequence[place], -1)


class SeenNodes:
    """The nodes that ran in a window, by thread, and the devices' blocks."""

    def __init__(self, seen: Observed = NOTHING_OBSERVED) -> None:
        self._seen = seen
        self._nodes: dict[int, Nodes] = {}
        self.devices: Callable[[], Mapping[int, set[int]]] = self._devices_by_thread
        """Returns the devices on which each thread allocated; called only if needed, as it takes time."""

    def _devices_by_thread(self) -> Mapping[int, set[int]]:
        rows = np.flatnonzero(self._seen.device >= 0)
        return devices_by_thread(self._seen.device[rows], self._seen.thread[rows])

    def nodes(self, device: int) -> Nodes:
        """The nodes that may have allocated on ``device``: the engine has one thread per device.

        A thread whose nodes allocated only on other devices is left out.
        """
        known = self._nodes.get(device)
        if known is None:
            devices, names = self.devices(), self._seen.names
            # A thread that allocated nowhere may have run nodes here: of those nothing is known that speaks against it.
            here = (row for row in self._seen.spans.tolist() if device in devices.get(row[-1], {device}))
            known = nodes_of([Ran(start, end, names[name], *rest) for start, end, name, *rest in here])
            self._nodes[device] = known
        return known

    def blocks(self, device: int) -> SeenBlocks:
        """The blocks of ``device``."""
        rows, op, ops = self._seen.on(device)
        return SeenBlocks(
            time_ns=self._seen.time_ns[rows],
            address=self._seen.address[rows],
            bytes=self._seen.bytes[rows],
            op=op,
            sequence=self._seen.number[rows],
            ops=ops,
        )


class NodeRecorder:
    """Records the nodes from one :meth:`take` to the next, by the compiled extension or the profiler."""

    def __init__(self, observer: CompiledExtension | Window) -> None:
        self._observer = observer
        self.running = False
        """Whether nodes are being recorded."""

    def start(self) -> None:
        """Start the observer."""
        with counting_begins():
            self._observer.start()
        self.running = True

    def abandon(self) -> None:
        """Stop in a forked child."""
        if self.running:
            self.running = False
            self._observer.abandon()

    def take(self, *, go_on: bool) -> SeenNodes:
        """The nodes since the last call, or since :meth:`start`."""
        if not self.running:
            return SeenNodes()
        self.running = False
        try:
            seen = self._observer.take(go_on=go_on)
        except ProfileLost:
            return SeenNodes()
        self.running = go_on
        return SeenNodes(seen)


NO_NODES = Nodes(since_ns=NO_BLOCKS.op, op=NO_BLOCKS.op, sequence=NO_BLOCKS.op, ops=("",))


class Ran(NamedTuple):
    """A node that ran, from ``start`` to ``end`` in ns; ``thread`` is the observer's number of the thread."""

    start: int
    end: int
    name: str
    sequence: int
    thread: int = 0


class _OpenNode(NamedTuple):
    """A running node: its end, the index of its name, its sequence number, its thread."""

    end: int
    op: int
    number: int
    thread: int


def nodes_of(spans: Sequence[Ran]) -> Nodes:
    """The innermost running node at each time, from ``spans``, which may be nested.

    Where spans of several threads overlap without being nested, an allocation cannot be attributed: no node runs there.
    A span nested in another thread's is one that the other thread waits for: a reentrant checkpoint.
    """
    names: dict[str, int] = {"": 0}
    rows = _changes(sorted(spans, key=lambda span: (span.start, -span.end)), names)
    since, ops, numbers = np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(-1, 3).T)
    return Nodes(since_ns=since, op=ops, sequence=numbers, ops=tuple(names))


def _changes(spans: Sequence[Ran], names: dict[str, int]) -> list[tuple[int, int, int]]:
    """(time, index into ``names``, sequence) of each change of the running node; ``spans`` are in order."""
    rows: list[tuple[int, int, int]] = []
    open_spans: list[_OpenNode] = []

    def now(instant: int) -> tuple[int, int, int]:
        if not open_spans:
            return instant, 0, -1
        newest = open_spans[-1]
        # Nested if the newest ends before all others. If not, two threads run at once, and either may have allocated.
        clear = all(each.end >= newest.end for each in open_spans)
        return (instant, newest.op, newest.number) if clear else (instant, 0, -1)

    def close(until: int) -> None:
        while open_spans and (end := min(each.end for each in open_spans)) <= until:
            open_spans[:] = [each for each in open_spans if each.end > end]
            rows.append(now(end))

    for start, end, name, sequence, thread in spans:
        close(start)
        around = next((each for each in reversed(open_spans) if each.thread == thread), None)
        if around is not None:  # clock resolution: a node may seem to outlast its parent
            end = min(end, around.end)
        number = sequence if sequence >= 0 or around is None else around.number
        open_spans.append(_OpenNode(end, names.setdefault(name, len(names)), number, thread))
        rows.append(now(start))
    close(2**62)
    return rows
