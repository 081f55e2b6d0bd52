"""Memory that the caching allocator has reserved and cannot use, and what a setting of it takes off."""

from __future__ import annotations

from dataclasses import replace

from ampmem.allocator.settings import VARIABLES, parse_settings
from ampmem.allocator.trace import trace_of_events, what_if
from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.errors import UsageError
from ampmem.units import format_bytes
from ampmem.vocabulary import SourceKind

_SHARE = 0.05
_LEAST = 64 << 20
"""Less, or less than this share of what is reserved, is how the allocator works: with segments of 20 MiB, of which
some are for small tensors only."""
_AGREES = 0.01
"""A replay whose peak is farther than this share from the recorded one proves nothing."""
_MOST_EVENTS = 200_000
"""A longer recording is not replayed: that would take seconds each time that it is shown."""
_SETTING = "expandable_segments:True"


def check(run: TrainingRun) -> Finding | None:
    """The most that is reserved is more than the most that is allocated, and expandable segments make it less.

    Of a request that failed its own finding tells.
    """
    layers, recording = run.analysis.layers, run.recording
    if recording.run.source == SourceKind.CPU or layers is None or run.analysis.failed_request is not None:
        return None
    reserved = int(max(layers.level.max(initial=0), layers.reserved.max()))
    idle = reserved - int(layers.allocated.max())
    expandable = (recording.allocator is not None and recording.allocator.expandable_segments) or bool(
        recording.segments.expandable.any()
    )
    least = max(_LEAST, _SHARE * reserved)
    if expandable or idle < least:
        return None
    peaks = _replayed(run)
    proven = peaks is not None and abs(peaks[0] - reserved) <= _AGREES * reserved
    saved = peaks[0] - peaks[1] if peaks is not None and proven else 0
    if proven and saved < least:
        return None
    return Finding(
        code="fragmentation",
        severity="advice" if proven else "info",
        section=Section.TIMELINE,
        message=f"the allocator reserves up to {format_bytes(reserved)}, {format_bytes(idle)} more than it ever has in "
        "use: its free memory lies in pieces that do not fit what is asked for.",
        bytes=idle,
        change=f"{_variable(run)} in the environment, before torch is imported",
        evidence=(
            f"most in use at once: {format_bytes(reserved - idle)}",
            f"the recorded allocations in ampmem's model of the allocator: {format_bytes(peaks[0])} reserved, "
            f"{format_bytes(peaks[1])} with {_SETTING}"
            if peaks is not None and proven
            else f"what {_SETTING} would take off is not known: the recorded allocations cannot be replayed, or not to "
            "the peak that was recorded",
        ),
        off_reserved=saved or None,
    )


def _variable(run: TrainingRun) -> str:
    """What to set, beside what is set already."""
    allocator = run.recording.allocator
    if allocator is None or not allocator.settings:
        return f"{VARIABLES[-1]}={_SETTING}"
    return f"{allocator.variable or VARIABLES[-1]}={allocator.settings},{_SETTING}"


def _replayed(run: TrainingRun) -> tuple[int, int] | None:
    """The most that is reserved, with the settings of the run and with expandable segments; ``None`` if not known."""
    recording = run.recording
    if len(recording.events) > _MOST_EVENTS:
        return None
    try:
        settings = parse_settings("" if recording.allocator is None else recording.allocator.settings)
    except UsageError:  # settings that the model does not have
        return None
    trace = trace_of_events(recording.events, recording.segments)
    found = what_if(trace, replace(settings, expandable_segments=True), instead_of=settings)
    return found.peak_reserved_before, found.peak_reserved_after
