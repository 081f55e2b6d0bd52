"""The entries of the allocator's trace, the time of each, and what the profiler saw of the same blocks.

The allocator reports each allocation and free to the profiler of the calling thread, with the exact block size and the
autograd node around it; the engine's threads use the profiler of the thread whose backward they run. Events of other
threads are in the trace alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ampmem.allocator.segments import RESERVING
from ampmem.allocator.snapshot import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from ampmem.events import Column
from ampmem.recorder.models.stacks import stack_text


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBlocks:
    """Blocks allocated (``bytes`` > 0) and freed (< 0), in order; ``op`` indexes ``ops``, the names of nodes."""

    time_ns: Column
    address: Column
    bytes: Column
    op: Column
    sequence: Column
    ops: tuple[str, ...] = ("",)

    def __len__(self) -> int:
        return len(self.time_ns)


_NONE = np.zeros(0, dtype=np.int64)
NO_BLOCKS = SeenBlocks(time_ns=_NONE, address=_NONE, bytes=_NONE, op=_NONE, sequence=_NONE)


def devices_by_thread(devices: Column, threads: Column) -> dict[int, set[int]]:
    """The devices on which each thread allocated or freed, from a device and a thread for each time that one did."""
    found: dict[int, set[int]] = {}
    for device, thread in set(zip(devices.tolist(), threads.tolist(), strict=True)):
        found.setdefault(thread, set()).add(device)
    return found


class Uses(NamedTuple):
    """Allocs (``size`` requested bytes) and frees of the trace; ``entry`` is the index of each in the trace."""

    entry: Column
    address: Column
    size: Column
    freed: NDArray[np.bool_]


def found_in(uses: Uses, seen: SeenBlocks) -> tuple[Column, Column]:
    """Indices of trace entries and, for each, of the event in ``seen`` that is certainly the same.

    At each address both are in order, but ``seen`` lacks events of other threads. A scan from the front gives the
    earliest entry that each can be, one from the back the latest: if these are equal, there is no other.
    """
    # Grouped by address, in order of time at each: where both have as many events there, they are the same ones.
    there, known = np.argsort(uses.address, kind="stable"), np.argsort(seen.address, kind="stable")
    addresses, counts = np.unique(seen.address, return_counts=True)
    used_at, used = np.unique(uses.address, return_counts=True)
    place = np.minimum(np.searchsorted(used_at, addresses), max(len(used_at) - 1, 0))
    if len(used_at) == 0 or len(addresses) == 0:
        return _NONE, _NONE
    as_many = (used_at[place] == addresses) & (used[place] == counts)  # the usual case: each matches exactly one
    there_alike = there[np.isin(uses.address[there], addresses[as_many])]
    known_alike = known[np.isin(seen.address[known], addresses[as_many])]
    fits = (uses.freed[there_alike] == (seen.bytes[known_alike] < 0)) & (
        np.abs(seen.bytes[known_alike]) >= uses.size[there_alike]
    )
    if len(fits):
        starts = np.concatenate([[0], np.cumsum(counts[as_many])[:-1]])
        fits = np.repeat(np.logical_and.reduceat(fits, starts), counts[as_many])
    entries, which = [uses.entry[there_alike[fits]]], [known_alike[fits]]
    for address in addresses[~as_many].tolist():
        some = _surely_same(uses, there[uses.address[there] == address], seen, known[seen.address[known] == address])
        entries.append(some[0])
        which.append(some[1])
    return np.concatenate(entries), np.concatenate(which)


def _surely_same(uses: Uses, there: Column, seen: SeenBlocks, known: Column) -> tuple[Column, Column]:
    """Certain matches at one address, if the profiler has seen fewer events than the trace has."""
    rows = list(zip(uses.entry[there].tolist(), uses.size[there].tolist(), uses.freed[there].tolist(), strict=True))
    sizes = seen.bytes[known].tolist()
    # If the first and the last place that a block can have are equal, there is no other.
    early = _earliest(rows, sizes)
    late = _earliest(rows[::-1], sizes[::-1])[::-1]
    same = [(first, index) for index, first, last in zip(known.tolist(), early, late, strict=False) if first == last]
    entries, which = np.array(same, dtype=np.int64).reshape(-1, 2).T
    return entries, which


def _earliest(uses: Sequence[tuple[int, int, bool]], sizes: Sequence[int]) -> list[int]:
    """The first entry that each block can be; empty if they do not fit."""
    found: list[int] = []
    rest = iter(uses)
    for size in sizes:
        for entry, asked, freed in rest:
            if freed == (size < 0) and abs(size) >= asked:
                found.append(entry)
                break
        else:
            return []
    return found


_US = 1000
_NEVER = 2**62
_SNAPSHOT = "snapshot"


class Counted(NamedTuple):
    """Torch's counts: ``blocks`` end with their free, ``requested`` bytes with their wait for other streams."""

    blocks: int
    requested: int


class MarkCount(NamedTuple):
    """The allocator's counts at a mark, which came after the stamp ``since_ns``."""

    since_ns: int
    time_ns: int
    counted: Counted


class TraceEntry(NamedTuple):
    """One entry of a :class:`Trace`."""

    action: str
    address: int
    size: int
    stream: int
    time_ns: int
    stack: int = 0
    block: int = 0
    seen: int = -1


@dataclass(slots=True)
class Trace:
    """The entries of the trace as columns: a step may have a million, and an object for each would be slow.

    ``kind`` is the index of the action in :data:`KINDS`, 0 for others. ``stack`` indexes :attr:`StackTexts.texts`,
    ``tag`` is the time that an entry is tagged with, or 0. ``seen`` indexes the blocks that the profiler saw, or is -1;
    ``block`` is the block's size in bytes, 0 if unknown.
    """

    kind: NDArray[np.int64]
    address: NDArray[np.int64]
    size: NDArray[np.int64]
    stream: NDArray[np.int64]
    time_ns: NDArray[np.int64]
    stack: NDArray[np.int64]
    tag: NDArray[np.int64]
    block: NDArray[np.int64]
    seen: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.kind)

    def entries(self) -> list[TraceEntry]:
        """The entries one by one, for code that must look at each."""
        action = [KINDS[kind] for kind in self.kind.tolist()]
        columns = (self.address, self.size, self.stream, self.time_ns, self.stack, self.block, self.seen)
        return list(map(TraceEntry, action, *(column.tolist() for column in columns)))


KINDS = ("", ALLOC, FREE_REQUESTED, FREE_COMPLETED, _SNAPSHOT, *RESERVING)
"""The actions of a trace that are used."""
IS_ALLOC, IS_FREE, IS_DONE, IS_SNAPSHOT, IS_SEGMENT = 1, 2, 3, 4, 5
"""Indices in :data:`KINDS`; ``IS_SEGMENT`` and larger ones are actions on segments."""
_KIND = {word: place for place, word in enumerate(KINDS)}


class Stamps:
    """Times with which the recorded thread tagged its events; each holds until the next."""

    def __init__(self) -> None:
        self._instants: list[int] = []

    def add(self, now_ns: int) -> None:
        """Tag allocations with ``now_ns`` from now on."""
        self._instants.append(now_ns)

    @property
    def last(self) -> int:
        """The current stamp; 0 before the first."""
        return self._instants[-1] if self._instants else 0

    def take(self) -> dict[int, int]:
        """Each stamp with the one after it; the last one stays current, and is kept for the next call."""
        taken = self._instants[:]
        # The last stamp goes on into the next window.
        del self._instants[: len(taken) - 1]
        return dict(pairwise([*taken, _NEVER]))


class StackTexts:
    """The Python stacks of trace entries, each once."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {"": 0}
        self._known: dict[tuple[int, ...], int] = {}

    def forget(self) -> None:
        """Forget the identities of the last snapshot's frames, whose memory may be reused."""
        self._known.clear()

    def add(self, frames: Iterable[tuple[str, int, str]]) -> int:
        """The index of the stack of ``frames`` (file, line, function; innermost first)."""
        return self.texts.setdefault(stack_text(frames), len(self.texts))

    def index(self, frames: Any) -> int:
        """The index of ``frames``, a list as torch returns it; 0 for no frames."""
        if not frames:
            return 0
        key = tuple(map(id, frames))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.add((each["filename"], each["line"], each["name"]) for each in frames)
        return found


def read_trace(rows: Sequence[Mapping[str, Any]], stacks: StackTexts) -> Trace:
    """The entries with times of the trace's own clock; nothing is known of their blocks."""
    action = [row["action"] for row in rows]
    # A free has the stack of its alloc.
    stack = [stacks.index(row.get("frames")) if word == ALLOC else 0 for word, row in zip(action, rows, strict=True)]
    texts = [row.get("user_metadata", "") for row in rows]
    instants = {text: int(text) if text.isdigit() else 0 for text in set(texts)}  # many entries share one tag
    count = len(rows)
    return Trace(
        kind=np.fromiter((_KIND.get(word, 0) for word in action), dtype=np.int64, count=count),
        address=np.array([row.get("addr", 0) for row in rows], dtype=np.int64),
        size=np.array([row["size"] for row in rows], dtype=np.int64),
        stream=np.array([row.get("stream", 0) for row in rows], dtype=np.int64),
        time_ns=np.array([row.get("time_us", 0) for row in rows], dtype=np.int64) * _US,
        stack=np.array(stack, dtype=np.int64),
        tag=np.array([instants[text] for text in texts], dtype=np.int64),
        block=np.zeros(count, dtype=np.int64),
        seen=np.full(count, -1, dtype=np.int64),
    )


def timed(
    trace: Trace,
    stamps: Mapping[int, int],
    seen: SeenBlocks,
    marks: Sequence[MarkCount],
    *,
    span: tuple[int, int],
    final: Counted,
) -> NDArray[np.int64]:
    """The time of each entry of ``trace`` on the clock of ``time.time_ns``: in order, and inside ``span``.

    Torch gives whole microseconds, truncated, on a clock that it maps to ``time.time_ns`` by a line through two points:
    off by the system clock's slew in between. So better knowledge comes first:

    - what the profiler saw has the profiler's time, which is set at both ends of the step;
    - a tagged entry came after that stamp of the recorded thread, and before its next;
    - the order of the trace is that of the allocator's lock, across threads;
    - at a mark the allocator had counted blocks and bytes: of the places allowed by the tags, the mark is at one
      where the entries add up to those counts, the nearest by the clock.

    ``final`` are the counts after the last entry. Events with equal times keep their order: a free and the alloc that
    reuses its memory must not be swapped.
    """
    if not len(trace):
        return trace.time_ns
    when = trace.time_ns
    tag, ends = _known_tags(trace.tag, stamps)
    # A snapshot has an entry, too: one that ampmem takes at a mark is not an event of the script before the mark.
    done = trace.kind != IS_SNAPSHOT
    low = np.maximum.accumulate(np.maximum(tag, span[0]))
    # An entry comes before the end of its own stamp, and before whatever the entries after it come before.
    high = np.minimum.accumulate(np.minimum(ends, span[1])[::-1])[::-1].copy()
    low, high = _around_seen(trace.seen, seen, low, high)
    first = 0
    for mark, places in _places(marks, tag, ends, _counts_by_entry(trace, final)):
        near = np.searchsorted(_clamped(when, low, high), mark.time_ns, side="left")
        places = places[places >= first]
        first = int(places[np.argmin(np.abs(places - near))])
        # Even if the profiler's time is earlier: then the match was the wrong one of two uses of the address.
        high[first:] = np.maximum(high[first:], mark.time_ns)
        tagged = (done[:first] & (tag[:first] == mark.since_ns)).any()
        before = mark.time_ns if tagged else mark.since_ns or mark.time_ns
        high[:first] = np.minimum(high[:first], before - 1)
        low[first:] = np.maximum(low[first:], mark.time_ns)
    return _clamped(when, low, high)


def _known_tags(tags: Column, stamps: Mapping[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each entry's stamp, 0 if the tag is not ampmem's, and the last instant before the next stamp."""
    known, of = np.unique(tags, return_inverse=True)
    stamp = np.array([each if each in stamps else 0 for each in known.tolist()], dtype=np.int64)
    end = np.array([stamps.get(each, _NEVER) - 1 for each in stamp.tolist()], dtype=np.int64)
    return stamp[of], end[of]


def _around_seen(
    of: Column, seen: SeenBlocks, low: NDArray[np.int64], high: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The bounds of entries, with the profiler's time for those that it saw, if that is within the bounds.

    ``of`` is the index of each entry's block in ``seen``, or -1.
    """
    known = of >= 0
    low, high = low.copy(), high.copy()
    low[known] = high[known] = np.clip(seen.time_ns[of[known]], low[known], high[known])
    return np.maximum.accumulate(low), np.minimum.accumulate(high[::-1])[::-1].copy()


def _clamped(when: Column, low: Column, high: Column) -> NDArray[np.int64]:
    return np.maximum.accumulate(np.minimum(np.maximum(when, low), high))


def _counts_by_entry(trace: Trace, final: Counted) -> NDArray[np.int64]:
    """Torch's counts before each entry and after the last, as rows of :class:`Counted`."""
    change = np.stack([_BLOCKS[trace.kind], _REQUESTED[trace.kind] * trace.size])
    after = np.concatenate([np.cumsum(change[:, ::-1], axis=1)[:, ::-1], np.zeros((2, 1), dtype=np.int64)], axis=1)
    counted: NDArray[np.int64] = np.array(final, dtype=np.int64) - after.T
    return counted


def _by_kind(changes: Mapping[int, int]) -> NDArray[np.int64]:
    return np.array([changes.get(kind, 0) for kind in range(len(KINDS))], dtype=np.int64)


_BLOCKS = _by_kind({IS_ALLOC: 1, IS_FREE: -1})
_REQUESTED = _by_kind({IS_ALLOC: 1, IS_DONE: -1})


def _places(
    marks: Sequence[MarkCount], tag: Column, ends: Column, counted: NDArray[np.int64]
) -> list[tuple[MarkCount, NDArray[np.int64]]]:
    """For each mark the entries before which it may be, so that the later marks still fit after it."""
    found: list[tuple[MarkCount, NDArray[np.int64]]] = []
    end = len(tag)
    for mark in reversed(marks):
        later = np.flatnonzero(tag >= mark.time_ns)
        end = min(end, int(later[0]) if len(later) else end)
        places = np.flatnonzero((counted[: end + 1] == mark.counted).all(axis=1))
        earlier = np.flatnonzero((tag > 0) & (ends < mark.time_ns))
        first = int(earlier[-1]) + 1 if len(earlier) else 0
        places = places[places >= first]
        if len(places):
            end = int(places[-1])
            found.append((mark, places))
    return found[::-1]
