"""Everything that the analysis derives from a recording before anything is summed up for people."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ampmem.analysis.activations import Saved, saved_as
from ampmem.analysis.allocator.layers import Layers, layers_of
from ampmem.analysis.allocator.out_of_memory import FailedRequest, failed_request
from ampmem.analysis.casts import Casts, Ledger, casts_of, ledger_of
from ampmem.analysis.conservation import Conservation, conservation_of
from ampmem.analysis.static_model.verdict import StaticVerdict, judge
from ampmem.analysis.timeline.classify import classify, view_of
from ampmem.analysis.timeline.communication import CommunicationParts, communication_of
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.analysis.timeline.lifetimes import join_facts, pair
from ampmem.analysis.timeline.marks import marks_of
from ampmem.analysis.timeline.order import in_order
from ampmem.analysis.timeline.tensors import Tensors, tensors_of
from ampmem.analysis.timeline.timeline import timeline
from ampmem.analysis.timeline.untrained import untrained
from ampmem.events import Column, Recording, StepRecord


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
        """Of each position the bytes by which a peak is measured: allocated where that is known, else requested."""
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
    def ledger(self) -> Ledger:
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
    def layers(self) -> Layers | None:
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
