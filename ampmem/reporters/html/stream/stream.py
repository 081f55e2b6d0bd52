"""The events of one recording for the page: all of them where they fit, else what is needed to draw them exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.events import Column
from ampmem.reporters.html.stream.container import base64_of, compressed_within, framed, planes
from ampmem.reporters.html.stream.kinds import Kinds, kinds_header, kinds_of
from ampmem.reporters.html.stream.layers import places_of, segments_header
from ampmem.reporters.html.stream.reduced import StreamView, reduced_stream

EXACT = "exact"

SHORT = 100_000
"""Events of a recording whose times are kept to the nanosecond; of a longer one to the microsecond."""


def stream_view(analysis: Analysis, peaks: Sequence[int], peak: int, limit: int, *, when: str = "peak") -> StreamView:
    """The events in at most ``limit`` bytes of base64, but for reduced ones, whose size is bounded anyway.

    ``peaks`` are the positions of the steps' peaks, ``peak`` that of the run's, or of another instant that the page
    shows: ``when`` is what it is called. Where the segments are known, the
    addresses of all blocks come along if there is room for them.
    """
    kinds, kind = kinds_of(analysis)
    layered = len(analysis.recording.segments) > 0
    for addresses in (True, False) if layered else (False,):
        packed = exact_stream(analysis, kinds, kind, limit // 4 * 3, addresses=addresses)
        if packed is not None:
            events = len(analysis.recording.events)
            return StreamView(mode=EXACT, events=events, note="", addresses=addresses, packed=base64_of(packed))
    return reduced_stream(analysis, kinds, kind, peaks, peak, layers=analysis.layers, when=when)


def exact_stream(
    analysis: Analysis, kinds: Kinds, kind: Column, limit: int, *, addresses: bool = False
) -> bytes | None:
    """Every event; ``None`` when that takes more than ``limit`` bytes. ``kind`` is that of each allocation."""
    codes = planes(_codes(analysis, kind))
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


def _codes(analysis: Analysis, kind: Column) -> Column:
    """Twice the kind of the allocation that each event is about, and one more for a free."""
    lifetimes = analysis.lifetimes
    codes = np.zeros(len(analysis.recording.events), dtype=np.int64)
    codes[lifetimes.born] = 2 * kind
    freed = np.flatnonzero(lifetimes.died != ALIVE)
    codes[lifetimes.died[freed]] = 2 * kind[freed] + 1
    return codes


def _deltas(time_ns: Column, unit: int) -> Column:
    """Time since the event before; rounded as a time and not as a difference, so that nothing adds up."""
    if not len(time_ns):
        return time_ns
    deltas: Column = np.diff((time_ns - time_ns[0]) // unit, prepend=0)
    return deltas
