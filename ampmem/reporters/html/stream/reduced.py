"""A recording with too many events for one page: what is needed to draw it, and what lives at its peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ampmem.analysis.allocator.layers import Layers
from ampmem.analysis.analyse import Analysis
from ampmem.analysis.json.jsonable import Json
from ampmem.events import Column
from ampmem.reporters.html.stream.container import base64_of, compressed, framed
from ampmem.reporters.html.stream.kinds import Kinds, kinds_header
from ampmem.reporters.html.stream.reduce import extreme_positions
from ampmem.units import format_count

REDUCED = "reduced"

BUCKETS = 24_000
"""Stretches of which the lowest and the highest instant are kept: some twenty for each pixel of a wide screen."""

RESERVED_BUCKETS = 2_000
"""The same for what is reserved, which changes seldom."""

WINDOW = 2_000
"""Instants on each side of the run's peak, all of which are kept."""

WINDOWS = 12_000
"""As many at most around the peaks of all steps together."""

MAX_PEAK_KINDS = 20_000
"""Kinds that are described; more than that are put together, from the smallest on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamView:
    """The events, packed; ``note`` says what was left out, empty in mode ``exact``.

    ``addresses`` says whether the events come with addresses, from which the page makes its address map.
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
    layers: Layers | None = None,
    buckets: int = BUCKETS,
    when: str = "peak",
) -> StreamView:
    """The extremes of every stretch, everything around the steps' ``peaks``, and what is alive at ``peak``.

    ``kind`` is the kind of each allocation.
    """
    positions = kept_positions(analysis, peaks, peak, buckets)
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
        "them: the lowest and the highest of every stretch, and all around the peaks, exact. "
        f"Modules, stacks, addresses and allocations are those at the {when}."
    )
    packed = compressed([framed(header), *_arrays(analysis, layers, positions)])
    return StreamView(mode=REDUCED, events=events, note=note, addresses=False, packed=base64_of(packed))


def kept_positions(analysis: Analysis, peaks: Sequence[int], peak: int, buckets: int) -> NDArray[np.intp]:
    """Both ends, the extremes of each bucket, the marks, and windows around the peaks; ascending."""
    timeline, events = analysis.timeline, len(analysis.recording.events)
    instants = [step.start_ns for step in analysis.recording.steps] + [step.end_ns for step in analysis.recording.steps]
    instants += [oom.time_ns for oom in analysis.recording.ooms[-1:]]
    for marks in analysis.marks:
        named = (marks.after_forward, marks.after_backward, marks.after_optimizer)
        instants += [instant for instant in named if instant is not None]
    side = min(WINDOW, WINDOWS // (2 * max(1, len(peaks))))
    windows = np.concatenate([_window(position, side) for position in peaks] + [_window(peak, WINDOW)])
    chosen = np.concatenate(
        [
            extreme_positions(timeline.total, buckets),
            np.clip(windows, 0, events),
            np.array([0, events]),
            np.searchsorted(timeline.time_ns, instants),
        ]
    )
    return np.unique(chosen).astype(np.intp)


def _window(position: int, side: int) -> NDArray[np.intp]:
    return np.arange(position - side, position + side + 1)


def _arrays(analysis: Analysis, layers: Layers | None, positions: NDArray[np.intp]) -> Iterator[bytes]:
    timeline = analysis.timeline
    times = np.concatenate([timeline.time_ns[:1], timeline.time_ns])[positions]
    above = () if layers is None else (layers.allocated - timeline.total, layers.cached)
    for column in (positions, times - times[0], *(series[positions] for series in (*timeline.live, *above))):
        yield column.astype("<f8").tobytes()


def _at_peak(kinds: Kinds, count: Column, texts: Sequence[str]) -> tuple[Kinds, Column, Sequence[str]]:
    """The kinds that live, how many of each, and the texts, to which those of what is put together are added."""
    living = np.flatnonzero(count)
    order = living[np.argsort(-(kinds.bytes * count)[living], kind="stable")]
    shown, rest = order[:MAX_PEAK_KINDS], order[MAX_PEAK_KINDS:]
    if not len(rest):
        return kinds.take(shown), count[shown], texts
    together, names = _together(kinds.take(rest), count[rest], len(texts))
    joined = {
        column.name: np.concatenate([getattr(kinds, column.name)[shown], getattr(together, column.name)])
        for column in fields(kinds)
    }
    return Kinds(**joined), np.append(count[shown], np.ones(len(names), dtype=np.int64)), (*texts, *names)


def _together(kinds: Kinds, count: Column, first_text: int) -> tuple[Kinds, list[str]]:
    """One kind for each category and phase of ``kinds``, and the texts that name them, from ``first_text`` on."""
    key = kinds.category * 8 + kinds.phase
    groups, row = np.unique(key, return_inverse=True)
    size, number = np.zeros(len(groups), dtype=np.int64), np.zeros(len(groups), dtype=np.int64)
    np.add.at(size, row, kinds.bytes * count)
    np.add.at(number, row, count)
    nothing = np.zeros(len(groups), dtype=np.int64)
    together = Kinds(
        category=groups // 8,
        bytes=size,
        block_bytes=size,
        name=np.arange(len(groups)) + first_text,
        module=nothing,
        op=nothing,
        stack=nothing,
        phase=groups % 8,
        dtype=nothing,
        shape=nothing,
    )
    return together, [f"{format_count(each)} smaller allocations" for each in number.tolist()]
