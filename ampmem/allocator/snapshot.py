"""A torch memory snapshot, typed: one device's final segments and its trace of allocator events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampmem.allocator.layout import DEFAULT_POOL, SnapshotBlock, SnapshotSegment
from ampmem.allocator.settings import ROUNDUP_INTERVALS, Settings
from ampmem.allocator.trace import Operation, Trace, trace_of
from ampmem.errors import RecordingError

ALLOC = "alloc"
FREE_REQUESTED = "free_requested"
FREE_COMPLETED = "free_completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEvent:
    """One entry of the trace, in torch's words (``TraceEntry``, ``c10/core/CachingDeviceAllocator.h``)."""

    action: str
    address: int
    size: int
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSnapshot:
    """One device of a snapshot. ``settings`` is ``None`` where the snapshot does not have them."""

    segments: tuple[SnapshotSegment, ...]
    events: tuple[SnapshotEvent, ...]
    settings: Settings | None


def read_snapshot(parsed: Mapping[str, Any], device: int = 0) -> DeviceSnapshot:
    """The part of ``torch.cuda.memory._snapshot()`` that is about ``device``.

    Old snapshots lack block addresses and requested sizes. Raises :class:`RecordingError` for anything
    that is no snapshot.
    """
    try:
        traces = parsed["device_traces"]
        return DeviceSnapshot(
            segments=tuple(_segment(each) for each in parsed["segments"] if each["device"] == device),
            events=tuple(_event(each) for each in traces[device]) if device < len(traces) else (),
            settings=_settings(parsed.get("allocator_settings")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordingError(f"this is not a memory snapshot of torch, or a part of it is missing: {error!r}") from None


def _segment(raw: Mapping[str, Any]) -> SnapshotSegment:
    blocks = []
    address = int(raw["address"])
    for block in raw["blocks"]:
        size = int(block["size"])
        state = block["state"]
        blocks.append(
            SnapshotBlock(
                address=int(block.get("address", address)),
                size=size,
                requested=int(block.get("requested_size", size)),
                allocated=state == "active_allocated",
                awaiting=state in ("active_awaiting_free", "active_pending_free"),
            )
        )
        address += size
    first, second = raw.get("segment_pool_id", DEFAULT_POOL)
    return SnapshotSegment(
        address=int(raw["address"]),
        size=int(raw["total_size"]),
        stream=int(raw["stream"]),
        is_small=raw["segment_type"] == "small",
        expandable=bool(raw.get("is_expandable", False)),
        pool_id=(int(first), int(second)),
        blocks=tuple(blocks),
    )


def _event(raw: Mapping[str, Any]) -> SnapshotEvent:
    # An out-of-memory entry has no address, but the free bytes of the device.
    return SnapshotEvent(
        action=str(raw["action"]),
        address=int(raw.get("addr", 0)),
        size=int(raw["size"]),
        stream=int(raw["stream"]),
    )


def _settings(raw: Mapping[str, Any] | None) -> Settings | None:
    if raw is None:
        return None
    limit = int(raw.get("max_split_size", -1))
    divisions = [int(value) for value in raw.get("roundup_power2_divisions", {}).values()]
    return Settings(
        max_split_size=None if limit < 0 else limit,
        garbage_collection_threshold=float(raw.get("garbage_collection_threshold", 0.0)),
        expandable_segments=bool(raw.get("expandable_segments", False)),
        roundup_power2_divisions=tuple((divisions + [0] * ROUNDUP_INTERVALS)[:ROUNDUP_INTERVALS]),
    )


def trace_of_snapshot(snapshot: DeviceSnapshot) -> Trace:
    """The snapshot's calls as a trace for other settings.

    What was alive when the trace starts is allocated first, in the order of its addresses; what was cached
    then is left out. A free that waited for other streams happens when the wait is over.
    """
    rows: list[tuple[int, int, int, int]] = []
    live: dict[int, int] = {}
    for address, (size, stream) in sorted(_alive_at_start(snapshot).items()):
        live[address] = len(rows)
        rows.append((Operation.MALLOC, len(rows), size, stream))
    mallocs = len(rows)
    for event in snapshot.events:
        if event.action == ALLOC:
            live[event.address] = mallocs
            rows.append((Operation.MALLOC, mallocs, event.size, event.stream))
            mallocs += 1
        elif event.action == FREE_COMPLETED:
            if event.address not in live:
                raise RecordingError(f"the snapshot's trace frees {event.address:#x} twice")
            rows.append((Operation.FREE, live.pop(event.address), 0, 0))
    return trace_of(rows)


def _alive_at_start(snapshot: DeviceSnapshot) -> dict[int, tuple[int, int]]:
    """Address to (requested bytes, stream) of what is freed, or alive at the end, but not allocated in the trace."""
    found = {}
    live = set()
    for event in snapshot.events:
        if event.action == ALLOC:
            live.add(event.address)
        elif event.action == FREE_COMPLETED and event.address in live:
            live.remove(event.address)
        elif event.action == FREE_COMPLETED:
            found[event.address] = (event.size, event.stream)
    for segment in snapshot.segments:
        for block in segment.blocks:
            if (block.allocated or block.awaiting) and block.address not in live:
                found[block.address] = (block.requested, segment.stream)
    return found
