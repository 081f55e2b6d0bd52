"""The interface of a source of allocator events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ampmem.events import (
    NO_SEGMENTS,
    NO_STEP,
    AllocatorRecord,
    Column,
    LayersRecord,
    OomRecord,
    PredictionRecord,
    SegmentColumns,
)
from ampmem.recorder.facts.addresses import Addresses, AliveBlocks
from ampmem.recorder.facts.log import Log, See
from ampmem.vocabulary import Mark, SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RawEvents:
    """Allocator events before they are joined to steps, phases and modules.

    Columns are as in :class:`~ampmem.events.EventColumns`; ``op`` holds indices into ``ops``, the names of autograd
    nodes, and is 0 (no name) outside of backward. ``sequence`` is, for an event in backward, autograd's sequence number
    of the running node, which equals that of the forward op that made the node; elsewhere it is -1. ``stack`` holds
    indices into ``stacks``, if the source itself takes Python stacks; else it is ``None``. The positions of
    ``segments`` count these events only.
    """

    time_ns: Column
    action: Column
    address: Column
    bytes: Column
    block_bytes: Column
    stream: Column
    allocated: Column
    op: Column
    sequence: Column
    ops: tuple[str, ...]
    stack: Column | None = None
    stacks: tuple[str, ...] = ("",)
    segments: SegmentColumns = NO_SEGMENTS

    @classmethod
    def from_table(
        cls,
        table: Sequence[Column] | NDArray[np.int64],
        *,
        op: Column,
        sequence: Column,
        ops: tuple[str, ...] = ("",),
        stack: Column | None = None,
        segments: SegmentColumns = NO_SEGMENTS,
    ) -> RawEvents:
        """The events whose other columns are the rows of ``table``, in the order of :data:`_TABLE`."""
        columns = dict(zip(_TABLE, table, strict=True))
        return cls(**columns, op=op, sequence=sequence, ops=ops, stack=stack, segments=segments)


_TABLE = ("time_ns", "action", "address", "bytes", "block_bytes", "stream", "allocated")
_NONE = np.zeros(0, dtype=np.int64)
NO_EVENTS = RawEvents.from_table([_NONE] * len(_TABLE), op=_NONE, sequence=_NONE)


def joined(parts: Sequence[RawEvents]) -> RawEvents:
    """The ``parts`` of one window joined in order; the stacks of each are among those of the last."""
    # Each part has its own numbers for the names of nodes.
    names = dict.fromkeys(name for part in parts for name in part.ops)
    index = {name: place for place, name in enumerate(names)}
    columns = (*_TABLE, "sequence", "stack")
    counts = np.cumsum([0, *(len(part.time_ns) for part in parts)])[:-1].tolist()
    # Positions of segments count the events of their own part.
    shifted = [
        replace(part.segments, position=part.segments.position + before)
        for part, before in zip(parts, counts, strict=True)
    ]
    return RawEvents(
        **{name: np.concatenate([_column(part, name) for part in parts]) for name in columns},
        op=np.concatenate([np.array([index[name] for name in part.ops])[part.op] for part in parts]),
        ops=tuple(names),
        stacks=max((part.stacks for part in parts), key=len),
        segments=SegmentColumns(
            **{name: np.concatenate([getattr(each, name) for each in shifted]) for name in SegmentColumns.names()}
        ),
    )


def _column(part: RawEvents, name: str) -> Column:
    found: Column | None = getattr(part, name)
    return np.zeros_like(part.time_ns) if found is None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of the script: in ``op`` and ``module``, called from ``stack``; empty if unknown."""

    step: int = NO_STEP
    op: str = ""
    module: str = ""
    stack: str = ""


class Source:
    """Records allocator events between :meth:`start` and :meth:`stop`.

    A method with a body here is optional: by default it does nothing, or returns that there is nothing.
    """

    kind: SourceKind
    """The source's name in a recording."""
    device_type: str
    """The type of the torch device whose memory is recorded."""
    device_name: str
    """The name of the device."""
    addresses: Addresses
    """Addresses of tensors on the device."""
    uses_profiler = False
    """Whether the source needs torch's profiler, of which only one can run."""
    uses_history = False
    """Whether the source needs the memory history of torch's CUDA allocator, of which there is only one."""
    models_at: Callable[[], frozenset[int]] = frozenset
    """Returns the indices of the devices of the trained parameters."""
    see: See | None = None
    """Called with each tensor that hooks find to be the script's; ``None`` if the source does not need it."""
    stamp: Callable[[int], None] | None = None
    """Tags the calling thread's allocations from a time (ns) on; ``None`` if not needed."""

    def attach(self, locate: Callable[[], Place], log: Log) -> None:
        """Set ``locate``, which returns the calling thread's place, and ``log`` for facts that no hook can see."""

    def install(self) -> Callable[[], None]:
        """Install the source's patches; returns the undo."""
        return lambda: None

    def again(self) -> Source | None:
        """A source for another recording of the same device; ``None`` if the options of that one say which."""
        return None

    def notes(self) -> list[str]:
        """Notes for the reader of the recording."""
        raise NotImplementedError

    def owns_mode(self, mode: object) -> bool:
        """Whether ``mode`` is the simulated device's, which stays on the stack whatever mode is on top."""
        return False

    def stamps_ops(self) -> bool:
        """Whether :attr:`stamp` has to be called at each op, and not just at each phase."""
        return self.stamp is not None

    def check(self) -> None:
        """Raise :class:`~ampmem.errors.UsageError` if this source cannot record now."""
        raise NotImplementedError

    def start(self, baseline: Mapping[int, int]) -> None:
        """Start recording. ``baseline`` maps the address of each live storage to its bytes."""
        raise NotImplementedError

    def drain(self) -> RawEvents:
        """The events since the last call, in order; recording goes on."""
        raise NotImplementedError

    def stop(self) -> RawEvents:
        """The events since the last :meth:`drain`; stops recording."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Stop recording in this process, a forked child; the parent goes on."""
        raise NotImplementedError

    def blocks(self) -> AliveBlocks | None:
        """The live blocks after the last event; ``None`` if unknown."""
        return None

    # The rest is of sources whose allocator reserves memory from a device, and can run out of it.

    def mark(self, step: int, mark: Mark) -> None:
        """Take the allocator's statistics now; a second mark of the same kind in a step replaces the first."""

    def pause(self) -> None:
        """Read the events so far, if there are many: the recorded thread is between two phases."""

    def take_layers(self) -> list[LayersRecord]:
        """The marks that the last :meth:`drain` or :meth:`stop` settled."""
        return []

    def take_ooms(self) -> list[OomRecord]:
        """Out-of-memory errors since the last call."""
        return []

    def allocator(self) -> AllocatorRecord | None:
        """The settings and statistics of the caching allocator so far; ``None`` if it was not used."""
        return None

    def nothing(self) -> str | None:
        """Why nothing of the device was recorded, with what to do; ``None`` if something was."""
        return None

    def prediction(self) -> PredictionRecord | None:
        """The predicted memory of the run so far; ``None`` where memory is measured."""
        return None
