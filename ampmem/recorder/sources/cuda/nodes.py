"""Autograd nodes: when each ran and which blocks were allocated in it, to name what backward allocates.

The CPU profiler follows a backward pass onto the autograd engine's own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from ampmem.events import Column
from ampmem.recorder.facts.log import ELSEWHERE
from ampmem.recorder.sources.cuda.trace import NO_BLOCKS, SeenBlocks, devices_by_thread
from ampmem.recorder.sources.extension import CompiledExtension, Observed
from ampmem.recorder.sources.torch_flags import counting_begins
from ampmem.recorder.sources.window import COLLECTIVES, MARKER, MARKERS, ProfileLost, Span, Window, shift_between
from ampmem.recorder.torch_private.general import ALLOCATION, OP_FIELDS, enter_scope, exit_scope


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
    """The profiler's data of a window: the nodes that ran, by thread, and the devices' blocks."""

    def __init__(
        self,
        spans: Callable[[], Sequence[Ran]] = tuple,
        blocks: Mapping[int, SeenBlocks] | None = None,
        devices: Callable[[], Mapping[int, set[int]]] = dict,
        shift: Callable[[Column], Column] = np.array,
    ) -> None:
        self._spans = spans
        self.devices = devices
        """Gives the devices on which each thread allocated. Like the spans, it is asked only if needed."""
        self._shift = shift
        self._nodes: dict[int, Nodes] = {}
        self._blocks = blocks or {}

    def nodes(self, device: int) -> Nodes:
        """The nodes that may have allocated on ``device``: the engine has one thread per device.

        A thread whose nodes allocated only on other devices is left out.
        """
        known = self._nodes.get(device)
        if known is None:
            devices = self.devices()
            spans = [each for each in self._spans() if device in devices.get(each.thread, {device})]
            known = self._nodes[device] = nodes_of(spans, self._shift)
        return known

    def blocks(self, device: int) -> SeenBlocks:
        """The blocks of ``device``."""
        return self._blocks.get(device, NO_BLOCKS)


class NodeRecorder:
    """Records the nodes from one :meth:`take` to the next."""

    def __init__(self) -> None:
        self._window = Window()
        self._scope: Any = None
        self.running = False
        """Whether nodes are being recorded."""

    def start(self) -> None:
        """Start the profiler."""
        with counting_begins():
            self._window.open()
        # Torch's event tree has a device's allocations only inside another event, hence one scope around all.
        self._scope = enter_scope(_WHOLE)
        self.running = True

    def abandon(self) -> None:
        """Stop in a forked child."""
        if self.running:
            self._left()
            self._window.abandon()

    def _left(self) -> None:
        """End the scope, which must not outlast the profile that it is in."""
        self.running = False
        scope, self._scope = self._scope, None
        exit_scope(scope)

    def take(self, *, go_on: bool) -> SeenNodes:
        """The nodes since the last call, or since :meth:`start`."""
        if not self.running:
            return SeenNodes()
        self._left()
        try:
            result, marks = self._window.close()
        except ProfileLost:
            return SeenNodes()
        if go_on:
            self.start()
        walk = _Walk(result.experimental_event_tree())
        if len(walk.markers) < 2 * MARKERS:  # without them the nodes' times are unknown
            return SeenNodes()
        shift = shift_between(walk.markers, marks)
        return SeenNodes(lambda: walk.spans, walk.blocks(shift), lambda: walk.devices, shift)


class ObservedNodes:
    """Records the nodes, as :class:`NodeRecorder` does, by the compiled extension."""

    def __init__(self, extension: CompiledExtension) -> None:
        self._extension = extension
        self.running = False
        """Whether nodes are being recorded."""

    def start(self) -> None:
        """Start the extension."""
        with counting_begins():
            self._extension.start()
        self.running = True

    def abandon(self) -> None:
        """Stop in a forked child."""
        if self.running:
            self.running = False
            self._extension.stop()

    def take(self, *, go_on: bool) -> SeenNodes:
        """The nodes since the last call, or since :meth:`start`."""
        if not self.running:
            return SeenNodes()
        if not go_on:
            self.abandon()
        seen = self._extension.take()
        rows = np.flatnonzero(seen.device >= 0)
        threads = devices_by_thread(seen.device[rows], seen.thread[rows])
        blocks = {device: _blocks_on(device, seen) for device in set().union(*threads.values())}
        return SeenNodes(lambda: _spans_of(seen), blocks, lambda: threads)


def _spans_of(seen: Observed) -> list[Ran]:
    return [Ran(start, end, seen.names[name], *rest) for start, end, name, *rest in seen.spans.tolist()]


def _blocks_on(device: int, seen: Observed) -> SeenBlocks:
    rows, op, ops = seen.on(device)
    return SeenBlocks(
        time_ns=seen.time_ns[rows],
        address=seen.address[rows],
        bytes=seen.bytes[rows],
        op=op,
        sequence=seen.number[rows],
        ops=ops,
    )


NO_NODES = Nodes(since_ns=NO_BLOCKS.op, op=NO_BLOCKS.op, sequence=NO_BLOCKS.op, ops=("",))

_WHOLE = "ampmem::window"
"""The name of the scope around the whole window."""


class _Around(NamedTuple):
    """The node around the current place of the walk; ``sequence`` is the innermost known number."""

    name: str = ""
    sequence: int = -1
    thread: int = -1


_IN_NONE = _Around()


class Ran(NamedTuple):
    """A node that ran, with times of the profiler's clock; ``thread`` is the profiler's number of the thread."""

    start: int
    end: int
    name: str
    sequence: int
    thread: int = 0


class _Open(NamedTuple):
    """A running node: its end, the index of its name, its sequence number, its thread."""

    end: int
    op: int
    number: int
    thread: int


_fields, _start = attrgetter("extra_fields"), attrgetter("start_time_ns")
_of_allocation = attrgetter("ptr", "alloc_size", "device")


class _Walk:
    """Reads the nodes, and the device's blocks in them, out of a profile's event tree.

    Each attribute of a node costs a call into C++: those of allocations, which are most of the tree, are read by loops
    in C.
    """

    def __init__(self, roots: list[Any]) -> None:
        self.markers: list[Span] = []
        self.spans: list[Ran] = []
        """The nodes that ran; parents come before their children."""
        self._times: list[int] = []
        self._allocations: list[tuple[int, int, torch.device]] = []
        self._runs: list[tuple[int, _Around]] = []
        """(index of the first allocation, node around it) of each run of allocations."""
        self._thread: int | None = None
        """The profiler's number of the recorded thread, known from the markers."""
        pending = [(roots, _IN_NONE)]
        while pending:
            nodes, around = pending.pop()
            inside = self._visit(nodes, around)
            pending += reversed(inside)
        self._indices = {
            device: (device.index or 0) if device.type == "cuda" else -1
            for device in {device for _, _, device in self._allocations}
        }

    def _visit(self, nodes: list[Any], around: _Around) -> list[tuple[list[Any], _Around]]:
        """Read the ``nodes`` inside ``around``; returns their children, each list with the node around it."""
        fields = list(map(_fields, nodes))
        kinds = list(map(type, fields))
        allocated = [kind is ALLOCATION for kind in kinds]
        if any(allocated):
            self._runs.append((len(self._times), around))
            self._times += map(_start, compress(nodes, allocated))
            self._allocations += map(_of_allocation, compress(fields, allocated))
        found = []
        for node, of_node, kind in zip(nodes, fields, kinds, strict=True):
            if kind is OP_FIELDS:  # otherwise a call of the CUDA runtime
                name = node.name
                if name == MARKER:
                    self.markers.append((node.start_time_ns, node.end_time_ns))
                    self._thread = node.start_tid
                    continue
                inside = around
                if name != _WHOLE and not name.startswith(COLLECTIVES):
                    inside = self._node(node, of_node, name, around)
                if children := node.children:
                    found.append((children, inside))
        return found

    @property
    def devices(self) -> dict[int, set[int]]:
        """The CUDA devices on which each thread's nodes allocated or freed."""
        found: dict[int, set[int]] = {}
        for thread, (_, _, device) in zip(self._around()[2].tolist(), self._allocations, strict=True):
            if self._indices[device] >= 0:
                found.setdefault(thread, set()).add(self._indices[device])
        return found

    def blocks(self, shift: Callable[[Column], Column] = np.array) -> dict[int, SeenBlocks]:
        """The blocks that the profiler saw, by device index."""
        numbers = [(address, size, self._indices[device]) for address, size, device in self._allocations]
        address, size, device = np.array(numbers, dtype=np.int64).reshape(-1, 3).T
        time = np.array(self._times, dtype=np.int64)
        op, sequence, _ = self._around()
        names = [around.name for _, around in self._runs]
        found = {}
        for index in set(self._indices.values()) - {-1}:
            rows = np.flatnonzero(device == index)
            rows = rows[np.argsort(time[rows], kind="stable")]
            used, of = np.unique(op[rows], return_inverse=True)
            ops = {"": 0}
            places = np.array([ops.setdefault(names[each], len(ops)) for each in used.tolist()], dtype=np.int64)
            found[index] = SeenBlocks(
                time_ns=shift(time[rows]),
                address=address[rows],
                bytes=size[rows],
                op=places[of],
                sequence=sequence[rows],
                ops=tuple(ops),
            )
        return found

    def _around(self) -> tuple[Column, Column, Column]:
        """Name, sequence number and thread of the node around each allocation."""
        starts = [start for start, _ in self._runs]
        counts = np.diff([*starts, len(self._times)])
        sequences = np.array([around.sequence for _, around in self._runs], dtype=np.int64)
        threads = np.array([around.thread for _, around in self._runs], dtype=np.int64)
        runs = np.arange(len(starts))
        return np.repeat(runs, counts), np.repeat(sequences, counts), np.repeat(threads, counts)

    def _node(self, node: Any, fields: Any, name: str, around: _Around) -> _Around:
        number, thread = getattr(fields, "sequence_number", -1), node.start_tid
        # A node inside another on the engine's thread was made there, by a recomputed forward.
        if number >= 0 and around.sequence >= 0 and thread != self._thread:
            number += ELSEWHERE
        self.spans.append(Ran(node.start_time_ns, node.end_time_ns, name, number, thread))
        # Ops that a node calls have no number of their own.
        return _Around(name, number if number >= 0 else around.sequence, thread)


def nodes_of(spans: Sequence[Ran], shift: Callable[[Column], Column] = np.array) -> Nodes:
    """The innermost running node at each time, from ``spans``, which may be nested.

    Where spans of several threads overlap without being nested, an allocation cannot be attributed: no node runs there.
    A span nested in another thread's is one that the other thread waits for: a reentrant checkpoint.
    """
    names: dict[str, int] = {"": 0}
    in_order = sorted(spans, key=lambda span: (span[0], -span[1]))
    rows = _of_one_thread(in_order, names) if len({span[4] for span in spans}) == 1 else _of_threads(in_order, names)
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    since, ops, numbers = np.ascontiguousarray(table.T)
    return Nodes(since_ns=shift(since), op=ops, sequence=numbers, ops=tuple(names))


def _of_one_thread(spans: Sequence[Ran], names: dict[str, int]) -> list[tuple[int, int, int]]:
    """(time, index into ``names``, sequence) of each change; each span is nested in the last, or after its end."""
    rows: list[tuple[int, int, int]] = []
    running: list[tuple[int, int, int]] = []
    for start, end, name, sequence, _ in [*spans, Ran(2**62, 2**62, "", -1)]:
        while running and running[-1][0] <= start:
            ended = running.pop()[0]
            rows.append((ended, *running[-1][1:]) if running else (ended, 0, -1))
        if name:
            number = sequence
            if running:  # clock resolution: a node may seem to outlast its parent
                end = min(end, running[-1][0])
                number = sequence if sequence >= 0 else running[-1][2]
            running.append((end, names.setdefault(name, len(names)), number))
            rows.append((start, *running[-1][1:]))
    return rows


def _of_threads(spans: Sequence[Ran], names: dict[str, int]) -> list[tuple[int, int, int]]:
    """(time, index into ``names``, sequence) of each change, for spans of several threads, in order."""
    rows: list[tuple[int, int, int]] = []
    open_spans: list[_Open] = []

    def now(instant: int) -> tuple[int, int, int]:
        if not open_spans:
            return instant, 0, -1
        newest = open_spans[-1]
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
        open_spans.append(_Open(end, names.setdefault(name, len(names)), number, thread))
        rows.append(now(start))
    close(2**62)
    return rows
