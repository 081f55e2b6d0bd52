"""Which autograd node ran when, and which blocks were handed out in it: names and numbers for what backward allocates.

The CPU profiler follows a backward pass onto the engine's own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ampmem.events import Column
from ampmem.recorder.facts.log import ELSEWHERE
from ampmem.recorder.sources.cuda.blocks import SeenBlocks
from ampmem.recorder.sources.torch_flags import counting_begins
from ampmem.recorder.sources.window import COLLECTIVES, MARKER, MARKERS, ProfileLost, Span, Window, shift_between
from ampmem.recorder.torch_private.general import TORCH_OP, enter_scope, exit_scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """From ``since_ns`` on, until the next row, the node ``op`` (an index into ``ops``) with ``sequence`` runs.

    ``blocks`` are those that the profiler saw, by the index of their device.
    """

    since_ns: Column
    op: Column
    sequence: Column
    ops: tuple[str, ...]
    blocks: Mapping[int, SeenBlocks] = field(default_factory=dict)

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

    def take(self, *, go_on: bool) -> Nodes:
        """The nodes since the last call, or since :meth:`start`."""
        if not self.running:
            return NO_NODES
        self._left()
        try:
            result, marks = self._window.close()
        except ProfileLost:
            return NO_NODES
        if go_on:
            self.start()
        walk = _Walk(result.experimental_event_tree())
        if len(walk.markers) < 2 * MARKERS:  # without them there is no telling when the nodes ran
            return NO_NODES
        return nodes_of(walk.spans, shift_between(walk.markers, marks), walk.blocks)


_WHOLE = "ampmem::window"
"""The name of the scope around all that the recorded thread does."""
_ALLOCATION = "[memory]"
"""The profiler's name for every allocation and free, the CPU's too."""


@dataclass(frozen=True, slots=True)
class _Around:
    """The node that the walk is in; ``sequence`` is that of the innermost one that has a number."""

    name: str = ""
    sequence: int = -1


class _Walk:
    """Reads the nodes, and the device's blocks in them, out of a profile's event tree."""

    def __init__(self, roots: list[Any]) -> None:
        self.markers: list[Span] = []
        self.spans: list[tuple[int, int, str, int]] = []
        """(start, end, name, sequence number), parents before children."""
        self.blocks: list[tuple[int, int, int, int, str, int]] = []
        """(time, device, address, bytes, name of the node around it, its sequence number)."""
        self._thread: int | None = None
        """The recorded one, in the profiler's numbers: the markers are its own."""
        pending = [(root, _Around()) for root in reversed(roots)]
        while pending:
            node, around = pending.pop()
            name = node.name
            if name == _ALLOCATION:
                self._block(node, around)
            elif node.tag == TORCH_OP:  # or else a call of CUDA's runtime
                if name == MARKER:
                    self.markers.append((node.start_time_ns, node.end_time_ns))
                    self._thread = node.start_tid
                    continue
                inside = around
                if name != _WHOLE and not name.startswith(COLLECTIVES):
                    inside = self._node(node, name, around)
                pending += [(child, inside) for child in reversed(node.children)]

    def _block(self, node: Any, around: _Around) -> None:
        fields = node.extra_fields
        if fields.device.type == "cuda":
            index = fields.device.index or 0
            self.blocks.append((node.start_time_ns, index, fields.ptr, fields.alloc_size, around.name, around.sequence))

    def _node(self, node: Any, name: str, around: _Around) -> _Around:
        number = getattr(node.extra_fields, "sequence_number", -1)
        # What runs inside a node on the engine's own thread was made there: forward is computed again.
        if number >= 0 and around.sequence >= 0 and node.start_tid != self._thread:
            number += ELSEWHERE
        self.spans.append((node.start_time_ns, node.end_time_ns, name, number))
        # What a node calls has no number of its own.
        return _Around(name, number if number >= 0 else around.sequence)


def nodes_of(
    spans: list[tuple[int, int, str, int]],
    shift: Callable[[Column], Column] = np.array,
    blocks: Sequence[tuple[int, int, int, int, str, int]] = (),
) -> Nodes:
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
        number = sequence if sequence >= 0 or not open_spans else open_spans[-1][2]
        rows.append((start, op, number))
        open_spans.append((min(end, open_spans[-1][0]) if open_spans else end, op, number))
    close(2**62)
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    since, ops, numbers = np.ascontiguousarray(table.T)
    seen = _by_device(blocks, names, shift)
    return Nodes(since_ns=shift(since), op=ops, sequence=numbers, ops=tuple(names), blocks=seen)


def _by_device(
    blocks: Sequence[tuple[int, int, int, int, str, int]], names: dict[str, int], shift: Callable[[Column], Column]
) -> dict[int, SeenBlocks]:
    found: dict[int, list[tuple[int, int, int, int, int]]] = {}
    for time, device, address, size, name, sequence in sorted(blocks, key=lambda block: block[0]):
        op = names.setdefault(name, len(names))
        found.setdefault(device, []).append((time, address, size, op, sequence))
    return {device: _seen(rows, shift) for device, rows in found.items()}


def _seen(rows: list[tuple[int, int, int, int, int]], shift: Callable[[Column], Column]) -> SeenBlocks:
    time, address, size, op, sequence = np.ascontiguousarray(np.array(rows, dtype=np.int64).T)
    return SeenBlocks(time_ns=shift(time), address=address, bytes=size, op=op, sequence=sequence)
