"""A sequence of allocator calls that does not depend on addresses, and its result under given settings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ampmem.allocator.blocks import Block, Counters
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.oom import OutOfMemory, OutOfMemoryReport
from ampmem.allocator.settings import Settings
from ampmem.errors import UsageError
from ampmem.events import NO_SEGMENTS, Action, Column, Columns, EventColumns, SegmentAction, SegmentColumns


class Operation(IntEnum):
    """One call to the allocator, or progress of the device."""

    MALLOC = 1
    """Make ``allocation``, of ``bytes`` bytes, on ``stream``."""
    FREE = 2
    """Free ``allocation``."""
    RECORD_STREAM = 3
    """Note that ``stream`` uses ``allocation``, too."""
    COMPLETE_EVENTS = 4
    """Complete the work queued on ``stream``, or on every stream if that is negative."""
    EMPTY_CACHE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTrace(Columns):
    """Allocator calls in order. ``allocation`` numbers the mallocs from 0 on; columns that do not apply are 0."""

    operation: Column
    allocation: Column
    bytes: Column
    stream: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRun:
    """The result of a trace. ``events`` counts the calls made: all, unless memory ran out."""

    counters: Counters
    events: int
    out_of_memory: OutOfMemoryReport | None


def trace_of_events(events: EventColumns, segments: SegmentColumns = NO_SEGMENTS) -> CallTrace:
    """The trace of a recording's events; its baseline is allocated first, in the listed order.

    Where ``segments`` show memory returned to the device, the cache is emptied, as by ``torch.cuda.empty_cache``.
    Allocations of 0 bytes, which the allocator never sees, are left out.
    """
    rows: list[tuple[int, int, int, int]] = []
    live: dict[int, int] = {}
    mallocs = 0
    emptied = set(segments.position[segments.action == SegmentAction.RELEASE].tolist())
    columns = [column.tolist() for column in (events.action, events.address, events.bytes, events.stream)]
    for number, (action, address, size, stream) in enumerate(zip(*columns, strict=True)):
        if number in emptied:
            rows.append((Operation.EMPTY_CACHE, 0, 0, 0))
        if action == Action.FREE:
            allocation = live.pop(address, None)
            if allocation is not None:
                rows.append((Operation.FREE, allocation, 0, 0))
        elif size > 0:
            live[address] = mallocs
            rows.append((Operation.MALLOC, mallocs, size, stream))
            mallocs += 1
    return CallTrace.of_rows(rows)


def make_calls(trace: CallTrace, allocator: DeviceCachingAllocator) -> TraceRun:
    """Make the calls of ``trace`` until its end, or until memory runs out."""
    blocks: list[Block] = []
    malloc, free = allocator.malloc, allocator.free
    # Plain integers: comparing enum members is three times slower, a tenth of the whole run.
    is_malloc, is_free = int(Operation.MALLOC), int(Operation.FREE)
    columns = [getattr(trace, name).tolist() for name in trace.names()]
    event = 0
    failure = None
    try:
        for event, (operation, allocation, size, stream) in enumerate(zip(*columns, strict=True)):
            if operation == is_malloc:
                if allocation != len(blocks):
                    raise UsageError(f"event {event} of the trace makes allocation {allocation} out of order")
                blocks.append(malloc(size, stream))
            elif operation == is_free:
                free(blocks[allocation])
            else:
                _call(allocator, operation, blocks, allocation, stream)
        event = len(trace)
    except OutOfMemory as error:
        failure = error.report
    return TraceRun(counters=allocator.counters, events=event, out_of_memory=failure)


def _call(allocator: DeviceCachingAllocator, operation: int, blocks: list[Block], allocation: int, stream: int) -> None:
    match operation:
        case Operation.RECORD_STREAM:
            allocator.record_stream(blocks[allocation], stream)
        case Operation.COMPLETE_EVENTS:
            allocator.complete_events(None if stream < 0 else stream)
        case Operation.EMPTY_CACHE:
            allocator.empty_cache()
        case _:
            raise UsageError(f"the trace has an unknown operation {operation}")


class WhatIf(NamedTuple):
    """The results of one trace under two settings."""

    before: TraceRun
    after: TraceRun


def peak_reserved(trace: CallTrace, settings: Settings) -> int:
    """Peak reserved bytes of ``trace`` under ``settings``, from an empty start, without a memory limit."""
    return make_calls(trace, DeviceCachingAllocator(settings)).counters.reserved_peak


def what_if(trace: CallTrace, settings: Settings) -> WhatIf:
    """The effect of ``settings`` compared with PyTorch's defaults, without a memory limit.

    Both runs start with an empty allocator, so compare them with each other and not with a recorded peak.
    """
    return WhatIf(*(make_calls(trace, DeviceCachingAllocator(each)) for each in (None, settings)))
