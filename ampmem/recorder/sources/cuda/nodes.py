"""Which autograd node ran when, and which blocks were handed out in it: names and numbers for what backward allocates.

The CPU profiler follows a backward pass onto the engine's own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ampmem.events import Column
from ampmem.recorder.facts.log import ELSEWHERE
from ampmem.recorder.sources.cuda.blocks import NO_BLOCKS, SeenBlocks
from ampmem.recorder.sources.torch_flags import counting_begins
from ampmem.recorder.sources.window import COLLECTIVES, MARKER, MARKERS, ProfileLost, Span, Window, shift_between
from ampmem.recorder.torch_private.general import ALLOCATION, OP_FIELDS, enter_scope, exit_scope


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


class Seen:
    """What the profiler saw of a window: the nodes that ran, each on its thread, and the devices' blocks."""

    def __init__(
        self,
        spans: Sequence[Ran] = (),
        blocks: Sequence[BlockRow] = (),
        devices: Mapping[int, set[int]] | None = None,
        shift: Callable[[Column], Column] = np.array,
    ) -> None:
        self._spans = spans
        self._devices = devices or {}
        self._shift = shift
        self._nodes: dict[int, Nodes] = {}
        self._blocks = blocks_of(blocks, shift)

    def nodes(self, device: int) -> Nodes:
        """The nodes by which memory of ``device`` is named: each device has a thread of the engine's own.

        A thread whose nodes had memory of other devices only has none of this one's.
        """
        known = self._nodes.get(device)
        if known is None:
            spans = [each for each in self._spans if device in self._devices.get(each.thread, {device})]
            known = self._nodes[device] = nodes_of(spans, self._shift)
        return known

    def blocks(self, device: int) -> SeenBlocks:
        """The blocks of ``device``."""
        return self._blocks.get(device, NO_BLOCKS)


class NodeRecorder:
    """Follows the nodes from one :meth:`take` to the next."""

    def __init__(self) -> None:
        self._window = Window(memory=True)
        self._scope: Any = None
        self.running = False
        """Whether nodes are followed."""

    def start(self) -> None:
        """Begin."""
        with counting_begins():
            self._window.open()
        # Of a device's blocks torch's tree has only those that lie in something.
        self._scope = enter_scope(_WHOLE)
        self.running = True

    def abandon(self) -> None:
        """End in a child that was forked."""
        if self.running:
            self._left()
            self._window.abandon()

    def _left(self) -> None:
        """The scope must not end after the profile that it is in."""
        self.running = False
        scope, self._scope = self._scope, None
        exit_scope(scope)

    def take(self, *, go_on: bool) -> Seen:
        """What was seen since the last call, or since :meth:`start`."""
        if not self.running:
            return Seen()
        self._left()
        try:
            result, marks = self._window.close()
        except ProfileLost:
            return Seen()
        if go_on:
            self.start()
        walk = _Walk(result.experimental_event_tree())
        if len(walk.markers) < 2 * MARKERS:  # without them there is no telling when the nodes ran
            return Seen()
        return Seen(walk.spans, walk.blocks, walk.devices, shift_between(walk.markers, marks))


_WHOLE = "ampmem::window"
"""The name of the scope around all that the recorded thread does."""


class _Around(NamedTuple):
    """The node that the walk is in; ``sequence`` is that of the innermost one that has a number."""

    name: str = ""
    sequence: int = -1
    thread: int = -1


_IN_NONE = _Around()


class Ran(NamedTuple):
    """A node that ran, by the profiler's clock; ``thread`` is its number of the thread."""

    start: int
    end: int
    name: str
    sequence: int
    thread: int = 0


class _Open(NamedTuple):
    """A node that runs: its end, the index of its name, its sequence number, its thread."""

    end: int
    op: int
    number: int
    thread: int


BlockRow: TypeAlias = tuple[int, int, int, int, str, int]
"""Time, device, address, bytes, name of the node around it, its sequence number."""


_of_allocation = attrgetter("ptr", "alloc_size", "device")


class _Walk:
    """Reads the nodes, and the device's blocks in them, out of a profile's event tree."""

    def __init__(self, roots: list[Any]) -> None:
        self.markers: list[Span] = []
        self.spans: list[Ran] = []
        """Parents before children."""
        self.blocks: list[BlockRow] = []
        self.devices: dict[int, set[int]] = {}
        """By thread, the CUDA devices whose memory its nodes took or gave back."""
        self._thread: int | None = None
        """The recorded one, in the profiler's numbers: the markers are its own."""
        self._indices: dict[torch.device, int] = {}
        """The CUDA devices that were met, and others as -1."""
        self._met: set[tuple[int, int]] = set()
        pending = [(root, _IN_NONE) for root in reversed(roots)]
        while pending:
            node, around = pending.pop()
            fields = node.extra_fields
            kind = type(fields)
            if kind is ALLOCATION:
                self._block(node, fields, around)
            elif kind is OP_FIELDS:  # or else a call of CUDA's runtime
                name = node.name
                if name == MARKER:
                    self.markers.append((node.start_time_ns, node.end_time_ns))
                    self._thread = node.start_tid
                    continue
                inside = around
                if name != _WHOLE and not name.startswith(COLLECTIVES):
                    inside = self._node(node, fields, name, around)
                pending += [(child, inside) for child in reversed(node.children)]

    def _block(self, node: Any, fields: Any, around: _Around) -> None:
        address, size, device = _of_allocation(fields)
        index = self._indices.get(device)
        if index is None:
            index = self._indices[device] = (device.index or 0) if device.type == "cuda" else -1
        if index >= 0:
            name, sequence, thread = around
            self.blocks.append((node.start_time_ns, index, address, size, name, sequence))
            if (thread, index) not in self._met:
                self._met.add((thread, index))
                self.devices.setdefault(thread, set()).add(index)

    def _node(self, node: Any, fields: Any, name: str, around: _Around) -> _Around:
        number, thread = getattr(fields, "sequence_number", -1), node.start_tid
        # What runs inside a node on the engine's own thread was made there: forward is computed again.
        if number >= 0 and around.sequence >= 0 and thread != self._thread:
            number += ELSEWHERE
        self.spans.append(Ran(node.start_time_ns, node.end_time_ns, name, number, thread))
        # What a node calls has no number of its own.
        return _Around(name, number if number >= 0 else around.sequence, thread)


def nodes_of(spans: Sequence[Ran], shift: Callable[[Column], Column] = np.array) -> Nodes:
    """``spans``, which may lie in each other, as what runs innermost when.

    Where those of several threads overlap and none lies in the other, nothing tells whose an allocation is: no node
    runs there. One that lies in another thread's is what that thread waits for: a reentrant checkpoint.
    """
    names: dict[str, int] = {"": 0}
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

    for start, end, name, sequence, thread in sorted(spans, key=lambda span: (span[0], -span[1])):
        close(start)
        around = next((each for each in reversed(open_spans) if each.thread == thread), None)
        if around is not None:  # by the clock a node may seem to outlast the one that it is in
            end = min(end, around.end)
        number = sequence if sequence >= 0 or around is None else around.number
        open_spans.append(_Open(end, names.setdefault(name, len(names)), number, thread))
        rows.append(now(start))
    close(2**62)
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    since, ops, numbers = np.ascontiguousarray(table.T)
    return Nodes(since_ns=shift(since), op=ops, sequence=numbers, ops=tuple(names))


def blocks_of(rows: Sequence[BlockRow], shift: Callable[[Column], Column] = np.array) -> dict[int, SeenBlocks]:
    """What the profiler saw of the blocks, by the index of their device."""
    found: dict[int, list[tuple[int, int, int, int, int]]] = {}
    names: dict[int, dict[str, int]] = {}
    for time, device, address, size, name, sequence in sorted(rows, key=itemgetter(0)):
        known = names.setdefault(device, {"": 0})
        op = known.setdefault(name, len(known))
        found.setdefault(device, []).append((time, address, size, op, sequence))
    return {device: _seen(of_device, tuple(names[device]), shift) for device, of_device in found.items()}


def _seen(
    rows: list[tuple[int, int, int, int, int]], ops: tuple[str, ...], shift: Callable[[Column], Column]
) -> SeenBlocks:
    time, address, size, op, sequence = np.ascontiguousarray(np.array(rows, dtype=np.int64).T)
    return SeenBlocks(time_ns=shift(time), address=address, bytes=size, op=op, sequence=sequence, ops=ops)
