"""The events of one recording for the page: all events if they fit, else those that an exact drawing needs."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.jsonable import Json, like
from ampmem.analysis.layers import AllocatorLayers, address_map
from ampmem.analysis.ops import result_of
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.events import Column, SegmentAction
from ampmem.reporters.html.safety import distinct_texts, visible
from ampmem.units import format_count
from ampmem.vocabulary import STEP_MARKS

LEVEL = 5
"""The level of gzip: higher ones make long recordings half a percent smaller in twice the time."""

_GZIP = 31
"""zlib's ``wbits`` for a gzip stream, without a name or a time in it."""

_CHUNK = 1 << 20


def framed(header: Mapping[str, Json]) -> bytes:
    """Length and text of ``header``, padded so that the following bytes are aligned to eight."""
    text = json.dumps(header, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + 4) % 8)
    return struct.pack("<I", len(text)) + text


def planes(column: Column) -> list[bytes]:
    """The bytes of the non-negative ``column``: first all lowest bytes, then the next ones, as many as needed."""
    # The high bytes are mostly equal: side by side gzip packs them better.
    width = max(1, (int(column.max(initial=0)).bit_length() + 7) // 8)
    by_byte = column.astype("<i8").view(np.uint8).reshape(len(column), 8)
    return [by_byte[:, plane].tobytes() for plane in range(width)]


def packed(parts: Iterable[bytes]) -> str:
    """``parts`` in gzip and base64, as the page has them."""
    return base64.b64encode(b"".join(_squeezed(parts))).decode("ascii")


def compressed_within(parts: Iterable[bytes], limit: int) -> bytes | None:
    """``parts`` in gzip, or ``None`` as soon as this exceeds ``limit`` bytes."""
    out = bytearray()
    for squeezed in _squeezed(parts):
        out += squeezed
        if len(out) > limit:
            return None
    return bytes(out)


def _squeezed(parts: Iterable[bytes]) -> Iterator[bytes]:
    squeezer = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP)
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK):
            yield squeezer.compress(view[start : start + _CHUNK])
    yield squeezer.flush()


def extreme_positions(total: Column, buckets: int) -> NDArray[np.intp]:
    """The positions of the first lowest and the first highest value of each bucket; ascending and unique.

    The buckets are stretches of ``total`` of equal length, except the last.
    """
    width = max(1, -(-len(total) // max(1, buckets)))
    whole = len(total) // width * width
    rows = total[:whole].reshape(-1, width)
    starts = np.arange(0, whole, width)
    found = [starts + rows.argmin(axis=1), starts + rows.argmax(axis=1)]
    if whole < len(total):
        rest = total[whole:]
        found.append(np.array([whole + rest.argmin(), whole + rest.argmax()]))
    return np.unique(np.concatenate(found))


_LARGEST = 1 << 62
"""Keys below this value stay within an ``int64``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """The kinds of allocations, as columns: allocations of one kind are equal in all of them.

    Names, stacks, types and shapes are text ids; ``phase`` is the phase of birth.
    """

    category: Column
    bytes: Column
    block_bytes: Column
    name: Column
    module: Column
    op: Column
    stack: Column
    phase: Column
    dtype: Column
    shape: Column

    def __len__(self) -> int:
        return len(self.category)

    def select(self, rows: NDArray[np.intp]) -> Kinds:
        """The kinds at the indices ``rows``, in that order."""
        return Kinds(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


def kinds_of(analysis: Analysis) -> tuple[Kinds, Column]:
    """The kinds of a run in order of first birth, and the kind of each allocation."""
    lifetimes, classes, tensors = analysis.lifetimes, analysis.classes, analysis.tensors
    every = like(
        Kinds,
        lifetimes,
        category=classes.category,
        name=classes.name,
        module=np.where(lifetimes.module != 0, lifetimes.module, classes.module),
        dtype=tensors.dtype,
        shape=tensors.shape,
    )
    _, first, kind = np.unique(_key(every), return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return every.select(first[order]), place[kind]


def _key(columns: Kinds) -> Column:
    """One number per row, equal only for equal rows."""
    key = np.zeros(len(columns), dtype=np.int64)
    span = 1
    for column in fields(columns):
        code, width = _dense(getattr(columns, column.name))
        if span > _LARGEST // width:
            key, span = _dense(key)
        key = key * width + code
        span *= width
    return key


def _dense(column: Column) -> tuple[Column, int]:
    """``column`` as small numbers, and an upper bound for how many there are."""
    if not len(column):
        return column, 1
    low, high = int(column.min()), int(column.max())
    if high - low < 4096:
        return column - low, high - low + 1
    values, code = np.unique(column, return_inverse=True)
    return code, len(values)


def kinds_header(kinds: Kinds, texts: Sequence[str]) -> dict[str, Json]:
    """The kinds and their texts, as both modes of the stream have them.

    The kinds' columns are indices into the tables of texts, stacks and shapes, of which the first is the empty one.
    Stacks are indices into the frames, outermost first. Texts are made visible and short, and different ones stay so.
    """
    used, (name, module, op, dtype) = _used_ids(kinds.name, kinds.module, kinds.op, kinds.dtype)
    stacks, (stack,) = _used_ids(kinds.stack)
    shapes, (shape,) = _used_ids(kinds.shape)
    frames: dict[str, int] = {}
    lines = [[line for line in texts[index].split("\n") if line] for index in stacks]
    indices: list[Json] = [[frames.setdefault(line, len(frames)) for line in each] for each in lines]
    words, what = _tensor_texts(kinds, texts, len(used))
    columns = {
        "category": kinds.category,
        "bytes": kinds.bytes,
        "name": name,
        "module": module,
        "op": op,
        "what": what,
        "stack": stack,
        "phase": kinds.phase - 1,  # phases count from 1
        "dtype": dtype,
        "shape": shape,
    }
    return {
        "texts": [*distinct_texts(texts[index] for index in used), *words],
        "frames": [*distinct_texts(frames)],
        "stacks": indices,
        "shapes": [texts[index] for index in shapes],
        "kinds": {key: column.tolist() for key, column in columns.items()},
    }


def _tensor_texts(kinds: Kinds, texts: Sequence[str], first: int) -> tuple[list[str], Column]:
    """Descriptions of tensors without a name, as texts numbered from ``first``, and each kind's text; 0 for none."""
    found: dict[str, int] = {}
    column = np.zeros(len(kinds), dtype=np.int64)
    unnamed = [CATEGORIES.index(category) for category in (Category.ACTIVATIONS, Category.TEMPORARIES)]
    for kind in np.flatnonzero(np.isin(kinds.category, unnamed) & (kinds.op != 0)).tolist():
        words = result_of(texts[kinds.op[kind]], mask=texts[kinds.dtype[kind]] == "bool")
        column[kind] = found.setdefault(visible(words), first + len(found))
    return [*found], column


def _used_ids(*columns: Column) -> tuple[list[int], list[Column]]:
    """The ids that occur in ``columns``, 0 first, and the columns as indices into them."""
    ids = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *columns]))
    return ids.tolist(), [np.searchsorted(ids, column).astype(np.int64) for column in columns]


CACHED = "cached"
"""In place of a category: reserved memory in no block that is in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """One segment of the allocator: ``blocks`` are (offset, bytes, category or ``cached``)."""

    address: int
    bytes: int
    blocks: tuple[tuple[int, int, str], ...]


def segments_header(analysis: Analysis) -> dict[str, Json]:
    """The segments as columns: ``since`` is the first position at which a row applies.

    ``pages`` is 0 for a whole segment, else a number shared by the pages of one expandable segment.
    """
    segments = analysis.recording.segments
    baseline, release = segments.action == SegmentAction.BASELINE, segments.action == SegmentAction.RELEASE
    number = np.unique(segments.stream, return_inverse=True)[1]
    columns = {
        "since": np.where(baseline, 0, segments.position + 1),
        "bytes": np.where(release, -segments.bytes, segments.bytes),
        "address": segments.address,
        "pages": np.where(segments.expandable, 1 + 2 * number + segments.small, 0),
    }
    return {name: column.tolist() for name, column in columns.items()}


def places_of(analysis: Analysis) -> tuple[list[Json], Column]:
    """The addresses at which blocks begin, each as the distance from the one before, and each event's address."""
    addresses, place = np.unique(analysis.lifetimes.address, return_inverse=True)
    return np.diff(addresses, prepend=0).tolist(), _of_events(analysis, place, place)


def _of_events(analysis: Analysis, born: Column, died: Column) -> Column:
    """For each event the value of its allocation: that in ``born`` for an alloc, that in ``died`` for a free."""
    owner = analysis.lifetimes.owners(len(analysis.recording.events))
    values: Column = died[owner] if len(owner) else owner
    values[analysis.lifetimes.born] = born
    return values


def address_map_view(analysis: Analysis, position: int) -> tuple[SegmentView, ...]:
    """The segments and their blocks at ``position``, for a page whose events have no addresses."""
    found = []
    for each in address_map(analysis, position):
        start, blocks = each.extent.address, []
        for piece in each.pieces:
            of = None if piece.allocation is None else CATEGORIES[analysis.classes.category[piece.allocation]]
            blocks.append((piece.address - start, piece.bytes, CACHED if of is None else str(of)))
        found.append(SegmentView(address=start, bytes=each.extent.size, blocks=tuple(blocks)))
    return tuple(found)


REDUCED = "reduced"

BUCKETS = 24_000
"""Stretches of which the lowest and highest instant are kept: some twenty per pixel of a wide screen."""

RESERVED_BUCKETS = 2_000
"""The same for reserved memory, which seldom changes."""

WINDOW = 2_000
"""Instants that are kept on each side of the run's peak."""

WINDOWS = 12_000
"""The most instants kept around the peaks of all steps together."""

MAX_PEAK_KINDS = 20_000
"""The most kinds that are described; further ones, from the smallest on, are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamView:
    """The packed events; ``note`` says which events were left out, empty in mode ``exact``.

    ``addresses`` says whether the events have addresses, from which the page makes its address map.
    """

    mode: str
    events: int
    note: str
    addresses: bool
    packed: str


def reduced_stream(
    analysis: Analysis,
    kinds: Kinds,
    kind: Column,
    peaks: Sequence[int],
    peak: int,
    *,
    buckets: int = BUCKETS,
    when: str = "peak",
) -> StreamView:
    """The extremes of every stretch, everything around the steps' ``peaks``, and the kinds alive at ``peak``.

    ``kind`` is the kind of each allocation.
    """
    positions, layers = kept_positions(analysis, peaks, peak, buckets), analysis.layers
    if layers is not None:
        positions = np.union1d(positions, extreme_positions(layers.reserved, RESERVED_BUCKETS))
    alive = analysis.lifetimes.alive_at(peak)
    shown, counts, texts = _at_peak(kinds, np.bincount(kind[alive], minlength=len(kinds)), analysis.recording.texts)
    header = kinds_header(shown, texts)
    pairs: list[Json] = [[number, count] for number, count in enumerate(counts.tolist())]
    header |= {"count": len(positions), "peak_kinds": pairs, "layered": layers is not None}
    events = len(analysis.recording.events)
    note = (
        f"{format_count(events)} events are too many for one page. The timeline is drawn from {len(positions):,} of "
        "them: the lowest and the highest of every stretch, and every event around the peaks. "
        f"Modules, stacks, addresses and allocations are those at the {when}."
    )
    text = packed([framed(header), *_arrays(analysis, layers, positions)])
    return StreamView(mode=REDUCED, events=events, note=note, addresses=False, packed=text)


def kept_positions(analysis: Analysis, peaks: Sequence[int], peak: int, buckets: int) -> NDArray[np.intp]:
    """The positions that are kept: both ends, the extremes of each bucket, the marks, and windows around the peaks."""
    timeline, events = analysis.timeline, len(analysis.recording.events)
    instants = [instant for step in analysis.recording.steps for instant in (step.start_ns, step.end_ns)]
    instants += [oom.time_ns for oom in analysis.recording.ooms[-1:]]
    reached = (getattr(marks, name) for marks in analysis.marks for name in STEP_MARKS)
    instants += [instant for instant in reached if instant is not None]
    side = min(WINDOW, WINDOWS // (2 * max(1, len(peaks))))
    centres = [*((position, side) for position in peaks), (peak, WINDOW)]
    windows = np.concatenate([np.arange(position - side, position + side + 1) for position, side in centres])
    at_marks = np.searchsorted(timeline.time_ns, instants)
    extremes = extreme_positions(timeline.total, buckets)
    return np.unique(np.concatenate([extremes, np.clip(windows, 0, events), [0, events], at_marks])).astype(np.intp)


def _arrays(analysis: Analysis, layers: AllocatorLayers | None, positions: NDArray[np.intp]) -> Iterator[bytes]:
    timeline = analysis.timeline
    times = np.concatenate([timeline.time_ns[:1], timeline.time_ns])[positions]
    above = () if layers is None else (layers.allocated - timeline.total, layers.cached)
    for column in (positions, times - times[0], *(series[positions] for series in (*timeline.live, *above))):
        yield column.astype("<f8").tobytes()


def _at_peak(kinds: Kinds, count: Column, texts: Sequence[str]) -> tuple[Kinds, Column, Sequence[str]]:
    """The live kinds, the number of allocations of each, and ``texts`` with further ones that name merged kinds."""
    living = np.flatnonzero(count)
    order = living[np.argsort(-(kinds.bytes * count)[living], kind="stable")]
    shown, rest = order[:MAX_PEAK_KINDS], order[MAX_PEAK_KINDS:]
    if not len(rest):
        return kinds.select(shown), count[shown], texts
    # The others are merged by category and phase, and named by further texts.
    groups, row = np.unique(kinds.category[rest] * 8 + kinds.phase[rest], return_inverse=True)
    size, number = np.zeros((2, len(groups)), dtype=np.int64)
    np.add.at(size, row, (kinds.bytes * count)[rest])
    np.add.at(number, row, count[rest])
    merged = dict.fromkeys((column.name for column in fields(kinds)), np.zeros(len(groups), dtype=np.int64))
    merged |= {"category": groups // 8, "bytes": size, "block_bytes": size, "phase": groups % 8}
    merged["name"] = np.arange(len(groups)) + len(texts)
    joined = {name: np.concatenate([getattr(kinds, name)[shown], column]) for name, column in merged.items()}
    names = [f"{format_count(each)} smaller allocations" for each in number.tolist()]
    return Kinds(**joined), np.append(count[shown], np.ones(len(names), dtype=np.int64)), (*texts, *names)


EXACT = "exact"

SHORT = 100_000
"""Recordings with at most this many events keep times in ns; longer ones in µs."""


def stream_view(analysis: Analysis, peaks: Sequence[int], peak: int, limit: int, *, when: str = "peak") -> StreamView:
    """The events in at most ``limit`` bytes of base64; reduced events may take more, but are bounded anyway.

    ``peaks`` are the positions of the steps' peaks, ``peak`` that of the run's peak or of another instant that the page
    shows, whose name is ``when``. If the segments are known, the addresses of all blocks are included if there is room.
    """
    kinds, kind = kinds_of(analysis)
    layered = len(analysis.recording.segments) > 0
    for addresses in (True, False) if layered else (False,):
        found = exact_stream(analysis, kinds, kind, limit // 4 * 3, addresses=addresses)
        if found is not None:
            events, text = len(analysis.recording.events), base64.b64encode(found).decode("ascii")
            return StreamView(mode=EXACT, events=events, note="", addresses=addresses, packed=text)
    return reduced_stream(analysis, kinds, kind, peaks, peak, when=when)


def exact_stream(
    analysis: Analysis, kinds: Kinds, kind: Column, limit: int, *, addresses: bool = False
) -> bytes | None:
    """All events; ``None`` if they take more than ``limit`` bytes. ``kind`` is the kind of each allocation."""
    # Twice the kind of each event's allocation, plus one for a free.
    codes = planes(_of_events(analysis, 2 * kind, 2 * kind + 1))
    unit = 1 if len(analysis.recording.events) <= SHORT else 1000
    times = planes(_deltas(analysis.timeline.time_ns, unit))
    header = kinds_header(kinds, analysis.recording.texts)
    header |= {"code_bytes": len(codes), "time_bytes": len(times), "time_unit_ns": unit, "start_ns": 0}
    if len(analysis.recording.segments):
        header |= {"segments": segments_header(analysis), "block_bytes": kinds.block_bytes.tolist()}
    where: list[bytes] = []
    if addresses:
        steps, places = places_of(analysis)
        where = planes(places)
        header |= {"addresses": steps, "place_bytes": len(where)}
    return compressed_within([framed(header), *codes, *times, *where], limit)


def _deltas(time_ns: Column, unit: int) -> Column:
    """The time since the previous event; times are rounded before the subtraction, so errors do not add up."""
    if not len(time_ns):
        return time_ns
    deltas: Column = np.diff((time_ns - time_ns[0]) // unit, prepend=0)
    return deltas
