"""Memory that the caching allocator has reserved and cannot use, and what a setting of it takes off."""

from __future__ import annotations

from ampmem.allocator.settings import VARIABLES, Settings, parse_settings
from ampmem.allocator.trace import peak_reserved, trace_of_events
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
_OTHERS = ("max_split_size_mb:128", "max_split_size_mb:512")
"""What else is tried. It is told only where it saves more: it keeps large blocks whole, so other requests may need new
segments."""


def check(run: TrainingRun) -> Finding | None:
    """The most that is reserved is more than the most that is allocated, and a setting of the allocator makes it less.

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
    settings = _settings(run)
    peaks = {} if settings is None else _replayed(run, settings)
    proven = bool(peaks) and abs(peaks[""] - reserved) <= _AGREES * reserved
    # Of equal ones the first.
    best = min((each for each in peaks if each), key=lambda each: peaks[each]) if proven else _SETTING
    saved = peaks[""] - peaks[best] if proven else 0
    if proven and saved < least:
        return None
    return Finding(
        code="fragmentation",
        severity="advice" if proven else "info",
        section=Section.TIMELINE,
        message=f"the allocator reserves up to {format_bytes(reserved)}, {format_bytes(idle)} more than it ever has in "
        "use: its free memory lies in pieces that do not fit what is asked for.",
        bytes=idle,
        change=f"{_variable(run, best)} in the environment, before torch is imported",
        evidence=(
            f"most in use at once: {format_bytes(reserved - idle)}",
            f"the recorded allocations in ampmem's model of the allocator: {format_bytes(peaks[''])} reserved, "
            + ", ".join(f"{format_bytes(peaks[each])} with {each}" for each in dict.fromkeys((best, _SETTING)))
            if proven
            else f"what {_SETTING} would take off is not known: the recorded allocations cannot be replayed, or not to "
            "the peak that was recorded",
        ),
        off_reserved=saved or None,
    )


def _variable(run: TrainingRun, setting: str) -> str:
    """What to set, beside what is set already."""
    allocator = run.recording.allocator
    if allocator is None or not allocator.settings:
        return f"{VARIABLES[-1]}={setting}"
    return f"{allocator.variable or VARIABLES[-1]}={allocator.settings},{setting}"


def _settings(run: TrainingRun) -> Settings | None:
    """The settings of a run that can be replayed; ``None`` for others."""
    recording = run.recording
    if len(recording.events) > _MOST_EVENTS:
        return None
    try:
        return parse_settings("" if recording.allocator is None else recording.allocator.settings)
    except UsageError:  # settings that the model does not have
        return None


def _replayed(run: TrainingRun, settings: Settings) -> dict[str, int]:
    """The most that is reserved with ``settings``, under the empty key, and with each setting that is tried beside."""
    trace = trace_of_events(run.recording.events, run.recording.segments)
    tried = ("", _SETTING, *(_OTHERS if settings.max_split_size is None else ()))
    return {each: peak_reserved(trace, parse_settings(each, settings)) for each in tried}
