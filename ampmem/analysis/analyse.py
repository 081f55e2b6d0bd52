"""The analysis of a recording, from which summaries are made, and the check of its sums against the allocator's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ampmem.analysis.activations import Saved, saved_as
from ampmem.analysis.casts import Casts, casts_of, ledger_of
from ampmem.analysis.layers import AllocatorLayers, layers_of, marks_residual, reserved_residual
from ampmem.analysis.out_of_memory import FailedRequest, failed_request
from ampmem.analysis.static_model.verdict import StaticVerdict, judge
from ampmem.analysis.timeline.classify import classify, untrained, view_of
from ampmem.analysis.timeline.lifetimes import Tensors, in_order, join_facts, pair, tensors_of
from ampmem.analysis.timeline.marks import marks_of, phase_at
from ampmem.analysis.timeline.timeline import MemoryHistory, communication_of, timeline
from ampmem.events import OTHER_THREADS, UNKNOWN, Column, Phase, Recording, StepRecord
from ampmem.names import is_warning, warning_text
from ampmem.units import format_bytes, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservation:
    """The largest differences between ampmem's sums and the allocator's own totals; 0 if they agree.

    ``residual_bytes`` compares the categories, ``reserved_residual_bytes`` the segments at the steps' marks.
    ``other_threads_bytes`` is the most memory held by threads that are not recorded: it counts as ``other``.
    """

    events: int
    residual_bytes: int | None
    reserved_residual_bytes: int | None
    other_threads_bytes: int

    @property
    def breach(self) -> str | None:
        """The error of the sums, in words; ``None`` where everything that could be compared agrees."""
        compared = (
            ("the categories", self.residual_bytes, "total"),
            ("the segments", self.reserved_residual_bytes, "reserved bytes"),
        )
        parts = [
            f"{what} are up to {format_bytes(size)} ({format_count(size)} bytes) off the allocator's own {other}"
            for what, size, other in compared
            if size
        ]
        return ", and ".join(parts) or None


def conservation_of(history: MemoryHistory, layers: AllocatorLayers | None) -> Conservation:
    """Compare the sums with the allocator's totals at every event that has one, and at the steps' marks."""
    events = history.recording.events
    known = events.allocated != UNKNOWN
    residual = marks_residual(history)
    if known.any():
        # The sum of the categories, not the timeline's total: an allocation that is lost before it gets a category must
        # show.
        categories = history.timeline.live.sum(axis=0)[1:]
        residual = max(residual or 0, int(np.abs(categories[known] - events.allocated[known]).max()))
    return Conservation(
        events=len(events),
        residual_bytes=residual,
        reserved_residual_bytes=reserved_residual(history, layers),
        other_threads_bytes=int(events.bytes[events.address == OTHER_THREADS].max(initial=0)),
    )


def doubts_of(conservation: Conservation, static_problem: str | None, notes: Sequence[str]) -> tuple[str, ...]:
    """The reasons not to trust the numbers of a run, a sentence each; empty if the numbers add up.

    ``static_problem`` is the reason why the static model gives no verdict; ``notes`` are the recorder's, some of which
    are warnings.
    """
    found = []
    breach = conservation.breach
    if breach is not None:
        wrong = "Some of the memory below is attributed wrongly or not at all, and the static model proves nothing."
        found.append(f"{breach}. {wrong}")
    if static_problem not in (None, breach):
        found.append(f"{static_problem}.")
    return (*found, *(warning_text(note) for note in notes if is_warning(note)))


# The analysis of a recording.


@dataclass(frozen=True, kw_only=True, repr=False)
class Analysis(MemoryHistory):
    """A history, and the values that several reports derive from it; each is computed once, when first needed."""

    @cached_property
    def start_ns(self) -> int:
        """The start of the recording in ns: the first event, phase or step."""
        columns = (self.timeline.time_ns, self.recording.phases.time_ns)
        times = [int(column[0]) for column in columns if len(column)]
        return min([*times, *(step.start_ns for step in self.recording.steps)], default=0)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The position of each step's peak: the most bytes allocated, or requested if no allocator was recorded.

        Of several positions with that many allocated bytes, the first with the most requested bytes counts.
        """
        return tuple(self._peak_of(step) for step in self.recording.steps)

    def _peak_of(self, step: StepRecord) -> int:
        start, end = map(self.timeline.position, (step.start_ns, step.end_ns))
        sizes, requested = (column[start : end + 1] for column in (self.sizes, self.timeline.total))
        # Block sizes are rounded: two tensors may take more than a third that is larger than both together.
        return start + int(np.argmax(np.where(sizes == sizes.max(), requested, -1)))

    @cached_property
    def sizes(self) -> Column:
        """The bytes that a peak is measured in, at each position: allocated where known, else requested."""
        return self.timeline.total if self.layers is None else self.layers.allocated

    @cached_property
    def top(self) -> int:
        """The index in the recording's steps of the step with the run's peak; of equal ones the last; 0 without steps.

        Comparisons and the page show the last such step too, so every text names the same step. A step that only starts
        at the level of the previous step's peak does not have that peak.
        """
        sizes, peaks = self.sizes, self.peaks

        def rank(place: int) -> tuple[int, bool, int]:
            own = peaks[place] > self.timeline.position(self.recording.steps[place].start_ns)
            return int(sizes[peaks[place]]), own, place if own else -place

        return max(range(len(peaks)), key=rank, default=0)

    @cached_property
    def peak(self) -> int:
        """The position of the run's peak, that of the step :attr:`top`; 0 without a step."""
        return self.peaks[self.top] if self.peaks else 0

    def made_by(self, position: int, step: StepRecord) -> tuple[Phase, str, str]:
        """The phase at ``position`` in ``step``, and the op and module of the alloc that reached that level.

        Op and module are empty at the start of the step, before its first event.
        """
        if position == self.timeline.position(step.start_ns):
            return phase_at(self.recording.phases, step.start_ns), "", ""
        return Phase(int(self.recording.events.phase[position - 1])), *self.born_at(position)

    ledger = cached_property(ledger_of)
    """The cast copies, one entry each."""

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
        """For each allocation the type and shape of its tensor."""
        return tensors_of(self.lifetimes, self.facts, self.recording.texts)

    communication = cached_property(communication_of)
    """The memory of distributed training, by purpose."""

    layers = cached_property(layers_of)
    """The allocator's layers; ``None`` where no segments are known."""

    @cached_property
    def verdict(self) -> StaticVerdict | None:
        """The static model's verdict on the last step with a backward; ``None`` without such a step."""
        return judge(self, self.ledger, breach=self.conservation.breach)

    @cached_property
    def conservation(self) -> Conservation:
        """The differences between the sums and the allocator's own totals."""
        return conservation_of(self, self.layers)

    @cached_property
    def failed_request(self) -> FailedRequest | None:
        """The last request that failed with out of memory; ``None`` when no request failed."""
        return failed_request(self, self.tensors)


def analyse(recording: Recording) -> Analysis:
    """The analysis of a recording. Raises :class:`~ampmem.errors.RecordingError` for contradictory events."""
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
    _ = analysis.layers  # contradictory segments are refused here, before anything is derived from the rest
    return analysis
