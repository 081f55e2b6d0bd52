"""What a source of allocator events is to a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from ampmem.events import (
    NO_SEGMENTS,
    AllocatorRecord,
    Column,
    LayersRecord,
    OomRecord,
    PredictionRecord,
    SegmentColumns,
)
from ampmem.recorder.facts.addresses import Addresses, AliveBlocks
from ampmem.recorder.facts.log import Log, See, Texts
from ampmem.vocabulary import Mark, SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RawEvents:
    """Allocator events before they are joined to steps, phases and modules.

    Columns are as in :class:`~ampmem.events.EventColumns`; ``op`` holds indices into
    ``ops``, the names of autograd nodes, and is 0 (no name) outside of backward.
    ``sequence`` is, for an event inside backward, autograd's sequence number of the node that runs,
    which the forward op that made the node has too; elsewhere it is -1. ``stack`` holds indices into
    ``stacks``, for events whose Python stack the source itself has taken; ``None`` where it takes none.
    The positions of ``segments`` count these events only.
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


_NONE = np.zeros(0, dtype=np.int64)

NO_EVENTS = RawEvents(
    time_ns=_NONE,
    action=_NONE,
    address=_NONE,
    bytes=_NONE,
    block_bytes=_NONE,
    stream=_NONE,
    allocated=_NONE,
    op=_NONE,
    sequence=_NONE,
    ops=("",),
)


def joined(parts: Sequence[RawEvents]) -> RawEvents:
    """``parts`` of one window, in order, as one; the stacks of each are among those of the last."""
    names = dict.fromkeys(name for part in parts for name in part.ops)
    index = {name: place for place, name in enumerate(names)}
    columns = ("time_ns", "action", "address", "bytes", "block_bytes", "stream", "allocated", "sequence", "stack")
    counts = np.cumsum([0, *(len(part.time_ns) for part in parts)])[:-1].tolist()
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


class Source(Protocol):
    """Records allocator events between :meth:`start` and :meth:`stop`."""

    kind: SourceKind
    """What a recording names it."""
    device_type: str
    """The type of torch device whose memory it watches."""
    device_name: str
    """That device, in words."""
    uses_profiler: bool
    """Whether it needs torch's profiler, of which there is one at a time."""
    uses_history: bool
    """Whether it needs the memory history of torch's CUDA allocator, of which there is one."""

    @property
    def addresses(self) -> Addresses:
        """Where tensors lie on that device."""

    @property
    def see(self) -> See | None:
        """Told of every tensor that a hook finds to be the script's; ``None`` where the source needs not know."""

    def install(self) -> Callable[[], None]:
        """Patch what it needs to; returns what undoes it."""

    def notes(self) -> list[str]:
        """What a reader of the recording has to know."""

    def owns_mode(self, mode: object) -> bool:
        """Whether this dispatch mode is the device itself, which stays on the stack and never minds what is on top."""

    def check(self) -> None:
        """Raise :class:`~ampmem.errors.UsageError` when this source cannot record now."""

    def start(self, baseline: Mapping[int, int]) -> None:
        """Begin. ``baseline`` maps the address of each live storage to its bytes."""

    def drain(self) -> RawEvents:
        """The events since the last call, in order; goes on recording."""

    def stop(self) -> RawEvents:
        """The events since the last :meth:`drain`; records no more."""

    def abandon(self) -> None:
        """Record no more in this process, a child that was forked; the recording goes on in its parent."""

    def blocks(self) -> AliveBlocks | None:
        """What is alive, by the last events; ``None`` where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the script was: in ``op`` and ``module``, called from ``stack``; empty where not known."""

    step: int
    op: str
    module: str
    stack: str


@runtime_checkable
class DeviceSource(Source, Protocol):
    """A source whose allocator has layers above the tensors, and can run out of memory."""

    stamp: Callable[[int], None] | None
    """Tags what the calling thread allocates from now on with an instant; ``None`` where that is not needed."""

    def attach(self, locate: Callable[[], Place], log: Log, texts: Texts) -> None:
        """From now on ``locate`` says where the calling thread is; facts that no hook can see go to ``log``."""

    def mark(self, step: int, mark: Mark) -> None:
        """Take the allocator's statistics now; a mark that comes again in a step replaces the one before."""

    def pause(self) -> None:
        """The recorded thread is between two phases: a source that keeps the events of a long step may read them."""

    def take_layers(self) -> list[LayersRecord]:
        """The marks that the last :meth:`drain` or :meth:`stop` has settled."""

    def take_ooms(self) -> list[OomRecord]:
        """The failures since the last call."""

    def allocator(self) -> AllocatorRecord | None:
        """How the caching allocator was set and used by now; ``None`` where it was not."""

    def nothing(self) -> str | None:
        """Why nothing of the device was recorded, with what to do; ``None`` where something was."""

    def prediction(self) -> PredictionRecord | None:
        """What the run comes to on the device by now, where that is only predicted."""
