"""Whether what was recorded adds up to what the allocator itself says is allocated and reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.allocator.layers import Layers, marks_residual, reserved_residual
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.events import OTHER_THREADS, UNKNOWN
from ampmem.names import is_warning, said_in
from ampmem.units import format_bytes, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservation:
    """How far our sums ever were from the allocator's own totals; 0 when they agree.

    ``residual_bytes`` is of the categories, ``reserved_residual_bytes`` of the segments at the steps' marks.
    ``other_threads_bytes`` is the most that threads held which are not recorded: it is in ``other``, without names.
    """

    events: int
    residual_bytes: int | None
    reserved_residual_bytes: int | None
    other_threads_bytes: int

    @property
    def breach(self) -> str | None:
        """How far the sums are off, in words; ``None`` where all that could be compared agrees."""
        parts = []
        if self.residual_bytes:
            parts.append(f"the categories are up to {_exactly(self.residual_bytes)} off the allocator's own total")
        if self.reserved_residual_bytes:
            size = _exactly(self.reserved_residual_bytes)
            parts.append(f"the segments are up to {size} off what the allocator says it has reserved")
        return ", and ".join(parts) or None


def conservation_of(history: MemoryHistory, layers: Layers | None) -> Conservation:
    """Compare the sums with the allocator's totals at every event that has one, and at the steps' marks."""
    events = history.recording.events
    known = events.allocated != UNKNOWN
    residual = marks_residual(history)
    if known.any():
        # Of the categories and not of the total: an allocation lost on the way to a category must show.
        categories = history.timeline.live.sum(axis=0)[1:]
        residual = max(residual or 0, int(np.abs(categories[known] - events.allocated[known]).max()))
    return Conservation(
        events=len(events),
        residual_bytes=residual,
        reserved_residual_bytes=reserved_residual(history, layers),
        other_threads_bytes=int(events.bytes[events.address == OTHER_THREADS].max(initial=0)),
    )


def doubts_of(conservation: Conservation, static_problem: str | None, notes: Sequence[str]) -> tuple[str, ...]:
    """Why the numbers of a run prove nothing, or less, a sentence each; empty where they add up.

    ``static_problem`` is why its static model is no verdict; ``notes`` are the recorder's, some of which are warnings.
    """
    found = []
    breach = conservation.breach
    if breach is not None:
        found.append(
            f"{breach}. Some of the memory below has a wrong name, or none, and the static model proves nothing."
        )
    if static_problem not in (None, breach):
        found.append(f"{static_problem}.")
    return (*found, *(said_in(note) for note in notes if is_warning(note)))


def _exactly(size: int) -> str:
    return f"{format_bytes(size)} ({format_count(size)} bytes)"
