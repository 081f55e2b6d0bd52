"""Everything that the analysis derives from a recording before anything is summed up for people."""

from __future__ import annotations

from dataclasses import dataclass

from ampmem.analysis.timeline.classify import Classes, classify, view_of
from ampmem.analysis.timeline.lifetimes import JoinedFacts, Lifetimes, join_facts, pair
from ampmem.analysis.timeline.marks import Instants, marks_of
from ampmem.analysis.timeline.timeline import Timeline, timeline
from ampmem.events import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A recording with its allocations, their categories and their sums; ``marks`` has one entry per step."""

    recording: Recording
    lifetimes: Lifetimes
    facts: JoinedFacts
    classes: Classes
    timeline: Timeline
    marks: tuple[Instants, ...]


def analyse(recording: Recording) -> Analysis:
    """Raises :class:`~ampmem.errors.RecordingError` when the events contradict each other."""
    lifetimes = pair(recording.events)
    facts = join_facts(recording.events, lifetimes, recording.facts)
    classes = classify(view_of(lifetimes, facts, recording), facts)
    return Analysis(
        recording=recording,
        lifetimes=lifetimes,
        facts=facts,
        classes=classes,
        timeline=timeline(recording.events, lifetimes, classes),
        marks=marks_of(recording),
    )
