"""Everything that the analysis derives from a recording before it is summed up, and whether it adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ampmem.analysis.activations import Saved, saved_as
from ampmem.analysis.casts import CastLedger, Casts, casts_of, ledger_of
from ampmem.analysis.layers import AllocatorLayers, layers_of, marks_residual, reserved_residual
from ampmem.analysis.out_of_memory import FailedRequest, failed_request
from ampmem.analysis.static_model.verdict import StaticVerdict, judge
from ampmem.analysis.timeline.classify import classify, untrained, view_of
from ampmem.analysis.timeline.lifetimes import Tensors, in_order, join_facts, pair, tensors_of
from ampmem.analysis.timeline.marks import marks_of
from ampmem.analysis.timeline.timeline import CommunicationParts, MemoryHistory, communication_of, timeline
from ampmem.events import OTHER_THREADS, UNKNOWN, Column, Recording, StepRecord
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


def conservation_of(history: MemoryHistory, layers: AllocatorLayers | None) -> Conservation:
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


# Everything that the analysis derives from a recording before anything is summed up for people.


@dataclass(frozen=True, kw_only=True, repr=False)
class Analysis(MemoryHistory):
    """A history, and what several readers need of it: each is derived when it is first asked for, and once."""

    @cached_property
    def start_ns(self) -> int:
        """When the recording starts: the instant of its first event, phase or step."""
        columns = (self.timeline.time_ns, self.recording.phases.time_ns)
        times = [int(column[0]) for column in columns if len(column)]
        return min([*times, *(step.start_ns for step in self.recording.steps)], default=0)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The position of each step's peak: where the most is allocated, or requested where no allocator is known.

        Of positions with as much allocated it is the first with the most requested.
        """
        return tuple(self._peak_of(step) for step in self.recording.steps)

    def _peak_of(self, step: StepRecord) -> int:
        total, layers = self.timeline.total, self.layers
        if layers is None:
            return self.timeline.peak_between(step.start_ns, step.end_ns)
        start, end = map(self.timeline.position, (step.start_ns, step.end_ns))
        allocated = layers.allocated[start : end + 1]
        # Blocks are rounded: two tensors may take more than a third that is larger than both.
        return start + int(np.argmax(np.where(allocated == allocated.max(), total[start : end + 1], -1)))

    @cached_property
    def sizes(self) -> Column:
        """The bytes by which a peak is measured, at each position: allocated where that is known, else requested."""
        return self.timeline.total if self.layers is None else self.layers.allocated

    @cached_property
    def top(self) -> int:
        """The place, among the recording's steps, of the one with the run's peak: of equal steps the last.

        The last step is the one that a comparison shows and that the page opens on, so every text names the same step.
        A step that only begins with what the one before it reached does not have that one's peak. 0 without a step.
        """
        sizes, peaks = self.sizes, self.peaks

        def rank(place: int) -> tuple[int, bool, int]:
            own = peaks[place] > self.timeline.position(self.recording.steps[place].start_ns)
            return int(sizes[peaks[place]]), own, place if own else -place

        return max(range(len(peaks)), key=rank, default=0)

    @cached_property
    def peak(self) -> int:
        """The position of the run's peak, which is that of the step :attr:`top`; 0 without a step."""
        return self.peaks[self.top] if self.peaks else 0

    @cached_property
    def ledger(self) -> CastLedger:
        """The cast copies, one by one."""
        return ledger_of(self)

    @cached_property
    def casts(self) -> Casts:
        """The cast copies, summed up."""
        return casts_of(self, self.ledger)

    @cached_property
    def saved_as(self) -> Saved:
        """For each allocation the op that saved it, and its type."""
        return saved_as(self)

    @cached_property
    def tensors(self) -> Tensors:
        """For each allocation the type and the shape of its tensor."""
        return tensors_of(self.lifetimes, self.facts, self.recording.texts)

    @cached_property
    def communication(self) -> CommunicationParts:
        """The memory of distributed training, by what it is for."""
        return communication_of(self)

    @cached_property
    def layers(self) -> AllocatorLayers | None:
        """The allocator's layers; ``None`` where no segments are known."""
        return layers_of(self)

    @cached_property
    def verdict(self) -> StaticVerdict | None:
        """The static model against the last step with a backward; ``None`` when there is none."""
        return judge(self, self.ledger, breach=self.conservation.breach)

    @cached_property
    def conservation(self) -> Conservation:
        """How far the sums are from the allocator's own totals."""
        return conservation_of(self, self.layers)

    @cached_property
    def failed_request(self) -> FailedRequest | None:
        """The last request that failed for want of memory; ``None`` when none did."""
        return failed_request(self, self.tensors)


def analyse(recording: Recording) -> Analysis:
    """Raises :class:`~ampmem.errors.RecordingError` when the events contradict each other."""
    recording = in_order(recording)
    lifetimes = pair(recording.events)
    facts = join_facts(recording.events, lifetimes, recording.facts)
    names = untrained(recording)
    classes = classify(view_of(lifetimes, facts, recording, names), facts)
    analysis = Analysis(
        recording=recording,
        lifetimes=lifetimes,
        facts=facts,
        classes=classes,
        timeline=timeline(recording.events, lifetimes, classes),
        marks=marks_of(recording),
        untrained=names,
    )
    _ = analysis.layers  # segments that contradict each other are refused here, before anything is made of the rest
    return analysis
