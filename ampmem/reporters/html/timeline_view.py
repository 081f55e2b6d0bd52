"""What the chart of one recording is drawn from: plain numbers, prepared here and only drawn in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from ampmem.events import Column, Phase
from ampmem.reporters.html.palette import FILLS
from ampmem.reporters.html.reduce import MAX_POINTS, extreme_instants

MAX_PHASES = 300
"""More phases than this would be narrower than a pixel and slow to draw; the strip is then left out."""

_LABEL_SHARE = 0.06
"""Least share of the chart's width that a phase's name fits into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Live bytes of one category at the view's instants, and how its area looks."""

    category: str
    bytes: list[int]
    light: str
    dark: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """A run of events in one phase: from event ``start`` up to event ``end``; ``wide`` when its name fits."""

    name: str
    start: int
    end: int
    wide: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The instant that is marked as the peak, and how many bytes were alive then."""

    instant: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineView:
    """A stacked chart over allocator events; ``element`` is the id of the element that it is drawn in.

    Instant ``n`` is the state after ``n`` events.
    """

    element: str
    events: int
    instants: list[int]
    series: list[Series]
    phases: list[PhaseSpan]
    peak: Peak

    def as_json(self) -> dict[str, object]:
        """For the page's JSON block."""
        return asdict(self)


def timeline_view(
    element: str, live: Mapping[str, Column], phase: Column, peak: int, *, max_points: int = MAX_POINTS
) -> TimelineView | None:
    """Reduce ``live``, the bytes of each category, to what a chart can show.

    ``phase`` has shape ``(events,)`` and the columns of ``live``, in stacking order, ``(events + 1,)``:
    one for the state after each event and one, the first, for that before any. ``peak`` is the instant
    to mark. Categories that are empty throughout are left out. ``None`` without an event.
    """
    if not len(phase):
        return None
    total = np.sum(list(live.values()), axis=0)
    instants = extreme_instants(total, peak, max_points)
    return TimelineView(
        element=element,
        events=len(phase),
        instants=instants.tolist(),
        series=[_series(name, column[instants]) for name, column in live.items() if column.any()],
        phases=_phases(phase),
        peak=Peak(instant=peak, bytes=int(total[peak])),
    )


def _series(category: str, live: Column) -> Series:
    fill = FILLS[category]
    return Series(category=category, bytes=live.tolist(), light=fill.light, dark=fill.dark, pattern=fill.pattern)


def _phases(phase: Column) -> list[PhaseSpan]:
    count = len(phase)
    starts = [0, *(np.flatnonzero(np.diff(phase)) + 1).tolist()]
    if len(starts) > MAX_PHASES:
        return []
    return [
        PhaseSpan(
            name=Phase(int(phase[start])).name.lower(),
            start=start,
            end=end,
            wide=end - start >= _LABEL_SHARE * count,
        )
        for start, end in zip(starts, [*starts[1:], count], strict=True)
    ]
